"""``GET /hosts/NAME/check``: a host as it is now, and what there is to put right on it.

Memory is in MiB, link speeds are in GT/s. Values that nobody could tell are null or 0.
"""

from __future__ import annotations

from pydantic import Field

from gpuspawner.schema import Reply


class Finding(Reply):
    """One thing that a check found."""

    level: str = Field(description="error, warning, info")
    text: str
    remedy: str = Field(default="", description="What to change, if that is known")


class Pages(Reply):
    """Hugepages of one size on one node."""

    kib: int
    total: int
    free: int


class CheckedNode(Reply):
    """One NUMA node."""

    id: int
    cores: int
    cpus: int = Field(description="Logical CPUs that are online")
    memory_mib: int
    free_mib: int | None = Field(default=None, description="Free right now, whoever has the rest")
    reserve_mib: int
    usable_mib: int = Field(description="What all guests together may have")
    hugepages: list[Pages] = Field(default_factory=list)


class Link(Reply):
    """A PCIe link: as it is, and the most that this end could do."""

    gts: float
    width: int
    max_gts: float
    max_width: int


class CheckedGpu(Reply):
    """One GPU."""

    address: str
    model: str
    emulated: bool
    kind: str
    node: int
    group: int
    functions: list[str] = Field(description="All that move with it, its whole IOMMU group")
    link: Link
    port: str = Field(description="The port above it")
    port_link: Link
    bars_mib: list[int] = Field(description="Memory BARs")
    reset_methods: list[str]
    driver: str
    state: str
    problems: list[str] = Field(description="What keeps it out of the pool")


class HostCheck(Reply):
    """A host, whole. ``nodes`` and ``gpus`` are empty if it could not be asked."""

    host: str
    machine: dict[str, str] = Field(default_factory=dict)
    nodes: list[CheckedNode] = Field(default_factory=list)
    gpus: list[CheckedGpu] = Field(default_factory=list)
    hugepages_kib: int = Field(default=0, description="Pages that leases' memory is made of")
    findings: list[Finding] = Field(default_factory=list)
