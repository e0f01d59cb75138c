"""Archives taken apart and made anew: what is not changed on purpose is right."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from functools import lru_cache
from typing import NamedTuple


class Member(NamedTuple):
    """What an archive is made from; sizes, checksums and places follow."""

    name: bytes
    content: bytes
    method: int = 0
    comment: bytes = b""
    extra: bytes = b""
    flags: int = 0


@lru_cache(maxsize=512)
def members(data: bytes) -> tuple[Member, ...]:
    """What an archive holds, small members only; nothing if zipfile cannot read it."""
    found: list[Member] = []
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist()[:12]:
                if info.file_size <= 1 << 16:
                    name = info.filename.encode("utf-8", "replace")
                    flags = 0 if name.isascii() else 0x800
                    found.append(Member(name, archive.read(info), info.compress_type, info.comment, b"", flags))
    except Exception:  # zipfile and the codecs raise many things for damaged archives
        return ()
    return tuple(found)


def archive(of: tuple[Member, ...], comment: bytes = b"", streamed: bool = False) -> bytes:
    """A consistent archive; `streamed` puts sizes behind the data, as writers to pipes do."""
    out, directory = bytearray(), bytearray()
    for member in of:
        packed = _packed(member)
        flags = member.flags | (8 if streamed else 0)
        name, extra, crc = member.name[:0xFFFF], member.extra[:0xFFFF], zlib.crc32(member.content)
        known = (crc, len(packed), len(member.content))
        start = len(out)
        here = (0, 0, 0) if streamed else known
        out += (
            struct.pack("<4s5H3L2H", b"PK\x03\x04", 20, flags, member.method, 0, 33, *here, len(name), 0)
            + name
            + packed
        )
        if streamed:
            out += struct.pack("<4s3L", b"PK\x07\x08", *known)
        lengths = (len(name), len(extra), len(member.comment[:0xFFFF]))
        directory += struct.pack(
            "<4s6H3L5H2L", b"PK\x01\x02", 20, 20, flags, member.method, 0, 33, *known, *lengths, 0, 0, 0, start
        )
        directory += name + extra + member.comment[:0xFFFF]
    tail = (len(of), len(of), len(directory), len(out), len(comment[:0xFFFF]))
    return bytes(out + directory + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, *tail) + comment[:0xFFFF])


def with_zip64_end(data: bytes) -> bytes:
    """The archive with a zip64 end record and its locator, to which the plain end record points."""
    at = data.rindex(b"PK\x05\x06")
    _, _, _, _, count, size, begin, _ = struct.unpack_from("<4s4H2LH", data, at)
    large = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, begin)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, at, 1)
    full = struct.pack("<4s4H2L", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
    return data[:at] + large + locator + full + data[at + 20 :]


def _packed(member: Member) -> bytes:
    if member.method == 8:
        stream = zlib.compressobj(6, wbits=-15)
        return stream.compress(member.content) + stream.flush()
    if member.method in (12, 14):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", member.method) as made:
            made.writestr("x", member.content)
            size = made.getinfo("x").compress_size
        return buffer.getvalue()[31 : 31 + size]
    return member.content
