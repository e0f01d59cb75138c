"""What the globals and states in a pickle of numpy arrays mean: records, never objects.

A global is a row of `GLOBALS`. REDUCE and BUILD look up here what calling it, or setting the state of its result,
gives: a dtype, an array, bytes, a complex number or a dictionary. See `readers.pickles` for why.

Source: numpy 2.4 `array_reduce`, `array_setstate`, `arraydescr_reduce` and `_array_descr`; ml_dtypes 0.6, whose dtypes
are reduced to their scalar class; files of numpy 1 and Python 2 differ in module paths and in text being bytes. Read
2026-11-29.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from convert.dtypes import BY_NAME
from convert.errors import CorruptError, LimitError, UnsupportedError, quoted
from convert.limits import Budget as Budget

HINT = "only numpy arrays, numbers, strings, dicts, lists and tuples are read from pickles"
_MAX_FIELDS = 65_536
_MAX_FIELDS_DEPTH = 16
_MAX_DIMENSIONS = 64
"""These three are beyond what numpy itself, or anybody, writes; the limits of `convert.limits` come on top."""

_SIZES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8, 12, 16), "c": (8, 16, 24, 32), "m": (8,)}
_SIZES |= {"M": (8,), "O": (0, 4, 8)}
_TYPE = re.compile(r"([biufcmMSUVO])([0-9]{0,10})")
_ML_DTYPES = {name: dtype.item_bytes for name, dtype in BY_NAME.items() if dtype.kind in ("bfloat16", "float8")}
_UNITS = frozenset(("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic"))
SURROGATE = re.compile("[\ud800-\udfff]")


class PickledArray(NamedTuple):
    """One array as it lies in a pickle.

    Attributes:
        descr: The npy descr, as `numpy.lib.format.dtype_to_descr` gives it: a type string, or a list of fields. For
            what numpy would write as raw void, the canonical name ('bfloat16', 'float8_e5m2'); '>g2' is a big-endian
            bfloat16.
        shape: Sides, each 0 or more; () for a scalar.
        fortran: The first index varies fastest.
        data: Exactly prod(shape) * itemsize bytes.
    """

    descr: object
    shape: tuple[int, ...]
    fortran: bool
    data: bytes | memoryview


@dataclass(slots=True, eq=False)
class DTypeRecord:
    """A dtype, unfinished until its state is set. `kind` is numpy's letter, or 'ml_dtypes'."""

    kind: str
    count: int
    built: bool = False
    descr: object = None
    itemsize: int = 0
    shape: tuple[int, ...] = ()  # of a subarray; its descr is then that of one element
    fields: int = 1
    depth: int = 0


