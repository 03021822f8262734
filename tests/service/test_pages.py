"""The pages, between a real hub and a real allocator on scripted hosts."""

from __future__ import annotations

import asyncio
import re
import stat
from pathlib import Path
from typing import Any

from gpuspawner import schema
from tests.layers import wait_for_async
from tests.service.front import NAVIGATE, SCRIPT, Front, visitor
from tests.service.harness import Site, gpu_in, lease_in
from tests.service.page_site import PAGE, Pages, confirm
from tests.service.real_hub import PASSWORD, RealHub
from tests.service.scripted import encode, report

ADDRESS = "0000:40:00.0"
GPU = f"{PAGE}admin/gpus/h1/{ADDRESS}"
NASTY = "\"><script>alert(1)</script><img src=x onerror=alert(2)>'{{7*7}}"


# ------------------------------------------------------------------ who may


async def test_login_is_the_hubs_and_outlives_a_restart(pages: Pages) -> None:
    async with visitor(pages.front.url) as stranger:
        first = await stranger.get(PAGE, follow=False)
        assert first.status == 302
        assert first.headers["Location"].startswith("/hub/api/oauth2/authorize?")
        assert (await stranger.get(PAGE, SCRIPT)).status in (200, 302)  # the hub's login
        part = await stranger.get(PAGE + "?fragment=counts", SCRIPT, follow=False)
        assert part.status == 401
        assert "logged out" in part.text
        posted = await stranger.post(f"{GPU}/retest", {"reason": "x"})
        assert posted.status == 403
    secret = pages.site.folder / "pages.cookie_secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    before = secret.read_text()
    async with pages.user("anna") as anna:
        assert "You have no server now" in (await anna.get(PAGE, follow=False)).text
    assert secret.read_text() == before


async def test_scopes(pages: Pages) -> None:
    async with pages.user("plain") as plain:
        page = await plain.get(PAGE)
        assert "GPU pool</a>" not in page.text
        for path in ("admin", f"admin/gpus/h1/{ADDRESS}", f"admin/gpus/h1/{ADDRESS}/retest"):
            refused = await plain.get(PAGE + path)
            assert refused.status == 403
            assert "custom:gpu:" in refused.text
            assert "What to do:" in refused.text
        refused = await plain.post(f"{GPU}/retest", {"_xsrf": page.xsrf})
        assert refused.status == 403
    async with pages.user("viewer", "gpu-viewers") as viewer:
        page = await viewer.get(f"{PAGE}admin")
        assert page.status == 200
        assert "Drain" not in page.text
        assert "data-ask" not in (await viewer.get(GPU)).text
        for path in (f"{GPU}/retest", f"{PAGE}admin/hosts/h1/drain"):
            assert (await viewer.get(path)).status == 403
            refused = await viewer.post(path, {"_xsrf": page.xsrf, "reason": "x"})
            assert refused.status == 403
            assert "custom:gpu:manage" in refused.text
    assert not (await pages.client.hosts())[0].drained


async def test_only_her_own_leases(pages: Pages) -> None:
    mine = await pages.lease("berta")
    other = await pages.lease("carl", start="start-0002")
    async with pages.user("berta") as berta:
        page = await berta.get(PAGE)
        assert mine.id in page.text
        assert other.id not in page.text
        assert "carl" not in page.text
        assert (await berta.get(f"{PAGE}leases/{other.id}/stop")).status == 404
        refused = await berta.post(f"{PAGE}leases/{other.id}/stop", {"_xsrf": page.xsrf})
        assert refused.status == 404
    assert (await pages.client.lease(other.id)).state == "running"


async def test_a_form_without_its_token_does_nothing(pages: Pages) -> None:
    async with pages.user("root1", "gpu-admins") as root, pages.user("other1") as other:
        foreign = (await other.get(PAGE)).xsrf
        for fields in ({}, {"_xsrf": "2|abc|def|123"}, {"_xsrf": foreign}):
            refused = await root.post(f"{PAGE}admin/hosts/h1/drain", fields)
            assert refused.status == 403
            assert "This form has expired" in refused.text
        # A script of another page on the same origin has no token either.
        assert (await root.get(f"{PAGE}admin?fragment=hosts", SCRIPT, follow=False)).status == 401
    assert not (await pages.client.hosts())[0].drained


