"""A kernel that needs no unpacking by the guest.

A bzImage carries the kernel compressed and the guest's processor unpacks it: 7 s of a 12 s boot
under emulation.  QEMU (from 4.0) also starts an uncompressed ELF kernel, by its PVH entry point
(``docs/system/i386`` and Xen's ``docs/misc/pvh.pandoc``); only firmware other than SeaBIOS refuses.
"""

from __future__ import annotations

import lzma
import struct

from images.errors import ImageError

# Linux boot protocol, Documentation/arch/x86/boot.rst.
_SETUP_SECTORS = 0x1F1
_MAGIC = 0x202
_PAYLOAD = 0x248
_SECTOR = 512
_NOTE_PHDR = 4
_XEN_PHYS32_ENTRY = 18


def uncompressed(bzimage: bytes) -> bytes:
    """The ELF kernel inside `bzimage`.

    :raises ImageError: not a bzImage, packed with something else than xz, or without PVH entry.
    """
    if bzimage[_MAGIC : _MAGIC + 4] != b"HdrS":
        raise ImageError("The kernel is not a bzImage.", "Use a kernel of Debian for amd64.")
    offset, length = struct.unpack_from("<II", bzimage, _PAYLOAD)
    start = ((bzimage[_SETUP_SECTORS] or 4) + 1) * _SECTOR + offset
    packed = bzimage[start : start + length]
    if not packed.startswith(b"\xfd7zXZ\0"):
        raise ImageError(
            f"The kernel is packed with something unknown ({packed[:6].hex()}).",
            "Teach images.kernel.uncompressed the new format.",
        )
    # What follows the xz stream is its length for the boot code, not data.
    kernel = lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(packed)
    if not has_pvh_entry(kernel):
        raise ImageError(
            "The kernel has no PVH entry point.", "Use a kernel that is built with CONFIG_PVH=y."
        )
    return kernel


def has_pvh_entry(kernel: bytes) -> bool:
    """Whether an ELF64 file has the note by which QEMU finds the PVH entry point."""
    if kernel[:5] != b"\x7fELF\x02":
        return False
    table, size, count = (
        *struct.unpack_from("<Q", kernel, 32),
        *struct.unpack_from("<HH", kernel, 54),
    )
    for number in range(count):
        at = table + number * size
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", kernel, at)
        if kind == _NOTE_PHDR and _has_note(kernel[offset : offset + length]):
            return True
    return False


def _has_note(notes: bytes) -> bool:
    at = 0
    while at + 12 <= len(notes):
        name_length, length, kind = struct.unpack_from("<III", notes, at)
        name = notes[at + 12 : at + 12 + name_length]
        if name == b"Xen\0" and kind == _XEN_PHYS32_ENTRY:
            return True
        at += 12 + -(-name_length // 4) * 4 + -(-length // 4) * 4
    return False
