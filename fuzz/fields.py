"""Where a format has its fields: numbers, words of a header, names, instructions of a pickle.

The formats are known only as far as to find them; what they mean is left to the programs under test.
"""

from __future__ import annotations

import io
import pickletools
import re
from functools import lru_cache
from typing import NamedTuple

SUFFIXES = (".npy", ".npz", ".safetensors", ".safetensors.index.json")


class Field(NamedTuple):
    """Bytes [begin, end) of a file that mean one thing; `kind` says which replacements make sense."""

    begin: int
    end: int
    kind: str


_PYTHON_TOKEN = re.compile(rb"'[^'\n]*'|\"[^\"\n]*\"|-?[0-9]+L?|True|False|None|[{}()\[\]:,]|[ \n]+")
_JSON_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?[0-9.eE+]+|true|false|null|[{}\[\]:,]|[ \n]+')
RECORDS: dict[bytes, tuple[int, ...]] = {
    # Widths of the fields after the signature: APPNOTE 4.3.7, 4.3.12, 4.3.14, 4.3.15, 4.3.16.
    b"PK\x03\x04": (2, 2, 2, 2, 2, 4, 4, 4, 2, 2),
    b"PK\x01\x02": (2, 2, 2, 2, 2, 2, 4, 4, 4, 2, 2, 2, 2, 2, 4, 4),
    b"PK\x06\x06": (8, 2, 2, 4, 4, 8, 8, 8, 8),
    b"PK\x06\x07": (4, 8, 4),
    b"PK\x05\x06": (2, 2, 2, 2, 4, 4, 2),
}
_MOST_TOKENS = 400


@lru_cache(maxsize=512)
def fields(data: bytes, suffix: str) -> tuple[Field, ...]:
    """The fields of a file, as far as they can be found; never none."""
    found: list[Field] = []
    if suffix == ".npy":
        found = _npy_fields(data, 0)
    elif suffix == ".npz":
        found = _zip_fields(data)
    elif suffix == ".safetensors":
        end = 8 + min(int.from_bytes(data[:8], "little"), max(len(data) - 8, 0))
        found = [Field(0, min(8, len(data)), "number"), *_tokens(data, 8, end, _JSON_TOKEN, "json")]
        found.append(Field(min(end, len(data)), len(data), "data"))
    else:
        found = _tokens(data, 0, len(data), _JSON_TOKEN, "json")
    found = [field for field in found if field.begin < field.end or field.kind == "data"]
    return tuple(found) or (Field(0, len(data), "data"),)


def _tokens(data: bytes, begin: int, end: int, token: re.Pattern[bytes], kind: str) -> list[Field]:
    matches = token.finditer(data, begin, end)
    return [Field(*match.span(), kind) for match, _ in zip(matches, range(_MOST_TOKENS), strict=False)]


def _npy_fields(data: bytes, at: int) -> list[Field]:
    if len(data) < at + 12:
        return []
    width = 2 if data[at + 6] == 1 else 4
    begin = at + 8 + width
    end = min(begin + int.from_bytes(data[at + 8 : begin], "little"), len(data))
    found = [Field(at, at + 6, "data"), Field(at + 6, at + 7, "number"), Field(at + 7, at + 8, "number")]
    found += [Field(at + 8, begin, "number"), *_tokens(data, begin, end, _PYTHON_TOKEN, "python")]
    if data[end : end + 1] == b"\x80":
        found += _opcodes(data, end)
    return [*found, Field(end, len(data), "data")] if at == 0 else found


def _opcodes(data: bytes, begin: int) -> list[Field]:
    """The instructions of a pickle, as far as they can be read."""
    found = []
    try:
        last = None
        for _, _, at in pickletools.genops(io.BytesIO(data[begin : begin + 100_000])):
            if last is not None and at is not None:
                found.append(Field(begin + last, begin + at, "opcode"))
            last = at
            if len(found) >= _MOST_TOKENS:
                break
    except Exception:  # a damaged pickle has the fields up to its fault; pickletools raises many things
        pass
    return found


def _zip_fields(data: bytes) -> list[Field]:
    found = []
    for match, _ in zip(
        re.finditer(rb"PK(?:\x03\x04|\x01\x02|\x06\x06|\x06\x07|\x05\x06)", data), range(60), strict=False
    ):
        at = match.end()
        found.append(Field(match.start(), at, "data"))
        values = []
        for width in RECORDS[match[0]]:
            if at + width <= len(data):
                found.append(Field(at, at + width, "number"))
                values.append(int.from_bytes(data[at : at + width], "little"))
            at += width
        lengths = {10: values[8:10], 16: values[9:12], 7: values[6:7]}.get(len(values), [])
        for length in lengths:  # name, extra fields, comment
            if 0 < length <= len(data) - at:
                found.append(Field(at, at + length, "extra" if length >= 4 and data[at + 1] == 0 else "name"))
                at += length
        if match[0] == b"PK\x03\x04":
            found += _npy_fields(data, at) if data[at : at + 6] == b"\x93NUMPY" else []
    return found
