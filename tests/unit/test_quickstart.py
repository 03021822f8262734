"""The quickstart's parts that need neither root nor libvirt."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from traitlets.config.loader import PyFileConfigLoader

from deploy.stack import needs, tools
from deploy.stack.emulated import TEMPLATE, available_mib, fitted, write_declaration
from deploy.stack.images import Event
from deploy.stack.images import parse as parse_progress
from deploy.stack.leftovers import instance_of
from deploy.stack.options import Options, parse
from deploy.stack.process import Child, answers, last_lines
from deploy.stack.say import Problem
from deploy.stack.state import (
    State,
    gpuspawner_config,
    hub_environment,
    hub_url,
    make_secrets,
    secret,
)
from gpuspawner.config import installation
from gpuspawner.host.emulated import Emulated
from tests.layers import missing, wait_for

SCRIPT = tools.CHECKOUT / "deploy" / "quickstart"


def options(tmp_path: Path, *words: str) -> Options:
    return parse(["--state", str(tmp_path), *words])


# --- what is missing ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finding", "word"),
    [
        (needs.python((3, 9)), "3.11"),
        (needs.architecture("aarch64"), "x86_64"),
        (needs.distribution({"ID": "fedora", "PRETTY_NAME": "Fedora 44"}), "Fedora 44"),
        (needs.memory("MemTotal: 4000000 kB\nMemAvailable: 3900000 kB\n"), "6 GiB"),
        (needs.memory("MemTotal: 8000000 kB\nMemAvailable: 2000000 kB\n"), "free"),
        (needs.disk(Path("/"), free_bytes=5 << 30), "--state"),
        (needs.network("10.201.0.0/24", routes='[{"dst":"10.201.0.0/16","dev":"eth0"}]'), "eth0"),
        (needs.network("10.201.0.0/30"), "16 addresses"),
        (needs.network("8.8.8.0/24"), "private"),
        (needs.network("guests"), "10.201.0.0/24"),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(finding: list[needs.Finding], word: str) -> None:
    (one,) = finding
    assert one.fatal
    assert word in one.text
    assert "\n" not in one.text


def test_nothing_is_missing() -> None:
    debian = {"ID": "debian", "VERSION_ID": "13", "PRETTY_NAME": "Debian 13"}
    routes = '[{"dst":"default","dev":"eth0"},{"dst":"10.201.0.0/24","dev":"gs0123456789"}]'
    assert needs.python((3, 11)) == []
    assert needs.architecture("x86_64") == []
    assert needs.distribution(debian) == []
    assert needs.memory("MemTotal: 6100000 kB\nMemAvailable: 5000000 kB\n") == []
    assert needs.disk(Path("/not/there/yet"), free_bytes=12 << 30) == []
    assert needs.network("10.201.0.0/24", bridges=("gs",), routes=routes) == []


def test_another_debian_is_tried_with_a_warning() -> None:
    (finding,) = needs.distribution({"ID": "debian", "VERSION_ID": "14"})
    assert not finding.fatal


def test_a_taken_port_names_its_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (finding,) = needs.ports({"login page": ("127.0.0.1", port, "--port")})
    assert finding.text == (
        f"Port {port} for the login page is taken: stop what listens there, or choose another "
        "with --port PORT."
    )
    assert needs.ports({"login page": ("127.0.0.1", port, "--port")}) == []


def test_check_changes_nothing_and_lists_everything(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = ["--check", "--state", str(state), "--port", str(server.getsockname()[1])]
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *words, "--network", "guests"],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 3
    assert "is taken" in done.stderr
    assert "guests is not a network" in done.stderr
    assert not state.exists()


def test_help_is_the_manual() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    for word in ("--state", "what it changes on this machine", "exit status", "Ctrl-C"):
        assert word in done.stdout


# --- state -------------------------------------------------------------------------------------


def test_secrets_are_private_and_stay(tmp_path: Path) -> None:
    state = State(tmp_path / "s")
    state.make()
    made = make_secrets(state)
    assert make_secrets(state) == made
    assert len(made.admin_password) >= 32, "JupyterHub refuses a shorter one"
    assert len(made.user_password) >= 8
    private = [*state.root.glob("*password*"), *state.root.glob("*.token")]
    assert len(private) == 6
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in private)
    assert made.user_password in state.passwords.read_text()


def test_a_secret_that_others_can_read_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "x.token"
    path.write_text("known\n")
    path.chmod(0o644)
    assert secret(path) == "known"
    assert path.stat().st_mode & 0o777 == 0o600


def test_one_quickstart_at_a_time(tmp_path: Path) -> None:
    state = State(tmp_path)
    with state.lock(), pytest.raises(Problem, match=f"process {os.getpid()}"), state.lock():
        pass
    with state.lock():
        pass


def test_both_configurations_are_read_as_meant(tmp_path: Path) -> None:
    chosen = options(tmp_path, "--allocator-port", "9091", "--network", "10.9.0.0/24")
    state = State(tmp_path)
    state.config.write_text(gpuspawner_config(state, chosen))
    settings = installation(state.config)
    assert settings.allocator_url == "http://127.0.0.1:9091/services/gpu/"
    assert settings.token_path() == tmp_path / "spawner.token"
    assert hub_url(chosen) == "http://10.9.0.1:8081"
    assert hub_environment(chosen) == {
        "GPUSPAWNER_HUB_URL": "http://10.9.0.1:8081",
        "GPUSPAWNER_BIND_URL": "http://127.0.0.1:8000",
        "GPUSPAWNER_PROXY_API": "http://127.0.0.1:8001",
    }


def test_the_hub_starts_with_what_the_quickstart_lays_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, state = options(tmp_path, "--port", "9000"), State(tmp_path)
    made = make_secrets(state)
    state.config.write_text(gpuspawner_config(state, chosen))
    monkeypatch.setenv("GPUSPAWNER_CONFIG", str(state.config))
    for name, value in hub_environment(chosen).items():
        monkeypatch.setenv(name, value)
    hub = PyFileConfigLoader("jupyterhub_config.py", path=str(tools.CHECKOUT)).load_config()
    assert hub.JupyterHub.bind_url == "http://127.0.0.1:9000"
    assert hub.JupyterHub.hub_connect_url == hub.JupyterHub.hub_bind_url == hub_url(chosen)
    assert hub.ConfigurableHTTPProxy.auth_token == made.proxy_token
    assert hub.SharedPasswordAuthenticator.user_password == made.user_password
    assert hub.SharedPasswordAuthenticator.admin_password == made.admin_password
    assert hub.JupyterHub.cleanup_servers is False


def test_the_instance_is_read_from_the_ledger(tmp_path: Path) -> None:
    assert instance_of(tmp_path) is None
    sqlite3.connect(tmp_path / "a-hub.sqlite").close()
    (tmp_path / "b-broken.sqlite").write_text("not a database")
    with sqlite3.connect(tmp_path / "ledger.sqlite") as database:
        database.execute("CREATE TABLE installation (id, instance, epoch)")
        database.execute("INSERT INTO installation VALUES (1, '0123abcd', 1)")
    database.close()
    assert instance_of(tmp_path) == "0123abcd"


# --- the emulated host -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available", "memory"),
    [(2000, 1792), (5500, 1792), (8192, 3328), (24000, 11008), (1 << 20, 65536)],
)
def test_the_host_is_fitted_to_the_machine(available: int, memory: int) -> None:
    text = fitted(TEMPLATE.read_text(), available)
    host = Emulated.parse(text)
    assert {node.memory_mib for node in host.nodes} == {memory}
    assert len(host.gpus) == 4
    assert {gpu.memory_mib for gpu in host.gpus} == {16}
    assert "# reserve_mib" in text, "the comments stay"
    assert yaml.safe_load(text)["nodes"][0]["reserve_mib"] == 512


def test_an_edited_declaration_stays(tmp_path: Path) -> None:
    target = tmp_path / "host.yaml"
    write_declaration(target)
    target.write_text("mine\n")
    write_declaration(target)
    assert target.read_text() == "mine\n"


def test_available_memory() -> None:
    assert available_mib("MemTotal: 1 kB\nMemAvailable:    2048000 kB\n") == 2000
    assert available_mib("") == 0


# --- processes ---------------------------------------------------------------------------------


def python_child(tmp_path: Path, code: str) -> Child:
    return Child("thing", [sys.executable, "-u", "-c", code], tmp_path / "logs" / "x.log", tmp_path)


def test_a_child_that_dies_is_named_with_its_last_lines(tmp_path: Path) -> None:
    child = python_child(tmp_path, "print('the disk is full'); raise SystemExit(7)")
    wait_for(lambda: child.ended() is not None, 20, "the child's end")
    with pytest.raises(Problem) as raised:
        child.check()
    assert "The thing ended with status 7" in str(raised.value)
    assert "| the disk is full" in str(raised.value)
    assert str(child.log) in str(raised.value)


def test_the_last_lines_are_those_of_the_last_start(tmp_path: Path) -> None:
    for word in ("first", "second"):
        child = python_child(tmp_path, f"print({word!r})")
        wait_for(lambda child=child: child.ended() is not None, 20, "the child's end")
    assert last_lines(child.log) == ["second"]
    assert "first" in child.log.read_text()


def test_waiting_ends_with_the_child(tmp_path: Path) -> None:
    child = python_child(tmp_path, "raise SystemExit(1)")
    with pytest.raises(Problem, match="ended with status 1"):
        child.wait_until(lambda: False, 60, "does not answer")


def test_waiting_is_bounded(tmp_path: Path) -> None:
    child = python_child(tmp_path, "import time; time.sleep(600)")
    with pytest.raises(Problem, match="does not answer after 0 s"):
        child.wait_until(lambda: False, 0.1, "does not answer")
    child.stop()
    assert child.ended() == -signal.SIGTERM


def test_a_stubborn_child_and_what_it_started_are_killed(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "grandchild = subprocess.Popen(['sleep', '600'])\n"
        "print('up', grandchild.pid)\n"
        "time.sleep(600)\n"
    )
    child = python_child(tmp_path, code)
    wait_for(lambda: "up" in child.log.read_text(), 20, "the grandchild")
    grandchild = int(last_lines(child.log)[-1].split()[1])
    child.stop(timeout_s=0.2)
    assert child.ended() == -signal.SIGKILL
    wait_for(lambda: ended(grandchild), 20, "the grandchild's end")


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_children_go_when_the_quickstart_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from deploy.stack.process import Child\n"
        f"child = Child('x', ['sleep', '600'], Path({str(tmp_path)!r}) / 'x.log', Path('/'))\n"
        "print(child.pid, flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=tools.CHECKOUT
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_for(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n", 20, "the child's exec")
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: ended(pid), 20, "the child's end")


def test_nobody_answers() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert not answers(f"http://127.0.0.1:{closed.getsockname()[1]}/", timeout_s=1)


# --- tools -------------------------------------------------------------------------------------


def test_node_versions() -> None:
    assert tools.node_version("v20.20.2\n") == 20
    assert tools.node_version("command not found") == 0


def test_missing_packages_are_those_that_dpkg_does_not_know() -> None:
    assert tools.missing_packages(["no-such-package-at-all", "dpkg"]) == ["no-such-package-at-all"]


def test_a_failed_command_shows_its_last_lines() -> None:
    with pytest.raises(Problem, match=r"(?s)Trying failed with status 3.*\| out of luck"):
        tools.run_quietly(["sh", "-c", "echo out of luck; exit 3"], "Trying")
    with pytest.raises(Problem, match="cannot be run"):
        tools.run_quietly(["no-such-program-at-all"], "Trying")


def test_progress_lines_of_the_builder() -> None:
    line = '{"stage":"a","title":"Copying","percent":12.5,"detail":"x","state":"at","elapsed_s":1}'
    assert parse_progress(line) == Event(12.5, "Copying x", "at")
    assert parse_progress("Traceback (most recent call last):") is None
    assert parse_progress("[]") is None


# --- the tests' own needs ----------------------------------------------------------------------


def test_layers_with_machines_run_only_in_their_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert missing({"unit", "service"}) is None
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in str(missing({"vm"}))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.delenv("GPUSPAWNER_TEST_NETNS", raising=False)
    assert "tests/run browser vm" in str(missing({"vm", "browser"}))
    monkeypatch.setenv("GPUSPAWNER_TEST_NETNS", "elsewhere")
    (tmp_path / "elsewhere").touch()
    assert "not in it" in str(missing({"vm"}, tmp_path))
    (tmp_path / "here").symlink_to("/proc/self/ns/net")
    monkeypatch.setenv("GPUSPAWNER_TEST_NETNS", "here")
    assert missing({"vm"}, tmp_path) is None
