"""Right files of any type and shape, to begin with: a change to one of these often gets far."""

from __future__ import annotations

import json
import random
import struct

_ITEM_BYTES = {
    **dict.fromkeys(("|b1", "|u1", "|i1", "<f1", "|V1", "<V1", "|S1", "float8_e4m3fn"), 1),
    **dict.fromkeys(("<f2", ">i2", "<V2", "|V2", ">V2", "bfloat16", "<g2", "|S2"), 2),
    **dict.fromkeys(("<f4", ">f4", "<u4", "<U1", ">U1", "|V4"), 4),
    **dict.fromkeys(("<f8", ">f8", "<i8", "<c8", ">c8", "<M8[ns]", ">m8[25s]", "<U2", "<M8"), 8),
    **dict.fromkeys((">c16", "<c16", "<f16"), 16),
    "|V0": 0,
    "|S0": 0,
    "<U0": 0,
    "|S3": 3,
    "|V3": 3,
    "<f12": 12,
    "<c32": 32,
}
_RECORDS = {
    "[('a', '<f4'), ('b', '>i2'), ('', '|V2')]": 8,
    "[('a', [('b', '>f2'), ('c', '|S3')], (2,)), ('d', '<c8')]": 18,
    "[('é', '<U1', (2, 1)), ('x', '|b1')]": 9,
    "[]": 0,
    "('>f4', (2,))": 8,
}
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
_METADATA: tuple[dict[str, str], ...] = (
    {},
    {"format": "pt"},
    {"a": "", "é": "\t\u2028"},
    {"w": "text", "tensor-convert": '{"w":{"dtype":"S4","encoding":"text","shape":[]}}'},
    {"tensor-convert": '{"w":{"dtype":"datetime64[ns]","encoding":"bytes","shape":[2,2]}}'},
)


def _shape(rng: random.Random) -> list[int]:
    if rng.random() < 0.03:  # empty, or nearly so for types without bytes
        return rng.sample((0, 1 << 62, 8, 3), rng.choice((3, 4)))
    return [rng.choice((0, 1, 2, 2, 3, 4, 5, 8)) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4)))]


def _data(rng: random.Random, count: int) -> bytes:
    count = min(count, 1 << 16)
    """Random, zeros, or few values, as weights, masks and text have them."""
    return rng.choice((rng.randbytes(count), bytes(count), bytes(rng.choices(b"\0\1A\x80\xff", k=count))))


def _product(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def npy(rng: random.Random) -> bytes:
    """A .npy file."""
    if rng.random() < 0.8:
        name, item = rng.choice(list(_ITEM_BYTES.items()))
        descr = f"'{name}'"
    else:
        descr, item = rng.choice(list(_RECORDS.items()))
    shape = _shape(rng)
    header = f"{{'descr': {descr}, 'fortran_order': {rng.random() < 0.4}, 'shape': {tuple(shape)}, }}"
    text = header.encode("utf-8")
    text = text.ljust(rng.choice((118, len(text), 500))) + b"\n"
    version = 3 if not header.isascii() else rng.choice((1, 1, 1, 2))
    length = struct.pack("<H" if version == 1 else "<L", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + _data(rng, item * _product(shape))


def safetensors(rng: random.Random) -> bytes:
    """A .safetensors file of a few tensors."""
    header: dict[str, object] = {}
    if rng.random() < 0.5:
        header["__metadata__"] = rng.choice(_METADATA)
    at = 0
    for name in rng.sample(("w", "a.b", "x/y", "é", "file", "", "W", "..", "n" * 300, "con"), rng.randrange(4)):
        shape, (code, bits) = _shape(rng), rng.choice(list(_BITS.items()))
        if _product(shape) * bits % 8:
            shape.append(4)
        end = at + _product(shape) * bits // 8
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, ensure_ascii=rng.random() < 0.5).encode()
    text += b" " * rng.choice((0, -len(text) % 8))
    return struct.pack("<Q", len(text)) + text + _data(rng, at)
