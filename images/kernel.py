"""The kernel as QEMU likes it best: uncompressed.

A Debian bzImage carries its kernel in xz, and unpacking that costs an emulated processor four
seconds of every boot.  QEMU starts the uncompressed ELF kernel directly (the PVH entry point,
since QEMU 4.0, behind SeaBIOS); firmware of the UEFI kind cannot, and needs the bzImage.
"""

from __future__ import annotations

import gzip
import lzma
import struct

_XZ, _GZIP, _ELF = b"\xfd7zXZ\0", b"\x1f\x8b", b"\x7fELF"


def uncompressed(image: bytes) -> bytes:
    """The ELF kernel inside a bzImage, or `image` itself where it cannot be unpacked.

    Offsets of the setup header: Documentation/arch/x86/boot.rst (setup_sects 0x1f1, HdrS 0x202,
    payload_offset 0x248, payload_length 0x24c).
    """
    if len(image) < 0x250 or image[0x202:0x206] != b"HdrS":
        return image
    setup = ((image[0x1F1] or 4) + 1) * 512
    offset, length = struct.unpack_from("<II", image, 0x248)
    payload = image[setup + offset : setup + offset + length]
    try:
        if payload.startswith(_XZ):
            kernel = lzma.LZMADecompressor(format=lzma.FORMAT_XZ).decompress(payload)
        elif payload.startswith(_GZIP):
            kernel = gzip.decompress(payload[:-4])
        else:
            return image
    except (lzma.LZMAError, OSError, EOFError):
        return image
    return kernel if kernel.startswith(_ELF) else image
