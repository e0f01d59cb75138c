"""Hugging Face's safetensors.

    N (u64, little-endian) | header: N bytes of UTF-8 JSON, starts with '{', may end in spaces | data
    header: {"name": {"dtype": code, "shape": [...], "data_offsets": [begin, end]}, "__metadata__": {text: text}}

Every rule of the README is checked: header at most 100 MB, no key twice, ranges that cover the data exactly once, in
whole, without overlap, each as long as shape and type say. The reference library is laxer in two points, which are
refused here: equal ranges under a key given twice, and space before the '{'. Unknown fields of an entry are ignored,
`"__metadata__": null` (MLX) is none, and data may begin at any byte.

Source: README and safetensors/src/tensor.rs of the safetensors repository, version 0.8.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from convert.dtypes import BY_CODE
from convert.errors import ConvertError, CorruptError, LimitError, UnsupportedError, quoted
from convert.files import Source, open_source
from convert.jsontext import kind_of, parse_json
from convert.limits import DEFAULT, Limits, exceeded
from convert.memory import take_origins
from convert.tensor import Checkpoint, Extent, Tensor

_LENGTH_BYTES = 8
_LARGEST_SIZE = (1 << 64) - 1
_AGAIN = "download or copy the file again"


def open(path: str | os.PathLike[str], limits: Limits = DEFAULT) -> Checkpoint:
    """The tensors of a file in the order of their bytes; only the header is read.

    Raises:
        CorruptError: A rule of the format is broken.
        UnsupportedError: A dtype the format does not know.
        LimitError: A header longer than `limits.json_bytes`, or with more in it than `limits` allow.
    """
    file = open_source(path)
    try:
        header, begin = _header(file, limits)
        metadata = _metadata(header.pop("__metadata__", None))
        tensors = _tensors(header, file, begin, limits)
        checkpoint = Checkpoint(os.fspath(path), "safetensors", tensors, metadata, [], [file])
        take_origins(checkpoint, limits)
    except ConvertError as err:
        file.close()
        err.at(path)
        raise
    return checkpoint


def _header(file: Source, limits: Limits) -> tuple[dict[str, Any], int]:
    """The JSON object and where the data begins."""
    if file.size < _LENGTH_BYTES:
        what = "the file is empty" if file.size == 0 else "the file is cut short"
        raise CorruptError(f"{what} (expected at least {_LENGTH_BYTES} bytes, found {file.size})", hint=_AGAIN)
    count = int.from_bytes(file.read(0, _LENGTH_BYTES), "little")
    if count == 0:
        raise CorruptError("empty header (expected a JSON object, found length 0 at byte 0)")
    if count > limits.json_bytes:
        if count <= file.size - _LENGTH_BYTES:
            raise exceeded("json_bytes", "the header length is over the limit", limits.json_bytes, count)
        raise LimitError(
            f"the header length is over the limit (expected at most {limits.json_bytes} bytes, found {count})",
            hint="is this a safetensors file at all? its first 8 bytes give the length of the header",
        )
    if count > file.size - _LENGTH_BYTES:
        raise CorruptError(
            f"the header length exceeds the file (expected at most {file.size - _LENGTH_BYTES} bytes, found {count})",
            hint=_AGAIN,
        )
    data = file.read(_LENGTH_BYTES, count)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as err:
        raise CorruptError(
            f"the header is not UTF-8 (found {data[err.start]:#04x} at byte {_LENGTH_BYTES + err.start})"
        ) from err
    if text[0] != "{":
        raise CorruptError(f"the header is not a JSON object (expected '{{' at byte 8, found {text[0]!r})")
    del data  # a large header shall not be held twice while it is parsed
    header = _parse(text, limits)
    if isinstance(header, _Entry):
        header = header._asdict()
    return header, _LENGTH_BYTES + count


def _parse(text: str, limits: Limits) -> dict[str, Any] | _Entry:
    try:
        return parse_json(text, "the header", limits, _unique)  # type: ignore[no-any-return]
    except ValueError as err:
        raise CorruptError(f"invalid JSON in the header: {err}") from err


class _Entry(NamedTuple):
    """A tensor's entry; takes far less memory than the dictionary, of which there may be very many at once."""

    dtype: Any
    shape: Any
    data_offsets: Any


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Entry:
    """The object, as an entry if it has exactly the fields of one in the usual order."""
    if len(pairs) == 3 and tuple(key for key, _ in pairs) == _Entry._fields:
        return _Entry(*(value for _, value in pairs))
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise CorruptError(f"duplicate key {quoted(key)} in the header")
            seen.add(key)
    return found


def _metadata(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, _Entry):
        value = value._asdict()
    if not isinstance(value, dict):
        raise CorruptError(f"__metadata__ is reserved for an object of strings (found {kind_of(value)})")
    for key, text in value.items():
        if not isinstance(text, str):
            hint = None
            if key in ("dtype", "shape", "data_offsets"):
                hint = "a tensor was saved under the reserved name; save it again under another"
            raise CorruptError(
                f"__metadata__ is reserved for an object of strings (found {kind_of(text)} for {quoted(key)})",
                hint=hint,
            )
    _check_unicode([*value, *value.values()])
    return value


