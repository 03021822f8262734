"""The programs inside the JupyterLab image: seed, server start, gpuspawner-gpu."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

GUEST = Path(__file__).parents[2] / "images/lab/guest"


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, GUEST / path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


seed = load("usr/lib/gpuspawner/seed.py")
serve = load("usr/lib/gpuspawner/serve.py")
gpu = load("opt/lab/lib/python3.11/site-packages/gpuspawner_gpu.py")

HOSTILE = {
    "QUOTES": "a'b\"c`d`",
    "DOLLAR": "$HOME ${PATH} $(reboot) %h %%",
    "LINES": "first\nsecond\r\n\n third\t",
    "BACKSLASH": "\\ \\n \\",
    "UNICODE": "衛星 🛰 ü",
    "EMPTY": "",
    "EQUALS": "a=b=c",
    "SPACES": "  both ends  ",
    "JSON": '["access:servers!server=alice/"]',
    "HASH": "#no comment",
}


class FakeMachine(seed.Machine):  # type: ignore[name-defined,misc]
    """A root in a directory; programs answer as told and are only recorded."""

    def __init__(self, root: Path, **codes: list[int] | int) -> None:
        super().__init__(str(root))
        self.codes = codes
        self.ran: list[tuple[str, ...]] = []
        self.said: list[str] = []
        self.hostname = ""

    def run(self, *command: str) -> int:
        self.ran.append(command)
        codes = self.codes.get(command[0].replace(".", "_"), 0)
        if isinstance(codes, list):
            return codes.pop(0)
        return codes

    def set_hostname(self, name: str) -> None:
        self.hostname = name

    def chown(self, path: str, uid: int, gid: int) -> None:
        pass

    def say(self, text: str) -> None:
        self.said.append(text)

    def programs(self) -> list[str]:
        return [command[0] for command in self.ran]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {
        "etc/passwd": "root:x:0:0::/root:/bin/sh\njovyan:x:1000:1000::/home/jovyan:/bin/bash\n",
        "etc/group": "root:x:0:\njovyan:x:1000:\ngpu:x:990:jovyan\n",
        "etc/shadow": "root:*:1::::::\njovyan:!:1::::::\n",
        "etc/skel/.bashrc": "# bash\n",
        "sys/block/vdb/serial": "home\n",
        "sys/block/vdb/size": "2048\n",
        "dev/vdb": "\0" * 4096,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "etc/shadow").chmod(0o640)
    return tmp_path


def document(**changes: Any) -> dict[str, Any]:
    return {
        "v": 1,
        "lease_id": "4b1c",
        "hostname": "gs-0a1b2c3d-alice",
        "network": {
            "mac": "52:54:00:12:34:56",
            "address": "10.201.0.10/24",
            "gateway": "10.201.0.1",
            "dns": ["10.201.0.1"],
        },
        "home": {"serial": "home", "new": False},
        "user": {"name": "jovyan", "uid": 1000, "sudo": True},
        "server": {"argv": ["jupyterhub-singleuser"], "env": dict(HOSTILE), "port": 8888},
        **changes,
    }


def apply(machine: FakeMachine, **changes: Any) -> None:
    seed.apply(machine, json.dumps(document(**changes)).encode())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_hostile_values_reach_the_server_exactly(root: Path) -> None:
    apply(FakeMachine(root))
    stored = root / "run/gpuspawner/server.json"
    assert mode(stored) == 0o600
    env = serve.environment(json.loads(stored.read_text()))
    show = "import os, sys; sys.stdout.buffer.write(repr(dict(os.environb)).encode())"
    got = subprocess.run([sys.executable, "-c", show], env=env, check=True, capture_output=True)
    seen = eval(got.stdout)
    for name, value in HOSTILE.items():
        assert seen[name.encode()] == value.encode()
    assert seen[b"HOME"] == b"/home/jovyan"


def test_impossible_variables_are_left_out_and_said(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = {"GOOD": "1", "A=B": "2", "NUL": "a\0b", "": "3", "SURROGATE": "\ud800"}
    apply(FakeMachine(root), server={"argv": ["x"], "env": env})
    server = json.loads((root / "run/gpuspawner/server.json").read_text())
    found = serve.environment(server)
    assert found[b"GOOD"] == b"1"
    assert found[b"SURROGATE"] == b"\xed\xa0\x80"
    assert b"NUL" not in found
    assert b"A=B" not in found
    assert "'NUL'" in capsys.readouterr().out


def test_secrets_are_on_tmpfs_only_and_closed(root: Path) -> None:
    server = {
        "argv": ["x"],
        "env": {"JUPYTERHUB_API_TOKEN": "s3cret-token"},
        "files": {"/run/gpuspawner/ssl/key.pem": "s3cret-key\n"},
    }
    apply(FakeMachine(root), server=server)
    assert (root / "run/gpuspawner/ssl/key.pem").read_text() == "s3cret-key\n"
    assert mode(root / "run/gpuspawner/ssl") == 0o700
    for path in root.rglob("*"):
        if path.is_file() and "s3cret" in path.read_text():
            assert path.is_relative_to(root / "run")
            assert mode(path) == 0o600


@pytest.mark.parametrize(
    "path",
    ["/etc/shadow", "/run/gpuspawner/../../etc/x", "/run/gpuspawner/seed.json", "/run/gpuspawner"],
)
def test_files_of_the_server_stay_in_their_place(root: Path, path: str) -> None:
    with pytest.raises(ValueError, match="must be below"):
        apply(FakeMachine(root), server={"argv": ["x"], "env": {}, "files": {path: "x"}})


def test_network_and_names(root: Path) -> None:
    machine = FakeMachine(root)
    apply(machine)
    assert machine.hostname == "gs-0a1b2c3d-alice"
    text = (root / "run/systemd/network/10-gpuspawner.network").read_text()
    assert "MACAddress=52:54:00:12:34:56\n" in text
    assert "Address=10.201.0.10/24\nGateway=10.201.0.1\nDNS=10.201.0.1\n" in text
    assert "10.201.0.10 gs-0a1b2c3d-alice\n" in (root / "etc/hosts").read_text()
    assert (root / "run/resolv.conf").read_text() == "nameserver 10.201.0.1\n"
    with pytest.raises(ValueError, match="line break"):
        seed.network_file({"mac": "a", "address": "b\n[Route]"})


def test_the_user_is_renamed_and_gets_sudo(root: Path) -> None:
    apply(FakeMachine(root), user={"name": "alice", "uid": 1001, "sudo": True})
    assert "alice:x:1001:1001::/home/alice:/bin/bash" in (root / "etc/passwd").read_text()
    assert "gpu:x:990:alice" in (root / "etc/group").read_text()
    assert mode(root / "etc/shadow") == 0o640
    assert mode(root / "etc/sudoers.d/gpuspawner") == 0o440
    assert (root / "run/user/1001/jupyter").is_dir()


def test_without_sudo_there_is_no_rule(root: Path) -> None:
    apply(FakeMachine(root), user={"name": "jovyan", "uid": 1000, "sudo": False})
    assert not (root / "etc/sudoers.d/gpuspawner").exists()


@pytest.mark.parametrize("user", [{"name": "root", "uid": 0}, {"name": "a b", "uid": 1000}])
def test_no_system_user_becomes_the_notebooks(root: Path, user: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a user"):
        apply(FakeMachine(root), user=user)


def test_a_new_home_is_formatted_only_if_nothing_is_on_it(root: Path) -> None:
    new = {"serial": "home", "new": True}
    empty = FakeMachine(root, blkid=2)
    apply(empty, home=new)
    assert empty.programs() == ["blkid", "mkfs.ext4", "mount"]
    for found in (0, 8, 4):  # something, more than one thing, an error
        machine = FakeMachine(root, blkid=found)
        apply(machine, home=new)
        assert "mkfs.ext4" not in machine.programs()


def test_an_old_home_is_never_formatted(root: Path) -> None:
    machine = FakeMachine(root, mount=1, timeout=4)
    apply(machine)
    assert "mkfs.ext4" not in machine.programs()


def test_a_damaged_home_is_repaired_or_opened_for_reading(root: Path) -> None:
    machine = FakeMachine(root, mount=[1, 0], timeout=1)
    apply(machine)
    assert machine.programs() == ["mount", "timeout", "mount"]
    assert json.loads((root / "run/gpuspawner/home.json").read_text())["state"] == "ok"
    machine = FakeMachine(root, mount=[1, 0], timeout=4)
    apply(machine)
    assert ",ro" in machine.ran[-1][4]
    assert json.loads((root / "run/gpuspawner/home.json").read_text())["state"] == "readonly"
    server = json.loads((root / "run/gpuspawner/server.json").read_text())
    assert serve.environment(server)[b"JUPYTER_DATA_DIR"].startswith(b"/run/user/1000/")


def test_errors_noted_in_the_file_system_are_repaired_first(root: Path) -> None:
    block = bytearray(4096)
    block[1024 + 58] = 2
    (root / "dev/vdb").write_bytes(block)
    machine = FakeMachine(root)
    apply(machine)
    assert machine.programs() == ["timeout", "mount"]


def test_a_home_that_cannot_be_opened_starts_with_a_warning(root: Path) -> None:
    apply(FakeMachine(root, mount=32, timeout=8))
    assert "LOST" in (root / "home/jovyan/HOME-NOT-AVAILABLE.txt").read_text()
    assert (root / "run/gpuspawner/server.json").exists()


def test_without_a_home_disk_the_server_starts_too(root: Path) -> None:
    (root / "sys/block/vdb/serial").write_text("other\n")
    apply(FakeMachine(root))
    assert json.loads((root / "run/gpuspawner/home.json").read_text())["state"] == "temporary"
    assert (root / "run/gpuspawner/server.json").exists()


def test_a_full_home_is_said_and_jupyter_writes_elsewhere(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seed, "can_write", lambda directory: False)
    apply(FakeMachine(root))
    assert (root / "home/jovyan/HOME-IS-FULL.txt").exists()
    server = json.loads((root / "run/gpuspawner/server.json").read_text())
    assert serve.environment(server)[b"IPYTHONDIR"] == b"/run/user/1000/ipython"
    monkeypatch.setattr(seed, "can_write", lambda directory: True)
    apply(FakeMachine(root))
    assert not (root / "home/jovyan/HOME-IS-FULL.txt").exists()


def test_a_new_home_gets_the_skeleton_with_its_folders(root: Path) -> None:
    (root / "etc/skel/welcome").mkdir()
    (root / "etc/skel/welcome/ndvi.ipynb").write_text("ours")
    home = root / "home/jovyan"
    (home / "lost+found").mkdir(parents=True)
    apply(FakeMachine(root))
    assert (home / "welcome/ndvi.ipynb").read_text() == "ours"
    assert (home / ".bashrc").exists()
    (home / "welcome/ndvi.ipynb").write_text("hers")
    (home / ".bashrc").unlink()
    apply(FakeMachine(root))
    assert (home / "welcome/ndvi.ipynb").read_text() == "hers"
    assert not (home / ".bashrc").exists()


def test_a_skeleton_that_cannot_be_copied_stops_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "etc/skel/welcome").mkdir()
    (root / "etc/skel/welcome/ndvi.ipynb").write_text("ours")

    really = os.mkdir

    def mkdir(path: str, mode: int = 0o777) -> None:
        if str(path).endswith("jovyan/welcome"):
            raise OSError(errno.ENOSPC, "No space left on device")
        really(path, mode)

    monkeypatch.setattr(seed.os, "mkdir", mkdir)
    apply(FakeMachine(root))
    assert not (root / "home/jovyan/welcome").exists()
    assert (root / "run/gpuspawner/server.json").exists()
    assert json.loads((root / "run/gpuspawner/home.json").read_text())["state"] == "ok"


def in_home(home: Path, env: dict[str, str] | None = None, state: str = "ok") -> str:
    """The page that the server is told to open with, "" for its own choice."""
    found = serve.environment(
        {"user": "jovyan", "uid": 1000, "home_state": state, "env": {"HOME": str(home)}}
    ) | {name.encode(): text.encode() for name, text in (env or {}).items()}
    page: bytes = serve.first_page(found, state).get(b"JUPYTERHUB_DEFAULT_URL", b"")
    return page.decode()


def test_the_welcome_notebook_opens_until_jupyterlab_was_used(tmp_path: Path) -> None:
    assert (GUEST / "etc/skel" / serve.WELCOME).is_file()
    assert in_home(tmp_path) == ""
    (tmp_path / "welcome").mkdir()
    (tmp_path / serve.WELCOME).write_text("{}")
    assert in_home(tmp_path) == f"/lab/tree/{serve.WELCOME}"
    for state in ("full", "readonly", "temporary"):
        assert in_home(tmp_path, state=state) == ""
    workspaces = tmp_path / ".jupyter/lab/workspaces"
    workspaces.mkdir(parents=True)
    assert in_home(tmp_path) == f"/lab/tree/{serve.WELCOME}"
    (workspaces / "default-37a8.jupyterlab-workspace").write_text("{}")
    assert in_home(tmp_path) == ""
    assert in_home(tmp_path, {"JUPYTER_CONFIG_DIR": str(tmp_path / "other")}) != ""
    assert in_home(tmp_path, {"JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "other")}) != ""


def test_what_the_hub_chooses_comes_first(tmp_path: Path) -> None:
    (tmp_path / "welcome").mkdir()
    (tmp_path / serve.WELCOME).write_text("{}")
    assert in_home(tmp_path, {"JUPYTERHUB_DEFAULT_URL": "/lab/tree/README.md"}) == ""
    assert in_home(tmp_path, {"JUPYTERHUB_ROOT_DIR": "/data"}) == ""
    (tmp_path / ".jupyter").write_text("a file where a folder should be")
    assert in_home(tmp_path) == ""


def test_a_users_link_is_not_followed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = root / "home/jovyan"
    home.mkdir(parents=True)
    (home / "HOME-IS-FULL.txt").symlink_to(root / "etc/passwd")
    monkeypatch.setattr(seed, "can_write", lambda directory: False)
    before = (root / "etc/passwd").read_text()
    apply(FakeMachine(root))
    assert (root / "etc/passwd").read_text() == before
    assert not (home / "HOME-IS-FULL.txt").is_symlink()


def test_a_seed_of_another_version_is_refused(root: Path) -> None:
    with pytest.raises(ValueError, match="version 2"):
        apply(FakeMachine(root), v=2)


def test_the_seed_disk_is_found_by_its_label(root: Path) -> None:
    (root / "sys/block/sr0").mkdir(parents=True)
    volume = bytearray(17 * 2048)
    volume[16 * 2048 + 1 : 16 * 2048 + 6] = b"CD001"
    volume[16 * 2048 + 40 : 16 * 2048 + 72] = b"cidata".ljust(32)
    (root / "dev/sr0").write_bytes(volume)
    machine = FakeMachine(root)
    assert seed.find_seed_disk(machine) == str(root / "dev/sr0")
    assert seed.read_seed(machine) is None  # no gpuspawner.json on it: cloud-init's
    assert machine.programs() == ["mount", "umount"]


def emulated_gpu(sysfs: Path, registers: bool = False) -> None:
    device = sysfs / "bus/pci/devices/0000:01:00.1"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x1af4\n")
    (device / "device").write_text("0x1110\n")
    identity = {
        "magic": "gpuspawner-emulated-gpu",
        "v": 1,
        "serial": "EMU-a-0",
        "uuid": "GPU-1",
        "model": "Emulated GPU 1M",
        "vbios": "1.0",
    }
    page = json.dumps(identity).encode().ljust(4096, b"\0")
    (device / "resource2").write_bytes(page + bytes((1 << 20) - 4096))
    if registers:
        peer = sysfs / "bus/pci/devices/0000:01:00.0"
        peer.mkdir()
        (peer / "vendor").write_text("0x1234\n")
        (peer / "device").write_text("0x11e8\n")
        (peer / "resource0").write_bytes(bytes(4096))


def test_gpus_are_listed_written_and_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    emulated_gpu(tmp_path)
    (found,) = gpu.find(tmp_path)
    assert (found.model, found.serial, found.memory_mib) == ("Emulated GPU 1M", "EMU-a-0", 1)
    bar = tmp_path / "bus/pci/devices/0000:01:00.1/resource2"
    page = bar.read_bytes()[:4096]
    gpu.write(found, 0, b"tenant", tmp_path)
    assert gpu.read(found, 0, 6, tmp_path) == b"tenant"
    assert bar.read_bytes()[4096:4102] == b"tenant"
    assert gpu.test(found, tmp_path) == ["no registers beside the memory"]
    assert bar.read_bytes()[:4096] == page
    for offset, length in ((-1, 1), ((1 << 20) - 4096, 1), (0, 1 << 20)):
        with pytest.raises(gpu.GpuError, match="outside"):
            gpu.read(found, offset, length, tmp_path)
    base = ["--sysfs", str(tmp_path)]
    assert gpu.main([*base, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["uuid"] == "GPU-1"
    assert gpu.main([*base, "write", "0x10", "deadbeef"]) == 0
    assert gpu.main([*base, "read", "16", "4"]) == 0
    assert capsys.readouterr().out == "deadbeef\n"
    assert gpu.main([*base, "--gpu", "3", "read", "0", "1"]) == 1
    assert "there is no GPU 3" in capsys.readouterr().err


def test_registers_that_do_not_answer_fail_the_test(tmp_path: Path) -> None:
    emulated_gpu(tmp_path, registers=True)
    (found,) = gpu.find(tmp_path)
    assert gpu.test(found, tmp_path) == ["the id register reads 0x00000000"]


def test_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--sysfs", str(tmp_path)]) == 0
    assert "no GPU" in capsys.readouterr().out
    assert gpu.main(["--sysfs", str(tmp_path), "test"]) == 1


def test_programs_of_the_early_boot_import_little() -> None:
    code = (
        f"import sys; sys.argv = ['x']; import runpy; runpy.run_path({str(seed.__file__)!r});"
        "print(len(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], check=True, capture_output=True, text=True
    )
    heavy = {"subprocess", "typing", "pathlib", "logging", "asyncio"}
    assert int(done.stdout) < 120
    text = (GUEST / "usr/lib/gpuspawner/seed.py").read_text()
    assert not [name for name in heavy if f"\nimport {name}" in text]


def test_unit_files_start_what_is_there() -> None:
    for unit in (GUEST / "etc/systemd/system").glob("*.service"):
        for line in unit.read_text().splitlines():
            for word in line.split():
                if word.startswith("/usr/lib/gpuspawner/"):
                    assert (GUEST / word.lstrip("/")).exists()
    assert os.access(GUEST, os.R_OK)
