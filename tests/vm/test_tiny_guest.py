"""The tiny guest under plain QEMU: it reads the seed, serves, keeps its home, switches off."""

from __future__ import annotations

import hashlib
import io
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pycdlib
import pytest

from tests.layers import wait_for
from tests.vm.bare_qemu import Monitor, gpu_devices, make_gpu_memory

PREFIX = "/user/alice/"
MAC = "52:54:00:12:34:56"
SECRET = "not to be shown"


def make_seed(path: Path, *, new: bool) -> Path:
    """A seed disk as the allocator makes it."""
    seed = {
        "v": 1,
        "lease_id": "0d2ad1f5-46c5-4ca6-9a35-0e4b1ee7ab53",
        "hostname": "gs-test",
        "network": {
            "mac": MAC,
            "address": "10.0.2.15/24",
            "gateway": "10.0.2.2",
            "dns": ["10.0.2.3"],
        },
        "home": {"serial": "home", "new": new},
        "user": {"name": "jovyan", "uid": 1000, "sudo": True},
        "server": {
            "argv": ["jupyterhub-singleuser"],
            "env": {"JUPYTERHUB_SERVICE_PREFIX": PREFIX, "JUPYTERHUB_API_TOKEN": SECRET},
            "files": {"/run/gpuspawner/ssl/key.pem": "key"},
            "port": 8888,
        },
    }
    data = json.dumps(seed).encode()
    iso = pycdlib.PyCdlib()
    iso.new(vol_ident="cidata", joliet=3, rock_ridge="1.09")
    iso.add_fp(
        io.BytesIO(data),
        len(data),
        "/GPUSPAWN.JSO;1",
        rr_name="gpuspawner.json",
        joliet_path="/gpuspawner.json",
    )
    iso.write(str(path))
    iso.close()
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Tiny:
    """A running tiny guest."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, scratch: Path) -> None:
        self.process = process
        self.monitor = Monitor(scratch / "qmp")
        self._base = f"http://127.0.0.1:{port}{PREFIX}"

    def ask(self, path: str, body: bytes | None = None, timeout_s: float = 30) -> bytes:
        with urllib.request.urlopen(self._base + path, body, timeout=timeout_s) as answer:
            return bytes(answer.read())

    def json(self, path: str, body: bytes | None = None) -> Any:
        return json.loads(self.ask(path, body))

    def up(self) -> Any:
        assert self.process.poll() is None, "the guest has ended; see console.log"
        try:
            # QEMU accepts connections before the guest does, and then lets them hang.
            return json.loads(self.ask("api", timeout_s=1)) == {"version": "tiny"}
        except (OSError, ValueError):
            return False


@contextmanager
def tiny(image: Path, scratch: Path, *, new: bool, gpu: Path | None = None) -> Iterator[Tiny]:
    """Boot until it answers."""
    manifest = json.loads((image / "manifest.json").read_text())
    seed = make_seed(scratch / "seed.iso", new=new)
    home = scratch / "home.raw"
    if not home.exists():
        with home.open("wb") as handle:
            handle.truncate(256 << 20)
    port = free_port()
    command = [
        "qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot",
        "-machine", "q35,accel=tcg", "-cpu", "max", "-m", str(manifest["min_memory_mib"]),
        "-display", "none", "-serial", f"file:{scratch / 'console.log'}",
        "-kernel", str(image / manifest["files"]["kernel"]["file"]),
        "-initrd", str(image / manifest["files"]["initrd"]["file"]),
        "-append", manifest["cmdline"],
        "-drive", f"if=none,id=home,file={home},format=raw",
        "-device", "virtio-blk-pci,drive=home,serial=home",
        "-drive", f"if=none,id=seed,file={seed},format=raw,media=cdrom,readonly=on",
        "-device", "ide-cd,drive=seed,bus=ide.0",
        "-netdev", f"user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:{port}-10.0.2.15:8888",
        "-device", f"virtio-net-pci,netdev=net,mac={MAC}",
        "-qmp", f"unix:{scratch / 'qmp'},server=on,wait=off",
        *(gpu_devices(gpu) if gpu else []),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        guest = Tiny(process, port, scratch)
        began = time.monotonic()
        wait_for(guest.up, 90, "the tiny guest to answer", every=0.2)
        print(f"answered after {time.monotonic() - began:.1f} s")
        yield guest
    finally:
        process.kill()
        process.wait()


def test_it_serves_and_keeps_its_home(images_dir: Path, tmp_path: Path) -> None:
    image = images_dir / "tiny"
    gpu = make_gpu_memory(tmp_path / "gpu0")
    with tiny(image, tmp_path, new=True, gpu=gpu) as guest:
        assert guest.json("test/state")["problems"] == []
        assert guest.json("test/home/state")["formatted"] is True
        env = guest.json("test/env")
        assert env["JUPYTERHUB_API_TOKEN"] == hashlib.sha256(SECRET.encode()).hexdigest()
        assert SECRET.encode() not in guest.ask("test/seed")
        assert b"Tiny guest" in guest.ask("lab")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            guest.ask("test/nothing")

        (device,) = guest.json("test/gpu/list")
        assert device["bytes"] == 16 << 20
        guest.ask("test/gpu/write?offset=8192&pattern=deadbeef&bytes=4096", b"")
        assert guest.ask("test/gpu/read?offset=8192&bytes=8") == b"deadbeefdeadbeef"
        assert gpu.read_bytes()[8192 : 8192 + 4] == bytes.fromhex("deadbeef")

        done = guest.json("test/exec", b"hostname 2>/dev/null; cat /proc/sys/kernel/hostname")
        assert (done["rc"], done["output"].strip()) == (0, "gs-test")
        closed = guest.json("test/connect?host=10.0.2.2&port=9&timeout=2")
        assert closed["connected"] is False

        assert guest.json("test/home/write?name=work/a.txt", b"hello")["bytes"] == 5
        guest.monitor.command("system_powerdown")
        assert guest.process.wait(30) == 0
    with tiny(image, tmp_path, new=True) as guest:
        state = guest.json("test/home/state")
        assert (state["mounted"], state["formatted"]) == (True, False)
        assert guest.ask("test/home/read?name=work/a.txt") == b"hello"
        guest.ask("test/poweroff", b"")
        assert guest.process.wait(30) == 0


@pytest.mark.parametrize("verb", ["panic", "reboot"])
def test_it_dies_on_request(images_dir: Path, tmp_path: Path, verb: str) -> None:
    with tiny(images_dir / "tiny", tmp_path, new=True) as guest:
        guest.ask(f"test/{verb}", b"")
        assert guest.process.wait(30) == 0


def test_a_damaged_home_does_not_stop_the_start(images_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "home.raw").write_bytes(b"\x5a" * (8 << 20))
    with tiny(images_dir / "tiny", tmp_path, new=False) as guest:
        state = guest.json("test/home/state")
        assert (state["mounted"], state["formatted"]) == (False, False)
        assert state["problem"]
