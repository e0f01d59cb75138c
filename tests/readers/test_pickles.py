"""`readers.pickles` against numpy and pickle: the same arrays, and nothing of the stream is ever run."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import struct
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.lib.recfunctions import repack_fields

import convert
from convert import dtypes
from convert.errors import ConvertError, CorruptError, LimitError, UnsupportedError
from convert.limits import Limits
from readers.npy import parse_descr
from readers.pickles import PickledArray, load_object_array

from .. import oracle

Leaf = tuple[str, str] | tuple[str, object, tuple[int, ...], bytes]
PROTOCOLS = range(6)
ML_DTYPES = [
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]


def boxed(value: object, shape: tuple[int, ...] = ()) -> np.ndarray[Any, Any]:
    """An object array: 0-d around a value, or filled from a flat list."""
    array = np.empty(shape, object)
    if shape == ():
        array[()] = value
    else:
        assert isinstance(value, list)
        for index, item in zip(np.ndindex(shape), value, strict=True):
            array[index] = item
    return array


def dense(array: np.ndarray[Any, Any]) -> bytes:
    """Row-major bytes, without padding, which numpy copies or leaves as it likes."""
    if array.dtype.names:
        return repack_fields(array).tobytes("C")
    data = bytearray(array.tobytes("C"))
    if array.dtype.type in (np.longdouble, np.clongdouble) and np.finfo(np.longdouble).nmant == 63:
        item_bytes = np.dtype("g").itemsize
        for begin in range(0, len(data), item_bytes):  # 10 bytes of x87, then some that mean nothing
            end = begin + item_bytes
            padding = slice(begin, end - 10) if array.dtype.str[0] == ">" else slice(begin + 10, end)
            data[padding] = bytes(item_bytes - 10)
    return bytes(data)


def expected(value: object, path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """The oracle: what numpy says of each leaf of an unpickled object; Python's numbers and strings are texts."""
    children: Iterator[tuple[object, object]]
    if not isinstance(value, np.generic) and isinstance(value, str | int | float | complex):
        yield ".".join(path), str(value).lower() if isinstance(value, bool) else str(value)
        return
    if isinstance(value, np.ndarray) and value.dtype == object:
        children = ((".".join(map(str, index)), value[index]) for index in np.ndindex(value.shape))
    elif isinstance(value, list | tuple):
        children = enumerate(value)
    elif isinstance(value, dict):
        children = iter(value.items())
    else:
        array = np.asarray(bytes(value) if isinstance(value, bytearray) else value)
        dtype = value.dtype if isinstance(value, np.generic) else array.dtype
        descr: object = dtype.name if dtype.name in ML_DTYPES else np.lib.format.dtype_to_descr(dtype)
        if descr == "bfloat16" and dtype.byteorder == ">":
            descr = ">g2"
        yield ".".join(path), descr, array.shape, dense(array) if descr != "<U0" else b""
        return
    for key, item in children:
        name = key.decode() if isinstance(key, bytes) else str(key)
        yield from expected(item, path if name == "" and isinstance(value, np.ndarray) else (*path, name))


def in_c_order(array: PickledArray) -> bytes:
    descr: Any = array.descr
    dtype = np.dtype(">V2") if descr == ">g2" else np.lib.format.descr_to_dtype(descr)
    assert len(array.data) == np.prod(array.shape, dtype=object) * dtype.itemsize
    return dense(np.ndarray(array.shape, dtype, bytes(array.data), order="F" if array.fortran else "C"))


def loaded(data: bytes, shape: tuple[int, ...] = ()) -> list[Leaf]:
    return [
        (path, leaf) if isinstance(leaf, str) else (path, leaf.descr, leaf.shape, in_c_order(leaf))
        for path, leaf in load_object_array(data, shape)
    ]


def same(array: np.ndarray[Any, Any], data: bytes) -> None:
    """What we read is what was pickled, and what pickle gives (which swaps big-endian arrays to native order)."""
    leaves = list(expected(array))
    assert loaded(data, array.shape) == leaves
    if ">" not in repr([leaf[1] for leaf in leaves]):
        assert leaves == list(expected(pickle.loads(data)))


SIMPLE = ["?", "b", "B", "f2", "f4", "f8", "c8", "c16", "i2", "u2", "i4", "u4", "i8", "u8", "g", "G", "S5", "U3", "V2"]
SIMPLE += ["M8[ns]", "M8[25s]", "m8[D]", "M8", "S0", "U0"]
DTYPES = [dtype for code in SIMPLE for dtype in (np.dtype(code).newbyteorder("<"), np.dtype(code).newbyteorder(">"))]
DTYPES += [
    np.dtype([("a", "<f4"), ("b", ">i2", (2, 3)), ("ü", "M8[ms]")]),
    np.dtype([("a", "u1"), ("b", "f8")], align=True),
    np.dtype([("in", [("x", "U2"), ("y", [("z", "?")], (2,))]), ("o", "S3")]),
    np.dtype({"names": ["a", "b"], "formats": ["f4", "i1"], "offsets": [4, 12], "titles": ["A", None], "itemsize": 20}),
    np.dtype("f4", metadata={"unit": "m"}),
]


