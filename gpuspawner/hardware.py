"""An admin's say on a host's hardware: which devices are its GPUs, and what is kept back.

    gpus:
      - {vendor: "10de", device: "2330", model: H100, memory_mib: 81559}
    system_cores: 2                # of each NUMA node, for the host itself
    reserve_mib: 8192              # of each NUMA node, for the host, QEMU and the service VM
    hugepages: auto
    gpu_nodes: {"0000:c1:00.0": 1} # where the firmware does not say

Known to the hub's side and to the allocator alike, so it knows nobody.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

Hex4 = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{4})?$")]
ClassPrefix = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{2}([0-9a-f]{2}){0,2}$")]
Slot = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")]
Kind = Literal["", "nvidia", "amd", "intel", "emulated"]

DISPLAY = ("0300", "0302")  # VGA controllers, and GPUs without a display


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class GpuRule(_Strict):
    """PCI functions that are GPUs; what a rule leaves out fits anything. The other functions of
    a GPU's IOMMU group move along without a rule."""

    vendor: Hex4 = Field(default="", description='PCI vendor, four hex digits: "10de"')
    device: Hex4 = Field(default="", description='PCI device, four hex digits: "2330"')
    classes: list[ClassPrefix] | None = Field(
        default=None,
        max_length=16,
        description='Beginnings of the class code. Default: "0300" and "0302", and any class '
        "where a device is named",
    )
    model: str = Field(
        default="",
        max_length=120,
        pattern=r"^[^\x00-\x1f\x7f]*$",
        description="Name in the pool; default: vendor:device",
    )
    memory_mib: int = Field(default=0, ge=0, le=1 << 24, description="Its memory, in MiB")
    kind: Kind = Field(
        default="",
        description="Which checks it takes; default: by vendor. 'emulated' are devices that "
        "stand for GPUs: they are real to the host and never shown as GPUs in earnest",
    )

    @model_validator(mode="after")
    def _says_something(self) -> GpuRule:
        if not (self.vendor or self.device or self.classes):
            raise ValueError(
                'fits every device; give it a vendor, a device or classes, as vendor: "10de"'
            )
        return self

    def class_prefixes(self) -> tuple[str, ...]:
        """``classes`` with its default."""
        if self.classes is not None:
            return tuple(self.classes)
        return ("",) if self.device else DISPLAY


class HostHardware(_Strict):
    """What an admin says of a real host. The first rule that fits a function counts."""

    gpus: list[GpuRule] = Field(
        default_factory=lambda: [GpuRule(vendor="10de")],
        max_length=64,
        description="Which devices are GPUs; default: NVIDIA's",
    )
    system_cores: int = Field(
        default=1, ge=0, le=256, description="Whole cores of each NUMA node kept for the host"
    )
    reserve_mib: int = Field(
        default=4096,
        ge=0,
        le=1 << 24,
        description="Memory of each NUMA node kept for the host, QEMU and the service VM, in MiB",
    )
    hugepages: Literal["auto", "off", "2M", "1G"] = Field(
        default="auto",
        description="Pages that guests' memory is made of; they must be allocated on the host. "
        "'auto' takes the size, or ordinary pages, that leave guests the most memory on the "
        "GPUs' nodes",
    )
    gpu_nodes: dict[Slot, Annotated[int, Field(ge=0, le=1023)]] = Field(
        default_factory=dict,
        description="NUMA node of GPUs whose firmware does not say: address to node",
    )
