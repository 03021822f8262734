"""Runs in Nova's own environment: fits cases that come as lines of JSON, and says how long it took.

A case: ``nodes`` with free ``cpus``, ``gib`` and ``gpus`` each, the ``request`` with ``cells``,
and for each cell ``cpus`` and ``gib``, and ``gpus`` for all; ``known`` false: the host does not say
on which node its GPUs are. The answer: the nodes of the cells or null, and CPU seconds.
"""

import json
import logging
import sys
import time

from nova import conf, objects
from nova.objects import fields
from nova.pci import stats
from nova.virt import hardware

conf.CONF([], project="nova", version="bench")
objects.register_all()
logging.disable(logging.CRITICAL)

GIB_KB = 1048576


def host(nodes):
    """Single-threaded dedicated CPUs and 1 GiB pages, all free ones free."""
    cells, cpu = [], 0
    for number, node in enumerate(nodes):
        cpus = set(range(cpu, cpu + node["cpus"]))
        cpu += max(1, node["cpus"])
        mib = node["gib"] * 1024
        pages = [
            objects.NUMAPagesTopology(size_kb=4, total=mib * 256, used=0, reserved=0),
            objects.NUMAPagesTopology(size_kb=GIB_KB, total=node["gib"], used=0, reserved=0),
        ]
        cells.append(
            objects.NUMACell(
                id=number, cpuset=cpus, pcpuset=cpus, memory=mib, cpu_usage=0, memory_usage=0,
                mempages=pages, siblings=[{one} for one in cpus], pinned_cpus=set(), socket=0,
                network_metadata=objects.NetworkMetadata(physnets=set(), tunneled=False),
            )
        )  # fmt: skip
    return objects.NUMATopology(cells=cells)


def instance(request):
    """As many guest cells, all alike."""
    cells = [
        objects.InstanceNUMACell(
            id=number,
            cpuset=set(),
            pcpuset=set(range(number * request["cpus"], (number + 1) * request["cpus"])),
            memory=request["gib"] * 1024,
            pagesize=GIB_KB,
            cpu_policy=fields.CPUAllocationPolicy.DEDICATED,
            cpu_thread_policy=None,
        )
        for number in range(request["cells"])
    ]
    return objects.InstanceNUMATopology(cells=cells, emulator_threads_policy=None)


def pools(topology, case):
    """Each GPU a pool of its own, as with PCI devices in Placement."""
    found = stats.PciDeviceStats(topology)
    for number, node in enumerate(case["nodes"]):
        for _ in range(node["gpus"]):
            found.pools.append(
                {
                    "vendor_id": "10de", "product_id": "2330", "dev_type": "type-PF", "count": 1,
                    "numa_node": number if case["known"] else None, "devices": [],
                    "address": f"0000:{len(found.pools):02x}:00.0",
                }
            )  # fmt: skip
    return found


for line in sys.stdin:
    case = json.loads(line)
    topology, guest = host(case["nodes"]), instance(case["request"])
    count = case["request"]["gpus"]
    wanted = [
        objects.InstancePCIRequest(
            count=count,
            spec=[{"vendor_id": "10de", "product_id": "2330", "dev_type": "type-PF"}],
            request_id="r",
            numa_policy="required",
        )
    ]
    found = pools(topology, case)
    began = time.process_time()
    result = hardware.numa_fit_instance_to_host(
        topology, guest, None, pci_requests=wanted if count else None, pci_stats=found
    )
    seconds = time.process_time() - began
    cells = None if result is None else [cell.id for cell in result.cells]
    print(json.dumps({"cells": cells, "seconds": seconds}), flush=True)
