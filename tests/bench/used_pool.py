"""A pool of any size as it is after a while: partly used, in many ways.

Each host has two NUMA nodes with 64 cores of two threads, 512 GiB and four GPUs each. Servers of
eight kinds (``KINDS``) are placed until nine tenths of the GPUs are in use, and then end at random
until six tenths are; one GPU in ten of theirs still waits for its wipe.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from gpuspawner.pool.choosing import Mix, mix_of
from gpuspawner.pool.index import HostIndex
from gpuspawner.pool.topology import Claim, Gpu, HostView, Inventory, Node, Request

IMAGE = "sha256:" + "a" * 64
# GPUs, cores and GiB, and how often they are asked for, in percent.
KINDS = [
    (0, 2, 8, 10),
    (0, 4, 16, 10),
    (1, 4, 32, 25),
    (1, 8, 64, 25),
    (1, 8, 128, 10),
    (2, 16, 128, 10),
    (4, 32, 256, 6),
    (8, 64, 512, 4),
]


@dataclass
class Pool:
    """Some hosts and the servers on them."""

    index: HostIndex
    claims: list[tuple[Request, Claim]]
    rng: random.Random
    asked: list[Request]
    mix: Mix = ()

    def request(self) -> Request:
        """What somebody asks for next. Every 20 requests it is looked anew at what people ask."""
        if len(self.asked) % 20 == 0:
            self.mix = mix_of(self.asked[-500:])
        gpus, cores, gib, _ = self.rng.choices(KINDS, [kind[3] for kind in KINDS])[0]
        one = Request(gpus, cores, gib * 1024, image=IMAGE, policy="split")
        self.asked.append(one)
        return one

    def start(self, request: Request) -> Claim | None:
        """Decide, and see the chosen host as it is then; ``None`` if it fits nowhere."""
        found = self.index.place(request, self.mix)
        if not isinstance(found, Claim):
            return None
        self.index.put(without(self.index.views[found.host], found))
        self.claims.append((request, found))
        return found

    def end_one(self, wiped: bool = True) -> None:
        """Some server ends, if there is one."""
        if not self.claims:
            return
        at = self.rng.randrange(len(self.claims))
        self.claims[at], self.claims[-1] = self.claims[-1], self.claims[at]
        _, claim = self.claims.pop()
        self.index.put(given_back(self.index.views[claim.host], claim, wiped))

    def gpus_in_use(self) -> int:
        """Of all hosts."""
        return sum(request.gpus for request, _ in self.claims)


def without(view: HostView, claim: Claim) -> HostView:
    """The host once a claim is taken."""
    used_mib = dict(view.used_mib)
    for cell in claim.cells:
        used_mib[cell.node] = used_mib.get(cell.node, 0) + cell.memory_mib
    return replace(
        view,
        free_gpus=view.free_gpus - set(claim.gpus),
        used_cpus=view.used_cpus | set(claim.cpus),
        used_mib=used_mib,
        free_addresses=view.free_addresses - 1,
    )


def given_back(view: HostView, claim: Claim, wiped: bool) -> HostView:
    """The host once a claim has ended; its GPUs are free, or still wait for their wipe."""
    used_mib = dict(view.used_mib)
    for cell in claim.cells:
        used_mib[cell.node] -= cell.memory_mib
    gpus = frozenset(claim.gpus)
    return replace(
        view,
        free_gpus=view.free_gpus | gpus if wiped else view.free_gpus,
        coming_gpus=view.coming_gpus if wiped else view.coming_gpus | gpus,
        used_cpus=view.used_cpus - set(claim.cpus),
        used_mib=used_mib,
        free_addresses=view.free_addresses + 1,
    )


NODES = tuple(
    Node(n, tuple((64 * n + core, 128 + 64 * n + core) for core in range(64)), 1 << 19)
    for n in range(2)
)
GPUS = tuple(Gpu(f"0000:{0x40 + n:02x}:00.0", "A", n // 4) for n in range(8))


def used_pool(hosts: int) -> Pool:
    """So many hosts, partly used; the same for the same number."""
    index = HostIndex()
    for number in range(hosts):
        index.put(
            HostView(
                Inventory(f"h{number:05}", "boot", NODES, GPUS),
                frozenset(gpu.address for gpu in GPUS),
                free_addresses=253,
                images=frozenset({IMAGE}),
            )
        )
    pool = Pool(index, [], random.Random(hosts), [])
    while pool.gpus_in_use() < 0.9 * 8 * hosts:
        for _ in range(1 + hosts // 10):
            pool.start(pool.request())
    while pool.gpus_in_use() > 0.6 * 8 * hosts:
        for _ in range(1 + hosts // 100):
            pool.end_one(wiped=pool.rng.random() < 0.9)
    return pool