@dataclass(slots=True, eq=False)
class ArrayRecord:
    """An array, unfinished until its state is set: a leaf, or a container of objects."""

    built: bool = False
    leaf: PickledArray | None = None
    objects: list[object] = field(default_factory=list)
    shape: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class DictRecord:
    """A dict or OrderedDict as written, so that no key is ever hashed."""

    pairs: list[tuple[object, object]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Global:
    """A name that a pickle may mention; `call` is what REDUCE does with it, if it may be called."""

    name: str
    call: Callable[..., object] | None
    arities: tuple[int, ...]


# What the accepted globals mean when called. `_reconstruct` and `dtype` give records that BUILD completes.


def _call_reconstruct(copied: Budget, kind: object, *_: object) -> object:
    if kind is not GLOBALS["numpy", "ndarray"]:
        raise UnsupportedError(f"an array of the class {kind_of(kind)}", hint=HINT)
    return ArrayRecord()


def _call_scalar(copied: Budget, dtype: object, data: object) -> object:
    return _new_array(dtype, (), False, data)


def _call_frombuffer(copied: Budget, data: object, dtype: object, shape: object, order: object, *_: object) -> object:
    if text_of(order) not in ("C", "F"):
        raise UnsupportedError(f"an array in memory order {quoted(text_of(order))}", hint="save it in C order")
    return _new_array(dtype, _shape(shape), text_of(order) == "F", data)


def _call_dtype(copied: Budget, code: object, *_: object) -> object:
    """A type string, or the scalar class of ml_dtypes, which is all that names those dtypes."""
    name = code.name.removeprefix("ml_dtypes.") if isinstance(code, Global) else ""
    if name in _ML_DTYPES:
        return DTypeRecord("ml_dtypes", _ML_DTYPES[name], descr=name)
    found = _TYPE.fullmatch(text_of(code))
    if found is None or int(found[2] or 0) not in _SIZES.get(found[1], range(1 << 31)):
        raise UnsupportedError(f"the dtype {quoted(text_of(code))}", hint=HINT)
    return DTypeRecord(found[1], int(found[2] or 0))


def _call_bytes(copied: Budget, value: object = b"", encoding: object = None) -> object:
    """`_codecs.encode(text, 'latin1')` is how protocols 0 to 2 write bytes; also bytes() and bytearray()."""
    if isinstance(value, bytes) and encoding is None:
        return value
    if not isinstance(value, str) or encoding is None or text_of(encoding) not in ("latin1", "latin-1"):
        raise UnsupportedError("bytes of something else than text in latin1", hint=HINT)
    copied.spend(len(value))
    try:
        return value.encode("latin-1")
    except UnicodeEncodeError as err:
        raise CorruptError(f"bytes with a value over 255, at {err.start}") from err


def _call_complex(copied: Budget, real: object, imaginary: object) -> object:
    if not isinstance(real, float) or not isinstance(imaginary, float):
        raise CorruptError("a complex number of other parts than two floats")
    return complex(real, imaginary)


def _call_ordered_dict(copied: Budget, items: object = ()) -> object:
    """Items follow the call, but Python 2 gives them as a list of [key, value] lists."""
    if not isinstance(items, list | tuple):
        raise CorruptError("an OrderedDict of something else than pairs")
    copied.spend(16 * len(items))
    result = DictRecord()
    for pair in items:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise CorruptError("an OrderedDict of something else than pairs")
        result.pairs.append((pair[0], pair[1]))
    return result


# What the states mean that BUILD sets.


def build_dtype(copied: Budget, dtype: DTypeRecord, state: tuple[object, ...]) -> None:
    """Complete a dtype from its state, as `dtype.__setstate__` of versions 3 and 4 would."""
    if len(state) not in (8, 9) or not isinstance(state[0], int) or state[0] not in (3, 4):
        raise UnsupportedError(f"dtype state of {len(state)} items, with another version than numpy writes")
    order, subdtype, names, fields, size = text_of(state[1]), *state[2:6]
    flexible = dtype.kind in "SUV"
    dtype.itemsize = dtype.count * (4 if dtype.kind == "U" else 1)
    if not isinstance(size, int) or size not in ((dtype.itemsize,) if flexible else (-1, dtype.itemsize)):
        raise CorruptError(f"dtype {dtype.kind}{dtype.count} has another itemsize than {dtype.itemsize}")
    if subdtype is not None or names is not None:
        if dtype.kind != "V" or (subdtype is not None and names is not None):
            raise CorruptError(f"fields or a subarray in dtype {dtype.kind}{dtype.count}")
        _build_fields(copied, dtype, names, fields) if names is not None else _build_subarray(dtype, subdtype)
        return
    if dtype.kind in "SVO" or dtype.itemsize == 1:
        order = "|"
    elif order not in ("<", ">"):
        raise CorruptError(f"dtype {dtype.kind}{dtype.count} has byte order {quoted(order)} (expected '<' or '>')")
    if dtype.kind == "ml_dtypes":
        dtype.descr = ">g2" if order == ">" else dtype.descr
        return
    unit = _unit(state) if dtype.kind in "mM" else ""
    dtype.descr = f"{order}{dtype.kind}{'' if dtype.kind == 'O' else dtype.count}{unit}"


def _unit(state: tuple[object, ...]) -> str:
    """The unit of a datetime64 or timedelta64: '[ns]', '[25s]', or '' when generic."""
    extra = state[8] if len(state) == 9 else None
    found = extra[1] if isinstance(extra, tuple) and len(extra) == 2 else None
    if not isinstance(found, tuple) or len(found) != 4 or not all(isinstance(n, int) for n in found[1:]):
        raise CorruptError("a datetime64 without its unit")
    unit, (count, divisor, event) = text_of(found[0]), found[1:]
    if unit not in _UNITS or not 1 <= count < 1 << 31 or (divisor, event) != (1, 1):
        raise UnsupportedError(f"datetime64 unit {quoted(unit)} times {count}, divisor {divisor}, event {event}")
    if unit == "generic":
        return ""
    return f"[{'' if count == 1 else count}{unit}]"


def _build_subarray(dtype: DTypeRecord, subdtype: object) -> None:
    if not isinstance(subdtype, tuple) or len(subdtype) != 2:
        raise CorruptError("a subarray that is no pair of dtype and shape")
    base, shape = _member(subdtype[0]), _shape(subdtype[1])
    if base.shape:
        raise UnsupportedError("a subarray of subarrays")
    if math.prod(shape) * base.itemsize != dtype.itemsize or not shape:
        raise CorruptError(f"a subarray of shape {shape} does not fill its {dtype.itemsize} bytes")
    dtype.descr, dtype.shape, dtype.fields, dtype.depth = base.descr, shape, base.fields, base.depth


def _build_fields(copied: Budget, dtype: DTypeRecord, names: object, fields: object) -> None:
    """The list of fields that `numpy.lib.format.dtype_to_descr` gives, padding included."""
    if not isinstance(names, tuple) or not names or not isinstance(fields, DictRecord):
        raise UnsupportedError("a structured dtype without fields")
    copied.spend(8 * (len(names) + len(fields.pairs)))
    by_name = {text_of(key): value for key, value in fields.pairs}
    descr: list[object] = []
    end = 0
    for name in map(text_of, names):
        copied.spend(len(name))
        found = by_name.pop(name, None)
        if not isinstance(found, tuple) or len(found) not in (2, 3) or not isinstance(found[1], int):
            raise CorruptError(f"field {quoted(name)} is missing, twice, or no pair of dtype and offset")
        member, offset = _member(found[0]), found[1]
        if not end <= offset <= dtype.itemsize - member.itemsize:
            raise UnsupportedError(f"field {quoted(name)} overlaps, is out of order, or leaves the structure")
        if offset > end:
            descr.append(("", f"|V{offset - end}"))
        label = (text_of(found[2]), name) if len(found) == 3 else name
        descr.append((label, member.descr, member.shape) if member.shape else (label, member.descr))
        end = offset + member.itemsize
        dtype.depth = max(dtype.depth, member.depth + 1)
        dtype.fields += member.fields
    if end < dtype.itemsize:
        descr.append(("", f"|V{dtype.itemsize - end}"))
    if dtype.fields > _MAX_FIELDS or dtype.depth > _MAX_FIELDS_DEPTH:
        raise LimitError(f"the pickle has a structured dtype of {dtype.fields} fields, {dtype.depth} deep")
    dtype.descr = descr


def _member(dtype: object) -> DTypeRecord:
    if not isinstance(dtype, DTypeRecord) or not dtype.built:
        raise CorruptError(f"{kind_of(dtype)} where a dtype belongs")
    if dtype.kind == "O":
        raise UnsupportedError("a structured dtype with an object field", hint=HINT)
    if dtype.kind == "ml_dtypes":
        raise UnsupportedError(f"a structured dtype with a {dtype.descr} field", hint="save that field on its own")
    return dtype


def build_array(array: ArrayRecord, state: tuple[object, ...]) -> None:
    """Complete an array from its state, as `ndarray.__setstate__` of version 1 would."""
    if len(state) != 5 or not isinstance(state[0], int) or state[0] != 1:
        raise UnsupportedError(f"array state of {len(state)} items, with another version than numpy writes")
    _, shape, dtype, fortran, data = state
    array.shape = _shape(shape)
    if not isinstance(fortran, int) or fortran not in (0, 1):
        raise CorruptError(f"the order of an array is {kind_of(fortran)}, not True or False")
    if not isinstance(dtype, DTypeRecord) or dtype.kind != "O":
        array.leaf = _new_array(dtype, array.shape, bool(fortran), data).leaf
    elif not isinstance(data, list) or not dtype.built:
        raise CorruptError(f"the data of an object array is {kind_of(data)}, not a list")
    elif len(data) != math.prod(array.shape):
        raise CorruptError(f"an object array of shape {array.shape} holds {len(data)} objects")
    else:
        array.objects = data  # in C order, whatever `fortran` says (numpy `_getlist_pkl`)


def _new_array(dtype: object, shape: tuple[int, ...], fortran: bool, data: object) -> ArrayRecord:
    if not isinstance(dtype, DTypeRecord) or not dtype.built or dtype.shape:
        raise CorruptError(f"an array whose dtype is {kind_of(dtype)}")
    if dtype.kind == "O":
        raise UnsupportedError("a numpy scalar or buffer of objects", hint=HINT)
    if not isinstance(data, bytes):
        raise CorruptError(f"the data of an array is {kind_of(data)}, not bytes")
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise CorruptError(f"an array of shape {shape} and {dtype.itemsize} byte elements has {len(data)} bytes")
    return ArrayRecord(True, PickledArray(dtype.descr, shape, fortran, data), [], shape)


def _shape(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > _MAX_DIMENSIONS:
        raise CorruptError(f"a shape that is {kind_of(value)} or has over {_MAX_DIMENSIONS} sides")
    if not all(type(side) is int and side >= 0 for side in value):
        raise CorruptError("a shape with a side that is negative or no integer")
    if math.prod(side or 1 for side in value) >= 1 << 63:
        raise LimitError("a shape of more than 2**63 elements")
    return value


def text_of(value: object) -> str:
    """Text of the machinery (names, codes, keys), which Python 2 wrote as bytes."""
    if isinstance(value, bytes) and value.isascii():
        return value.decode("ascii")
    if not isinstance(value, str):
        raise UnsupportedError(f"{kind_of(value)} where text belongs", hint=HINT)
    if not value.isascii() and SURROGATE.search(value):
        raise UnsupportedError("a name with half of a surrogate pair")
    return value


def kind_of(value: object) -> str:
    """What a value is, for messages."""
    if isinstance(value, Global):
        return value.name
    if isinstance(value, ArrayRecord | DTypeRecord | DictRecord):
        return {ArrayRecord: "a numpy array", DTypeRecord: "a numpy dtype", DictRecord: "a dict"}[type(value)]
    return "None" if value is None else f"a {type(value).__name__}"


# The table. A global that is not in it is refused.

GLOBALS: dict[tuple[str, str], Global] = {
    (module, name): Global(f"{module}.{name}", call, arities)
    for modules, name, call, arities in (
        ("numpy", "ndarray", None, ()),
        ("numpy", "dtype", _call_dtype, (1, 2, 3)),
        ("numpy.core.multiarray numpy._core.multiarray", "_reconstruct", _call_reconstruct, (3,)),
        ("numpy.core.multiarray numpy._core.multiarray", "scalar", _call_scalar, (2,)),
        ("numpy.core.numeric numpy._core.numeric", "_frombuffer", _call_frombuffer, (4, 5)),
        ("_codecs", "encode", _call_bytes, (2,)),
        ("builtins __builtin__", "bytes", _call_bytes, (0, 1)),
        ("builtins __builtin__", "bytearray", _call_bytes, (0, 1, 2)),
        ("builtins __builtin__", "complex", _call_complex, (2,)),
        ("collections", "OrderedDict", _call_ordered_dict, (0, 1)),
        *(("ml_dtypes", name, None, ()) for name in _ML_DTYPES),
    )
    for module in modules.split()
}
