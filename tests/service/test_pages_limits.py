"""Limits and the audit in the pages, between a real hub and a real allocator."""

from __future__ import annotations

import asyncio

import pytest

from gpuspawner import schema
from gpuspawner.client import AllocatorError
from tests.layers import wait_for_async
from tests.service.front import SCRIPT, Visitor
from tests.service.harness import acquire_body, gpu_in, lease_in
from tests.service.page_site import PAGE, Pages, confirm

LIMITS = f"{PAGE}admin/limits"
AUDIT = f"{PAGE}admin/audit"
GPU = "0000:40:00.0"
ODD = "sar lab/ä & <b>'\""


async def lines(pages: Pages) -> list[tuple[str, str, str, int | None, int | None]]:
    """The audit: who, what, why, old and new."""
    return [(one.who, one.what, one.why, one.old, one.new) for one in await pages.client.audit()]


async def test_a_limit_is_set_changed_and_removed(pages: Pages) -> None:
    async with pages.user("lara", "gpu-admins") as lara:
        page = await lara.get(LIMITS)
        assert "Every user without one of her own" in page.text
        assert "no limit" in page.text
        url = f"{LIMITS}/user/set"
        page = await confirm(lara, url, name=" ada ", gpus="2", reason="trains  a model")
        assert "User ada: at most 2 GPUs at once." in page.text
        page = await confirm(lara, f"{url}?name=ada", known="ada", gpus="1", reason="done")
        await confirm(lara, f"{LIMITS}/default/set", gpus="3", reason="a small pool")
        await confirm(lara, f"{LIMITS}/group/set", name=ODD, gpus="4", reason="course")
        assert [(one.kind, one.name, one.gpus) for one in await pages.client.limits()] == [
            ("default", "", 3),
            ("group", ODD, 4),
            ("user", "ada", 1),
        ]
        page = await lara.get(LIMITS)
        assert "sar lab/ä &amp; &lt;b&gt;" in page.text
        assert "<b>" not in page.text
        assert "lara: course" in page.text.replace("by ", "")
        removal = f"{url.replace('set', 'clear')}?name=ada"
        assert "The default then holds for her: 3 GPUs at once." in (await lara.get(removal)).text
        page = await confirm(lara, removal, known="ada", reason="back to normal")
        assert "User ada: the limit is removed." in page.text
        gone = await lara.get(removal)
        assert gone.status == 404
    assert (await lines(pages))[:2] == [
        ("lara", "limit user ada", "back to normal", 1, None),
        ("lara", f"limit group {ODD}", "course", None, 4),
    ]
    assert ("lara", "limit user ada", "done", 2, 1) in await lines(pages)


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("user", {"name": "", "gpus": "1", "reason": "x"}, "Say which user"),
        ("user", {"name": "a" * 256, "gpus": "1", "reason": "x"}, "Say which user"),
        ("group", {"name": "  ", "gpus": "1", "reason": "x"}, "Say which group"),
        ("user", {"name": "ada", "gpus": "-1", "reason": "x"}, "whole number"),
        ("user", {"name": "ada", "gpus": "1.5", "reason": "x"}, "whole number"),
        ("user", {"name": "ada", "gpus": "100001", "reason": "x"}, "whole number"),
        ("default", {"gpus": "", "reason": "x"}, "whole number"),
        ("default", {"gpus": "1", "reason": " \t"}, "Give a reason"),
    ],
)
async def test_what_makes_no_limit(
    pages: Pages, kind: str, fields: dict[str, str], said: str
) -> None:
    """The question comes again with what was typed, and nothing is set."""
    async with pages.user("lara", "gpu-admins") as lara:
        url = f"{LIMITS}/{kind}/set"
        again = await lara.post(url, {"_xsrf": (await lara.get(url)).xsrf, **fields})
        assert again.status == 400
        assert said in again.text
        assert f'value="{fields["gpus"]}"' in again.text
    assert await pages.client.limits() == []
    assert not [line for line in await lines(pages) if line[1].startswith("limit")]