async def test_programs_need_no_form_token(pages: Pages) -> None:
    changed = await pages.client.change_host("h1", schema.ChangeHost(drained=True))
    assert changed.drained
    back = await pages.client.change_host("h1", schema.ChangeHost(drained=False))
    assert not back.drained


async def test_headers(pages: Pages) -> None:
    async with pages.user("dora") as dora:
        page = await dora.get(PAGE)
        policy = page.headers["Content-Security-Policy"]
        assert "unsafe" not in policy
        assert "script-src 'nonce-" in policy
        nonce = re.search(r"nonce-([^']+)'", policy)
        assert nonce
        scripts = re.findall(r"<script[^>]*>", page.text)
        assert scripts
        assert all(f'nonce="{nonce[1]}"' in script for script in scripts)
        assert not re.findall(r"<script[^>]*>[^<]", page.text), "no script inside the page"
        assert " style=" not in page.text
        assert not re.findall(r"\son\w+=", page.text)
        assert page.headers["Cache-Control"] == "no-store"
        for name in ("pages.css", "pages.js"):
            found = re.search(rf'"([^"]*{name}[^"]*)"', page.text)
            assert found
            assert (await dora.get(found[1])).status == 200
        assert "external" not in page.text
        assert not re.findall(r'(?:src|href)="(?:https?:)?//', page.text), "nothing from elsewhere"


# ------------------------------------------------------------------ what is shown


async def test_users_page(pages: Pages) -> None:
    lease = await pages.lease("emil", "training")
    async with pages.user("emil") as emil:
        page = await emil.get(PAGE)
        for text in ("training", "1 × Emulated GPU 16M", "h1, NUMA node 0", "1 core, 1 GiB"):
            assert text in page.text
        assert 'href="/user/emil/training/"' in page.text
        counts = await emil.get(PAGE + "?fragment=counts", {**SCRIPT, "X-XSRFToken": page.xsrf})
        assert counts.status == 200
        assert "<html" not in counts.text
        assert re.search(r'data-label="Free"><strong[^>]*>1<', counts.text)
        assert re.search(r'data-label="In use">1<', counts.text)
        await pages.world.end(lease.id)
        await lease_in(pages.client, lease.id, "ended")
        after = await emil.get(PAGE)
        assert "Your last server ended" in after.text
        assert "powered off or rebooted" in after.text


async def test_admins_pages(pages: Pages) -> None:
    await pages.lease("frida")
    async with pages.user("root2", "gpu-admins") as root:
        page = await root.get(f"{PAGE}admin")
        for text in ("h1", "KVM", "NUMA node 0", "NUMA node 1", "in use", "free", "frida",
                     "2 GiB kept back", "emulated", ADDRESS):  # fmt: skip
            assert text in page.text, text
        gpu = await root.get(GPU)
        for text in ("EMU-0000:40:00.0", "known answer", "answers on the bus", "read back",
                     "the last line of the console",
                     "in use"):  # fmt: skip
            assert text in gpu.text, text
        run = re.search(r'href="(/services/gpu/admin/diagnoses/[^"]+)"', gpu.text)
        assert run
        assert "the last line of the console" in (await root.get(run[1])).text
        assert (await root.get(f"{PAGE}admin/gpus/h1/0000:ff:00.0")).status == 404
        missing = await root.get(f"{PAGE}nothing/here")
        assert missing.status == 404
        assert "What to do:" in missing.text
        for text in (page.text, gpu.text):
            assert "secret-of-frida" not in text
            assert "s" * 40 not in text


