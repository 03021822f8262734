"""The sample scene: taken out of a Debian package by pin and digest, with a real apt."""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from images.apt import Source
from images.errors import ImageError
from images.lab import scene
from images.lab.scene import LANDSAT, Scene, scene_files
from images.progress import Progress

CONTENT = b"II*\0 pixels"
PINNED = Scene(
    package="sample",
    version="1.0-1",
    member="usr/share/sample/tif/scene.tif",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


def package(mirror: Path, version: str = "1.0-1", content: bytes = CONTENT) -> None:
    """A mirror with one package, which depends on what nobody has."""
    tree = mirror.parent / f"tree-{version}"
    control = f"Package: sample\nVersion: {version}\nArchitecture: all\nDepends: not-there\n"
    control += "Maintainer: Nobody <nobody@example.org>\nDescription: a sample\n"
    for name, data in (
        ("DEBIAN/control", control.encode()),
        (PINNED.member, content),
        ("usr/share/doc/sample/copyright", b"License: Apache-2.0\n"),
    ):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(data)
    pool = mirror / "pool/main/s/sample"
    pool.mkdir(parents=True)
    deb = pool / f"sample_{version}_all.deb"
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "--build", tree, deb], check=True, capture_output=True
    )
    found = deb.read_bytes()
    index = f"{control}Filename: {deb.relative_to(mirror)}\nSize: {len(found)}\n"
    index += f"SHA256: {hashlib.sha256(found).hexdigest()}\n"
    dists = mirror / "dists/bookworm"
    (dists / "main/binary-amd64").mkdir(parents=True)
    (dists / "main/binary-amd64/Packages").write_text(index)
    digest = hashlib.sha256(index.encode()).hexdigest()
    (dists / "Release").write_text(
        "Suite: bookworm\nCodename: bookworm\nArchitectures: amd64\nComponents: main\n"
        f"SHA256:\n {digest} {len(index)} main/binary-amd64/Packages\n"
    )


def fetch(tmp_path: Path, wanted: Scene = PINNED) -> Path:
    sources = [Source(f"file:{tmp_path / 'mirror'}", "bookworm", ("trusted=yes",))]
    return scene_files(tmp_path / "cache", Progress.silent(), wanted, sources)


def test_the_scene_is_fetched_once_and_laid_into_the_image(tmp_path: Path) -> None:
    package(tmp_path / "mirror")
    found = fetch(tmp_path)
    assert sorted(path.name for path in found.iterdir()) == ["copyright", "scene.tif"]
    (tmp_path / "mirror").rename(tmp_path / "gone")
    assert fetch(tmp_path) == found
    scene.install(found, tmp_path / "root")
    laid = tmp_path / "root" / scene.DIRECTORY
    assert (laid / "scene.tif").read_bytes() == CONTENT
    assert "Apache-2.0" in (laid / "copyright").read_text()


def test_another_version_is_named_with_what_to_do(tmp_path: Path) -> None:
    package(tmp_path / "mirror", "1.0-2")
    with pytest.raises(ImageError, match=r"sample 1\.0-1, and the mirrors have only sample 1\.0-2"):
        fetch(tmp_path)
    with pytest.raises(ImageError, match="no such package") as caught:
        fetch(tmp_path, replace(PINNED, package="other"))
    assert "images/lab/scene.py" in caught.value.hint
    assert "snapshot.debian.org" in caught.value.hint
    assert not [path for path in (tmp_path / "cache/scene").iterdir() if path.is_dir()]


def test_another_file_is_refused(tmp_path: Path) -> None:
    package(tmp_path / "mirror", content=b"something else")
    with pytest.raises(ImageError, match=r"should have the SHA-256 .*, and has: [0-9a-f]{64}"):
        fetch(tmp_path)
    with pytest.raises(ImageError, match="and has: no file"):
        fetch(tmp_path, replace(PINNED, member="usr/share/sample/moved.tif"))


def test_a_mirror_that_does_not_answer(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="could not be fetched: apt-get") as caught:
        fetch(tmp_path)
    assert "apt-get update" in caught.value.hint


def test_the_pin_is_whole() -> None:
    assert len(bytes.fromhex(LANDSAT.sha256)) == 32
    assert LANDSAT.version
    assert (Path(scene.__file__).parent / "guest" / scene.DIRECTORY / "README.md").is_file()