@pytest.mark.filterwarnings("ignore:metadata on a dtype")
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_out_as_numpy_has_it(dtype: np.dtype[Any], protocol: int) -> None:
    """Descr, shape and bytes are numpy's for 0-d, empty, one, C, Fortran and strided arrays."""
    raw = np.random.default_rng(7).integers(0, 2 if dtype.kind in "bU" else 256, 24 * dtype.itemsize, np.uint8)
    flat = np.ndarray((24,), dtype, raw.tobytes()) if dtype.kind not in "U" else np.full(24, "é\U0001f600", dtype)
    grid = flat.reshape(2, 3, 4)
    arrays = [flat[0:0], flat[:1], flat, flat[::-2], grid, np.asfortranarray(grid), np.zeros((0, 3), dtype)]
    arrays += [np.asfortranarray(grid[0]), np.array(flat[0], dtype), np.zeros((2, 0), dtype, order="F")]
    array = boxed(list(arrays), (len(arrays),))
    same(array, pickle.dumps(array, protocol))


VALUES: list[object] = [
    {"conv1": [np.ones((2, 2), "f4"), np.zeros(2, "f4")], "step": 3},
    OrderedDict([("b", np.arange(3)), ("a", {"x": (1.5, -0.0), 7: True}), (b"key", 1j)]),
    [float("nan"), float("-inf"), 5e-324, 0, -1, 127, 255, 256, 65535, 65536, -(2**31), 2**31, 2**63 - 1, -(2**63)],
    [2**63, 2**64 - 1, True, False, complex(-0.0, float("nan")), 2**127 - 1, -(2**127 - 1), 1e22, 0.1, 1e-5, -1j],
    ["nul\0", "", "a", "naïve \U0001f600\n\\u0041", "x" * 300, b"", b"\x00\xff'\\\n", b"y" * 300, bytearray(b"ab")],
    [np.float32(1.5), np.int8(-1), np.bool_(True), np.datetime64("2020-01-01", "ns"), np.str_("ab"), np.bytes_(b"c")],
    [np.longdouble(1) / 3, np.complex64(1j), np.timedelta64(3, "h"), np.void(b"\x00a"), np.str_(""), np.float64(2)],
    np.zeros((), [("a", ">i4"), ("b", "S2")])[()],
    np.arange(6.0),
    [[], {}, (), np.empty(0, object), {"": {"": 1}}, [[[[[1]]]]]],
    boxed([1, boxed(["x", b"y"], (2, 1)), boxed(boxed(2)), boxed({"k": [3]})], (2, 2)),
    np.asfortranarray(boxed(list(range(6)), (2, 3))),
    {"a/b c": 1, "é": 2, "nul\0": 3, -5: 4},
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_nested_values_flatten_to_dotted_paths(value: object, protocol: int) -> None:
    """Containers, numbers, text, scalars and nested object arrays, in each protocol."""
    array = boxed(value)
    same(array, pickle.dumps(array, protocol))


def test_numbers_and_strings_are_texts_and_bytes_are_not() -> None:
    """What the oracle computes, spelled out: Python's numbers as Python prints them, numpy's as arrays."""
    values = [True, False, 7, -0.0, 1.5, 1e300, 2j, "x", b"x", np.float64(1.5), np.str_("x"), np.True_]
    assert loaded(pickle.dumps(boxed(values, (12,))), (12,)) == [
        ("0", "true"),
        ("1", "false"),
        ("2", "7"),
        ("3", "-0.0"),
        ("4", "1.5"),
        ("5", "1e+300"),
        ("6", "2j"),
        ("7", "x"),
        ("8", "|S1", (), b"x"),
        ("9", "<f8", (), b"\0\0\0\0\0\0\xf8\x3f"),
        ("10", "<U1", (), b"x\0\0\0"),
        ("11", "|b1", (), b"\1"),
    ]


# The types of ml_dtypes, which numpy names by their scalar class.


def ml_dtype(name: str) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def codes(name: str) -> np.ndarray[Any, Any]:
    """Every code of a type, in the type, NaNs included."""
    dtype = ml_dtype(name)
    return np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)


def test_all_canonical_types_of_ml_dtypes_are_tested() -> None:
    """A type added to the toolkit's table is a type read from pickles."""
    assert {d.name for d in dtypes.CANONICAL if d.kind in ("bfloat16", "float8")} == set(ML_DTYPES)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", ML_DTYPES)
def test_ml_dtypes_come_out_under_their_names(name: str, protocol: int) -> None:
    """Every code of bfloat16 and the 8-bit floats, in every layout, as arrays and as scalars."""
    flat = codes(name)
    grid = flat.reshape(4, 8, -1)
    arrays = [flat, flat[:0], flat[:1], flat[::-3], grid, np.asfortranarray(grid), np.array(flat[5]), flat[7]]
    for dtype in (flat.dtype.newbyteorder("<"), flat.dtype.newbyteorder(">")):
        arrays.append(flat.astype(dtype))
    array = boxed(list(arrays), (len(arrays),))
    data = pickle.dumps(array, protocol)
    assert loaded(data, array.shape) == list(expected(array))
    descrs = [leaf.descr for _, leaf in load_object_array(data, array.shape) if isinstance(leaf, PickledArray)]
    assert (descrs[-1] == ">g2") == (name == "bfloat16")
    for descr in descrs:
        assert parse_descr(descr) == (dtypes.BY_NAME[name], descr == ">g2", ())


