"""A host's volumes: one directory pool of libvirt per host and installation.

Everything a guest uses is a volume of it, moved by libvirt's volume streams: the allocator opens
no path on the host. libvirt cannot rename a volume, so "this image is whole" is a second, empty
volume beside it, made when the last byte was sent and checked (``.ok``). What a killed allocator
leaves half copied has no such mark, and is copied again.

All functions here take the open ``virConnect`` and block; ``connection.py`` runs them.
"""

from __future__ import annotations

import hashlib
import logging
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import libvirt

from gpuspawner.host.api import HostError, HostFull, Image, ImageFile
from gpuspawner.host.connection import NO_SPACE
from gpuspawner.host.devices import el

log = logging.getLogger(__name__)

CHUNK_BYTES = 1024 * 1024
OK = ".ok"
_RESERVED = ("image-", "file-", "guest-", "gpu-")
_VOLUME_NAME = re.compile(r"^[a-z0-9][a-z0-9._-]{0,120}$")


# -- names ----------------------------------------------------------------------------------------


_GUEST_VOLUME = re.compile(r"^guest-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})-[a-z]+$")


def pool_name(instance: str, host: str) -> str:
    """``gs-<instance>-<host>``: several declared hosts may share one libvirt."""
    return f"gs-{instance}-{host}"


def image_mark(digest: str) -> str:
    """The mark of a whole image. One name per digest; ``marked_images`` reads it back."""
    return f"image-{digest.removeprefix('sha256:')}{OK}"


def marked_images(names: list[str]) -> frozenset[str]:
    """Digests of the images among a pool's volume names."""
    return frozenset(
        f"sha256:{name.removeprefix('image-').removesuffix(OK)}"
        for name in names
        if name.startswith("image-") and name.endswith(OK)
    )


def file_volume(file: ImageFile) -> str:
    """One file of an image. Named by content, so images share equal kernels and initrds."""
    return f"file-{file.sha256}"


def guest_volume(uuid: str, part: str) -> str:
    """A part of one guest: ``root`` (overlay), ``seed`` or ``console``. One guest, one UUID, one
    volume of each."""
    return f"guest-{uuid}-{part}"


def guest_of(name: str) -> str | None:
    """The guest's UUID in a volume's name; ``None`` for every other kind of volume."""
    match = _GUEST_VOLUME.match(name)
    return match[1] if match else None


def gpu_volume(address: str) -> str:
    """The memory of the emulated GPU in this slot; reversible, as PCI addresses have no dash."""
    return f"gpu-{address.replace(':', '-').replace('.', '-')}"


def home_volume(name: str) -> str:
    """A home's volume name, checked: it must not be taken for anything else in the pool."""
    if not _VOLUME_NAME.match(name) or name.startswith(_RESERVED):
        raise HostError(
            f"{name!r} cannot be a home's volume.",
            "Use small letters, digits, dots and dashes, beginning with 'home-'.",
        )
    return name


# -- the pool -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Owner:
    """User and group that QEMU runs as, for volumes that libvirt does not hand over itself."""

    uid: int = 0
    gid: int = 0


