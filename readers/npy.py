r"""NumPy's single-array format.

    \x93NUMPY | major (1) | minor (1) | header length (u16 in 1.0, u32 in 2.0 and 3.0, little-endian)
    header: a Python literal {'descr': ..., 'fortran_order': ..., 'shape': ...}, padded with spaces to a newline
    data: the elements, row-major or column-major

Source: NumPy "NPY format", versions 1.0 to 3.0, numpy 2.4 documentation. Where numpy evaluates the header as a Python
literal, this module has a grammar of its own (strings, integers, booleans, tuples, lists, dictionaries), so that no
header can exhaust a stack. The order of keys, quotes and spacing are free, as in numpy; `2L` and `u'...'` of Python 2
are read. What numpy accepts beyond that (hexadecimal sizes, lists as shapes) no writer produces, and it is refused.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from functools import lru_cache
from math import prod
from pathlib import PurePath
from typing import NamedTuple, Self

from convert import dtypes
from convert.dtypes import DType, Field
from convert.errors import ConvertError, CorruptError, UnsupportedError, printable
from convert.files import MemoryFile, name_part, open_source
from convert.limits import DEFAULT, Budget, Limits, exceeded
from convert.records import ordered_fields
from convert.tensor import Checkpoint, Extent, Stream, Tensor, Text, path_of
from convert.transfer import stored_chunks

MAGIC = b"\x93NUMPY"
PROBE_BYTES = 192
"""Enough for the preamble and header of nearly every file."""
_LARGEST_SIZE = (1 << 63) - 1
_LARGEST_ITEM = (1 << 31) - 1
"""Bytes of an element, and sizes of a subarray: C ints. Source: `numpy.dtype`, which refuses more, numpy 2.4."""
_COMMON_BYTES = 512


class Header(NamedTuple):
    """What one header says; `big` tells how the bytes are stored, `nbytes` how many there must be (0 for objects).

    `version` is that of the preamble before it.
    """

    dtype: DType
    shape: tuple[int, ...]
    big: bool
    fortran: bool
    nbytes: int
    version: str = "1.0"

    @classmethod
    def of(cls, dtype: DType, shape: tuple[int, ...], big: bool, fortran: bool) -> Self:
        return cls(dtype, shape, big, fortran, dtype.nbytes(prod(shape)))


def open(path: str | os.PathLike[str], limits: Limits = DEFAULT) -> Checkpoint:
    """The one tensor of a .npy file, named after the file's stem.

    Raises:
        CorruptError: A rule of the format is broken, or the data is shorter or longer than the header says.
        UnsupportedError: A type this toolkit does not carry.
    """
    file = open_source(path)
    try:
        head_bytes, header = read_header(lambda count: file.read(0, min(count, file.size)), file.size, limits)
        name = PurePath(name_part(os.fspath(path))).stem
        data_bytes = file.size - head_bytes
        tensor = make_tensor(name, header, Extent(file, head_bytes, data_bytes), limits)
        check_size(header, data_bytes, ends_with_return=file.read(head_bytes - 1, 1) == b"\r")
    except ConvertError as err:
        file.close()
        err.at(path)
        raise
    return Checkpoint(os.fspath(path), "npy", [tensor], files=[file], version=f"npy {header.version}")


def make_tensor(name: str, header: Header, data: Extent | Stream, limits: Limits) -> Tensor:
    """The tensor that a header and its data describe."""
    tensor = Tensor(name, header.dtype, header.shape, data, header.big, header.fortran)
    if header.dtype is dtypes.OBJECT:
        tensor.unpickle = lambda: unpickled(name, header, data, limits)
    elif header.dtype.fields:
        tensor = ordered_fields(tensor)
    return tensor


def check_size(header: Header, found: int, *, ends_with_return: bool = False) -> None:
    """CorruptError unless `found` bytes of data are what the header promises."""
    if header.dtype is dtypes.OBJECT:
        return
    expected = header.nbytes
    if found == expected:
        return
    shape = shape_text(header.shape)
    if expected > _LARGEST_SIZE:
        raise CorruptError(f"the shape claims more than 2**63 bytes (found {found} of {header.dtype} {shape})")
    if found < expected:
        raise CorruptError(
            f"the data is cut short (expected {expected} bytes for {header.dtype} {shape}, found {found})",
            hint="copy or download the file again",
        )
    hint = "if np.save was called more than once on this file, load each array with np.load and save it on its own"
    if ends_with_return:
        hint = "a text-mode transfer seems to have added carriage returns; transfer the file again in binary mode"
    raise CorruptError(
        f"{found - expected} bytes follow the array (expected {expected} bytes for {header.dtype} {shape}, "
        f"found {found})",
        hint=hint,
    )


def shape_text(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def unpickled(name: str, header: Header, data: Extent | Stream, limits: Limits) -> list[Tensor | Text]:
    """The tensors in the pickle of an object array, named `name.path.to.it`, and its numbers and strings as texts.

    The pickle is held in memory.
    """
    from readers.pickles import load_object_array

    if data.nbytes > limits.pickle_bytes:
        raise exceeded("pickle_bytes", "the pickle is too long", limits.pickle_bytes, data.nbytes)
    pickle = io.BytesIO()
    for chunk in stored_chunks(data, 1 << 20):
        pickle.write(chunk)
    found: list[Tensor | Text] = []
    for path, array in load_object_array(pickle.getvalue(), header.shape, limits):
        full = f"{name}.{path}" if path else name
        if isinstance(array, str):
            found.append(Text(full, "object", array))
            continue
        dtype, big, subshape = parse_descr(array.descr, limits)
        leaf = Header.of(dtype, array.shape + subshape, big, array.fortran)
        content = Extent(MemoryFile(array.data, path_of(data)), 0, len(array.data))
        found.append(make_tensor(full, leaf, content, limits))
    return found


def read_header(
    read: Callable[[int], bytes], size: int, limits: Limits, long_headers: Budget | None = None
) -> tuple[int, Header]:
    """Preamble and header of an npy file of `size` bytes.

    Args:
        read: Gives the first bytes of the file, as many as asked for or all there are.
        size: Bytes of the whole file, data included.
        limits: `header_bytes` caps the header.
        long_headers: What all headers over 512 bytes of an archive may take together.

    Returns:
        Length of preamble and header together, and what they say.
    """
    start = read(PROBE_BYTES)
    if len(start) < 10 or start[:6] != MAGIC:
        if size == 0:
            raise CorruptError("the file is empty (expected an npy header)", hint="save or download it again")
        if len(start) >= 6 and start[:6] != MAGIC:
            raise CorruptError(f"no npy file (expected {MAGIC!r} at byte 0, found {start[:6]!r})")
        raise CorruptError(f"the header is cut short (expected at least 10 bytes, found {size})")
    version = (start[6], start[7])
    if version == (1, 0):
        head_bytes = 10 + int.from_bytes(start[8:10], "little")
    elif version in ((2, 0), (3, 0)):
        head_bytes = 12 + int.from_bytes(start[8:12], "little")
    else:
        raise UnsupportedError(f"unsupported npy version {version[0]}.{version[1]} (expected 1.0, 2.0 or 3.0)")
    if head_bytes > limits.header_bytes:
        raise exceeded("header_bytes", "the header is too long", limits.header_bytes, head_bytes)
    if head_bytes > size:
        raise CorruptError(f"the header is cut short (expected {head_bytes} bytes, found {size})")
    if long_headers is not None and head_bytes > _COMMON_BYTES:
        long_headers.spend(head_bytes)
    if head_bytes > len(start):
        start = read(head_bytes)
    body = start[10 if version == (1, 0) else 12 : head_bytes]
    header = parse_header(body, limits, utf8=version == (3, 0))
    return head_bytes, header if version == (1, 0) else header._replace(version=f"{version[0]}.0")


def parse_header(body: bytes, limits: Limits = DEFAULT, *, utf8: bool = False) -> Header:
    """What the dictionary says; `body` is the header after its length field, padding included.

    Raises:
        CorruptError: Not a literal dictionary with exactly the three keys, or a value of the wrong type.
        UnsupportedError: A type this toolkit does not carry.
        LimitError: Too many dimensions, or nested too deeply.
    """
    common = parse_common(body) if len(body) <= _COMMON_BYTES else None  # its cache keeps what it is given
    if common is not None and len(common.shape) <= limits.dimensions:
        return common
    return _parse_strict(body, utf8, limits)


_SIZE = rb"(?:0|[1-9][0-9]{0,17})"
_COMMON = re.compile(
    rb"\{'descr': '([<>|][a-z][0-9]{1,2})', 'fortran_order': (True|False), "
    rb"'shape': \((|%b,|%b(?:, %b)+)\), \} *\n" % (_SIZE, _SIZE, _SIZE)
)
"""Exactly what numpy writes for simple types; everything else goes to the strict parser, which must agree."""


@lru_cache(maxsize=4096)
def parse_common(body: bytes) -> Header | None:
    """The header if it is exactly what numpy writes for a simple type, else None."""
    match = _COMMON.fullmatch(body)
    if match is None:
        return None
    simple = _SIMPLE.get(match[1][1:].decode())
    if simple is None or simple.descr is None or simple.swap > 8:
        return None
    sizes = match[3]
    shape = tuple(map(int, sizes.rstrip(b",").split(b","))) if sizes else ()
    return Header.of(simple, shape, match[1][:1] == b">" and simple.swap > 1, match[2] == b"True")


def _parse_strict(body: bytes, utf8: bool, limits: Limits = DEFAULT) -> Header:
    from readers.literal import Literal

    try:
        text = body.decode("utf-8" if utf8 else "latin-1")
    except UnicodeDecodeError as err:
        raise CorruptError(f"the header is not UTF-8 (found {body[err.start]:#04x} at byte {err.start})") from err
    fields = Literal(text, limits).whole()
    if not isinstance(fields, dict):
        raise CorruptError("the header is not a dictionary")
    keys = {"descr", "fortran_order", "shape"}
    if set(fields) != keys:
        missing, extra = sorted(keys - set(fields)), sorted(set(fields) - keys, key=str)
        what = f"lacks {', '.join(missing)}" if missing else f"has an unknown key {extra[0]!r}"
        raise CorruptError(f"the header {what} (expected exactly descr, fortran_order and shape)")
    shape, fortran = fields["shape"], fields["fortran_order"]
    if type(shape) is not tuple:
        raise CorruptError(f"shape must be a tuple (found {_shown(shape)})")
    _check_shape(shape, limits)
    if type(fortran) is not bool:
        raise CorruptError(f"fortran_order must be True or False (found {_shown(fortran)})")
    dtype, big, subshape = parse_descr(fields["descr"], limits)
    if subshape and fortran and len(shape) + len(subshape) > 1 and shape:
        raise UnsupportedError("a subarray type in Fortran order (numpy writes none)")
    return Header.of(dtype, shape + subshape, big, fortran)


def _check_shape(shape: tuple[object, ...], limits: Limits) -> None:
    if len(shape) > limits.dimensions:  # the product of a hundred thousand sizes would take minutes
        raise exceeded("dimensions", "too many dimensions", limits.dimensions, len(shape))
    for size in shape:
        check_dimension(size)


def check_dimension(size: object) -> None:
    if type(size) is not int:
        raise CorruptError(f"a dimension must be an integer (found {_shown(size)})")
    if not 0 <= size <= _LARGEST_SIZE:
        what = "negative" if size < 0 else "over 2**63 - 1"
        raise CorruptError(f"a dimension is {what} (found {_shown(size)})")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- types -------------------------------------------------------------------------------------------------------

_SIMPLE: dict[str, DType] = {d.descr: d for d in dtypes.CANONICAL if d.descr}
_SIMPLE |= {d.descr: d for d in dtypes.LONG_DOUBLES.values() if d.descr}
_SIMPLE |= {"f1": dtypes.BY_NAME["float8_e5m2"], "g2": dtypes.BY_NAME["bfloat16"]}
"""By type string. ml_dtypes writes float8_e5m2 as <f1, and nothing else does; the bfloat16 package writes <g2."""

_TYPE = re.compile(r"([<>|=]?)(?:([a-ln-zA-LN-Z])([0-9]{0,18})|([Mm])8(?:\[([^\]]*)\])?)")
_PLATFORM = {
    "l": "a C long, 4 or 8 bytes by platform",
    "L": "an unsigned C long, 4 or 8 bytes by platform",
    "p": "an integer of pointer size",
    "P": "an unsigned integer of pointer size",
    "n": "an integer of pointer size",
    "N": "an unsigned integer of pointer size",
    "g": "a C long double, which differs by platform",
    "G": "a complex C long double, which differs by platform",
    "int": "a C long, 4 or 8 bytes by platform",
    "uint": "an unsigned C long, 4 or 8 bytes by platform",
    "long": "a C long, 4 or 8 bytes by platform",
    "ulong": "an unsigned C long, 4 or 8 bytes by platform",
    "longdouble": "a C long double, which differs by platform",
    "clongdouble": "a complex C long double, which differs by platform",
}
_RESAVE = "load it with the program that wrote it and save it again with an explicit type such as '<i8' or '<f8'"


def parse_descr(descr: object, limits: Limits = DEFAULT, depth: int = 0) -> tuple[DType, bool, tuple[int, ...]]:
    """The type a `descr` means, whether it is big-endian, and the shape of a subarray type (else empty)."""
    if depth > limits.depth:
        raise exceeded("depth", "a type is nested too deeply", limits.depth)
    if isinstance(descr, str):
        dtype, big = _parse_string(descr)
        return dtype, big, ()
    if isinstance(descr, list):
        return _parse_fields(descr, limits, depth), False, ()
    if isinstance(descr, tuple) and len(descr) == 2 and isinstance(descr[1], (tuple, int)):
        dtype, big, inner = parse_descr(descr[0], limits, depth + 1)
        shape = _subshape(descr[1], dtype, limits) + inner
        _check_item(dtype.item_bytes * prod(shape))
        return dtype, big, shape
    if isinstance(descr, tuple) and len(descr) == 2 and isinstance(descr[1], dict):
        return parse_descr(descr[0], limits, depth + 1)  # numpy's dtype metadata, which carries no data
    raise CorruptError(f"invalid descr (found {_shown(descr)})")


def _subshape(shape: object, dtype: DType, limits: Limits) -> tuple[int, ...]:
    sizes = shape if isinstance(shape, tuple) else (shape,)
    _check_shape(sizes, limits)
    if dtype.item_bytes == 0 and dtype.kind != "structured":
        raise CorruptError(f"a subarray of {dtype}, which has no bytes: numpy has none")
    if max(sizes, default=0) > _LARGEST_ITEM:
        raise CorruptError(f"a subarray type with a size beyond {_LARGEST_ITEM} (found {max(sizes)}): numpy has none")
    return sizes


def _check_item(item_bytes: int) -> None:
    if item_bytes > _LARGEST_ITEM:
        raise CorruptError(f"a type of more than {_LARGEST_ITEM} bytes an element (found {item_bytes}): numpy has none")


def _parse_string(descr: str) -> tuple[DType, bool]:
    if reason := _PLATFORM.get(descr.lstrip("<>|=")):
        raise UnsupportedError(f"descr {printable(repr(descr))} means {reason}", hint=_RESAVE)
    named = dtypes.BY_NAME.get(descr)
    if named is not None and named.kind != "subbyte":
        return named, False
    match = _TYPE.fullmatch(descr)
    if match is None:
        raise _unknown(descr)
    mark, letter, digits, time, unit = match.groups()
    if time:
        dtype = dtypes.by_name(("datetime64" if time == "M" else "timedelta64") + ("" if unit is None else f"[{unit}]"))
        if dtype is None:
            raise _unknown(descr)
        return dtype, mark == ">"
    if descr == ">V2":
        return dtypes.BY_NAME["bfloat16"], True  # a big-endian ml_dtypes array; numpy's own void types have no order
    if letter in "SaUV" and digits:
        dtype = dtypes.sized("S" if letter == "a" else letter, int(digits), mark if mark in ("<", "|") else "|")
        _check_item(dtype.item_bytes)
        return dtype, mark == ">" and dtype.swap > 1
    if letter == "O":
        if digits:
            raise UnsupportedError(f"an object array (pickle) of an old numpy, descr {descr!r}", hint=_RESAVE)
        return dtypes.OBJECT, False
    simple = _SIMPLE.get(letter + digits)
    if simple is None:
        raise _unknown(descr)
    if simple.kind == "longdouble" and mark == ">":
        raise UnsupportedError(
            f"descr {descr!r} is a long double of another platform (IEEE binary128 or double-double, not x87)",
            hint=_RESAVE,
        )
    if letter + digits == "f1" and mark != "<":
        raise _unknown(descr)
    return simple, mark == ">" and simple.swap > 1


def _unknown(descr: str) -> UnsupportedError:
    hint = None
    if descr.startswith("float8_e4m3") and descr not in dtypes.BY_NAME:
        hint = "float8_e4m3fn is the type safetensors knows; cast to it before saving, if the values allow it"
    return UnsupportedError(f"invalid or unknown descr (found {printable(repr(descr))})", hint=hint)


def _parse_fields(descr: list[object], limits: Limits, depth: int) -> DType:
    fields: list[Field] = []
    offset = 0
    for entry in descr:
        if not isinstance(entry, tuple) or len(entry) not in (2, 3):
            raise CorruptError(f"invalid field (found {_shown(entry)})")
        name = entry[0][1] if isinstance(entry[0], tuple) and len(entry[0]) == 2 else entry[0]
        if not isinstance(name, str):
            raise CorruptError(f"invalid field name (found {_shown(entry[0])})")
        dtype, big, shape = parse_descr(entry[1], limits, depth + 1)
        if len(entry) == 3:
            shape = _subshape(entry[2], dtype, limits) + shape
        if dtype is dtypes.OBJECT:
            raise UnsupportedError(
                f"a structured type that contains an object field {name!r} (pickle)",
                hint="save that field as an array of its own type",
            )
        if not (name == "" and dtype.name[0] == "V"):  # else padding
            fields.append(Field(name, dtype, offset, shape, big))
        offset += dtype.item_bytes * prod(shape)
        _check_item(offset)
    names = [field.name for field in fields]
    if len(set(names)) != len(names):
        raise CorruptError("two fields of a structured type have the same name")
    return dtypes.structured(tuple(fields), offset, _without_metadata(descr))


def _without_metadata(descr: object) -> object:
    """The descr but for numpy's dtype metadata, with which numpy itself could not read it."""
    if isinstance(descr, list):
        return [(entry[0], _without_metadata(entry[1]), *entry[2:]) for entry in descr]
    if isinstance(descr, tuple):
        base = _without_metadata(descr[0])
        return base if isinstance(descr[1], dict) else (base, *descr[1:])
    return descr