@pytest.mark.parametrize("name", ML_DTYPES)
def test_ml_dtypes_in_a_pickle_reach_safetensors(name: str, tmp_path: Path) -> None:
    """From an object array to the safetensors code of the type, code for code, whatever the byte order."""
    array = codes(name)
    value = {
        "w": array,
        "big": array.astype(array.dtype.newbyteorder(">")),
        "f": np.asfortranarray(array.reshape(4, -1)),
    }
    np.save(tmp_path / "a.npy", boxed(value), allow_pickle=True)
    convert.convert_file(tmp_path / "a.npy", tmp_path / "a.safetensors", policy=convert.Policy(object="unpickle"))
    _, tensors = oracle.read_safetensors(tmp_path / "a.safetensors")
    code = oracle.SAFETENSORS_CODES[name]
    assert tensors == {
        "a.w": (code, array.shape, array.tobytes()),
        "a.big": (code, array.shape, array.tobytes()),
        "a.f": (code, (4, array.size // 4), array.tobytes()),
    }


OTHERS = [
    *("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"),
    *("int2", "int4", "uint2", "uint4"),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", OTHERS)
def test_other_types_of_ml_dtypes_are_refused_by_name(name: str, protocol: int) -> None:
    """One element a byte, or nothing any format of ours holds: the message names the type."""
    with pytest.raises(UnsupportedError, match=rf"'ml_dtypes\.{name}'"):
        load_object_array(pickle.dumps(boxed(np.zeros(3, ml_dtype(name))), protocol), ())


@pytest.mark.parametrize("shape", [(), (2,)])
def test_ml_dtypes_in_a_record_are_refused(shape: tuple[int, ...]) -> None:
    """numpy could not read the descr back that keeps the name."""
    record = np.zeros(2, [("a", "f4"), ("b", ml_dtypes.bfloat16, shape)])
    with pytest.raises(UnsupportedError, match="bfloat16 field"):
        load_object_array(pickle.dumps(boxed(record)), ())


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("shape", [(), (1,), (6,), (0,), (2, 3), (1, 2, 3), (2, 0, 3)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_indices_of_an_object_array_name_its_elements(shape: tuple[int, ...], order: str, protocol: int) -> None:
    """0-d gives '', more dimensions give '0.1'; Fortran order does not disturb the names."""
    size = int(np.prod(shape))
    array = boxed([np.full(i, i) for i in range(size)], shape) if shape else boxed(np.arange(3))
    array = np.array(array, order=order, dtype=object)  # type: ignore[call-overload]
    assert [path for path, *_ in expected(array)] == [".".join(map(str, i)) for i in np.ndindex(shape)]
    same(array, pickle.dumps(array, protocol))


def test_what_np_save_writes_is_read(tmp_path: Path) -> None:
    """The bytes after an npy header are the pickle, to the end of the file; a memoryview will do."""
    array = boxed({"w": np.arange(4, dtype=">f4"), "n": [1, "x"]})
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    data = (tmp_path / "a.npy").read_bytes()
    assert loaded(data[128:]) == list(expected(array))
    assert load_object_array(memoryview(data)[128:], ()) == load_object_array(data[128:], ())


@pytest.mark.parametrize("protocol", range(4))
def test_numpy_1_module_paths(protocol: int) -> None:
    """numpy 1 wrote numpy.core where numpy 2 writes numpy._core."""
    array = boxed([np.arange(3), np.float32(2)], (2,))
    old = pickle.dumps(array, protocol).replace(b"cnumpy._core", b"cnumpy.core")
    assert b"numpy._core" not in old
    assert loaded(old, (2,)) == list(expected(array))


def test_numpy_1_module_paths_in_protocols_4_and_5() -> None:
    """The same where names are counted strings, for the functions of both modules."""
    array = boxed([np.arange(3), np.float32(2)], (2,))
    for protocol in (4, 5):
        old = bytearray(pickle.dumps(array, protocol))
        for name in (b"numpy._core.multiarray", b"numpy._core.numeric"):
            old = bytearray(
                bytes(old).replace(bytes([len(name)]) + name, bytes([len(name) - 1]) + name.replace(b"_", b""))
            )
        assert b"_core" not in old
        assert loaded(bytes(old), (2,)) == list(expected(array))


# Streams written by hand. Lengths of text fit one byte; S is what Python 2 wrote for str.


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def raw(value: bytes) -> bytes:
    return (b"U" + bytes([len(value)]) if len(value) < 256 else b"T" + struct.pack("<i", len(value))) + value


def short(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def tuple_(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


BFLOAT16 = b"cml_dtypes\nbfloat16\n"
DTYPE, NDARRAY = b"cnumpy\ndtype\n", b"cnumpy\nndarray\n"
RECONSTRUCT, SCALAR = b"cnumpy.core.multiarray\n_reconstruct\n", b"cnumpy.core.multiarray\nscalar\n"


def dtype_(code: bytes, order: bytes = b"<", *rest: bytes) -> bytes:
    rest = rest or (b"N", b"N", b"N", number(-1), number(-1), number(0))
    return DTYPE + tuple_(raw(code), number(0), number(1)) + b"R" + tuple_(number(3), raw(order), *rest) + b"b"


def bfloat16(order: bytes, *rest: bytes) -> bytes:
    rest = rest or (b"N", b"N", b"N", number(2), number(2), number(64))
    return DTYPE + tuple_(BFLOAT16, number(0), number(1)) + b"R" + tuple_(number(3), raw(order), *rest) + b"b"


def array_(shape: bytes, dtype: bytes, data: bytes, fortran: bytes = b"I00\n") -> bytes:
    empty = RECONSTRUCT + tuple_(NDARRAY, tuple_(number(0)), raw(b"b")) + b"R"
    return empty + tuple_(number(1), shape, dtype, fortran, data) + b"b"


OBJECT = dtype_(b"O8", b"|", b"N", b"N", b"N", number(-1), number(-1), number(63))


def box(value: bytes, *, end: bytes = b".") -> bytes:
    """A pickle of a 0-d object array around an object given by its opcodes."""
    return b"\x80\x02" + array_(b")", OBJECT, b"](" + value + b"e") + end


SHORT = array_(tuple_(number(2)), dtype_(b"f4"), raw(b"\x00\x00\x80?\xff\xff\x7f\xff"))


def test_python_2_strings_are_bytes() -> None:
    """SHORT_BINSTRING and BINSTRING hold raw data, dtype codes and keys; a str on its own is numpy's S."""
    long = np.arange(100, dtype="<f8")
    pair = array_(tuple_(number(100)), dtype_(b"f8"), raw(long.tobytes()))
    data = box(b"}(" + raw(b"w") + SHORT + raw(b"long") + pair + raw(b"name") + raw(b"caf\xc3\xa9") + b"u")
    assert loaded(data) == [
        ("w", "<f4", (2,), b"\x00\x00\x80?\xff\xff\x7f\xff"),
        ("long", "<f8", (100,), long.tobytes()),
        ("name", "|S5", (), b"caf\xc3\xa9"),
    ]
    assert loaded(data)[:2] == list(expected(pickle.loads(data, encoding="latin1")))[:2]


def test_python_2_ordered_dict_has_its_items_as_argument() -> None:
    """Python 2.7 reduces an OrderedDict to a list of [key, value] lists."""
    data = box(b"ccollections\nOrderedDict\n]](" + raw(b"b") + b"K\x01ea](" + raw(b"a") + b"K\x02ea\x85R")
    assert loaded(data) == [("b", "1"), ("a", "2")]


def test_an_array_shared_many_times_is_given_each_time() -> None:
    """References through the memo are values like any other."""
    shared = np.arange(3)
    array = boxed([shared, [shared, shared], {"k": shared}])
    same(array, pickle.dumps(array))


# Refusals.

OBJECT_FIELD = tuple_(raw(b"o")), b"}" + raw(b"o") + tuple_(OBJECT, b"K\0") + b"s", *map(number, (8, 1, 63))
ORDER_K = tuple_(raw(b"ab"), dtype_(b"u1", b"|"), tuple_(number(2)), text("K"))
ITEMS: dict[str, tuple[bytes, str]] = {
    "None": (b"N", "None"),
    "a set": (b"\x8f", "EMPTY_SET"),
    "a class": (NDARRAY, "ndarray"),
    "a dtype": (dtype_(b"f4"), "dtype"),
    "a wide int": (b"\x8a\x11" + b"\xff" * 16 + b"\0", "128 bits"),
    "a giant int": (b"\x8a\xff" + b"\x7f" * 255, "bits"),
    "a giant decimal": (b"I" + b"9" * 10_000 + b"\n", "10000 characters"),
    "bytes ending in NUL": (b"C\x02a\x00", "NUL"),
    "half a surrogate pair": (b"X\x03\x00\x00\x00\xed\xa0\x80", "surrogate"),
    "a key with half a pair": (b"}X\x03\x00\x00\x00\xed\xa0\x80K\x01s", "surrogate"),
    "a key of other bytes": (b"}C\x01\xffK\x01s", "bytes"),
    "a float key": (b"}G\x3f\xf0\x00\x00\x00\x00\x00\x00K\x01s", "float"),
    "a bool key": (b"}\x88K\x01s", "bool"),
    "a None key": (b"}NK\x01s", "None"),
    "a tuple key": (b"})K\x01s", "tuple"),
    "two same keys": (b"}(" + text("a") + b"K\x01" + text("a") + b"K\x02u", "'a'"),
    "keys equal as text": (b"}(" + text("1") + b"K\x01K\x01K\x02u", "'1'"),
    "paths that meet": (b"}(" + text("a.b") + b"K\x01" + text("a") + b"}" + text("b") + b"K\x02su", "'a.b'"),
    "an object field": (dtype_(b"V8", b"|", b"N", *OBJECT_FIELD), "object field"),
    "a scalar of objects": (SCALAR + tuple_(OBJECT, b"N") + b"R", "objects"),
    "an unknown dtype": (DTYPE + tuple_(b"crational\nrational\n"), "rational.rational"),
    "a dtype by its name": (DTYPE + tuple_(text("bfloat16")) + b"R", "the dtype 'bfloat16'"),
    "an ml_dtypes class": (BFLOAT16, "ml_dtypes.bfloat16"),
    "an 8-bit float": (dtype_(b"f1"), "f1"),
    "a decoy dtype": (dtype_("f\u0664".encode()), "text"),
    "memory order K": (b"cnumpy.core.numeric\n_frombuffer\n" + ORDER_K + b"R", "'K'"),
}  # fmt: skip


@pytest.mark.parametrize("what", ITEMS)
def test_valid_but_no_array_is_refused_by_name(what: str) -> None:
    """Each is an UnsupportedError that names what was found."""
    item, message = ITEMS[what]
    with pytest.raises(UnsupportedError) as caught:
        load_object_array(box(item), ())
    assert message in str(caught.value)


def test_a_refused_element_is_named_by_its_path() -> None:
    """The message says where a None is, and the hint what is read."""
    with pytest.raises(UnsupportedError, match=r"'opt\.1'.*None(.|\n)*hint: only numpy arrays"):
        load_object_array(pickle.dumps(boxed({"opt": [1, None]})), ())


FOUR = tuple_(number(4))
BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "only STOP": b".",
    "no STOP": box(b"K\x01", end=b""),
    "trailing": box(b"K\x01", end=b".."),
    "a second object": box(b"K\x01", end=b"N."),
    "an open mark": b"(" + box(b"K\x01"),
    "unknown opcode": b"\xff.",
    "top is a list": b"](K\x01e.",
    "top is an array": SHORT + b".",
    "top is unbuilt": RECONSTRUCT + tuple_(NDARRAY, tuple_(number(0)), raw(b"b")) + b"R.",
    "unbuilt element": box(RECONSTRUCT + tuple_(NDARRAY, tuple_(number(0)), raw(b"b")) + b"R"),
    "unbuilt dtype": box(array_(FOUR, DTYPE + tuple_(raw(b"f4")) + b"R", raw(b"0" * 16))),
    "too little data": box(array_(FOUR, dtype_(b"f4"), raw(b"0" * 15))),
    "too much data": box(array_(FOUR, dtype_(b"f4"), raw(b"0" * 17))),
    "text as data": box(array_(FOUR, dtype_(b"u1", b"|"), text("abcd"))),
    "a list as data": box(array_(FOUR, dtype_(b"u1", b"|"), b"]")),
    "bytes as objects": box(array_(FOUR, OBJECT, raw(b"0" * 32))),
    "too few objects": box(array_(FOUR, OBJECT, b"](K\x01e")),
    "negative side": box(array_(tuple_(number(-1), number(-4)), dtype_(b"u1", b"|"), raw(b"0000"))),
    "bool side": box(array_(tuple_(b"\x88"), dtype_(b"u1", b"|"), raw(b"0"))),
    "list as shape": box(array_(b"](K\x04e", dtype_(b"u1", b"|"), raw(b"0000"))),
    "65 sides": box(array_(tuple_(*[b"K\x01"] * 65), dtype_(b"u1", b"|"), raw(b"0"))),
    "no dtype": box(array_(FOUR, b"N", raw(b"0000"))),
    "odd order flag": box(array_(FOUR, dtype_(b"u1", b"|"), raw(b"0000"), b"K\x02")),
    "state twice": box(SHORT + b")b"),
    "state no tuple": box(DTYPE + tuple_(raw(b"f4")) + b"R]b"),
    "byte order |": box(dtype_(b"f4", b"|")),
    "byte order =": box(dtype_(b"f4", b"=")),
    "byte order of bfloat16": box(bfloat16(b"|")),
    "itemsize of bfloat16": box(bfloat16(b"<", b"N", b"N", b"N", *map(number, (4, 2, 64)))),
    "fields of bfloat16": box(bfloat16(b"<", b"N", tuple_(raw(b"a")), b"}", *map(number, (2, 2, 64)))),
    "bfloat16 without state": box(array_(FOUR, DTYPE + tuple_(BFLOAT16) + b"R", raw(b"0" * 8))),
    "too little bfloat16": box(array_(FOUR, bfloat16(b"<"), raw(b"0" * 7))),
    "itemsize": box(dtype_(b"U3", b"<", b"N", b"N", b"N", *map(number, (3, 4, 8)))),
    "fields of a float": box(dtype_(b"f4", b"<", b"N", tuple_(raw(b"a")), b"}", *map(number, (4, 4, 0)))),
    "missing field": box(dtype_(b"V4", b"|", b"N", tuple_(raw(b"a")), b"}", *map(number, (4, 1, 0)))),
    "datetime without unit": box(dtype_(b"M8")),
    "subarray too small": box(dtype_(b"V4", b"|", tuple_(dtype_(b"f4"), FOUR), b"N", b"N", *map(number, (4, 1, 0)))),
    "memo entry": b"h\x07.",
    "negative memo": b"]p-1\n.",
    "huge text memo": b"]p" + b"9" * 30 + b"\n.",
    "mark": b"t.",
    "pop": b"\x85.",
    "odd items": box(b"}(K\x01u"),
    "huge BINBYTES8": b"\x8e" + struct.pack("<Q", 2**62) + b"abc.",
    "huger BINBYTES8": b"\x8e" + struct.pack("<Q", 2**64 - 1) + b"abc.",
    "huge BYTEARRAY8": b"\x96" + struct.pack("<Q", 2**63 - 1) + b"abc.",
    "huge BINUNICODE8": b"\x8d" + struct.pack("<Q", 2**63) + b"abc.",
    "huge LONG4": b"\x8b" + struct.pack("<i", 2**31 - 1) + b"abc.",
    "negative LONG4": b"\x8b" + struct.pack("<i", -1) + b"abc.",
    "bad UTF-8": b"\x8c\x01\xff.",
    "bad UTF-8 global": b"c\xff\n\xff\n.",
    "bad unicode escape": b"V\\u12\n.",
    "bad float": b"Fabc\n.",
    "bad int": b"I1_0\n.",
    "no newline": b"I1",
    "encode of wide text": box(b"c_codecs\nencode\n" + tuple_(text("\u0100"), text("latin1")) + b"R"),
    "complex of text": box(b"c__builtin__\ncomplex\n" + tuple_(text("1"), text("2")) + b"R"),
    "dict of one argument": box(b"ccollections\nOrderedDict\n" + tuple_(b"K\x01") + b"R"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_malformed_stream_is_corrupt(what: str) -> None:
    """Each way to be wrong is a CorruptError, without allocating what is claimed."""
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError):
            load_object_array(BROKEN[what], ())
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_hand_written_streams_are_read_by_pickle_too() -> None:
    """The legal neighbour of the broken ones: `box` and `array_` write what pickle reads."""
    assert loaded(box(SHORT)) == list(expected(pickle.loads(box(SHORT), encoding="latin1")))


def test_the_shape_must_be_that_of_the_header() -> None:
    """Header and pickle both say the shape; they must agree."""
    with pytest.raises(CorruptError, match=r"\(2,\).*\(1, 2\)"):
        load_object_array(pickle.dumps(boxed([1, 2], (2,))), (1, 2))


def test_the_unknown_global_is_named_with_its_position() -> None:
    """Whoever looks at a suspicious file sees what it wanted to call, and where."""
    with pytest.raises(UnsupportedError, match=r"'posix\.system' \(pickle opcode GLOBAL at byte 2\)"):
        load_object_array(b"\x80\x02cposix\nsystem\n.", ())


# Attacks. Each, given to pickle.loads, creates the marker; given to us, none does.


class Call:
    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.reduced


def attacks(marker: Path) -> dict[str, bytes]:
    """Pickles that create the marker, by every opcode that can call something."""
    touch = f"import pathlib; pathlib.Path({str(marker)!r}).touch()"
    shell = f"touch {marker}"
    command = tuple_(text(shell))
    get = (
        b"cbuiltins\ngetattr\n" + tuple_(b"cbuiltins\n__import__\n" + tuple_(text("os")) + b"R", text("system")) + b"R"
    )
    mapped = b"cbuiltins\nmap\n" + tuple_(b"cbuiltins\nexec\n", tuple_(text(touch))) + b"\x81"
    return {f"reduce {p}": pickle.dumps(boxed([1, Call(os.system, shell)]), p) for p in PROTOCOLS} | {
        "exec": pickle.dumps(boxed(Call(exec, touch))),
        "eval": pickle.dumps(Call(eval, f"__import__('pathlib').Path({str(marker)!r}).touch()")),
        "getattr": box(get + command + b"R"),
        "inst": box(b"(" + text(shell) + b"ios\nsystem\n"),
        "obj": box(b"(cos\nsystem\n" + text(shell) + b"o"),
        "stack global": box(short("os") + short("system") + b"\x93" + command + b"R"),
        "dotted name": box(b"\x80\x04" + short("shutil") + short("os.system") + b"\x93" + command + b"R"),
        "newobj": box(b"cbuiltins\nlist\n" + tuple_(mapped) + b"R"),
        "function as class": box(RECONSTRUCT + tuple_(NDARRAY, b"cos\nsystem\n" + command + b"R", raw(b"b")) + b"R"),
    }


@pytest.mark.parametrize("what", sorted(attacks(Path("marker"))))
def test_an_attack_that_works_on_pickle_does_nothing_here(what: str, tmp_path: Path) -> None:
    """The payload is refused by name, and really was one."""
    marker = tmp_path / "marker"
    data = attacks(marker)[what]
    with pytest.raises(UnsupportedError, match="pickle"):
        load_object_array(data, ())
    assert not marker.exists()
    with contextlib.suppress(TypeError):  # numpy dislikes some of the results, too late
        pickle.loads(data)
    assert marker.exists()


SMUGGLED: dict[str, bytes] = {
    "dotted numpy name": short("numpy") + short("core.multiarray.os.system") + b"\x93",
    "dotted module": short("numpy.core.multiarray.x") + short("scalar") + b"\x93",
    "space in the module": b"cnumpy dtype\n\n",
    "global of bytes": b"C\x05numpyC\x05dtype\x93",
    "global of ints": b"K\x01K\x02\x93",
    "numpy function": b"cnumpy\nload\n",
    "numpy runner": b"cnumpy.testing._private.utils\nrunstring\n",
    "getattr": b"cbuiltins\ngetattr\n",
    "set": b"cbuiltins\nset\n",
    "reconstructor": b"ccopy_reg\n_reconstructor\n",
    "defaultdict": b"ccollections\ndefaultdict\n",
    "inst of an accepted name": b"(icollections\nOrderedDict\n",
    "obj of an accepted name": b"(ccollections\nOrderedDict\no",
    "newobj of an accepted name": b"ccollections\nOrderedDict\n)\x81",
    "newobj_ex": b"ccollections\nOrderedDict\n)}\x92",
    "ext1": b"\x82\x01",
    "ext2": b"\x83\x01\x00",
    "ext4": b"\x84\x01\x00\x00\x00",
    "persistent id": b"Pabc\n",
    "binary persistent id": b"K\x01Q",
    "next buffer": b"\x97",
    "readonly buffer": b"K\x01\x98",
    "dup": b"K\x012",
    "pop": b"K\x010",
    "string": b"S'a'\n",
    "protocol": b"\x80\x06",
    "call of ndarray": NDARRAY + tuple_(FOUR) + b"R",
    "call of a class of ml_dtypes": BFLOAT16 + tuple_(b"G\x3f\xf0\0\0\0\0\0\0") + b"R",
    "array of a class of ml_dtypes": RECONSTRUCT + tuple_(BFLOAT16, tuple_(number(0)), raw(b"b")) + b"R",
    "function of ml_dtypes": b"cml_dtypes\nfinfo\n",
    "dotted name of ml_dtypes": short("ml_dtypes") + short("bfloat16.mro") + b"\x93",
    "dtype of a function": DTYPE + tuple_(b"c_codecs\nencode\n") + b"R",
    "call of a dict": b"})R",
    "call of an array": SHORT + b")R",
    "call of text": text("os.system") + b")R",
    "array of a class": RECONSTRUCT + tuple_(b"ccollections\nOrderedDict\n", tuple_(number(0)), raw(b"b")) + b"R",
    "build a dict": b"}}" + text("__class__") + b"K\x01sb",
    "build an OrderedDict": b"ccollections\nOrderedDict\n)R}" + text("__setstate__") + DTYPE + b"sb",
    "build a list": b"]}b",
    "build a global": DTYPE + b"}" + text("__setstate__") + b"K\x01sb",
    "append to an array": SHORT + b"K\x01a",
    "append to a dict": b"}K\x01a",
    "items of a list": b"]K\x01K\x02s",
    "items of a global": b"ccollections\nOrderedDict\nK\x01K\x02s",
    "encode to another codec": b"c_codecs\nencode\n" + tuple_(text("x"), text("rot13")) + b"R",
    "bytes of a count": b"cbuiltins\nbytes\n" + tuple_(number(2**31 - 1)) + b"R",
    "bytearray of a count": b"cbuiltins\nbytearray\n" + tuple_(number(2**31 - 1)) + b"R",
    "dtype of a class": DTYPE + tuple_(NDARRAY) + b"R",
    "dtype of a list": DTYPE + tuple_(b"](" + tuple_(text("a"), text("f4")) + b"e") + b"R",
    "dtype of many": DTYPE + tuple_(text("f4,f4")) + b"R",
}  # fmt: skip


@pytest.mark.parametrize("what", SMUGGLED)
def test_everything_outside_the_table_is_unsupported(what: str) -> None:
    """Accepted names in unaccepted roles, and the opcodes that reach for more."""
    with pytest.raises(UnsupportedError, match=r"at byte \d+") as caught:
        load_object_array(box(SMUGGLED[what]), ())
    assert caught.value.message.isprintable()


# Bombs.


def laughs(inner: bytes, levels: int = 40) -> bytes:
    """Lists of ten references to a list of ten references to ..., around the inner object."""
    stream = inner + b"q\x00"
    for level in range(levels):
        stream = b"](" + stream + bytes([ord("h"), level]) * 9 + b"eq" + bytes([level + 1])
    return stream


def many_fields(count: int, times: int) -> bytes:
    """One list of fields, shared by many dtypes."""
    member = dtype_(b"V0", b"|", b"N", b"N", b"N", number(0), number(1), number(0)) + b"q\x00"
    names = [raw(b"%d" % n) for n in range(count)]
    fields = b"}(" + b"".join(name + b"h\x00K\x00\x86" for name in names) + b"u"
    dtype = dtype_(b"V1", b"|", b"N", b"h\x01", b"h\x02", number(1), number(1), number(0))
    return b"](" + member + tuple_(*names) + b"q\x01" + fields + b"q\x02" + dtype * times + b"e"


def nested_dtypes(depth: int) -> bytes:
    dtype = dtype_(b"u1", b"|") + b"q\x00"
    for _ in range(depth):
        fields = b"}" + raw(b"a") + b"h\x00K\x00\x86s"
        dtype += dtype_(b"V1", b"|", b"N", tuple_(raw(b"a")), fields, number(1), number(1), number(0)) + b"q\x00"
    return b"](" + dtype + b"e"


def doubled_fields(times: int) -> bytes:
    dtype = dtype_(b"V0", b"|", b"N", b"N", b"N", number(0), number(1), number(0)) + b"q\x00"
    for _ in range(times):
        fields = b"}(" + b"".join(raw(b"%d" % n) + b"h\x00K\x00\x86" for n in range(100)) + b"u"
        names = tuple_(*[raw(b"%d" % n) for n in range(100)])
        dtype += dtype_(b"V0", b"|", b"N", names, fields, number(0), number(1), number(0)) + b"q\x00"
    return b"](" + dtype + b"e"


LONG = b"x" * 100_000
EMPTY_ARRAY = RECONSTRUCT + tuple_(NDARRAY, tuple_(number(0)), raw(b"b")) + b"Rq\x00"
ENCODE, ORDERED = b"c_codecs\nencode\nq\x01", b"ccollections\nOrderedDict\nq\x01"
BIG_SHAPE = tuple_(*[b"\x8a\x05\x00\x00\x00\x00\x01"] * 4, b"K\0")
BOMBS: dict[str, tuple[bytes, str]] = {
    "self-referencing list": (b"]q\x00h\x00a", "deep"),
    "self-referencing dict": (b"}q\x00" + text("k") + b"h\x00s", "deep"),
    "self-referencing tuple": (b"]q\x00h\x00\x85a", "deep"),
    "self-referencing array": (EMPTY_ARRAY + tuple_(number(1), b")", OBJECT, b"I00\n", b"]h\x00a") + b"b", "deep"),
    "laughs of numbers": (laughs(b"K\x01"), "too many arrays"),
    "laughs of lists": (laughs(b"]"), "many containers"),
    "laughs of dicts": (laughs(b"}", 6), "many containers"),
    "laughs of arrays": (laughs(SHORT, 9), "too many arrays"),
    "deep lists": (b"]" * 15_000 + b"a" * 14_999, "deep"),
    "deep tuples": (b")" + b"\x85" * 30_000, "deep"),
    "deep dicts": (b"}" + b"K\x01}" * 10_000 + b"s" * 10_000, "deep"),
    "shared bytes": (b"](B" + struct.pack("<I", len(LONG)) + LONG + b"q\x00" + b"h\x00" * 99 + b"e", "many bytes"),
    "shared text": (b"](X" + struct.pack("<I", len(LONG)) + LONG + b"q\x00" + b"h\x00" * 99 + b"e", "many bytes"),
    "encoded again": (
        text("x" * 100_000) + text("latin1") + b"\x86q\x02" + ENCODE + b"h\x01h\x02R" * 99, "many bytes"),
    "copied again": (b"](" + b"](K\x01K\x02e" * 3_000 + b"e\x85q\x00" + ORDERED + b"h\x01h\x00R" * 99, "many bytes"),
    "long names": (b"}" + text("k" * 100_000) + b"](" + b"K\x01" * 900 + b"es", "long names"),
    "shared fields": (many_fields(1000, 300), "many bytes"),
    "doubled fields": (doubled_fields(9), "fields"),
    "nested dtypes": (nested_dtypes(20), "17 deep"),
    "2**128 elements": (array_(BIG_SHAPE, dtype_(b"u1", b"|"), raw(b"")), "elements"),
    "many operations": (b"](" + b"]" * 50_000 + b"e", "operations"),
}  # fmt: skip


@pytest.mark.parametrize("what", BOMBS)
def test_a_bomb_hits_a_limit(what: str) -> None:
    """Cycles, depth, sharing and sheer number end in a LimitError, in bounded memory."""
    item, message = BOMBS[what]
    data = box(item)
    tracemalloc.start()
    try:
        with pytest.raises(LimitError, match=message):
            load_object_array(data, (), Limits(pickle_leaves=1000))
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_limits_are_exact() -> None:
    """Just as many leaves and just as deep as allowed pass; one more does not."""
    three = pickle.dumps(boxed([1, 2, 3]))
    assert len(load_object_array(three, (), Limits(pickle_leaves=3, pickle_depth=2))) == 3
    with pytest.raises(LimitError):
        load_object_array(three, (), Limits(pickle_leaves=2))
    with pytest.raises(LimitError):
        load_object_array(three, (), Limits(pickle_depth=1))


def test_crafted_hashes_do_not_slow_down_a_dict() -> None:
    """Integer keys that collide in a Python dict cost no more than others."""
    keys = [k * (2**61 - 1) for k in range(1, 20_000)]
    stream = b"}(" + b"".join(b"\x8a\x10" + k.to_bytes(16, "little") + b"K\x01" for k in keys) + b"u"
    assert [path for path, _ in load_object_array(box(stream), ())] == list(map(str, keys))


# Any bytes.


def check_any(data: bytes) -> None:
    try:
        leaves = load_object_array(data, (), Limits(pickle_leaves=1000))
    except ConvertError:
        return
    for path, leaf in leaves:
        assert isinstance(path, str)
        if isinstance(leaf, PickledArray):
            in_c_order(leaf)


SEEDS = [pickle.dumps(boxed(value), protocol) for value in VALUES for protocol in PROTOCOLS]
MADE = [*DTYPES[-5:-1], np.dtype(ml_dtypes.bfloat16)]
SEEDS += [pickle.dumps(boxed(np.zeros(2, dtype)), protocol) for dtype in MADE for protocol in (0, 2, 4, 5)]


@given(st.binary(max_size=200))
@example(b"\x80\x04\x95")
def test_random_bytes_end_in_tensors_or_our_error(data: bytes) -> None:
    """Only ConvertError escapes."""
    check_any(data)


@given(st.sampled_from(SEEDS), st.data())
def test_mutated_pickles_end_in_tensors_or_our_error(seed: bytes, data: st.DataObject) -> None:
    """Changed, dropped and inserted bytes in valid pickles."""
    stream = bytearray(seed)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(stream) - 1))
        stream[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    check_any(bytes(stream))


@given(
    st.lists(
        st.sampled_from(
            [*b"(.012FGIJKLMNPQRSTUVXabcdeghijlopqrstu}])\x80\x81\x85\x86\x87\x88\x89\x8a\x8b\x8c\x8e\x93\x94\x96"]
        ),
        max_size=60,
    )
)
def test_any_order_of_opcodes_ends_in_tensors_or_our_error(codes: list[int]) -> None:
    """Streams of valid opcodes in senseless order."""
    check_any(bytes(codes))
    check_any(box(bytes(codes)))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_prefix_and_every_bit_flip(protocol: int) -> None:
    """All truncations are refused; all single bit flips give tensors or a refusal."""
    seed = pickle.dumps(boxed({"w": np.array([1, 2], "M8[s]"), "n": [1.5, "é"]}), protocol)
    for end in range(len(seed)):
        with pytest.raises(ConvertError):
            load_object_array(seed[:end], ())
    for at, bit in itertools.product(range(len(seed)), range(8)):
        check_any(seed[:at] + bytes([seed[at] ^ (1 << bit)]) + seed[at + 1 :])


def test_other_classes_are_refused_even_when_harmless() -> None:
    """A Fraction is a number, but its class would have to be called."""
    with pytest.raises(UnsupportedError, match=r"fractions\.Fraction"):
        load_object_array(pickle.dumps(boxed(Fraction(1, 3))), ())