async def test_limits_take_a_token_and_the_scope(pages: Pages) -> None:
    fields = {"name": "ada", "gpus": "9", "reason": "x"}
    url = f"{LIMITS}/user/set"
    async with (
        pages.user("lara", "gpu-admins") as lara,
        pages.user("lev", "gpu-viewers") as lev,
        pages.user("lina") as lina,
    ):
        foreign = (await lina.get(PAGE)).xsrf
        for token in ({}, {"_xsrf": foreign}):
            assert (await lara.post(url, {**fields, **token})).status == 403
        page = await lev.get(LIMITS)
        assert page.status == 200
        assert "data-ask" not in page.text
        assert (await lev.get(url)).status == 403
        assert (await lev.post(url, {**fields, "_xsrf": page.xsrf})).status == 403
        assert (await lev.get(AUDIT)).status == 200
        for path in (LIMITS, AUDIT, url):
            assert (await lina.get(path)).status == 403
        assert (await lina.post(url, {**fields, "_xsrf": foreign})).status == 403
    assert await pages.client.limits() == []


async def test_a_user_reads_where_she_stands(pages: Pages) -> None:
    async with pages.user("mona", "sar") as mona:
        assert "You hold 0 GPUs. There is no limit" in (await mona.get(PAGE)).text
        await pages.client.set_limit("default", "", 1, "a test")
        await pages.client.set_limit("group", "sar", 3, "a test")
        await pages.client.set_limit("group", "hers-not", 1, "a test")
        page = await mona.get(PAGE)
        assert "You hold 0 of the 1 GPU that you may hold at once." in page.text
        assert "your group sar hold 0 of the 3 GPUs" in page.text
        assert "hers-not" not in page.text
        body = acquire_body("mona").model_copy(update={"groups": ["sar"]})
        lease = await pages.client.acquire(body)
        await lease_in(pages.client, lease.id, "running")
        part = await mona.get(PAGE + "?fragment=limit", {**SCRIPT, "X-XSRFToken": page.xsrf})
        assert "You hold 1 of the 1 GPU" in part.text
        assert "Stop a server to start another one with a GPU." in part.text
        assert "your group sar hold 1 of the 3 GPUs" in part.text


async def test_open_pages_are_told_of_limits(pages: Pages) -> None:
    async with pages.user("nora") as nora:
        xsrf = (await nora.get(PAGE)).xsrf
        await nora.events(xsrf, "data: {}")
        waiting = asyncio.create_task(nora.events(xsrf, "limits"))
        for number in range(50):
            await pages.client.set_limit("user", "nora", number, "a test")
            if (await asyncio.wait([waiting], timeout=0.2))[0]:
                break
        assert "event: changed" in await waiting


async def test_older_lines_of_the_audit_are_reached(pages: Pages) -> None:
    for number in range(120):
        await pages.client.set_limit("user", "ada", number, f"change {number:03}")
    async with pages.user("olga", "gpu-admins") as olga:
        seen: list[str] = []
        url = AUDIT
        while url:
            page = await olga.get(url)
            assert page.status == 200
            seen += [f"{number:03}" for number in range(120) if f"change {number:03}" in page.text]
            found = page.text.partition('rel="next"')[0].rpartition('href="')[2].partition('"')[0]
            url = found if 'rel="next"' in page.text else ""
        assert sorted(seen) == [f"{number:03}" for number in range(120)], "each once"
        assert "add host h1" in page.text
        assert "Newest" in page.text
        assert (await olga.get(f"{AUDIT}?before=x")).status == 404
    newest = await pages.client.audit(limit=2)
    assert [one.new for one in newest] == [119, 118]
    older = await pages.client.audit(limit=2, before=newest[-1].id)
    assert [one.new for one in older] == [117, 116]


async def audited(pages: Pages, who: Visitor, url: str, **fields: str) -> tuple[str, ...]:
    """Answer a question; the newest line of audit that came of it: who, what, why."""
    before = await pages.client.audit(limit=1)
    await confirm(who, url, **fields)
    entry = (await pages.client.audit(limit=1))[0]
    assert not before or entry.id > before[0].id
    return entry.who, entry.what, entry.why


