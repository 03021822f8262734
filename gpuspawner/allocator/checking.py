"""``host check``: a host asked anew, joined with what the ledger knows of its GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuspawner import schema
from gpuspawner.allocator.context import Context
from gpuspawner.checkup import CheckedGpu, CheckedNode, Finding, HostCheck, Link, Pages
from gpuspawner.host.api import HostError
from gpuspawner.host.inspection import GpuFacts, Inspection


async def check(ctx: Context, host: schema.Host, gpus: Sequence[schema.Gpu]) -> HostCheck:
    """The check of one host. ``gpus`` are those of the pool. A host that does not answer has
    findings only."""
    known = [gpu for gpu in gpus if gpu.host == host.name]
    findings = list(_of_the_pool(ctx, host, known))
    try:
        seen = await ctx.driver(host.name).inspect()
    except HostError as error:
        text = f"The host cannot be asked: {error.args[0]}"
        findings.append(Finding(level="error", text=text, remedy=error.remedy))
        # What the last survey found is still in the way.
        findings += _problems((gpu.address, gpu.problems) for gpu in known)
        return HostCheck(host=host.name, findings=findings)
    findings += [
        Finding(level=each.level, text=each.text, remedy=each.remedy) for each in seen.findings
    ]
    findings += _problems((gpu.address, gpu.problems) for gpu in seen.inventory.gpus)
    return HostCheck(
        host=host.name,
        machine=dict(seen.machine),
        nodes=_nodes(seen),
        gpus=_gpus(seen, {gpu.address: gpu.state for gpu in known}),
        hugepages_kib=seen.inventory.hugepages_kib,
        findings=findings,
    )


def _of_the_pool(ctx: Context, host: schema.Host, gpus: Sequence[schema.Gpu]) -> Iterator[Finding]:
    if host.state != "ready":
        yield Finding(level="error", text=f"The host is {host.state}: {host.reason or 'waiting'}")
    if host.drained:
        yield Finding(
            level="warning",
            text="The host is drained and takes no new leases.",
            remedy=f"gpuspawner host undrain {host.name}",
        )
    service = ctx.images.service()
    if service is None or service.digest not in host.images:
        yield Finding(
            level="error",
            text="The host has no service VM image: no GPU can be wiped.",
            remedy="gpuspawner image build service",
        )
    for gpu in gpus:
        if gpu.state in ("failed", "lost", "quarantined"):
            yield Finding(
                level="warning",
                text=f"GPU {gpu.address} is {gpu.state}: {gpu.reason}",
                remedy=f"gpuspawner gpu retest {host.name} {gpu.address}",
            )
        if gpu.state == "new" and not gpu.emulated and not gpu.problems:
            yield Finding(
                level="warning",
                text=f"GPU {gpu.address} is new and waits for an admin.",
                remedy=f"gpuspawner gpu enroll {host.name} {gpu.address}",
            )


def _problems(gpus: Iterator[tuple[str, Sequence[str]]]) -> list[Finding]:
    return [
        Finding(level="error", text=f"GPU {address}: {problem}")
        for address, problems in gpus
        for problem in problems
    ]


def _nodes(seen: Inspection) -> list[CheckedNode]:
    return [
        CheckedNode(
            id=node.id,
            cores=node.cores,
            cpus=node.cpus,
            memory_mib=node.memory_mib,
            free_mib=node.free_mib,
            reserve_mib=seen.inventory.node(node.id).reserve_mib,
            usable_mib=seen.inventory.node(node.id).usable_mib,
            hugepages=[
                Pages(kib=kib, total=total, free=free) for kib, total, free in node.hugepages
            ],
        )
        for node in seen.nodes
    ]


def _gpus(seen: Inspection, states: dict[str, str]) -> list[CheckedGpu]:
    facts: dict[str, GpuFacts] = {each.address: each for each in seen.gpus}
    return [
        CheckedGpu(
            address=gpu.address,
            model=gpu.model,
            emulated=gpu.imitation,
            kind=gpu.kind,
            node=gpu.node,
            group=gpu.group,
            functions=list(gpu.functions),
            link=_link(facts[gpu.address].link, facts[gpu.address].able),
            port=facts[gpu.address].port,
            port_link=_link(facts[gpu.address].port_link, facts[gpu.address].port_able),
            bars_mib=list(facts[gpu.address].bars_mib),
            reset_methods=list(facts[gpu.address].reset_methods),
            driver=facts[gpu.address].driver,
            state=states.get(gpu.address, "not surveyed yet"),
            problems=list(gpu.problems),
        )
        for gpu in seen.inventory.gpus
    ]


def _link(now: tuple[float, int], able: tuple[float, int]) -> Link:
    return Link(gts=now[0], width=now[1], max_gts=able[0], max_width=able[1])
