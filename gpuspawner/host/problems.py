"""What keeps a GPU of a real host out of the pool, each as a sentence with its remedy. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

VFIO_DRIVERS = ("vfio-pci", "_vfio_pci")  # the stub, and variant drivers (mlx5_vfio_pci, ...)
# What sits on a GPU's board beside it, perhaps behind a bridge of the board's own: sound, USB,
# and USB-C's controller. Anything else in its group belongs to the host.
_COMPANIONS = ("0403", "0c03", "0c80")
_HOST_DRIVERS = ("nouveau", "nvidia", "amdgpu", "radeon", "i915", "xe", "snd_hda_intel")
_GIB_MIB = 1024

# OVMF's window for 64-bit BARs is an eighth of the guest's physical addresses, of which it uses
# 46 bits at most, and 40 on CPUs without pages of 1 GiB (edk2, PlatformInitLib).
_WINDOW_SHIFT = 3
_OVMF_BITS = 46
_OVMF_BITS_SMALL = 40
_OWN_WINDOW_MIB = 32 * 1024  # QEMU's, for q35


def mmio_window_mib(cpu: Mapping[str, Any]) -> int:
    """Room for the BARs of one guest's GPUs on this CPU, in MiB; 0 if it is not known."""
    bits = int(cpu.get("phys_bits", 0))
    if bits < 36:
        return 0
    bits = min(bits, _OVMF_BITS if cpu.get("huge_1g") else _OVMF_BITS_SMALL)
    return int(1 << (bits - _WINDOW_SHIFT - 20))


def mmio_mib(members: Sequence[Mapping[str, Any]]) -> int:
    """Room that the memory BARs of these functions take of a guest's window, in MiB: a BAR is
    aligned to its size, which is a power of two."""
    total = sum(int(bar["bytes"]) for each in members for bar in each.get("bars", ()))
    return -(-total // (1 << 20))


def asked_window_mib(needed_mib: int) -> int:
    """The window for 64-bit BARs to ask QEMU and OVMF for, in MiB, a power of two; 0 where QEMU's
    own 32 GiB hold BARs of this size twice, as they may have to for alignment. A guest with such
    a window boots with UEFI."""
    twice = 2 * needed_mib
    return 1 << (twice - 1).bit_length() if twice > _OWN_WINDOW_MIB else 0


def problems(
    address: str,
    node: int,
    members: Sequence[Mapping[str, Any]],
    nodes: Collection[int],
    window_mib: int,
) -> Iterator[str]:
    """Of the GPU at ``address``, to which ``members`` of its IOMMU group belong."""
    own = next(each for each in members if each["address"] == address)
    if node not in nodes:
        yield (
            f"The firmware does not say on which NUMA node {address} is (it says {node}). Write "
            f'gpu_nodes: {{"{address}": NODE}} into the host\'s hardware file and add the host '
            "again; 'lspci -tv' and the board's manual tell which."
        )
    if int(own["group"]) < 0:
        yield (
            f"{address} is in no IOMMU group. Switch the IOMMU on in firmware and kernel "
            "(intel_iommu=on or amd_iommu=on), then reboot the host."
        )
    if own.get("virtual"):
        yield (
            f"{address} is a virtual function, a share of a GPU, and only whole GPUs are given "
            "out. Switch SR-IOV off: 'echo 0 > sriov_numvfs' in its GPU's folder in sysfs."
        )
    if vfs := int(own.get("vfs", 0)):
        yield (
            f"{address} is divided into {vfs} virtual functions, and only whole GPUs are given "
            "out. Switch them off: 'echo 0 > sriov_numvfs' in its folder in sysfs."
        )
    if own.get("boot_vga"):
        yield (
            f"{address} is the screen that the host booted with, and its console writes to it. "
            "Choose another first display in the firmware (a server's own, of its BMC)."
        )
    yield from _group_problems(address, members)
    yield from _driver_problems(members)
    yield from _bar_problems(address, members, window_mib)


def _group_problems(address: str, members: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    slot = address.rsplit(".", 1)[0]
    for each in members:
        other = str(each["address"])
        if other.rsplit(".", 1)[0] == slot or str(each["class"]).startswith(_COMPANIONS):
            continue
        yield (
            f"{other} ({each['id']}, class {each['class']}) is in the IOMMU group of {address} "
            f"({each['group']}) and would go to the user with it. Move one of them to another "
            "slot, or switch ACS on in the firmware."
        )


def _driver_problems(members: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for each in members:
        driver = str(each["driver"])
        if driver.endswith(VFIO_DRIVERS):
            continue
        more = ""
        if driver.startswith(_HOST_DRIVERS):
            more = f" and keep '{driver}' from it ('softdep {driver} pre: vfio-pci')"
        yield (
            f"{each['address']} is bound to {driver or 'no driver'}. Bind every function of the "
            f"GPU's IOMMU group to vfio-pci at boot ('options vfio-pci ids={each['id']}' in "
            f"/etc/modprobe.d){more}."
        )


def _bar_problems(
    address: str, members: Sequence[Mapping[str, Any]], window_mib: int
) -> Iterator[str]:
    for each in members:
        for bar in each.get("bars", ()):
            if not bar.get("placed", True):
                yield (
                    f"The firmware found no room for BAR {bar['bar']} of {each['address']} "
                    f"({size(int(bar['bytes']) >> 20)}). Switch 'Above 4G decoding' on in the "
                    "firmware, and raise its 64-bit MMIO size where it has such a setting."
                )
    needed = mmio_mib(members)
    if window_mib and needed > window_mib:
        yield (
            f"The BARs of {address} take {size(needed)}, and a guest on this CPU has a window of "
            f"{size(window_mib)} for them. It takes a CPU with more physical address bits and "
            "with pages of 1 GiB; a host that is a VM itself needs its CPU passed through."
        )


def size(mib: int) -> str:
    """``128 GiB``, ``16 MiB``."""
    return f"{mib // _GIB_MIB} GiB" if mib >= _GIB_MIB and mib % _GIB_MIB == 0 else f"{mib} MiB"