def _check_unicode(texts: Iterable[str]) -> None:
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError:
        raise CorruptError("the header holds text that is not valid Unicode (a lone surrogate)") from None


def _tensors(header: dict[str, Any], file: Source, data_begin: int, limits: Limits) -> list[Tensor]:
    """All tensors, sorted by place; proves that their ranges cover the data exactly once."""
    if len(header) > limits.tensors:
        raise exceeded("tensors", "too many tensors", limits.tensors, len(header))
    try:
        "".join(header).encode("utf-8")
    except UnicodeEncodeError:
        for name in header:
            if any("\ud800" <= character <= "\udfff" for character in name):
                raise CorruptError(f"the name {quoted(name)} is not valid Unicode (a lone surrogate)") from None
    problems: list[ConvertError] = []
    placed: list[Tensor] = []
    for name in list(header):
        try:
            placed.append(_tensor(name, header.pop(name), file, data_begin, limits.dimensions))
        except ConvertError as err:
            problems.append(err.at(file.path, name))
    if problems:
        from convert.errors import gather

        raise gather(problems)
    placed.sort(key=_place)
    reached = 0
    for tensor in placed:
        begin = _place(tensor)[0] - data_begin
        if begin < reached:
            raise CorruptError(
                f"overlapping ranges (expected to begin at byte {reached} of the data, found {begin}); each byte has "
                "one owner",
                tensor=tensor.name,
                hint="tied tensors need one entry each with bytes of their own; save the file again",
            )
        if begin > reached:
            raise CorruptError(f"a hole in the data section (bytes {reached}..{begin})", tensor=tensor.name)
        reached = begin + tensor.nbytes
    data_bytes = file.size - data_begin
    if data_bytes < reached:
        raise CorruptError(
            f"the file is {reached - data_bytes} bytes short (expected {data_begin + reached}, found {file.size}): "
            "an incomplete download or copy",
            hint=_AGAIN,
        )
    if data_bytes > reached:
        raise CorruptError(
            f"{data_bytes - reached} bytes at the end belong to no tensor (expected {data_begin + reached} bytes, "
            f"found {file.size})"
        )
    return placed


def _place(tensor: Tensor) -> tuple[int, int]:
    data = tensor.data
    return (data.offset, data.nbytes) if isinstance(data, Extent) else (0, 0)


def _tensor(name: str, entry: object, file: Source, data_begin: int, dimensions: int) -> Tensor:
    code, shape, offsets = entry if type(entry) is _Entry else _entry(entry)
    dtype = BY_CODE.get(code) if type(code) is str else None
    if dtype is None:
        hint = f"codes are upper case: {code.upper()}" if type(code) is str and code.upper() in BY_CODE else None
        shown = quoted(code) if type(code) is str else kind_of(code)
        raise UnsupportedError(f"unknown dtype {shown} (expected one of {', '.join(BY_CODE)})", hint=hint)
    if type(shape) is not list or type(offsets) is not list:
        raise CorruptError("shape and data_offsets must be arrays")
    if len(offsets) != 2:
        raise CorruptError(f"data_offsets must have two entries (found {len(offsets)})")
    if len(shape) > dimensions:  # the product of a million sizes would take minutes
        raise exceeded("dimensions", "too many dimensions", dimensions, len(shape))
    count = 1
    for size in shape:
        if type(size) is not int or not 0 <= size <= _LARGEST_SIZE:
            raise CorruptError(f"a dimension must be an integer from 0 to 2**64 - 1 (found {_number(size)})")
        if count <= _LARGEST_SIZE:  # once over, a zero cannot help: the reference library has overflowed
            count *= size
    begin, end = offsets
    if type(begin) is not int or type(end) is not int:
        raise CorruptError(f"data_offsets must be integers (found {kind_of(begin)} and {kind_of(end)})")
    if begin < 0:
        raise CorruptError(f"negative offset {begin} in data_offsets")
    if begin > end:
        raise CorruptError(f"data_offsets have begin > end (found {begin} and {end})")
    if count > _LARGEST_SIZE or (end - begin) * 8 != count * dtype.bits:
        claim = (
            f"expected {count * dtype.bits / 8:.10g} bytes for {code} {_shown(shape)}"
            if count <= _LARGEST_SIZE
            else "the shape claims more than 2**64 - 1 elements"
        )
        raise CorruptError(f"shape and dtype do not fit the byte range ({claim}, found {end - begin})")
    return Tensor(name, dtype, tuple(shape), Extent(file, data_begin + begin, end - begin))


def _entry(entry: object) -> _Entry:
    """The three values of an entry in an unusual form: other order, other fields besides."""
    if type(entry) is not dict:
        raise CorruptError(f"the entry is not an object (found {kind_of(entry)})")
    try:
        return _Entry(*(entry[key] for key in _Entry._fields))
    except KeyError as err:
        hint = "a file of a version before 0.2; save it again with a current library" if "offsets" in entry else None
        raise CorruptError(f"{err.args[0]} is missing from the entry (found {_listed(entry)})", hint=hint) from None


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _number(value: object) -> str:
    return (f"negative {value}" if value < 0 else _shown(value)) if type(value) is int else kind_of(value)


def _listed(entry: dict[str, Any]) -> str:
    return ", ".join(quoted(key) for key in list(entry)[:5]) or "none"
