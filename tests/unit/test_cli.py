"""The admin's command line against a small allocator that records what it is asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from gpuspawner.cli import app
from gpuspawner.cli.check import hub_address
from gpuspawner.cli.common import ago
from gpuspawner.cli.gpus import full_address
from gpuspawner.cli.images import read_manifests

NOW = "2026-11-30T20:00:00Z"
TOKEN = "a" * 64


def gpu(**changes: Any) -> dict[str, Any]:
    return {
        "host": "lab-1", "address": "0000:41:00.0", "model": "Emulated GPU 16M", "node": 0,
        "emulated": True, "memory_mib": 16, "functions": ["0000:41:00.0"], "state": "unassigned",
        "since": NOW, "dirty": False,
    } | changes  # fmt: skip


def host(**changes: Any) -> dict[str, Any]:
    node = {
        "id": 0, "cores": 4, "free_cores": 3, "memory_mib": 8192, "reserve_mib": 512,
        "free_mib": 6144,
    }  # fmt: skip
    return {
        "name": "lab-1", "uri": "qemu:///system", "kind": "emulated", "state": "ready",
        "drained": False, "cidr": "10.201.0.0/24", "nodes": [node, node | {"id": 1}], "gpus": 4,
    } | changes  # fmt: skip


def lease(**changes: Any) -> dict[str, Any]:
    return {
        "id": "11111111-1111-4111-8111-111111111111", "hub_id": "hub", "username": "ada",
        "server_name": "", "start_id": "start-0001", "state": "running", "created_at": NOW,
        "request": {"gpus": 1, "cores": 2, "memory_mib": 2048, "image": "lab"},
        "host": "lab-1", "node": 0, "gpus": ["0000:41:00.0"],
    } | changes  # fmt: skip


def diagnosis(**changes: Any) -> dict[str, Any]:
    return {
        "id": "d1a90000-1111-4111-8111-111111111111", "host": "lab-1", "gpu": "0000:41:00.0",
        "state": "done", "outcome": "fail", "reasons": ["read_back: 1 error"], "attempt": 1,
        "started_at": NOW, "policy_version": 1,
        "checks": [
            {"check": "read_back", "status": "fail", "seconds": 1.5, "codes": ["MISMATCH"],
             "metrics": {"errors": 1, "first_bad_offset": 4096}},
        ],
        "witness": {"present": True},
    } | changes  # fmt: skip


class Allocator:
    """Answers what a test lays down and keeps what it was sent."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], tuple[int, Any]] = {}
        self.asked: list[tuple[str, str, Any]] = []
        self.tokens: set[str] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                path = self.path.removeprefix("/services/gpu/")
                outer.asked.append((self.command, path, body))
                outer.tokens.add(self.headers.get("Authorization", ""))
                status, reply = outer.answers.get(
                    (self.command, path),
                    (404, {"status": 404, "message": f"no {path}", "reason": "not-found"}),
                )
                content = b"" if reply is None else json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = answer

            def log_message(self, format: str, *args: object) -> None:
                """Keep the test's output clean."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/services/gpu/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def lay(self, verb: str, path: str, reply: Any, status: int = 200) -> None:
        self.answers[(verb, f"api/v1/{path}")] = (status, reply)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def allocator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    fake = Allocator()
    config = tmp_path / "gpuspawner_config.py"
    config.write_text(
        f"c.Installation.state_dir = {str(tmp_path)!r}\n"
        f"c.Installation.allocator_url = {fake.url!r}\n"
    )
    for name in ("spawner.token", "service.token", "proxy.token"):
        (tmp_path / name).write_text(TOKEN + "\n")
        (tmp_path / name).chmod(0o600)
    monkeypatch.setenv("GPUSPAWNER_CONFIG", str(config))
    yield fake
    fake.close()


def run(*words: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, list(words), input=answer)


# --- lists -------------------------------------------------------------------------------------


def test_gpu_list_shows_state_and_user(allocator: Allocator) -> None:
    allocator.lay(
        "GET",
        "gpus",
        {"gpus": [gpu(), gpu(address="0000:42:00.0", state="assigned", username="ada")]},
    )
    result = run("gpu", "list")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split()[:3] == ["HOST", "ADDRESS", "MODEL"]
    assert "unassigned" in lines[1]
    assert "assigned" in lines[2]
    assert "ada" in lines[2]
    assert allocator.tokens == {f"Bearer {TOKEN}"}


def test_gpu_list_filters_and_speaks_json(allocator: Allocator) -> None:
    allocator.lay("GET", "gpus", {"gpus": [gpu(), gpu(host="lab-2", state="failed")]})
    result = run("gpu", "list", "--state", "failed", "--json")
    assert [x["host"] for x in json.loads(result.stdout)] == ["lab-2"]


def test_a_real_gpu_is_told_from_an_emulated_one(allocator: Allocator) -> None:
    allocator.lay(
        "GET", "gpus", {"gpus": [gpu(model="NVIDIA L4", emulated=False), gpu(model="NVIDIA L4")]}
    )
    real, emulated = run("gpu", "list").stdout.splitlines()[1:]
    assert "(emulated)" not in real
    assert "NVIDIA L4 (emulated)" in emulated


def test_names_cannot_move_the_cursor(allocator: Allocator) -> None:
    allocator.lay("GET", "leases", {"leases": [lease(username="a\x1b[2Jda")]})
    assert "\x1b" not in run("lease", "list").stdout


def test_empty_lists_say_so(allocator: Allocator) -> None:
    for path, command in (("hosts", "host"), ("gpus", "gpu"), ("leases", "lease")):
        allocator.lay("GET", path, {path: []})
        result = run(command, "list")
        assert result.exit_code == 0
        assert result.stdout.startswith("No ")


def test_host_list(allocator: Allocator) -> None:
    allocator.lay("GET", "hosts", {"hosts": [host(), host(name="lab-2", drained=True)]})
    result = run("host", "list")
    assert "3/4 + 3/4" in result.stdout
    assert "drained" in result.stdout.splitlines()[2]


def test_lease_list_hides_what_has_ended(allocator: Allocator) -> None:
    ended = lease(id="22222222-1111-4111-8111-111111111111", state="ended", reason="stopped")
    allocator.lay("GET", "leases", {"leases": [lease()]})
    allocator.lay("GET", "leases?all=1", {"leases": [lease(), ended]})
    assert "22222222" not in run("lease", "list").stdout
    assert "22222222" in run("lease", "list", "--all").stdout


def test_limits(allocator: Allocator) -> None:
    allocator.lay("GET", "limits", {"limits": [{"kind": "group", "name": "sar", "gpus": 4}]})
    assert "sar" in run("limit", "list").stdout
    allocator.lay("PUT", "limits/user/ada", None, 204)
    done = run("limit", "set", "user", "2", "ada", "--reason", "she trains a model")
    assert done.stdout == "limit user ada: 2\n"
    assert "--reason" in run("limit", "set", "user", "2", "ada").stderr
    assert "Name the user" in run("limit", "clear", "group", "-r", "x").stderr


@pytest.mark.parametrize("words", [["audit"], ["limit", "audit"]])
def test_audit(allocator: Allocator, words: list[str]) -> None:
    line = {"id": 7, "at": "2026-11-30T20:00:00Z", "who": "root", "what": "drain host lab-1",
            "old": None, "new": None, "why": "a fan"}  # fmt: skip
    allocator.lay("GET", "audit?limit=200", {"audit": [line]})
    allocator.lay("GET", "audit?limit=1&before=8", {"audit": [line]})
    shown = run(*words).stdout
    for text in ("root", "drain host lab-1", "a fan"):
        assert text in shown
    older = run(*words, "--limit", "1", "--before", "8")
    assert "drain host lab-1" in older.stdout
    assert "--before 7" in older.stderr
    assert run(*words, "--limit", "0").exit_code == 2


def test_diagnosis_list_and_show(allocator: Allocator) -> None:
    allocator.lay("GET", "diagnoses", {"diagnoses": [diagnosis()]})
    allocator.lay("GET", "diagnoses?host=lab-1&gpu=0000:41:00.0", {"diagnoses": [diagnosis()]})
    assert (
        "read_back: 1 error"
        in run("diagnosis", "list", "--host", "lab-1", "--gpu", "41:00.0").stdout
    )
    shown = run("diagnosis", "show", "d1a9").stdout
    assert "errors=1, first_bad_offset=4096" in shown
    assert "MISMATCH" in shown
    assert "witness: present=True" in shown
    assert run("diagnosis", "show", "nope").exit_code == 1


def test_image_list(allocator: Allocator) -> None:
    image = {"name": "lab", "role": "lab", "title": "Lab", "digest": "sha256:abcdef0123456789",
             "bytes": 3 << 20, "hosts": ["lab-1"], "copying": {"lab-2": 40}}  # fmt: skip
    allocator.lay("GET", "images", {"images": [image]})
    assert "lab-1 lab-2 40%" in run("image", "list").stdout


# --- verbs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["retest", "enroll", "unhold"])
def test_gpu_verbs(allocator: Allocator, verb: str) -> None:
    path = "gpus/lab-1/0000:41:00.0/action"
    allocator.lay("POST", path, gpu(state="diagnosing"), 202)
    result = run("gpu", verb, "lab-1", "41:00.0", "--reason", "why not")
    assert result.exit_code == 0, result.output
    assert allocator.asked[-1][2] == {"action": verb, "reason": "why not", "hold": None}
    assert "diagnosing" in result.stdout


def test_one_hold_of_several_is_taken_away(allocator: Allocator) -> None:
    path = "gpus/lab-1/0000:41:00.0/action"
    allocator.lay("POST", path, gpu(holds=["other"]))
    result = run("gpu", "unhold", "lab-1", "41:00.0", "--hold", "fan", "-r", "swapped")
    assert result.exit_code == 0, result.output
    assert allocator.asked[-1][2] == {"action": "unhold", "reason": "swapped", "hold": "fan"}
    assert "held: other" in result.stdout


def test_holding_needs_a_reason(allocator: Allocator) -> None:
    result = run("gpu", "hold", "lab-1", "41:00.0")
    assert result.exit_code == 1
    assert "reason" in result.stderr
    assert allocator.asked == []


def test_retiring_asks_first(allocator: Allocator) -> None:
    assert run("gpu", "retire", "lab-1", "41:00.0", answer="n\n").exit_code == 1
    assert allocator.asked == []


def test_host_add_waits_until_ready(allocator: Allocator, tmp_path: Path) -> None:
    declaration = tmp_path / "emulated.yaml"
    declaration.write_text("nodes: []\n")
    allocator.lay("POST", "hosts", host(state="new"), 201)
    allocator.lay("GET", "hosts", {"hosts": [host()]})
    result = run(
        "host", "add", "lab-1", "--emulated", str(declaration), "--shell", "ssh -p 22 gpu1"
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == "lab-1: ready\n"
    body = allocator.asked[0][2]
    assert body["emulated"] == "nodes: []\n"
    assert body["shell"] == ["ssh", "-p", "22", "gpu1"]


def test_a_host_may_have_no_shell(allocator: Allocator) -> None:
    allocator.lay("POST", "hosts", host(state="new"), 201)
    uri = "qemu+tls://gpu1/system"
    result = run("host", "add", "lab-1", "--uri", uri, "--shell", "none", "--wait", "0")
    assert result.exit_code == 0, result.output
    assert allocator.asked[0][2]["shell"] is None


def test_another_machines_shell_must_be_named(allocator: Allocator) -> None:
    """Else the allocator's own GPUs would be taken for that host's."""
    result = run("host", "add", "lab-1", "--uri", "qemu+tls://gpu1/system")
    assert result.exit_code == 1
    assert "ssh -o BatchMode=yes" in result.stderr
    assert allocator.asked == []


def test_host_add_says_what_is_wrong_with_a_name(allocator: Allocator) -> None:
    result = run("host", "add", "Lab One")
    assert result.exit_code == 1
    assert "name:" in result.stderr
    assert allocator.asked == []


def test_a_host_that_cannot_be_reached_is_a_failure(allocator: Allocator) -> None:
    allocator.lay("POST", "hosts", host(state="new"), 201)
    allocator.lay("GET", "hosts", {"hosts": [host(state="unreachable", reason="no route")]})
    result = run("host", "add", "lab-1")
    assert result.exit_code == 1
    assert "no route" in result.stdout
    assert "host check lab-1" in result.stderr


def test_host_drain_and_back(allocator: Allocator) -> None:
    allocator.lay("PATCH", "hosts/lab-1", host(drained=True))
    assert run("host", "drain", "lab-1", "-r", "a fan").exit_code == 0
    assert run("host", "undrain", "lab-1").exit_code == 0
    assert [body for _, _, body in allocator.asked] == [
        {"drained": True, "reason": "a fan"},
        {"drained": False, "reason": ""},
    ]


def test_host_check_fails_with_an_error_only(allocator: Allocator) -> None:
    warning = {"level": "warning", "text": "no hugepages", "remedy": "reserve some"}
    gpu = {
        "address": "0000:41:00.0", "model": "Lab GPU", "emulated": True, "kind": "emulated",
        "node": 1, "group": 15, "functions": ["0000:41:00.0", "0000:41:00.1"],
        "link": {"gts": 16, "width": 8, "max_gts": 32, "max_width": 16}, "port": "0000:40:01.0",
        "port_link": {"gts": 16, "width": 8, "max_gts": 0, "max_width": 0}, "bars_mib": [16, 64],
        "reset_methods": ["bus"], "driver": "vfio-pci", "state": "unassigned", "problems": [],
    }  # fmt: skip
    node = {
        "id": 1, "cores": 4, "cpus": 8, "memory_mib": 65536, "free_mib": 1024, "reserve_mib": 0,
        "usable_mib": 32768, "hugepages": [{"kib": 1048576, "total": 32, "free": 30}],
    }  # fmt: skip
    parts = {"host": "lab-1", "nodes": [node], "gpus": [gpu], "machine": {"CPU": "A CPU"}}
    allocator.lay("GET", "hosts/lab-1/check", {**parts, "findings": [warning]})
    shown = run("host", "check", "lab-1").stdout
    for text in ("CPU: A CPU", "32 of 1024 MiB (30)", "Lab GPU (emulated)", "unassigned",
                 "15: 0000:41:00.0 0000:41:00.1", "16 GT/s x8 of 32 x16", "0000:40:01.0 16 GT/s x8",
                 "16 MiB + 64 MiB"):  # fmt: skip
        assert text in shown
    told = json.loads(run("host", "check", "lab-1", "--json").stdout)
    assert told["gpus"][0]["link"]["width"] == 8
    allocator.lay("GET", "hosts/lab-1/check", {"host": "lab-1", "findings": [warning]})
    assert run("host", "check", "lab-1").exit_code == 0
    allocator.lay(
        "GET", "hosts/lab-1/check", {"host": "lab-1", "findings": [warning | {"level": "error"}]}
    )
    result = run("host", "check", "lab-1")
    assert result.exit_code == 1
    assert "-> reserve some" in result.stdout


def test_lease_end_by_the_beginning_of_its_id(allocator: Allocator) -> None:
    other = lease(id="11222222-1111-4111-8111-111111111111")
    allocator.lay("GET", "leases", {"leases": [lease(), other]})
    allocator.lay("POST", f"leases/{other['id']}/end", other | {"state": "stopping"}, 202)
    assert run("lease", "end", "11", "--yes").exit_code == 1, "two leases begin with it"
    assert run("lease", "end", "33", "--yes").exit_code == 1, "none does"
    result = run("lease", "end", "112", "--reason", "maintenance", "--yes")
    assert result.exit_code == 0, result.output
    assert "stopping" in result.stdout
    assert allocator.asked[-1][2] == {"reason": "maintenance"}


# --- errors ------------------------------------------------------------------------------------


def test_a_refusal_is_one_sentence(allocator: Allocator) -> None:
    allocator.lay("GET", "gpus", {"status": 403, "message": "Not yours.", "reason": "scope"}, 403)
    result = run("gpu", "list")
    assert (result.exit_code, result.stderr) == (1, "gpuspawner: Not yours.\n")


def test_an_allocator_that_is_away(allocator: Allocator) -> None:
    allocator.close()
    result = run("gpu", "list")
    assert result.exit_code == 1
    assert "cannot be reached" in result.stderr
    assert "gpuspawner check" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_no_token(allocator: Allocator, tmp_path: Path) -> None:
    (tmp_path / "spawner.token").unlink()
    result = run("gpu", "list")
    assert result.exit_code == 1
    assert "gpuspawner token" in result.stderr


def test_a_broken_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "gpuspawner_config.py"
    broken.write_text("c.Installation.state_dir = \n")
    monkeypatch.setenv("GPUSPAWNER_CONFIG", str(broken))
    for words in (("gpu", "list"), ("check",), ("token",)):
        result = run(*words)
        assert result.exit_code == 1
        assert str(broken) in result.output


# --- token, check, images ----------------------------------------------------------------------


def test_token_makes_private_files_once(allocator: Allocator, tmp_path: Path) -> None:
    for path in tmp_path.glob("*.token"):
        path.unlink()
    assert run("token").exit_code == 0
    made = {path.name: path.read_text() for path in tmp_path.glob("*.token")}
    assert set(made) == {"spawner.token", "service.token", "proxy.token"}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.glob("*.token"))
    assert run("token").exit_code == 0
    assert {path.name: path.read_text() for path in tmp_path.glob("*.token")} == made
    assert run("token", "--replace").exit_code == 0
    assert (tmp_path / "spawner.token").read_text() != made["spawner.token"]


def lay_image(folder: Path, name: str, size: int = 4) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "vmlinuz").write_bytes(b"abcd")
    files = {"kernel": {"file": "vmlinuz", "sha256": "", "bytes": size}}
    manifest = {"v": 1, "name": name, "role": "lab", "built_at": NOW, "files": files}
    (folder / name / "manifest.json").write_text(json.dumps(manifest))


def checked(*words: str) -> tuple[int, dict[str, list[str]]]:
    result = run("check", "--json", "--uri", "", *words)
    by_level: dict[str, list[str]] = {}
    for finding in json.loads(result.stdout):
        by_level.setdefault(finding["level"], []).append(finding["text"])
    return result.exit_code, by_level


def test_check_finds_nothing_wrong(allocator: Allocator, tmp_path: Path) -> None:
    for name in ("lab", "service"):
        lay_image(tmp_path / "images", name)
    (tmp_path / "jupyterhub_config.py").write_text(
        "c.JupyterHub.hub_bind_url = 'http://10.201.0.1:8081'\n"
    )
    allocator.lay("GET", "health", {"ok": True, "version": "0.1.0", "epoch": 1, "hosts": {}})
    status, found = checked()
    assert (status, set(found)) == (0, {"ok"}), found


def test_check_names_each_fault(allocator: Allocator, tmp_path: Path) -> None:
    (tmp_path / "spawner.token").chmod(0o644)
    (tmp_path / "service.token").write_text("short")
    lay_image(tmp_path / "images", "lab", size=5)
    (tmp_path / "jupyterhub_config.py").write_text("c.JupyterHub.port = 8000\n")
    hosts = {"lab-1": "unreachable"}
    answer = {"ok": False, "version": "0.1.0", "epoch": 1, "hosts": hosts}
    allocator.lay("GET", "health", answer, 503)
    status, found = checked()
    assert status == 1
    text = "\n".join(found["error"])
    for expected in (
        "spawner.token has mode 0644",
        "service.token is too short",
        "would look for the hub inside itself",
        "vmlinuz is missing or cut off",
        "no image 'service'",
        "lab-1 is unreachable",
    ):
        assert expected in text
    assert len(found["error"]) == 6


def test_check_before_the_start(allocator: Allocator) -> None:
    allocator.close()
    _, found = checked("--no-allocator")
    assert not any("allocator" in text for text in found["error"])


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("c.JupyterHub.hub_ip = '10.0.0.5'", "ok"),
        ("c.JupyterHub.hub_connect_ip = 'hub.example.org'", "ok"),
        ("c.GPUSpawner.hub_connect_url = 'http://10.201.0.1:8081'", "ok"),
        ("c.JupyterHub.hub_bind_url = 'http://:8081'", "ok"),
        ("c.JupyterHub.hub_ip = '127.0.0.1'", "error"),
        ("c.JupyterHub.hub_connect_url = 'http://localhost:8081'", "error"),
        ("raise RuntimeError('no')", "error"),
    ],
)
def test_the_hub_must_be_reachable_from_guests(tmp_path: Path, line: str, level: str) -> None:
    path = tmp_path / "jupyterhub_config.py"
    path.write_text(line + "\n")
    assert hub_address(path).level == level


def test_local_images(allocator: Allocator, tmp_path: Path) -> None:
    lay_image(tmp_path / "images", "lab")
    (tmp_path / "images" / "odd").mkdir()
    (tmp_path / "images" / "odd" / "manifest.json").write_text("[]")
    assert "error" in read_manifests(tmp_path / "images")["odd"]
    assert "lab" in run("image", "list", "--local").stdout


# --- small things ------------------------------------------------------------------------------


def test_ago() -> None:
    now = datetime(2026, 11, 30, 20, tzinfo=UTC)
    for seconds, text in (
        (0, "0 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7200, "2 h"),
        (172800, "2 d"),
    ):
        assert ago(now - timedelta(seconds=seconds), now) == text
    assert ago(now + timedelta(seconds=5), now) == "0 s"
    assert ago(None) == "-"


def test_addresses_may_be_short() -> None:
    assert full_address("41:00.0") == "0000:41:00.0"
    assert full_address("0001:C1:00.0") == "0001:c1:00.0"
