"""A finished image: a directory with `manifest.json` and the files that it names.

The allocator copies such a directory to its hosts.  It appears in one rename, so whoever sees the
directory sees a whole image.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from images.cache import digest_of, fsync_tree, lock, sha256_file
from images.errors import ImageError

MANIFEST = "manifest.json"
VERSION = 1

Role = Literal["lab", "service", "probe"]


def utc_now() -> str:
    """The time of now as manifests write it: UTC, ISO 8601, whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class FileEntry:
    """One file of an image.

    :ivar file: name inside the image's directory.
    :ivar sha256: of its content, hex.
    :ivar bytes: its size.
    :ivar virtual_mib: size in MiB of the disk that a guest sees (root disk only).
    :ivar format: "qcow2" or "raw" (root disk only).
    """

    file: str
    sha256: str
    bytes: int
    virtual_mib: int | None = None
    format: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Manifest:
    """What is known of an image.

    :ivar name: the directory's name.
    :ivar role: "lab" (tenants), "service" (diagnosis) or "probe" (tests and boot probes).
    :ivar digest: "sha256:" and the digest of the files' digests and the command line.
    :ivar driver: branch of the NVIDIA driver in the image, or None.
    :ivar cuda_max: highest CUDA version that driver serves, or None.
    :ivar cmdline: kernel command line; the host appends its own words.
    :ivar files: "kernel", "initrd", and "root" where the image has a disk.
    :ivar min_memory_mib: less memory than this does not boot it.
    :ivar packages: what the image carries, name -> version; for people.
    """

    name: str
    role: Role
    title: str
    built_at: str
    digest: str
    kernel_release: str
    arch: str
    cmdline: str
    files: Mapping[str, FileEntry]
    min_memory_mib: int
    driver: str | None = None
    cuda_max: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The content of manifest.json."""
        found = asdict(self)
        found["files"] = {name: entry.to_json() for name, entry in self.files.items()}
        return {"v": VERSION, **found}


def content_digest(files: Mapping[str, FileEntry], cmdline: str) -> str:
    """ "sha256:…" of the canonical JSON of the files' digests and the command line."""
    sums = {name: entry.sha256 for name, entry in files.items()}
    return f"sha256:{digest_of({'files': sums, 'cmdline': cmdline})}"


@dataclass(frozen=True)
class SourceFile:
    """A file to publish: where it lies now, and what it is called in the image."""

    path: Path
    file: str
    virtual_mib: int | None = None
    format: str | None = None


def _place(source: Path, target: Path) -> None:
    """A second name for the same content where the file system allows it, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    target.chmod(0o644)


def publish(
    name: str,
    role: Role,
    files: Mapping[str, SourceFile],
    cmdline: str,
    *,
    out: Path,
    title: str,
    kernel_release: str,
    min_memory_mib: int,
    arch: str = "x86_64",
    driver: str | None = None,
    cuda_max: str | None = None,
    packages: Mapping[str, str] | None = None,
    built_at: str | None = None,
) -> Manifest:
    """Make the image directory `out`/`name` out of `files` in one step, replacing an older one.

    :param files: key ("kernel", "initrd", "root") -> file.  Sources are linked where possible:
        do not write into them afterwards.
    :param built_at: UTC time in ISO 8601; default now.
    :returns: the manifest that was written.
    """
    out.mkdir(parents=True, exist_ok=True)
    final, scratch, old = out / name, out / f".tmp-{name}", out / f".old-{name}"
    with lock(out / f".lock-{name}"):
        for stale in (scratch, old):
            if stale.exists():
                shutil.rmtree(stale)
        scratch.mkdir()
        entries = {}
        for key, source in sorted(files.items()):
            target = scratch / source.file
            _place(source.path, target)
            entries[key] = FileEntry(
                source.file,
                sha256_file(target),
                target.stat().st_size,
                source.virtual_mib,
                source.format,
            )
        manifest = Manifest(
            name=name,
            role=role,
            title=title,
            built_at=built_at or utc_now(),
            digest=content_digest(entries, cmdline),
            kernel_release=kernel_release,
            arch=arch,
            cmdline=cmdline,
            files=entries,
            min_memory_mib=min_memory_mib,
            driver=driver,
            cuda_max=cuda_max,
            packages=dict(sorted((packages or {}).items())),
        )
        text = json.dumps(manifest.to_json(), indent=1, ensure_ascii=False)
        (scratch / MANIFEST).write_text(text + "\n")
        fsync_tree(scratch)
        if final.exists():
            os.rename(final, old)
        os.rename(scratch, final)
        shutil.rmtree(old, ignore_errors=True)
        fsync_tree(out)
    return manifest


def load_manifest(path: Path) -> Manifest:
    """The manifest of the image directory (or of the manifest file) `path`.

    :raises ImageError: not there, not readable, or of another version.
    """
    file = path / MANIFEST if path.is_dir() else path
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        raise ImageError(
            f"{file} does not exist.", "Build the image: python -m images build NAME --out DIR"
        ) from None
    except ValueError as error:
        raise ImageError(f"{file} is not JSON ({error}).", "Build the image again.") from error
    version = found.pop("v", None)
    if version != VERSION:
        raise ImageError(
            f"{file} is of version {version}; this program reads {VERSION}.",
            "Build the image again with this program.",
        )
    try:
        files = {name: FileEntry(**entry) for name, entry in found.pop("files").items()}
        return Manifest(files=files, **found)
    except (KeyError, TypeError, AttributeError) as error:
        raise ImageError(f"{file} is incomplete ({error}).", "Build the image again.") from error


def verify(directory: Path) -> list[str]:
    """What is wrong with the image in `directory`, by reading all of it; empty is good."""
    manifest = load_manifest(directory)
    wrong = []
    for entry in manifest.files.values():
        path = directory / entry.file
        if not path.is_file():
            wrong.append(f"{path} is missing")
        elif path.stat().st_size != entry.bytes or sha256_file(path) != entry.sha256:
            wrong.append(f"{path} is not what the manifest says")
    if content_digest(manifest.files, manifest.cmdline) != manifest.digest:
        wrong.append(f"{directory / MANIFEST} does not match its own digest")
    return wrong


def list_images(out: Path) -> list[Manifest]:
    """All whole images below `out`, by name."""
    found = out.iterdir() if out.is_dir() else ()
    directories = sorted(item for item in found if (item / MANIFEST).is_file())
    return [load_manifest(item) for item in directories if not item.name.startswith(".")]