@dataclass(frozen=True, slots=True)
class Pool:
    """One host's pool. Raises ``HostError`` or ``libvirtError``."""

    name: str
    path: str

    def ensure(self, connection: Any) -> None:
        """Defined, built, running, and up to date with its directory."""
        try:
            pool = connection.storagePoolLookupByName(self.name)
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_NO_STORAGE_POOL:
                raise
            pool = connection.storagePoolDefineXML(self._xml(), 0)
        if not pool.isActive():
            pool.build(0)  # makes the directory; one that is there already is left as it is
            pool.create(0)
        pool.setAutostart(1)
        pool.refresh(0)

    def remove(self, connection: Any) -> None:
        """Delete the pool and every volume in it, homes too: for taking a host out for good."""
        try:
            pool = connection.storagePoolLookupByName(self.name)
        except libvirt.libvirtError as error:
            if error.get_error_code() == libvirt.VIR_ERR_NO_STORAGE_POOL:
                return
            raise
        if pool.isActive():
            for volume in pool.listAllVolumes(0):
                volume.delete(0)
            pool.destroy()
        pool.delete(0)
        pool.undefine()

    def names(self, connection: Any) -> list[str]:
        """Names of all volumes."""
        names: list[str] = self._pool(connection).listVolumes()
        return names

    def find(self, connection: Any, name: str) -> Any | None:
        """The volume, or ``None``."""
        try:
            return self._pool(connection).storageVolLookupByName(name)
        except libvirt.libvirtError as error:
            if error.get_error_code() == libvirt.VIR_ERR_NO_STORAGE_VOL:
                return None
            raise

    def path_of(self, connection: Any, name: str) -> str:
        """Where the host has this volume. ``HostError`` if it has not."""
        volume = self.find(connection, name)
        if volume is None:
            raise HostError(
                f"The volume {name} is missing from pool {self.name}.",
                "If it was deleted by hand: an image is copied again at the next start.",
            )
        path: str = volume.path()
        return path

    def make(
        self,
        connection: Any,
        name: str,
        size_bytes: int,
        *,
        mode: str = "0600",
        owner: Owner | None = None,
        backing: tuple[str, str] | None = None,
    ) -> bool:
        """A sparse raw volume, or with ``backing`` (path, format) a qcow2 overlay of it. False if
        there was one of that name already, which is left as it is."""
        if self.find(connection, name) is not None:
            return False
        xml = _volume_xml(name, size_bytes, mode, owner, backing)
        try:
            self._pool(connection).createXML(xml, 0)
        except libvirt.libvirtError as error:
            if error.get_error_code() == libvirt.VIR_ERR_STORAGE_VOL_EXIST:
                return False
            raise self._full(connection, error, name) from error
        return True

    def drop(self, connection: Any, name: str) -> None:
        """Delete a volume; success if there is none."""
        volume = self.find(connection, name)
        if volume is None:
            return
        try:
            volume.delete(0)
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_NO_STORAGE_VOL:
                raise

    def upload(
        self,
        connection: Any,
        name: str,
        chunks: Iterator[bytes],
        total: int,
        beat: Callable[[int], None],
        offset: int = 0,
    ) -> None:
        """Write ``total`` bytes into an existing volume. ``beat(done)`` after each chunk.

        libvirt writes behind the stream, and tells of a disk that ran full only if more is sent
        afterwards. It writes in order and not beyond a failure, so what proves the whole is that
        the last chunk with anything in it can be read back; new volumes are zeros.
        """
        volume = self.find(connection, name)
        if volume is None:
            raise HostError(f"The volume {name} vanished from pool {self.name}.", "")
        stream = connection.newStream(0)
        done = 0
        proof = (0, b"")
        try:
            volume.upload(stream, offset, total, 0)
            for chunk in chunks:
                if chunk.count(0) < len(chunk):
                    proof = (offset + done, chunk)
                view = memoryview(chunk)
                while view:
                    sent = stream.send(bytes(view[:CHUNK_BYTES]))
                    view = view[sent:]
                done += len(chunk)
                beat(done)
            stream.finish()
        except libvirt.libvirtError as error:
            _abort(stream)
            raise self._full(connection, error, name) from error
        except BaseException:
            _abort(stream)
            raise
        begin, content = proof
        if self.download(connection, name, begin, len(content)) != content:
            raise self._cut_short(connection, name)

    def download(self, connection: Any, name: str, offset: int, length: int) -> bytes:
        """At most ``length`` bytes from ``offset``; empty if the volume ends before."""
        volume = self.find(connection, name)
        if volume is None:
            return b""
        size = volume.info()[1]
        length = min(length, size - offset)
        if length <= 0:
            return b""
        stream = connection.newStream(0)
        content = bytearray()
        try:
            volume.download(stream, offset, length, 0)
            while len(content) < length and (chunk := stream.recv(CHUNK_BYTES)):
                content += chunk
            stream.finish()
        except libvirt.libvirtError:
            _abort(stream)
            raise
        return bytes(content[:length])

    def tail(self, connection: Any, name: str, length: int) -> bytes:
        """The last ``length`` bytes of a volume that something may be writing to."""
        volume = self.find(connection, name)
        if volume is None:
            return b""
        size = volume.info()[1]
        return self.download(connection, name, max(0, size - length), length)

    def untouched(self, connection: Any, name: str) -> bool:
        """Nothing was ever written to this (sparse) volume."""
        volume = self.find(connection, name)
        return volume is not None and volume.info()[2] == 0

    def refresh(self, connection: Any) -> None:
        """Notice files that something other than libvirt made or deleted."""
        self._pool(connection).refresh(0)

    def free_mib(self, connection: Any) -> int:
        """Free space of the pool's file system, in MiB."""
        return int(self._pool(connection).info()[3]) // (1024 * 1024)

    def _pool(self, connection: Any) -> Any:
        return connection.storagePoolLookupByName(self.name)

    def _full(self, connection: Any, error: Any, name: str) -> Exception:
        if NO_SPACE not in str(error):
            refusal: Exception = error
            return refusal
        return self._no_room(connection, name)

    def _cut_short(self, connection: Any, name: str) -> HostError:
        refusal = self._no_room(connection, name)
        if self.free_mib(connection) == 0:
            return refusal
        return HostError(
            f"The volume {name} was not written whole in pool {self.name} at {self.path}.",
            "Look at libvirt's log there and at the disk's health.",
        )

    def _no_room(self, connection: Any, name: str) -> HostFull:
        self.refresh(connection)
        return HostFull(
            f"There is no room for the volume {name} in pool {self.name} at {self.path}: "
            f"{self.free_mib(connection)} MiB are free.",
            "Free some space on that disk, or delete homes and images that nobody needs.",
        )

    def _xml(self) -> str:
        # Other users of the host may pass through the directory and no more; volumes are 0600
        # but for images, which hold no secrets and are opened by several guests at once.
        permissions = el("permissions", el("mode", text="0711"))
        pool = el(
            "pool",
            el("name", text=self.name),
            el("target", el("path", text=self.path), permissions),
            type="dir",
        )
        return ET.tostring(pool, encoding="unicode")


