"""The JupyterLab image with a seed that is not ours: a plain NoCloud ``user-data`` works on it."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path

import pycdlib

from tests.layers import wait_for

USER_DATA = """\
#cloud-config
write_files:
  - {path: /etc/proof, content: "written by cloud-init"}
runcmd:
  - [sh, -c, 'echo "proof: $(cat /etc/proof) on $(hostname)" > /dev/console']
"""


def nocloud(path: Path) -> Path:
    """A seed disk as any cloud tool makes it."""
    iso = pycdlib.PyCdlib()
    iso.new(interchange_level=3, vol_ident="cidata", joliet=3, rock_ridge="1.09")
    for number, (name, text) in enumerate(
        {
            "meta-data": json.dumps({"instance-id": "plain-1", "local-hostname": "plain"}),
            "network-config": json.dumps({"version": 2, "ethernets": {}}),
            "user-data": USER_DATA,
        }.items()
    ):
        data = text.encode()
        iso.add_fp(
            io.BytesIO(data),
            len(data),
            f"/SEED{number}.;1",
            rr_name=name,
            joliet_path=f"/{name}",
        )
    iso.write(str(path))
    iso.close()
    return path


def test_a_plain_user_data_is_applied(images_dir: Path, tmp_path: Path) -> None:
    """No ``gpuspawner.json`` on the seed: our boot is out of the way, and cloud-init runs."""
    image = images_dir / "lab"
    manifest = json.loads((image / "manifest.json").read_text())
    files = {kind: str(image / one["file"]) for kind, one in manifest["files"].items()}
    overlay, console = tmp_path / "root.qcow2", tmp_path / "console"
    subprocess.run(
        ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", files["root"],
         str(overlay)],
        check=True,
    )  # fmt: skip
    seed = nocloud(tmp_path / "seed.iso")
    qemu = subprocess.Popen(
        ["qemu-system-x86_64", "-machine", "q35,accel=tcg", "-cpu", "max", "-m", "1536",
         "-nodefaults", "-display", "none", "-no-reboot", "-serial", f"file:{console}",
         "-kernel", files["kernel"], "-initrd", files["initrd"], "-append", manifest["cmdline"],
         "-drive", f"if=none,id=root,file={overlay},format=qcow2,cache=unsafe",
         "-device", "virtio-blk-pci,drive=root,serial=root",
         "-drive", f"if=none,id=seed,file={seed},format=raw,media=cdrom,readonly=on",
         "-device", "ide-cd,drive=seed,bus=ide.0"],
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(
            lambda: (
                "proof: written by cloud-init on plain"
                in (console.read_text(errors="replace") if console.exists() else "")
            ),
            400,
            "cloud-init to apply the user-data",
            1.0,
        )
    finally:
        qemu.kill()
        qemu.wait()
        print(console.read_text(errors="replace")[-4000:])