async def test_hostile_names_break_nothing(pages: Pages) -> None:
    user = "gretel<b>&\"'"
    lease = await pages.lease(user, "Ünï/../<i>&\" ' x"[:200])
    pages.world.script = lambda run, nonce, gpu: encode(report(run, nonce, gpu, serial=NASTY))
    other = "0000:41:00.0"
    await pages.client.gpu_action("h1", other, "hold", NASTY)
    await pages.client.gpu_action("h1", other, "retest", NASTY)
    async with pages.user("root3", "gpu-admins") as root:
        page = await root.get(f"{PAGE}admin")
        assert "gretel&lt;b&gt;&amp;" in page.text
        gpu = await root.get(f"{PAGE}admin/gpus/h1/{other}")
        await pages.client.gpu_action("h1", other, "unhold", "")
        await gpu_in(pages.client, other, "failed")
        failed = await root.get(f"{PAGE}admin/gpus/h1/{other}")
        assert "alert(1)" in failed.text
        question = await root.get(f"{PAGE}admin/leases/{lease.id}/stop")
        back = await confirm(root, f"{PAGE}admin/leases/{lease.id}/stop", reason=NASTY)
        for seen in (page, gpu, failed, question, back):
            assert "<script>alert" not in seen.text
            assert "<img src=x" not in seen.text
            assert "<b>" not in seen.text
            assert "<i>" not in seen.text


# ------------------------------------------------------------------ what is done


async def test_gpu_actions(pages: Pages) -> None:
    async with pages.user("root4", "gpu-admins") as root:
        again = await root.post(
            f"{GPU}/hold", {"_xsrf": (await root.get(f"{GPU}/hold")).xsrf, "reason": "  "}
        )
        assert again.status == 400
        assert "Give a reason" in again.text
        page = await confirm(root, f"{GPU}/hold", reason="fan is being swapped")
        assert "it is held" in page.text.lower()
        gpu = await gpu_in(pages.client, ADDRESS, "unassigned")
        assert gpu.holds == ["fan is being swapped (root4)"]
        page = await confirm(root, f"{GPU}/unhold", choice=gpu.holds[0])
        assert (await gpu_in(pages.client, ADDRESS, "unassigned")).holds == []
        runs = len(await pages.client.diagnoses(host="h1", gpu=ADDRESS))
        await confirm(root, f"{GPU}/retest", reason="after the swap")
        await gpu_in(pages.client, ADDRESS, "unassigned")
        await wait_for_async(
            lambda: _runs(pages, runs + 1), 10, "another diagnosis"
        )  # fmt: skip
        await gpu_in(pages.client, ADDRESS, "unassigned")
        page = await confirm(root, f"{GPU}/retire", reason="broken fan")
        assert "retired" in page.text
        assert "broken fan" in page.text
        assert "root4" in page.text
        assert (await gpu_in(pages.client, ADDRESS, "retired")).reason == "broken fan"
        late = await root.post(
            f"{GPU}/retest", {"_xsrf": page.xsrf, "reason": "x"}
        )  # fmt: skip
        assert late.status == 409
        assert "cannot be asked to retest now" in late.text


async def _runs(pages: Pages, count: int) -> bool:
    return len(await pages.client.diagnoses(host="h1", gpu=ADDRESS)) >= count


async def test_drain(pages: Pages) -> None:
    async with pages.user("root5", "gpu-admins") as root:
        page = await confirm(root, f"{PAGE}admin/hosts/h1/drain")
        assert "takes no new servers" in page.text
        assert "takes no new servers" not in (await root.get(f"{PAGE}admin")).text, "said once"
        assert (await pages.client.hosts())[0].drained
        await confirm(root, f"{PAGE}admin/hosts/h1/undrain")
        assert not (await pages.client.hosts())[0].drained


async def _start(pages: Pages, user: str) -> schema.Lease:
    """A server started by the hub."""
    status, answer = await pages.hub.api("POST", f"users/{user}/server", {"profile": "emulated"})
    assert status in (201, 202), answer

    async def running() -> Any:
        found = await pages.client.leases(username=user)
        server = await pages.hub.server(user)
        return found and found[0].state == "running" and server and server["ready"] and found[0]

    return await wait_for_async(running, 30, f"the server of {user}")


async def test_a_user_stops_her_server_through_the_hub(pages: Pages) -> None:
    async with pages.user("helga") as helga:
        lease = await _start(pages, "helga")
        page = await confirm(helga, f"{PAGE}leases/{lease.id}/stop")
        assert "Your server is being stopped" in page.text
        assert (await lease_in(pages.client, lease.id, "ended")).reason == "released"
        await wait_for_async(lambda: _stopped(pages, "helga"), 20, "the hub to know")
        by = re.findall(r"DELETE /hub/api/users/helga/server \((\w+)@", pages.hub.log_text())
        assert by == ["helga"], "with her own rights, not with the allocator's"


