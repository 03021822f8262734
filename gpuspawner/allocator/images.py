"""The images that the allocator can give out: folders with a manifest, told apart by digest."""

from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpuspawner.host.api import Image, ImageFile

log = logging.getLogger(__name__)


class ManifestFile(BaseModel):
    """One file of an image."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    file: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,100}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)
    format: Literal["raw", "qcow2"] = "raw"
    virtual_mib: int = Field(default=0, ge=0)


class Manifest(BaseModel):
    """``manifest.json`` beside an image's files."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: Literal[1]
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    role: Literal["lab", "service", "probe"]
    title: str = ""
    built_at: datetime | None = None
    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    kernel_release: str | None = None
    cmdline: str
    files: dict[Literal["kernel", "initrd", "root"], ManifestFile]
    min_memory_mib: int = Field(default=0, ge=0)

    def image(self, folder: Path) -> Image:
        """The image as a host driver takes it."""
        return Image(
            name=self.name,
            digest=self.digest,
            cmdline=self.cmdline,
            files={
                kind: ImageFile(
                    folder / one.file, one.sha256, one.bytes, one.format, one.virtual_mib
                )
                for kind, one in self.files.items()
            },
            min_memory_mib=self.min_memory_mib,
        )


class ImageStore:
    """Reads the images' folder. An image that was replaced stays known until the restart, so
    that leases which were placed with it still start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._current: dict[str, Manifest] = {}
        self._by_digest: dict[str, Image] = {}
        self.problems: dict[str, str] = {}

    def refresh(self) -> bool:
        """Look again; true if an image is new or another. A broken manifest is remembered as a
        problem and loses only its own image."""
        before = {name: manifest.digest for name, manifest in self._current.items()}
        found: dict[str, Manifest] = {}
        self.problems = {}
        for path in sorted(self.folder.glob("*/manifest.json")):
            try:
                manifest = Manifest.model_validate_json(path.read_bytes())
                for one in manifest.files.values():
                    if (path.parent / one.file).stat().st_size != one.bytes:
                        raise ValueError(f"{one.file} is not {one.bytes} bytes long")
            except (OSError, ValueError, ValidationError) as error:
                self.problems[path.parent.name] = (
                    f"{path} cannot be used: {error}. Build the image again with "
                    f"'gpuspawner image build {path.parent.name}'."
                )
                log.error("image_broken %s", self.problems[path.parent.name])
                continue
            found[manifest.name] = manifest
            self._by_digest[manifest.digest] = manifest.image(path.parent)
        self._current = found
        return {name: manifest.digest for name, manifest in found.items()} != before

    def manifests(self) -> list[Manifest]:
        """Every usable image by name."""
        return [self._current[name] for name in sorted(self._current)]

    def named(self, name: str, role: str = "lab") -> Image | None:
        """The current image of this name, if it has this role."""
        manifest = self._current.get(name)
        if manifest is None or manifest.role != role:
            return None
        return self._by_digest[manifest.digest]

    def by_digest(self, digest: str) -> Image | None:
        """An image that is or was current since the allocator's start."""
        return self._by_digest.get(digest)

    def service(self) -> Image | None:
        """The service VM's image."""
        for manifest in self.manifests():
            if manifest.role == "service":
                return self._by_digest[manifest.digest]
        return None

    def wanted(self) -> list[Image]:
        """What every host should have."""
        return [self._by_digest[manifest.digest] for manifest in self.manifests()]