async def test_what_admins_do_is_on_record(pages: Pages) -> None:
    """Hosts and GPUs, from the pages."""
    gpu = f"{PAGE}admin/gpus/h1/{GPU}"
    async with pages.user("petra", "gpu-admins") as petra:
        host = f"{PAGE}admin/hosts/h1"
        said = await audited(pages, petra, f"{host}/drain", reason="new fan")
        assert said == ("petra", "drain host h1", "new fan")
        said = await audited(pages, petra, f"{host}/undrain", reason="")
        assert said == ("petra", "undrain host h1", "")
        said = await audited(pages, petra, f"{gpu}/hold", reason="loud")
        assert said == ("petra", f"hold GPU h1 {GPU}", "loud (petra)")
        said = await audited(pages, petra, f"{gpu}/unhold", choice="loud (petra)", reason="quiet")
        assert said == ("petra", f"unhold GPU h1 {GPU}: loud (petra)", "quiet")
        said = await audited(pages, petra, f"{gpu}/retest", reason="to be sure")
        assert said == ("petra", f"retest GPU h1 {GPU}", "to be sure")
        await gpu_in(pages.client, GPU, "unassigned")
        said = await audited(pages, petra, f"{gpu}/retire", reason="too old")
        assert said == ("petra", f"retire GPU h1 {GPU}", "too old")
        count = len(await pages.client.audit())
        xsrf = (await petra.get(gpu)).xsrf
        assert (await petra.post(f"{gpu}/retest", {"_xsrf": xsrf, "reason": "x"})).status == 409
        assert len(await pages.client.audit()) == count, "what was refused was not done"
        page = await petra.get(AUDIT)
        for text in ("new fan", "unhold GPU h1", "quiet", "too old", "add host h1"):
            assert text in page.text, text


async def test_a_stop_by_an_admin_is_on_record(pages: Pages) -> None:
    """Through the hub, and directly where the hub does not know the server."""
    lease = await pages.lease("quinn", "training")
    async with pages.user("rosa", "gpu-admins") as rosa, pages.user("ria"):
        stop = f"{PAGE}admin/leases/{lease.id}/stop"
        said = await audited(pages, rosa, stop, reason="left over")
        assert said == ("rosa", f"stop server {lease.id} of quinn, training", "left over")
        await lease_in(pages.client, lease.id, "ended")
        await confirm(rosa, stop, reason="again")
        assert (await pages.client.audit(limit=1))[0].why == "left over", "there was nothing to do"
        await pages.hub.api("POST", "users/ria/server", {"profile": "emulated"})

        async def running() -> schema.Lease | None:
            found = await pages.client.leases(username="ria")
            server = await pages.hub.server("ria")
            ready = found and found[0].state == "running" and server and server["ready"]
            return found[0] if ready else None

        hers = await wait_for_async(running, 30, "the server of ria")
        said = await audited(
            pages, rosa, f"{PAGE}admin/leases/{hers.id}/stop", reason="power cut at six"
        )
        assert said == ("rosa", f"stop server {hers.id} of ria", "power cut at six")
        await lease_in(pages.client, hers.id, "ended")


async def test_a_hold_that_is_not_there_is_not_taken_away(pages: Pages) -> None:
    """A typing mistake in its name is no success."""
    for reason in ("fan", "noise"):
        await pages.client.gpu_action("h1", GPU, "hold", reason)
    action = schema.GpuAction(action="unhold", hold="fam")
    with pytest.raises(AllocatorError) as error:
        await pages.client.gpu_action("h1", GPU, action)
    assert error.value.refusal.reason == "no-such-hold"
    action = schema.GpuAction(action="unhold", hold="fan", reason="swapped")
    assert (await pages.client.gpu_action("h1", GPU, action)).holds == ["noise"]
    async with pages.user("sara", "gpu-admins") as sara:
        url = f"{PAGE}admin/gpus/h1/{GPU}/unhold"
        gone = await sara.post(url, {"_xsrf": (await sara.get(url)).xsrf, "choice": "fan"})
        assert gone.status == 400
        assert "This hold is gone" in gone.text
    assert (await gpu_in(pages.client, GPU, "unassigned")).holds == ["noise"]