def _abort(stream: Any) -> None:
    try:
        stream.abort()
    except libvirt.libvirtError as error:  # the first error is the one to tell
        log.debug("aborting a stream: %s", error)


def _volume_xml(
    name: str, size_bytes: int, mode: str, owner: Owner | None, backing: tuple[str, str] | None
) -> str:
    permissions = el("permissions", el("mode", text=mode))
    if owner is not None:
        permissions.append(el("owner", text=str(owner.uid)))
        permissions.append(el("group", text=str(owner.gid)))
    kind = "raw" if backing is None else "qcow2"
    volume = el(
        "volume",
        el("name", text=name),
        el("capacity", text=str(size_bytes), unit="bytes"),
        el("target", el("format", type=kind), permissions),
        type="file",
    )
    if backing is None:
        volume.insert(2, el("allocation", text="0", unit="bytes"))
    else:
        path, path_format = backing
        volume.append(el("backingStore", el("path", text=path), el("format", type=path_format)))
    return ET.tostring(volume, encoding="unicode")


# -- images ---------------------------------------------------------------------------------------


def put_image(
    pool: Pool,
    connection: Any,
    image: Image,
    beat: Callable[[], None],
    progress: Callable[[int, int], None],
) -> None:
    """Copy what is missing of an image, then mark it whole. Called again after a crash it starts
    each unfinished file anew."""
    mark = image_mark(image.digest)
    total = sum(file.bytes for file in image.files.values())
    if pool.find(connection, mark) is not None:
        progress(total, total)
        return
    before = 0
    for _role, file in sorted(image.files.items()):
        start = before

        def told(done: int, start: int = start) -> None:
            beat()
            progress(start + done, total)

        _put_file(pool, connection, file, told)
        before += file.bytes
        told(file.bytes)
    pool.make(connection, mark, 0, mode="0644")


def _put_file(pool: Pool, connection: Any, file: ImageFile, told: Callable[[int], None]) -> None:
    name = file_volume(file)
    mark = name + OK
    if pool.find(connection, mark) is not None and pool.find(connection, name) is not None:
        return
    pool.drop(connection, mark)
    pool.drop(connection, name)
    free_mib = pool.free_mib(connection)
    if file.bytes > free_mib * 1024 * 1024:
        raise HostError(
            f"There is no room for {file.path.name} ({file.bytes // 1024**2} MiB) in pool "
            f"{pool.name} at {pool.path}: {free_mib} MiB are free.",
            "Free some space on that disk, or delete homes and images that nobody needs.",
        )
    pool.make(connection, name, file.bytes, mode="0644")
    digest = hashlib.sha256()
    pool.upload(connection, name, _chunks(file, digest.update), file.bytes, told)
    if digest.hexdigest() != file.sha256:
        pool.drop(connection, name)
        raise HostError(
            f"{file.path} is not what its manifest says (sha256 {digest.hexdigest()}).",
            "Build the image again.",
        )
    pool.make(connection, mark, 0, mode="0644")


def _chunks(file: ImageFile, seen: Callable[[bytes], None]) -> Iterator[bytes]:
    left = file.bytes
    with file.path.open("rb") as source:
        while left > 0 and (chunk := source.read(min(CHUNK_BYTES, left))):
            seen(chunk)
            left -= len(chunk)
            yield chunk
    if left > 0:
        raise HostError(f"{file.path} is shorter than its manifest says.", "Build the image again.")
