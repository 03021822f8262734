"""The guests whose domains are kept as golden files, and what goes into them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpuspawner.host.api import GuestSpec, Image, ImageFile, Nic
from gpuspawner.host.devices import EmulatedMemory, Parts
from gpuspawner.host.domain import Binding, Options, build_domain
from gpuspawner.pool.topology import Cell, Claim, Gpu, Node

GOLDEN = Path(__file__).parent / "golden"
UUID = "11111111-2222-4333-8444-555555555501"
POOL = "/var/lib/libvirt/images/gs-0badcafe-gpu1"


@dataclass(frozen=True)
class Case:
    """One guest on one host."""

    spec: GuestSpec
    binding: Binding
    parts: Parts
    options: Options

    def xml(self) -> str:
        return build_domain(self.spec, self.binding, self.parts, self.options)


def image(*roles: str) -> Image:
    files = {role: ImageFile(Path(f"/images/{role}"), "0" * 64, 1) for role in roles}
    return Image("lab", "sha256:" + "1" * 64, "root=/dev/vda ro console=ttyS0", files)


def real_gpu(bus: str, node: int, *, functions: int = 1, mmio_mib: int = 0) -> Gpu:
    addresses = tuple(f"0000:{bus}:00.{number}" for number in range(functions))
    return Gpu(addresses[0], "H100", node, addresses, group=7, ids=("10de:2330",) * functions,
               mmio_mib=mmio_mib)  # fmt: skip


def emulated_gpu(bus: str, node: int) -> Gpu:
    slot = f"0000:{bus}:00"
    return Gpu(f"{slot}.0", "Emulated", node, (f"{slot}.0", f"{slot}.1"), memory_mib=16,
               emulated=True)  # fmt: skip


def parts(*names: str, **more: object) -> Parts:
    paths = {name: f"{POOL}/{name}" for name in ("console", *names)}
    return Parts(**paths, **more)  # type: ignore[arg-type]


LAB_PARTS = parts("kernel", "initrd", "root", "home", "seed", network="gs-0badcafe-gpu1",
                  nwfilter="gs-0badcafe-gpu1")  # fmt: skip
NIC = Nic("52:54:00:12:34:56", "10.201.0.10")
SMT = ((4, 68), (5, 69))


def lease(gpus: tuple[Gpu, ...], cells: tuple[Cell, ...], **more: object) -> GuestSpec:
    claim = Claim("gpu1", tuple(gpu.address for gpu in gpus), cells)
    settings: dict[str, object] = {
        "title": "ada's server", "image": image("kernel", "initrd", "root"), "nic": NIC,
        "home": "home-ada", "seed": True, "labels": {"hub": "hub", "lease": UUID}, **more,
    }  # fmt: skip
    return GuestSpec(UUID, "lease", claim=claim, gpus=gpus, **settings)  # type: ignore[arg-type]


KVM = Options("0badcafe", "gpu1", accel="kvm", amd=True)
TCG = Options("0badcafe", "gpu1", accel="tcg")
NODES = {
    node: Node(node, tuple((core, core + 64) for core in range(node * 32, node * 32 + 32)), 524288)
    for node in range(2)
}
EMULATED = {
    node: Node(node, tuple((core, core + 16) for core in range(node * 8, node * 8 + 8)), 65536)
    for node in range(2)
} | {2: Node(2, ((0,),), 65536)}
HOUSE = Binding(NODES, housekeeping={0: (0, 64), 1: (32, 96)}, distances={(0, 1): 21, (1, 0): 21})

CASES = {
    "one_gpu_kvm": Case(
        lease((real_gpu("17", 0),), (Cell(0, SMT, 98304),)), HOUSE, LAB_PARTS, KVM
    ),
    "two_gpus_kvm": Case(
        lease((real_gpu("17", 0, functions=2), real_gpu("3b", 0)), (Cell(0, SMT, 98304),)),
        HOUSE,
        LAB_PARTS,
        Options("0badcafe", "gpu1", accel="kvm", amd=True, hugepages_kib=1048576),
    ),
    "one_h100_1g_pages_efi_kvm": Case(
        lease((real_gpu("98", 1, functions=2, mmio_mib=131120),),
              (Cell(1, ((36, 100), (37, 101)), 98304),)),
        HOUSE,
        LAB_PARTS,
        Options("0badcafe", "gpu1", accel="kvm", hugepages_kib=1048576, mmio_window_mib=8 << 20),
    ),
    "two_cells_kvm": Case(
        lease(
            (real_gpu("17", 0), real_gpu("98", 1)),
            (Cell(0, SMT, 65536), Cell(1, ((36, 100), (37, 101)), 65536)),
            image=image("root"),
        ),
        HOUSE,
        parts("root", "home", "seed", bridge="br-lab", nwfilter="gs-0badcafe-gpu1"),
        KVM,
    ),
    "four_h100_two_cells_1g_pages_kvm": Case(
        lease(
            tuple(real_gpu(bus, node, mmio_mib=131120)
                  for bus, node in (("17", 0), ("3b", 0), ("98", 1), ("c8", 1))),
            (Cell(0, SMT, 65536), Cell(1, ((36, 100), (37, 101)), 65536)),
        ),
        HOUSE,
        LAB_PARTS,
        Options("0badcafe", "gpu1", accel="kvm", hugepages_kib=1048576, mmio_window_mib=8 << 20),
    ),
    "large_bar_multifunction_kvm": Case(
        lease((real_gpu("17", 0, functions=4, mmio_mib=131120),), (Cell(0, SMT, 98304),),
              image=image("root")),
        HOUSE,
        parts("root", "home", "seed", network="gs-0badcafe-gpu1", nwfilter="gs-0badcafe-gpu1"),
        KVM,
    ),
    "emulated_lease_tcg": Case(
        lease((emulated_gpu("41", 1),), (Cell(1, ((9, 25),), 512),)),
        Binding(EMULATED, cpus=(0, 1), single_node=0, housekeeping={1: (8, 24)}),
        parts("kernel", "initrd", "root", "home", "seed", network="gs-0badcafe-gpu1",
              nwfilter="gs-0badcafe-gpu1", confining_models=("apparmor",),
              gpu_memories={"0000:41:00.0": EmulatedMemory(f"{POOL}/gpu,memory", 16)}),
        TCG,
    ),
    "service_vm_tcg": Case(
        GuestSpec(
            UUID,
            "service",
            "diagnosis of 0000:41:00.0",
            Claim("gpu1", ("0000:41:00.0",), (Cell(2, ((0,),), 512),)),
            (emulated_gpu("41", 2),),
            image("kernel", "initrd"),
            extra_cmdline="gpuspawner.run=x gpuspawner.nonce=y gpuspawner.tier=L1",
            channel="org.gpuspawner.service.0",
        ),
        Binding(EMULATED, cpus=(0, 1), single_node=0),
        parts("kernel", "initrd",
              gpu_memories={"0000:41:00.0": EmulatedMemory(f"{POOL}/gpu", 16, "dma_mask")}),
        TCG,
    ),
}  # fmt: skip
