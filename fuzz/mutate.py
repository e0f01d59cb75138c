"""Damaged files that get past the first check: changes made where a format has its fields.

`systematic` lists every change of one kind, `changed` makes one at random. Nothing here imports the product.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from itertools import chain

from fuzz import made
from fuzz.archives import Member, archive, members
from fuzz.fields import RECORDS, Field, fields
from fuzz.words import NOTES, replacements

EDGE_BYTES = 4 << 10
"""Within a file of more than twice this length, not every place is tried."""


def replaced(data: bytes, field: Field, new: bytes, suffix: str, repair: bool) -> bytes:
    """The file with other bytes in a field; with `repair`, the length that counts the field counts it still."""
    out = data[: field.begin] + new + data[field.end :]
    longer = len(new) - (field.end - field.begin)
    if not repair or not longer:
        return out
    if suffix == ".safetensors" and field.kind == "json":
        length = int.from_bytes(data[:8], "little") + longer
        return (length % (1 << 64)).to_bytes(8, "little") + out[8:]
    if suffix == ".npy" and field.kind == "python":
        width = 2 if data[6] == 1 else 4
        length = int.from_bytes(data[8 : 8 + width], "little") + longer
        return out[:8] + (length % (1 << 8 * width)).to_bytes(width, "little") + out[8 + width :]
    if suffix == ".npz" and field.kind in ("extra", "name"):
        return _repaired_record(data, field, out, longer)
    return out


def _repaired_record(data: bytes, field: Field, out: bytes, longer: int) -> bytes:
    """Lengths in the record of a name, extra field or comment, and the places of what follows it."""
    start = max(data.rfind(signature, 0, field.begin) for signature in RECORDS)
    at = {b"PK\x03\x04": (26, 28), b"PK\x01\x02": (28, 30, 32), b"PK\x05\x06": (20,)}.get(data[start : start + 4], ())
    head = {(26, 28): 30, (28, 30, 32): 46, (20,): 22}.get(at, 0)
    buffer = bytearray(out)
    begin = start + head
    for place in at:
        length = int.from_bytes(data[start + place : start + place + 2], "little")
        if begin == field.begin:
            buffer[start + place : start + place + 2] = ((length + longer) & 0xFFFF).to_bytes(2, "little")
            break
        begin += length
    end = buffer.rfind(b"PK\x05\x06")
    if head == 46 and end >= 0:  # the directory grew
        size = int.from_bytes(buffer[end + 12 : end + 16], "little") + longer
        buffer[end + 12 : end + 16] = (size & 0xFFFFFFFF).to_bytes(4, "little")
    if head == 30 and end >= 0:  # it moved
        place = int.from_bytes(buffer[end + 16 : end + 20], "little") + longer
        buffer[end + 16 : end + 20] = (place & 0xFFFFFFFF).to_bytes(4, "little")
    return bytes(buffer)


def _rearranged(found: tuple[Member, ...]) -> Iterator[tuple[Member, ...]]:
    first, rest = found[0], found[1:]
    yield (*found, first)
    yield rest
    yield found[::-1]
    for method in (0, 8, 12, 14):
        yield (first._replace(method=method), *rest)
    for name in (
        b"",
        b".npy",
        b"a/",
        b"../w.npy",
        b"/w.npy",
        b"w",
        b"W.npy",
        b"__metadata__.npy",
        b"\xff.npy",
        b"\0.npy",
        b"n" * 5000,
        b"file.npy",
    ):
        yield (first._replace(name=name), *rest)
    for note in NOTES:
        yield (first._replace(comment=note), *rest)
    for extra in (
        b"\1\0\0\0",
        b"\1\0\x18\0" + bytes(24),
        b"up\x09\0\x01" + zlib.crc32(first.name).to_bytes(4, "little") + b"\xc3\xa9ab",
        b"\0",
    ):
        yield (first._replace(extra=extra), *rest)
    for flags in (1, 0x20, 0x40, 0x800, 0x2000):
        yield (first._replace(flags=flags), *rest)
    for content in (b"", first.content[:-1], first.content + b"\0", first.content * 2, b"\x93NUMPY", bytes(1 << 16)):
        yield (first._replace(content=content), *rest)


def _places(data: bytes) -> Iterator[int]:
    """All of a file, or the beginning and end of a long one."""
    edge = len(data) if len(data) <= 2 * EDGE_BYTES else EDGE_BYTES
    return chain(range(edge), range(max(len(data) - EDGE_BYTES, edge), len(data)))


def prefixes(data: bytes) -> Iterator[bytes]:
    """Every proper prefix; of a long file those that end near its beginning or end."""
    return (data[:length] for length in _places(data))


def bit_flips(data: bytes) -> Iterator[bytes]:
    """Every file that differs in one bit; of a long file in one near its beginning or end."""
    for at in _places(data):
        for bit in range(8):
            yield data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def field_changes(data: bytes, suffix: str) -> Iterator[bytes]:
    """Every replacement of every field, lengths repaired and not; for an archive its members' fields too."""
    for field in fields(data, suffix):
        for new in replacements(data, field):
            yield replaced(data, field, new, suffix, repair=True)
            if len(new) != field.end - field.begin:
                yield replaced(data, field, new, suffix, repair=False)
    if suffix == ".npz" and (found := members(data)):
        for other in _rearranged(found):
            yield archive(other)
        for note in NOTES:
            yield archive(found, note)
        yield archive(found, streamed=True)
        for inner in field_changes(found[0].content, ".npy"):
            yield archive((found[0]._replace(content=inner), *found[1:3]))


