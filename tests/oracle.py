"""A second opinion for the tests: small, strict and independent of the product, which it never imports."""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
import safetensors

Entry = tuple[str, tuple[int, ...], bytes]

SAFETENSORS_CODES = {
    "bool": "BOOL",
    "float4_e2m1fn": "F4",
    "float6_e2m3fn": "F6_E2M3",
    "float6_e3m2fn": "F6_E3M2",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
"""The numpy or ml_dtypes name of each type that safetensors holds -> its code; in the reference's ascending order."""

CODE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits of one element of each safetensors code."""


def read_safetensors(path: str | Path) -> tuple[dict[str, str], dict[str, Entry]]:
    """Everything a safetensors file holds: its metadata, and name -> (code, shape, bytes) in the order of the header.

    Strict: any rule of the format that the file breaks is an AssertionError. Reads the whole file.
    """
    data = Path(path).read_bytes()
    assert len(data) >= 8, f"{len(data)} bytes: too short for a header length"
    (length,) = struct.unpack("<Q", data[:8])
    assert 2 <= length <= min(len(data) - 8, 100_000_000), f"header length {length} in a file of {len(data)} bytes"
    text = data[8 : 8 + length].decode("utf-8")
    assert text.startswith("{"), f"header starts with {text[:1]!r}"
    header = json.loads(text.rstrip(" "), object_pairs_hook=_without_duplicates)
    body = data[8 + length :]

    metadata = header.pop("__metadata__", {})
    assert isinstance(metadata, dict), "metadata is no object"
    assert all(isinstance(value, str) for value in metadata.values()), f"metadata values must be strings: {metadata}"

    tensors: dict[str, Entry] = {}
    ranges: list[tuple[int, int]] = []
    for name, entry in header.items():
        name.encode("utf-8")  # a lone surrogate is no text
        assert isinstance(entry, dict), f"{name!r}: no object"
        assert entry.keys() == {"dtype", "shape", "data_offsets"}, f"{name!r}: fields {sorted(entry)}"
        code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        assert code in CODE_BITS, f"{name!r}: unknown dtype {code!r}"
        assert _naturals(shape), f"{name!r}: shape {shape}"
        assert _naturals(offsets), f"{name!r}: data_offsets {offsets}"
        assert len(offsets) == 2, f"{name!r}: data_offsets {offsets}"
        begin, end = offsets
        bits = CODE_BITS[code]
        for size in shape:
            bits *= size
        assert bits == 8 * (end - begin), f"{name!r}: {code} {shape} is {bits} bits, not bytes {begin}..{end}"
        ranges.append((begin, end))
        tensors[name] = (code, tuple(shape), body[begin:end])

    position = 0
    for begin, end in sorted(ranges):
        assert begin == position, f"hole or overlap: a tensor begins at {begin}, expected {position}"
        position = end
    assert position == len(body), f"the tensors cover {position} of {len(body)} bytes"
    return metadata, tensors


def canonical(array: npt.NDArray[Any]) -> bytes:
    """The elements of any array as little-endian row-major bytes; complex numbers are swapped part by part."""
    dtype = array.dtype
    assert not dtype.hasobject, "objects have no bytes"
    if dtype.fields is not None or dtype.subdtype is not None:
        return array.astype(dtype.newbyteorder("<")).tobytes()
    if dtype.byteorder == ">" or (dtype.byteorder == "=" and sys.byteorder == "big"):
        array = array.byteswap()
    return array.tobytes()  # always row-major, whatever the layout


def save_with_reference(
    path: str | Path, arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays of any layout and byte order with the safetensors library, in the form it expects.

    The library copies raw memory, so it is given dense row-major little-endian bytes. It orders two or more metadata
    keys at random. ml_dtypes keeps a float4 in a byte of its own; the file holds two, the first in the low half.
    Raises what the library raises for a type it does not write (float6, complex128, ...).
    """
    specs: dict[str, Any] = {}
    keep_alive = []
    for name, array in arrays.items():
        dtype, shape, data = array.dtype.name, list(array.shape), canonical(array)
        if dtype == "float4_e2m1fn":
            assert shape, "a 0-d float4 fills no byte"
            assert shape[-1] % 2 == 0, f"float4 of shape {shape}: the last axis must be even"
            dtype, shape[-1] = "float4_e2m1fn_x2", shape[-1] // 2  # the library doubles the last axis again
            data = bytes(low | high << 4 for low, high in zip(data[::2], data[1::2], strict=True))
        if not hasattr(safetensors, "TensorSpec"):  # before 0.8
            specs[name] = {"dtype": dtype, "shape": shape, "data": data}
            continue
        buffer = ctypes.create_string_buffer(data, max(len(data), 1))
        keep_alive.append(buffer)
        pointer = ctypes.addressof(buffer)
        specs[name] = safetensors.TensorSpec(dtype=dtype, shape=shape, data_ptr=pointer, data_len=len(data))
    content = safetensors.serialize(specs, metadata=None if metadata is None else dict(metadata))
    Path(path).write_bytes(content)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    assert len(result) == len(pairs), f"duplicate key among {[key for key, _ in pairs]}"
    return result


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