async def _stopped(pages: Pages, user: str) -> bool:
    return await pages.hub.server(user) is None


async def test_an_admin_stops_a_server_through_the_hub(pages: Pages) -> None:
    async with pages.user("ida") as ida, pages.user("root6", "gpu-admins") as root:
        lease = await _start(pages, "ida")
        page = await confirm(root, f"{PAGE}admin/leases/{lease.id}/stop", reason="power cut at six")
        assert "JupyterHub is stopping" in page.text
        assert (await lease_in(pages.client, lease.id, "ended")).reason == "released"
        await wait_for_async(lambda: _stopped(pages, "ida"), 20, "the hub to know")
        assert "power cut at six" in (await ida.get(PAGE)).text


async def test_a_server_that_the_hub_does_not_know_is_ended_directly(pages: Pages) -> None:
    lease = await pages.lease("jan")
    async with pages.user("root7", "gpu-admins") as root, pages.user("jan") as jan:
        page = await confirm(jan, f"{PAGE}leases/{lease.id}/stop")
        assert "JupyterHub does not know this server" in page.text
        assert (await pages.client.lease(lease.id)).state == "running"
        page = await confirm(root, f"{PAGE}admin/leases/{lease.id}/stop", reason="left over")
        assert "its lease was ended directly" in page.text
        ended = await lease_in(pages.client, lease.id, "ended")
        assert ended.reason == "admin"
        assert "left over" in (ended.message or "")


# ------------------------------------------------------------------ live


async def test_a_change_is_told(pages: Pages) -> None:
    async with pages.user("karl") as karl:
        xsrf = (await karl.get(PAGE)).xsrf
        assert "event: hello" in await karl.events(xsrf, "data: {}")
        waiting = asyncio.create_task(karl.events(xsrf, '"leases"'))
        await asyncio.sleep(0.5)
        await pages.lease("karl")
        lines = await waiting
        assert "event: changed" in lines
        assert not [line for line in lines if "karl" in line], "only what changed, not whose"
        async with visitor(pages.front.url) as stranger:
            refused = await stranger.get(f"{PAGE}pages/events", SCRIPT, follow=False)
            assert refused.status in (302, 401)


async def test_without_the_hub_the_pages_say_so(tmp_path: Path) -> None:
    site = Site(tmp_path, hub_api_url="http://127.0.0.1:9/hub/api")
    async with site.running(), visitor(f"http://127.0.0.1:{site.port}") as one:
        page = await one.get(PAGE)
        assert page.status == 503
        assert "service.token" in page.text
    (tmp_path / "service.token").write_text("s" * 40)
    async with site.running(), visitor(f"http://127.0.0.1:{site.port}") as one:
        token = {**NAVIGATE, "Authorization": "token abc"}
        page = await one.get(PAGE, token)
        assert page.status == 503
        assert "JupyterHub does not answer" in page.text


async def test_below_another_base_url(tmp_path: Path) -> None:
    """A hub at /jupyter/: login, style, links and stop go there."""
    (tmp_path / "hub").mkdir()
    hub = RealHub(tmp_path / "hub")
    with (tmp_path / "hub" / "test_config.py").open("a") as config:
        config.write("c.JupyterHub.base_url = '/jupyter/'\n")
    hub.url = f"http://127.0.0.1:{hub.port}/jupyter/hub/"
    page_path = f"/jupyter{PAGE}"
    site = Site(tmp_path / "allocator", hub_api_url=hub.url + "api")
    (site.folder / "service.token").write_text("s" * 40)
    site.port = hub.allocator_port
    site.url = f"http://127.0.0.1:{site.port}{page_path}"
    await asyncio.to_thread(hub.start)
    try:
        front = Front(hub.port, hub.allocator_port, page_path)
        async with site.running(), front.running(), visitor(front.url) as one:
            page = await one.log_in("lena", PASSWORD, page_path)
            assert page.status == 200
            assert page.url == front.url + page_path
            assert 'href="/jupyter/hub/spawn"' in page.text
            style = await one.get("/jupyter/hub/static/css/style.min.css")
            assert style.status == 200
            assert "event: hello" in await one.events(page.xsrf, "data: {}", path=page_path)
    finally:
        hub.stop()