def systematic(data: bytes, suffix: str) -> Iterator[bytes]:
    """All prefixes, bit flips and field changes of a file."""
    yield data
    yield from prefixes(data)
    yield from bit_flips(data)
    yield from field_changes(data, suffix)


def changed(data: bytes, suffix: str, rng: random.Random) -> bytes:
    """Up to three changes at random, most of them in fields; at times of another file than the one given."""
    changes = rng.choice((1, 1, 1, 2, 3))
    if rng.random() < 0.15:
        data = _another(suffix, rng) or data
        changes = rng.choice((0, 0, 1, 2))
    for _ in range(changes):
        data = _one_change(data, suffix, rng)
    return data


def _another(suffix: str, rng: random.Random) -> bytes | None:
    """A right file that has nothing to do with the one at hand."""
    if suffix == ".npy":
        return made.npy(rng)
    if suffix == ".safetensors":
        return made.safetensors(rng)
    if suffix == ".npz":
        names = rng.sample((b"w.npy", b"a/b.npy", b"\xc3\xa9.npy", b"x", b"file.npy", b"W.npy"), rng.randrange(1, 4))
        comments = (b"", b"", b"", rng.choice(NOTES))
        new = tuple(
            Member(name, made.npy(rng), rng.choice((0, 0, 8)), rng.choice(comments), b"", 0x800) for name in names
        )
        return archive(new, rng.choice(comments))
    return None


def _one_change(data: bytes, suffix: str, rng: random.Random) -> bytes:
    if not data:
        return rng.randbytes(rng.randrange(40))
    kind = rng.randrange(10)
    if kind == 0:
        return data[: rng.randrange(len(data))]
    if kind == 1:
        at = rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == 2:
        at, source = rng.randrange(len(data) + 1), rng.randrange(len(data))
        return (
            data[:at] + data[source : source + rng.choice((1, 2, 4, 8, 30, 64))] + data[at + rng.choice((0, 0, 4, 8)) :]
        )
    if kind <= 5 and suffix == ".npz" and (found := members(data)):
        return _other_archive(found, rng)
    field = rng.choice(fields(data, suffix))
    options = replacements(data, field)
    return replaced(data, field, rng.choice(options), suffix, repair=rng.random() < 0.8) if options else data


def _other_archive(found: tuple[Member, ...], rng: random.Random) -> bytes:
    which = rng.randrange(len(found))
    found = (found[which], *found[:which], *found[which + 1 :])
    kind = rng.randrange(4)
    if kind == 0:
        found = rng.choice(list(_rearranged(found))) or found
    elif kind == 1:
        method = rng.choice((0, 8, 8, 12, 14))
        found = (found[0]._replace(method=method), *found[1:])
    else:
        inner = _one_change(found[0].content, ".npy", rng)
        found = (found[0]._replace(content=inner, method=rng.choice((found[0].method, 0, 8))), *found[1:])
    comment = rng.choice(NOTES) if rng.random() < 0.2 else b""
    return archive(found, comment, streamed=rng.random() < 0.1)
