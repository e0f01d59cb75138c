"""Archives built from structs, every field free to lie; nothing here uses the product."""

from __future__ import annotations

import bz2
import lzma
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from tests.strategies import npy_bytes

FULL = 0xFFFFFFFF
W = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.arange(4, dtype=np.uint8)


@dataclass(frozen=True)
class Member:
    """One member; None means the truth. `local_*` are the fields of the local header, the others the directory's."""

    name: bytes = b"w.npy"
    data: bytes = npy_bytes(W)
    method: int = 0
    packed: bytes | None = None
    flags: int = 0
    crc: int | None = None
    size: int | None = None
    packed_size: int | None = None
    offset: int | None = None
    disk: int = 0
    system: int = 3
    attributes: int = 0o600 << 16
    extra: bytes = b""
    comment: bytes = b""
    signature: bytes = b"PK\x01\x02"
    local_name: bytes | None = None
    local_flags: int | None = None
    local_method: int | None = None
    local_crc: int | None = None
    local_size: int | None = None
    local_packed_size: int | None = None
    local_extra: bytes = b""
    local_signature: bytes = b"PK\x03\x04"
    descriptor: bytes = b""
    listed: bool = True

    @property
    def stored(self) -> bytes:
        if self.packed is not None:
            return self.packed
        packers: dict[int, Callable[[bytes], bytes]] = {0: bytes, 8: deflated, 12: bz2.compress, 14: zip_lzma}
        return packers[self.method](self.data)

    def local(self) -> bytes:
        name = or_else(self.local_name, self.name)
        fields = struct.pack(
            "<4s5H3L2H",
            self.local_signature,
            45,
            or_else(self.local_flags, self.flags),
            or_else(self.local_method, self.method),
            0,
            33,
            or_else(self.local_crc, zlib.crc32(self.data)),
            or_else(self.local_packed_size, len(self.stored)),
            or_else(self.local_size, len(self.data)),
            len(name),
            len(self.local_extra),
        )
        return fields + name + self.local_extra + self.stored + self.descriptor

    def central(self, offset: int) -> bytes:
        fields = struct.pack(
            "<4s2B5H3L5H2L",
            self.signature,
            45,
            self.system,
            45,
            self.flags,
            self.method,
            0,
            33,
            or_else(self.crc, zlib.crc32(self.data)),
            or_else(self.packed_size, len(self.stored)),
            or_else(self.size, len(self.data)),
            len(self.name),
            len(self.extra),
            len(self.comment),
            self.disk,
            0,
            self.attributes,
            or_else(self.offset, offset),
        )
        return fields + self.name + self.extra + self.comment


T = TypeVar("T")


def or_else(value: T | None, truth: T) -> T:
    return truth if value is None else value


def deflated(data: bytes) -> bytes:
    pack = zlib.compressobj(6, zlib.DEFLATED, -15)
    return pack.compress(data) + pack.flush()


def zip_lzma(data: bytes, *, end_mark: bool = True, props: bytes = b"\x5d\0\0\x80\0", length: int = 5) -> bytes:
    """APPNOTE 5.8.8: version, length of properties, properties, raw stream."""
    filters = [{"id": lzma.FILTER_LZMA1, "dict_size": 1 << 23}]
    stream = lzma.compress(data, lzma.FORMAT_RAW, filters=filters)
    if not end_mark:  # the alone format can leave it out, and its payload is the same raw stream
        stream = LZMA_WITHOUT_END[data]
    return b"\x09\x14" + struct.pack("<H", length) + props + stream


@dataclass(frozen=True)
class End:
    """The end records; None means the truth. `zip64` adds the larger form."""

    count: int | None = None
    here: int | None = None
    disk: int = 0
    first_disk: int = 0
    size: int | None = None
    begin: int | None = None
    comment: bytes = b""
    comment_bytes: int | None = None
    zip64: bool = False
    saturated: bool = True
    signature64: bytes = b"PK\x06\x06"
    locator_at: int | None = None
    locator_disk: int = 0
    disks: int = 1
    count64: int | None = None
    gap: bytes = b""

    def pack(self, count: int, size: int, begin: int) -> bytes:
        out = self.gap
        small = (or_else(self.count, count), or_else(self.size, size), or_else(self.begin, begin))
        if self.zip64:
            count64 = or_else(self.count64, small[0])
            out += struct.pack(
                "<4sQ2H2L4Q", self.signature64, 44, 45, 45, self.disk, self.first_disk, count64, count64, *small[1:]
            )
            at = or_else(self.locator_at, begin + size)
            out += struct.pack("<4sLQL", b"PK\x06\x07", self.locator_disk, at, self.disks)
            if self.saturated:
                small = (0xFFFF, FULL, FULL)
        here = or_else(self.here, small[0])
        comment_bytes = or_else(self.comment_bytes, len(self.comment))
        disks = (0xFFFF, 0xFFFF) if self.zip64 and self.saturated else (self.disk, self.first_disk)
        out += struct.pack("<4s4H2LH", b"PK\x05\x06", *disks, here, *small, comment_bytes)
        return out + self.comment


TRUE_END = End()


def archive(*members: Member, end: End = TRUE_END, before: bytes = b"", tail: bytes = b"") -> bytes:
    """A zip file of these members."""
    out = before
    directory = b""
    for member in members:
        directory += member.central(len(out)) if member.listed else b""
        out += member.local()
    count = sum(member.listed for member in members)
    return out + directory + end.pack(count, len(directory), len(out)) + tail


def zip64(*values: int) -> bytes:
    """The zip64 extra field."""
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)


def extra(kind: int, data: bytes) -> bytes:
    return struct.pack("<2H", kind, len(data)) + data


PLAIN = Member()
OTHER = Member(name=b"b.npy", data=npy_bytes(B))
LONG = np.random.default_rng(3).integers(0, 5, 200_000, np.uint8)
DEFLATED = Member(name=b"long.npy", data=npy_bytes(LONG), method=8)
BZIP2 = replace(DEFLATED, method=12)
LZMA = replace(DEFLATED, method=14)
SIZE = len(PLAIN.data)
SPLIT_SIZE = len(DEFLATED.data)


def _alone(data: bytes) -> bytes:
    """A raw LZMA stream that ends without a mark: the stream with one, cut where all bytes are out already."""
    filters = [{"id": lzma.FILTER_LZMA1, "dict_size": 1 << 23}]
    stream = lzma.compress(data, lzma.FORMAT_RAW, filters=filters)
    for length in range(len(stream) - 12, len(stream)):
        decompressor = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=filters)
        if decompressor.decompress(stream[:length]) == data and not decompressor.eof:
            return stream[:length]
    raise AssertionError("no cut leaves all bytes")


LZMA_WITHOUT_END = {LZMA.data: _alone(LZMA.data)}


def unicode_path(name: str, raw: bytes, version: int = 1, crc: int | None = None) -> bytes:
    return extra(0x7075, struct.pack("<BL", version, or_else(crc, zlib.crc32(raw))) + name.encode())


def two_ends() -> bytes:
    """The comment of the one holds the directory and end record of the other: each is right by itself."""
    first = archive(PLAIN)
    directory = PLAIN.central(0)
    begin = len(first)
    second = directory + TRUE_END.pack(1, len(directory), begin)
    return archive(PLAIN, end=End(comment=second))


def nested(data: bytes) -> bytes:
    """A whole archive as the comment of another; its places are those it had by itself."""
    return archive(PLAIN, end=End(comment=data))
