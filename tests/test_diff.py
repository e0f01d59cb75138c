"""`convert diff`: what differs is found and measured, the rest is the same; numpy and ml_dtypes are the oracles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import convert
from convert.comparepairs import side_by_side
from convert.comparison import Facts, Tally
from tests.oracle import SAFETENSORS_CODES, save_with_reference

Array = npt.NDArray[Any]
SAMPLES = Path(__file__).resolve().parent.parent / "samples"
needs_x87 = pytest.mark.skipif(np.finfo(np.longdouble).nmant != 63, reason="numpy's long double is not x87 here")


def write(path: Path, arrays: dict[str, Array]) -> Path:
    """A file by numpy or the safetensors library; by convert.save for types that library does not write."""
    if path.suffix == ".npz":
        np.savez(path, **arrays)  # type: ignore[arg-type]
    elif path.suffix == ".npy":
        np.save(path, next(iter(arrays.values())))
    elif any(array.dtype.name.startswith("float6_") for array in arrays.values()):
        convert.save(arrays, path, overwrite=True)
    else:
        save_with_reference(path, arrays)
    return path


def compared(tmp_path: Path, a: Array, b: Array, **options: Any) -> convert.Comparison:
    """Two arrays of one name, each in the format that has its type."""
    paths = [
        write(tmp_path / f"{side}{'.safetensors' if array.dtype.name in SAFETENSORS_CODES else '.npz'}", {"w": array})
        for side, array in (("a", a), ("b", b))
    ]
    return convert.diff(*paths, **options)


def tally(found: convert.Comparison) -> Tally:
    """That of the only tensor that differs."""
    (difference,) = [*found.differences, *found.tolerated]
    assert difference.tally is not None
    return difference.tally


def whats(found: convert.Comparison) -> dict[str, tuple[str, ...]]:
    """In what each tensor differs."""
    return {difference.name: difference.what for difference in found.differences}


# --- ULPs --------------------------------------------------------------------------------------------------------

CODE_COUNTS = {
    "float4_e2m1fn": 16, "float6_e2m3fn": 64, "float6_e3m2fn": 64, "float8_e5m2": 256, "float8_e4m3fn": 256,
    "float8_e8m0fnu": 256, "float8_e4m3fnuz": 256, "float8_e5m2fnuz": 256, "float16": 1 << 16, "bfloat16": 1 << 16,
}  # fmt: skip


@pytest.mark.parametrize("name", CODE_COUNTS)
def test_ulps_count_the_values_in_between(tmp_path: Path, name: str) -> None:
    """Every code against others: as many steps as there are values between the two, infinities included."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    count = CODE_COUNTS[name]
    codes = np.arange(count, dtype=np.uint16 if dtype.itemsize == 2 else np.uint8)
    values = codes.view(dtype)
    with np.errstate(invalid="ignore"):
        wide = values.astype(np.float64)
    number = ~np.isnan(wide)
    place = np.searchsorted(np.unique(wide[number]), wide).astype(np.int64)  # 0.0 and -0.0 share theirs
    for index in (np.roll(codes, 1), codes[::-1], np.random.default_rng(7).permutation(codes)):
        both = number & number[index]
        found = tally(compared(tmp_path, values, values[index]))
        assert found.max_ulps == np.abs(place - place[index])[both].max()
        assert found.bits == np.count_nonzero(codes != codes[index])
        assert found.nans == np.count_nonzero(number != number[index])
        unequal = (wide != wide[index]) & ~(~number & ~number[index])
        assert found.values == np.count_nonzero(unequal)
        with np.errstate(all="ignore"):
            gaps = np.abs(wide - wide[index])[both & unequal]
        assert found.max_abs_error == gaps.max()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("start", [1.0, 0.0, -1e-300, 2.0**60, np.inf, -1.0])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_ulps_are_numpys_neighbours(tmp_path: Path, dtype: str, start: float, steps: int) -> None:
    """So many calls of np.nextafter lie between the two, across zero too."""
    a = np.array([start, 5.0], dtype)
    b = a.copy()
    for _ in range(steps):
        b[:1] = np.nextafter(b[:1], np.array([-np.inf], dtype))
    found = tally(compared(tmp_path, a, b))
    assert (found.max_ulps, found.bits) == (steps, 1)
    if np.isfinite(start):
        assert found.max_abs_error == abs(float(a[0]) - float(b[0]))


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_the_farthest_floats_do_not_overflow_the_count(tmp_path: Path, dtype: str) -> None:
    """From -inf to inf: all values but the NaNs and one of the zeros; a complex number has the worse of its parts."""
    a, b = np.array([-np.inf], dtype), np.array([np.inf], dtype)
    part = np.finfo(dtype).dtype
    infinity = int(np.array(np.inf, part).view(f"u{part.itemsize}"))
    assert tally(compared(tmp_path, a, b)).max_ulps == 2 * infinity


# --- errors and tolerances ---------------------------------------------------------------------------------------

FLOATS = ["float16", "bfloat16", "float8_e5m2", "float32", "float64", "complex64", "complex128"]
TOLERANCES = [(0.0, 0.0), (1e-3, 0.0), (0.0, 1e-2), (1e-2, 1e-3)]


def awkward(dtype: np.dtype[Any], rng: np.random.Generator, count: int = 5000) -> tuple[Array, Array]:
    """Values that nearly agree, with NaNs, infinities and zeros of both signs strewn in."""
    wide = np.complex128 if dtype.kind == "c" else np.float64
    a: Array = rng.standard_normal(count).astype(wide)
    if dtype.kind == "c":
        a = a + 1j * rng.standard_normal(count)
    b = a * (1 + rng.choice([0, 1e-4, 1e-3, 5e-3, 0.1], count))
    for array in (a, b):
        specials = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0]
        array[rng.integers(0, count, count // 10)] = rng.choice(specials, count // 10)
    with np.errstate(all="ignore"):
        return a.astype(dtype), b.astype(dtype)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(("rtol", "atol"), TOLERANCES)
def test_tolerance_is_that_of_isclose(tmp_path: Path, name: str, rtol: float, atol: float) -> None:
    """Elements beyond it, the first of them, and the largest errors, as numpy has them in float64."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    a, b = awkward(dtype, np.random.default_rng(3))
    found = tally(compared(tmp_path, a, b, rtol=rtol, atol=atol))
    wide = np.complex128 if dtype.kind == "c" else np.float64
    wide_a, wide_b = a.astype(wide), b.astype(wide)
    with np.errstate(all="ignore"):
        far = ~np.isclose(wide_a, wide_b, rtol=rtol, atol=atol, equal_nan=True)
        unequal = ~(wide_a == wide_b) & ~(np.isnan(wide_a) & np.isnan(wide_b))
        gaps = np.abs(wide_a - wide_b)[unequal]
        relative = gaps / np.abs(wide_b[unequal])
    assert found.beyond == np.count_nonzero(far)
    assert found.values == np.count_nonzero(unequal)
    assert found.nans == np.count_nonzero(np.isnan(wide_a) != np.isnan(wide_b))
    assert found.max_abs_error == pytest.approx(np.nanmax(gaps), rel=1e-15)
    assert found.max_rel_error == pytest.approx(np.nanmax(relative), rel=1e-15)
    at = int(np.argmax(far))
    assert found.first == at
    assert (found.first_a, found.first_b) == (str(a[at]), str(b[at]))


def test_errors_without_infinities_are_numbers(tmp_path: Path) -> None:
    """The largest errors are the least tolerances that would do, on their own."""
    rng = np.random.default_rng(5)
    a = rng.standard_normal(1000).astype(np.float32)
    b = (a * (1 + 1e-3 * rng.standard_normal(1000))).astype(np.float32)
    found = tally(compared(tmp_path, a, b))
    assert found.max_abs_error is not None
    assert found.max_rel_error is not None
    assert compared(tmp_path, a, b, atol=found.max_abs_error).same
    assert not compared(tmp_path, a, b, atol=np.nextafter(found.max_abs_error, 0)).same
    assert compared(tmp_path, a, b, rtol=found.max_rel_error * (1 + 1e-15)).same
    assert not compared(tmp_path, a, b, rtol=found.max_rel_error * (1 - 1e-15)).same


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint32", "int32", "int64", "uint64", "bool"])
def test_integers_are_exact(tmp_path: Path, name: str) -> None:
    """The largest distance as Python's integers have it, without overflow, from one end of the type to the other."""
    dtype = np.dtype(name)
    low, high = (0, 1) if name == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    a, b = np.array([low, high, 1, 0], dtype), np.array([high, high - 1, 1, 1], dtype)
    found = tally(compared(tmp_path, a, b))
    assert found.max_abs_error == int(high) - int(low)
    assert isinstance(found.max_abs_error, int)
    assert (found.bits, found.values, found.max_ulps) == (3, 3, None)
    near = tally(compared(tmp_path, a[1:], b[1:]))
    assert (near.max_abs_error, near.first_a, near.first_b) == (1, str(a[1]), str(b[1]))


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_tolerance_of_large_integers_is_exact(tmp_path: Path, dtype: str) -> None:
    """2**53 and one more is more than 2**53, though not in float64."""
    a, b = np.array([0], dtype), np.array([2**53 + 1], dtype)
    assert not compared(tmp_path, a, b, atol=2.0**53).same
    assert compared(tmp_path, a, b, atol=2.0**54).same
    assert compared(tmp_path, a, b, rtol=1.0).same
    assert not compared(tmp_path, b, a, rtol=1.0).same, "B is the reference, and it is 0"


def test_zeros_and_nans(tmp_path: Path) -> None:
    """Bits differ and values do not: a difference, unless values are asked for."""
    a = np.array([0.0, np.nan, 1.0], np.float32)
    b = np.array([-0.0, np.nan, 1.0], np.float32)
    b.view(np.uint32)[1] ^= 1
    found = compared(tmp_path, a, b)
    assert whats(found) == {"w": ("bits",)}
    counted = tally(found)
    assert (counted.bits, counted.values, counted.nans, counted.first) == (2, 0, 0, 0)
    assert (counted.max_abs_error, counted.max_rel_error, counted.max_ulps) == (0.0, 0.0, 0)
    assert (counted.first_a, counted.first_b) == ("0.0", "-0.0")
    assert compared(tmp_path, a, b, rtol=0).same
    assert compared(tmp_path, a, b, atol=0).same
    only_nans = tally(compared(tmp_path, a[1:], b[1:]))
    assert (only_nans.max_abs_error, only_nans.max_ulps) == (None, None)
    assert (only_nans.first_a, only_nans.first_b) == ("nan (0x7fc00000)", "nan (0x7fc00001)")


def test_equal_nans_are_the_same(tmp_path: Path) -> None:
    """Bit for bit, and by value."""
    a = np.array([np.nan, 1.0])
    assert compared(tmp_path, a, a).same
    assert compared(tmp_path, a, a, rtol=0).same
    assert not compared(tmp_path, a, np.array([1.0, 1.0]), rtol=1e300, atol=1e300).same


def test_an_infinity_is_beyond_any_tolerance(tmp_path: Path) -> None:
    """On either side, as in isclose."""
    a, b = np.array([np.inf, 1.0]), np.array([1.0, 1.0])
    for pair in ((a, b), (b, a), (a, -a)):
        found = compared(tmp_path, *pair, rtol=1e300, atol=1e300)
        assert not found.same
        assert tally(found).max_abs_error == tally(found).max_rel_error == np.inf
        json.loads(found.to_json(), parse_constant=pytest.fail)


def test_equal_infinities_are_no_error(tmp_path: Path) -> None:
    """In numbers of other types, and in one part of a complex number."""
    a = np.array([np.inf, -np.inf, 1.0], np.float32)
    found = tally(compared(tmp_path, a, a.astype(np.float64), ignore_dtype=True))
    assert (found.values, found.max_abs_error, found.max_rel_error) == (0, 0.0, 0.0)
    part = tally(compared(tmp_path, np.array([complex(np.inf, 1)]), np.array([complex(np.inf, 3)]), atol=5))
    assert (part.values, part.beyond, part.max_abs_error) == (1, 1, 2.0)


# --- what is no number -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["datetime64[ns]", "timedelta64[25s]"])
def test_times_differ_in_their_unit(tmp_path: Path, dtype: str) -> None:
    """Whole units apart, NaT like NaN; tolerances are for numbers."""
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    a = np.array([5, low, low + 1, 7], np.int64).view(dtype)
    b = np.array([8, low, high, low], np.int64).view(dtype)
    found = tally(compared(tmp_path, a, b))
    assert (found.bits, found.nans, found.max_abs_error, found.max_ulps) == (3, 1, 2**64 - 2, None)
    assert (found.first_a, found.first_b) == (str(a[0]), str(b[0]))
    assert not compared(tmp_path, a[:1], b[:1], rtol=1.0, atol=100.0).same
    assert compared(tmp_path, a, a, rtol=0).same


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.array([b"ab", b"c"]), np.array([b"ab", b"d"])),
        (np.array(["ab", "c\U0001f600"]), np.array(["ab", "c"], "U2")),
        (np.zeros(2, "V3"), np.array([b"\0\0\0", b"\0\0\1"], "V3")),
        (np.array([(1, 2.0), (3, 4.0)], "i2,f8"), np.array([(1, 2.0), (3, 4.5)], "i2,f8")),
    ],
    ids=["bytes", "str", "void", "structured"],
)
def test_others_are_counted(tmp_path: Path, a: Array, b: Array) -> None:
    """Elements that are not the same, whatever the tolerance; the first of them is shown."""
    assert a.dtype == b.dtype
    for options in ({}, {"rtol": 1.0, "atol": 10.0}):
        found = tally(compared(tmp_path, a, b, **options))
        assert (found.bits, found.values, found.beyond, found.first) == (1, 1, 1, 1)
        assert found.max_abs_error is found.max_rel_error is found.max_ulps is None
        assert found.first_a != found.first_b
    assert compared(tmp_path, a, a).same


def test_padding_of_records_does_not_count(tmp_path: Path) -> None:
    """It is no part of any field; nested fields are."""
    dtype = np.dtype({"names": ["x", "y"], "formats": ["i1", ("f4,i2", 2)], "offsets": [0, 4], "itemsize": 24})
    a = np.zeros(3, dtype)
    b = a.copy()
    b.view(np.uint8).reshape(3, 24)[:, [1, 2, 3, 16, 23]] = 9
    assert a.tobytes() != b.tobytes()
    assert compared(tmp_path, a, b).same
    b["y"]["f1"][2, 1] = 1
    assert tally(compared(tmp_path, a, b)).first == 2


def test_records_of_other_fields_are_other_types(tmp_path: Path) -> None:
    """Though both are called structured."""
    found = compared(tmp_path, np.zeros(2, "i2,f4"), np.zeros(2, "i2,i4"))
    (difference,) = found.differences
    assert difference.what == ("dtype",)
    assert difference.a is not None
    assert difference.b is not None
    assert difference.a.dtype != difference.b.dtype


def test_pickles_are_compared_by_their_bytes(tmp_path: Path) -> None:
    """Or by what is in them, if the policy says so."""
    a, b = tmp_path / "a.npz", tmp_path / "b.npz"
    first, second = (np.array([{"x": np.arange(3)}, {"x": np.arange(2) + at}]) for at in (0, 1))
    longer = np.array([{"x": np.arange(3)}, {"x": np.arange(300)}])
    np.savez(a, o=first)
    np.savez(b, o=first)
    assert convert.diff(a, b).same
    for other in (second, longer):
        np.savez(b, o=other)
        found = convert.diff(a, b)
        assert whats(found) == {"o": ("values",)}
        assert found.differences[0].tally is None
        assert found.differences[0].a == Facts("object", (2,))
        parts = convert.diff(a, b, policy=convert.Policy(object="unpickle"))
        assert whats(parts) == {"o.1.x": ("values",) if other is second else ("shape",)}


# --- long double -------------------------------------------------------------------------------------------------


@needs_x87
@pytest.mark.parametrize("start", [1.0, 0.0, -3.5, "1e4000", "-1e-4900"])
def test_long_doubles_one_step_apart(tmp_path: Path, start: float | str) -> None:
    """One ULP of 64 bits is seen, also where float64 has no such number."""
    a = np.array([start, 1.0, 2.0], np.longdouble)
    b = a.copy()
    b[0] = np.nextafter(b[0], np.longdouble("inf"))
    found = tally(compared(tmp_path, a, b))
    assert (found.bits, found.values, found.max_ulps) == (1, 1, 1)
    assert found.max_abs_error is not None
    assert found.max_abs_error > 0
    if start in (1.0, -3.5):
        assert found.max_abs_error == float(abs(b[0] - a[0]))
    assert not compared(tmp_path, a, b, rtol=0).same


@needs_x87
def test_long_doubles_as_numpy_has_them(tmp_path: Path) -> None:
    """Errors and tolerances of random values, complex ones too."""
    rng = np.random.default_rng(11)
    for dtype in (np.longdouble, np.clongdouble):
        a = rng.standard_normal(500).astype(dtype) / dtype(3)
        if dtype is np.clongdouble:
            a = a + dtype(1j) * rng.standard_normal(500)
        b = a * (1 + rng.choice([0, 1e-18, 1e-10, 1e-3], 500).astype(np.longdouble))
        found = tally(compared(tmp_path, a, b, rtol=1e-5))
        gaps = np.abs(a - b)
        assert found.values == np.count_nonzero(a != b)
        assert found.beyond == np.count_nonzero(gaps > 1e-5 * np.abs(b))
        assert found.max_abs_error == pytest.approx(float(gaps.max()), rel=1e-14)
        assert found.max_rel_error == pytest.approx(float((gaps / np.abs(b)).max()), rel=1e-14)
    specials = np.array([np.inf, -np.inf, np.nan, 0.0, 1.0], np.longdouble)
    found = tally(compared(tmp_path, specials, np.array([np.inf, np.inf, 1.0, -0.0, 1.0], np.longdouble)))
    assert (found.bits, found.values, found.nans, found.max_abs_error) == (3, 2, 1, np.inf)


@needs_x87
def test_long_doubles_beyond_float64_are_neither_zero_nor_infinite(tmp_path: Path) -> None:
    """Against the float64 that they would round to."""
    a = np.array(["1e4000", "-1e-4000", "inf", "1"], np.longdouble)
    for b in (np.array([np.inf, 0, np.inf, 1]), np.array([np.inf, 0, np.inf, 1], np.longdouble)):
        found = tally(compared(tmp_path, a, b, ignore_dtype=True, rtol=0))
        assert (found.values, found.beyond, found.max_abs_error) == (2, 2, np.inf)


@needs_x87
def test_padding_of_long_doubles_does_not_count(tmp_path: Path) -> None:
    """numpy leaves stray memory there; but where nothing proves that it is x87, every byte counts."""
    a = np.array([1.5, 2.5], np.longdouble)
    b = a.copy()
    a.view(np.uint8).reshape(2, 16)[:, 10:] = 0
    b.view(np.uint8).reshape(2, 16)[:, 10:14] = 7
    b.view(np.uint8).reshape(2, 16)[:, 14:] = 0
    assert a.tobytes() != b.tobytes()
    paths = [tmp_path / "a.npy", tmp_path / "b.npy"]
    header = (
        b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '<f16', 'fortran_order': False, 'shape': (2,), }".ljust(117) + b"\n"
    )
    for path, array in zip(paths, (a, b), strict=True):
        path.write_bytes(header + array.tobytes())
    assert convert.diff(*paths).same
    b.view(np.uint8).reshape(2, 16)[:, 14:] = 0x3F  # binary128 of ordinary size
    paths[1].write_bytes(header + b.tobytes())
    found = tally(convert.diff(*paths))
    assert (found.bits, found.values, found.max_abs_error) == (2, 2, None)


# --- other types on the other side -------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["bfloat16", "float16", "float64", "complex64"])
def test_a_cast_is_a_difference_unless_types_are_ignored(tmp_path: Path, target: str) -> None:
    """Its error is that of the rounding."""
    a = np.random.default_rng(2).standard_normal(1000).astype(np.float32)
    b = a.astype(getattr(ml_dtypes, target, target))
    wide = b.astype(np.complex128 if target[0] == "c" else np.float64)
    gaps = np.abs(a.astype(wide.dtype) - wide)
    found = compared(tmp_path, a, b)
    counted = tally(found)
    exact = gaps.max() == 0
    assert whats(found) == {"w": ("dtype",) if exact else ("dtype", "values")}
    assert counted.bits is counted.max_ulps is None
    assert counted.values == np.count_nonzero(gaps)
    assert counted.max_abs_error == gaps.max()
    assert found.differences[0].b == Facts(target, (1000,))
    assert compared(tmp_path, a, b, ignore_dtype=True).same == exact
    ignored = compared(tmp_path, a, b, ignore_dtype=True, atol=float(gaps.max()))
    assert ignored.same
    assert ignored.identical == 0
    assert len(ignored.tolerated) == 1
    assert not compared(tmp_path, a, b, atol=float(gaps.max())).same


@pytest.mark.parametrize("number", [2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63), 1, 0, -1, 2**32])
@pytest.mark.parametrize("dtype", ["float64", "float32", "uint64", "int32"])
def test_large_integers_against_other_types(tmp_path: Path, number: int, dtype: str) -> None:
    """Equal only if Python says so, which compares exactly."""
    a = np.array([number], np.int64)
    with np.errstate(all="ignore"):
        for value in (a.astype(dtype), np.nextafter(a.astype(dtype), 0) if dtype[0] == "f" else a.astype(dtype) + 1):
            found = tally(compared(tmp_path, a, value, ignore_dtype=True))
            gap = abs(number - int(value[0])) if float(value[0]).is_integer() else abs(number - float(value[0]))
            assert (found.values > 0) == (a[0].item() != value[0].item())
            assert found.max_abs_error == pytest.approx(float(gap), rel=1e-15)


def test_a_string_is_no_number(tmp_path: Path) -> None:
    """Only types are told; there is nothing to compare."""
    for a, b in ((np.array([1, 2]), np.array(["1", "2"])), (np.array(["1"]), np.array(["123"]))):
        found = compared(tmp_path, a, b, ignore_dtype=True)
        assert whats(found) == {"w": ("dtype",)}
        assert found.differences[0].tally is None


# --- layouts, formats, sizes -------------------------------------------------------------------------------------

LAYOUTS = ["plain", "fortran", "big", "big fortran", "deflated", "deflated fortran", "safetensors"]


def laid_out(folder: Path, name: str, array: Array, layout: str) -> Path:
    """One array in a file of that layout."""
    if layout == "safetensors":
        return write(folder / f"{name}.safetensors", {"w": array})
    array = np.asarray(array, order="F" if "fortran" in layout else "C")
    array = array.astype(array.dtype.newbyteorder(">")) if "big" in layout else array
    path = folder / f"{name}.npz"
    (np.savez_compressed if "deflated" in layout else np.savez)(path, w=array)
    return path


@pytest.mark.parametrize("other", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_never_counts_and_differences_are_found_in_any(tmp_path: Path, layout: str, other: str) -> None:
    """Equal arrays are the same; one changed element is found at its index in row-major order."""
    a = np.random.default_rng(4).integers(0, 1000, (70, 15, 129)).astype(np.int32)
    b = a.copy()
    first, second = (laid_out(tmp_path, name, array, kind) for name, array, kind in (("a", a, layout), ("b", b, other)))
    found = convert.diff(first, second)
    assert found.same
    assert (found.identical, found.nbytes) == (1, a.nbytes)
    b[31, 7, 128] += 3
    b[69, 0, 0] += 1
    found = convert.diff(first, laid_out(tmp_path, "b", b, other))
    (difference,) = found.differences
    assert difference.first() == (31, 7, 128)
    counted = tally(found)
    assert (counted.bits, counted.max_abs_error) == (2, 3)


@pytest.mark.parametrize("count", [0, 1, 2, 32767, 32768, 32769, (16 << 18) - 1, (16 << 18) + 1, 9 << 20])
def test_every_border_of_chunks_and_spans(tmp_path: Path, count: int) -> None:
    """The first and last elements, and those around the borders, with several threads and one."""
    a = np.zeros(count, np.int32)
    b = a.copy()
    places = [at for at in (0, 32767, 32768, (16 << 18) - 1, 16 << 18, count - 1) if 0 <= at < count]
    path_a, path_b = write(tmp_path / "a.npz", {"w": a}), tmp_path / "b.npz"
    assert convert.diff(path_a, write(path_b, {"w": b})).same
    for at in places:
        b[at] = 1
    write(path_b, {"w": b})
    results = []
    for jobs in (1, 2, 5):
        found = convert.diff(path_a, path_b, jobs=jobs)
        found.seconds = 0
        results.append(found)
    assert results[0] == results[1] == results[2]
    if places:
        counted = tally(results[0])
        assert (counted.bits, counted.first) == (len(set(places)), places[0])
    else:
        assert results[0].same


@pytest.mark.parametrize("name", ["float4_e2m1fn", "float6_e2m3fn", "bfloat16"])
def test_packed_types_over_several_chunks(tmp_path: Path, name: str) -> None:
    """No element is cut by a border; the index is that of the element, not of the byte."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    a = np.ones(800_000, np.float32).astype(dtype)
    b = a.copy()
    for at in (700_001, 799_999):
        b[at] = 2
    found = compared(tmp_path, a, b)
    counted = tally(found)
    assert (counted.bits, counted.first, counted.max_abs_error) == (2, 700_001, 1.0)
    assert (float(counted.first_a), float(counted.first_b)) == (1.0, 2.0)
    wide = tally(compared(tmp_path, a, b.astype(np.float32)))
    assert (wide.values, wide.first, wide.max_abs_error) == (2, 700_001, 1.0)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (1, 1, 1)])
@pytest.mark.parametrize("dtype", ["float32", "S0", "datetime64[s]"])
def test_scalars_and_nothing(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    """Every shape has its place, and elements may have no bytes."""
    a = np.zeros(shape, dtype) if dtype != "S0" else np.ndarray(shape, "S0")
    assert compared(tmp_path, a, a).same
    if a.nbytes:
        b = (a.view(np.int32 if a.itemsize == 4 else np.int64) + 1).view(dtype)
        found = compared(tmp_path, a, b)
        assert found.differences[0].first() == (0,) * a.ndim
        assert tally(found).bits == 1


def test_shards_folders_and_open_checkpoints(tmp_path: Path) -> None:
    """Whatever `open` opens; what was open stays open."""
    arrays = {name: np.arange(3000, dtype=np.int16) + at for at, name in enumerate("abc")}
    one = write(tmp_path / "one.npz", arrays)
    convert.save(arrays, tmp_path / "m.safetensors", max_shard_size=7000)
    convert.save(arrays, f"{tmp_path}/folder/")
    index = tmp_path / "m.safetensors.index.json"
    assert index.exists()
    assert convert.diff(one, index).same
    assert convert.diff([tmp_path / "folder" / f"{name}.npy" for name in "abc"], one).identical == 3
    with convert.open(tmp_path / "folder") as checkpoint:
        assert convert.diff(checkpoint, index).same
        assert checkpoint["b"].numpy()[0] == 1


def test_urls_are_compared_like_files(tmp_path: Path) -> None:
    """One side in a store, the other here; shards in the store too."""
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    arrays = {"w": np.random.default_rng(8).standard_normal(300_000), "v": np.asfortranarray(np.eye(300))}
    here = write(tmp_path / "a.npz", arrays)
    try:
        store.pipe_file("/diff/a.npz", here.read_bytes())
        assert convert.diff("memory://diff/a.npz", here).same
        convert.save(arrays, "memory://diff/m.safetensors", max_shard_size=800_000)
        assert convert.diff(here, "memory://diff/m.safetensors.index.json").identical == 2
        arrays["w"][250_000] += 1
        assert tally(convert.diff("memory://diff/a.npz", write(here, arrays))).first == 250_000
    finally:
        store.rm("/diff", recursive=True)


def test_limits_hold_for_both_sides(tmp_path: Path) -> None:
    """The second file may be the hostile one."""
    a, b = (
        write(tmp_path / "a.npz", {"x": np.zeros(2)}),
        write(tmp_path / "b.npz", {"x": np.zeros(2), "y": np.zeros(2)}),
    )
    with pytest.raises(convert.LimitError) as caught:
        convert.diff(a, b, limits=convert.Limits(tensors=1))
    assert caught.value.path == str(b)


# --- the way there and back --------------------------------------------------------------------------------------

FILES = sorted(path.name for path in SAMPLES.iterdir() if path.suffix in (".npy", ".npz", ".safetensors"))
NOT_HELD = {"object.npy", "structured.npy", "structured_version_3.npy", "unmappable.npz"}
"""By safetensors, whatever the policy, without loss."""


@pytest.mark.parametrize("name", FILES)
def test_what_was_converted_without_loss_is_the_same(tmp_path: Path, name: str) -> None:
    """Encodings are undone by what the file remembers; each sample with all that can be encoded."""
    policy = convert.Policy.preset("lossless")
    held = []
    for suffix in (".npz", ".safetensors", ".npy"):
        target = tmp_path / f"out{suffix}"
        try:
            convert.convert_file(SAMPLES / name, target, policy=policy)
        except convert.PolicyError:
            continue
        held.append(suffix)
        found = convert.diff(SAMPLES / name, target)
        assert found.same, found.to_dict()
        assert convert.diff(target, SAMPLES / name, rtol=0).same
    assert (".npz" in held) == (name != "object.npy")
    assert (".safetensors" in held) == (name not in NOT_HELD)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("structured.npy", {"structured": "split"}),
        ("object.npy", {"object": "unpickle"}),
        ("longdouble_inexact.npy", {"longdouble": "round"}),
        ("longdouble.npy", {"longdouble": "exact"}),
        ("complex128.npy", {"complex128": "round"}),
        ("float8.npz", {"V1": "float8_e4m3fn"}),
        ("bf16.npy", {"V2": "uint16"}),
        ("blob.npz", {"blob": "skip"}),
        ("unicode.npy", {"str": "skip"}),
    ],
)
def test_the_policy_of_the_conversion_makes_both_sides_alike(tmp_path: Path, name: str, policy: dict[str, str]) -> None:
    """What cannot be undone is done to the other side too."""
    made = convert.Policy([("*", *rule) for rule in policy.items()])
    target = tmp_path / "out.safetensors"
    convert.convert_file(SAMPLES / name, target, policy=made)
    found = convert.diff(SAMPLES / name, target, policy=made)
    assert found.same, found.to_dict()
    if "skip" in policy.values():
        assert any("left out" in note for note in found.notes)


def test_policies_that_only_rename_bits_end(tmp_path: Path) -> None:
    """bfloat16 as V2 as bfloat16 ... would go on for ever."""
    source = write(tmp_path / "a.safetensors", {"w": np.ones(4, ml_dtypes.bfloat16)})
    np.savez(tmp_path / "b.npz", w=np.ones(4, ml_dtypes.bfloat16))
    policy = convert.Policy(bfloat16="V2", float8="V1", V1="float8_e4m3fn")
    assert convert.diff(source, tmp_path / "b.npz", policy=policy).same


def test_metadata_is_reported_and_counts_if_asked(tmp_path: Path) -> None:
    """Keys that one side lacks, and those with another text."""
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, metadata in zip(paths, ({"x": "1", "y": "2", "z": "3"}, {"y": "2", "z": "4"}), strict=True):
        save_with_reference(path, {"w": np.zeros(2)}, metadata)
    found = convert.diff(*paths)
    assert found.same
    assert [row[:3] for row in found.metadata] == [("x", "1", None), ("z", "3", "4")]
    assert not convert.diff(*paths, metadata=True).same
    assert convert.diff(paths[0], paths[0], metadata=True).same


def test_strings_that_a_policy_moves_into_the_metadata_count(tmp_path: Path) -> None:
    """They were values of the file."""
    a, b = tmp_path / "a.npz", tmp_path / "b.npz"
    np.savez(a, s=np.array("one"), o=np.array({"t": "x"}))
    np.savez(b, s=np.array("two"), o=np.array({"t": "y"}))
    policy = convert.Policy(str="metadata", object="unpickle")
    found = convert.diff(a, b, policy=policy)
    assert whats(found) == {"s": ("values",)}
    assert [(row.key, row.counts) for row in found.metadata] == [("o.t", True)]
    assert not convert.diff(a, b, policy=policy, exclude=["s"]).same
    assert convert.diff(a, a, policy=policy).same


# --- names -------------------------------------------------------------------------------------------------------


def test_names_shapes_and_renames(tmp_path: Path) -> None:
    """Each in A's order, then what only B has."""
    rng = np.random.default_rng(1)
    data = [rng.standard_normal((4, 5)) for _ in range(4)]
    a: dict[str, Array] = {
        "same": data[0],
        "old": data[1],
        "gone": data[2],
        "bent": data[3],
        "twin1": np.zeros(3),
        "twin2": np.zeros(3),
    }
    b: dict[str, Array] = {
        "new": data[1],
        "same": data[0],
        "bent": data[3].reshape(5, 4),
        "zero": np.zeros(3),
        "more": data[2] + 1,
        "cast": data[1].astype(np.float32),
    }
    found = convert.diff(write(tmp_path / "a.npz", a), write(tmp_path / "b.safetensors", b))
    assert list(whats(found).items()) == [
        ("old", ("renamed",)),
        ("gone", ("only in A",)),
        ("bent", ("shape",)),
        ("twin1", ("renamed",)),
        ("twin2", ("only in A",)),
        ("more", ("only in B",)),
        ("cast", ("only in B",)),
    ]
    others = {difference.name: difference.other_name for difference in found.differences}
    assert (others["old"], others["twin1"]) == ("new", "zero")
    assert found.identical == 1
    renamed = convert.diff(tmp_path / "a.npz", tmp_path / "b.safetensors", rename=[("^old$", "new")])
    assert "new" not in whats(renamed)
    assert renamed.identical == 2


def test_renames_are_found_in_fortran_order_too(tmp_path: Path) -> None:
    """By their values, not by how they are stored."""
    array = np.arange(600_000, dtype=np.float32).reshape(600, 1000)
    a, b = tmp_path / "a.npz", tmp_path / "b.npz"
    np.savez(a, x=np.asfortranarray(array), y=np.zeros(1))
    np.savez_compressed(b, z=array.astype(">f4"), y=np.zeros(1))
    assert whats(convert.diff(a, b)) == {"x": ("renamed",)}


def test_a_lone_npy_has_no_name(tmp_path: Path) -> None:
    """Its tensor is called after the file, which says nothing; in other formats names count."""
    array = np.arange(5)
    first, second = write(tmp_path / "first.npy", {"": array}), write(tmp_path / "second.npy", {"": array})
    assert convert.diff(first, second).same
    other = write(tmp_path / "x.safetensors", {"w": array})
    assert convert.diff(first, other).same
    assert convert.diff(other, second).same
    assert whats(convert.diff(other, write(tmp_path / "y.npz", {"v": array}))) == {"w": ("renamed",)}
    both = write(tmp_path / "z.npz", {"w": array, "v": array})
    assert not convert.diff(first, both).same


def test_include_and_exclude(tmp_path: Path) -> None:
    """The others are not looked at; a glob that matches nothing on either side is a slip."""
    a = write(tmp_path / "a.npz", {"x.w": np.zeros(2), "y.w": np.zeros(2), "y.b": np.zeros(2)})
    b = write(tmp_path / "b.npz", {"x.w": np.zeros(2), "y.w": np.ones(2), "z": np.zeros(2)})
    assert convert.diff(a, b, include=["x.*"]).same
    assert convert.diff(a, b, include=["x.*", "y.*"], exclude=["y.?"]).same
    assert whats(convert.diff(a, b, include=["z"])) == {"z": ("only in B",)}
    with pytest.raises(convert.UsageError, match=r"no tensor matches --include 'q\*'"):
        convert.diff(a, b, include=["q*"])
    assert convert.diff(a, b, include=["x.w"], exclude=["q"]).notes == ["--exclude q matched nothing"]


@pytest.mark.parametrize("options", [{"rtol": -1.0}, {"atol": float("nan")}, {"rtol": float("inf")}, {"jobs": 0}])
def test_a_wrong_call_is_a_usage_error(tmp_path: Path, options: dict[str, Any]) -> None:
    """Before anything is opened."""
    with pytest.raises(convert.UsageError):
        convert.diff(tmp_path / "missing", tmp_path / "missing", **options)


# --- damage ------------------------------------------------------------------------------------------------------


def damaged(path: Path, *arrays: Array) -> Path:
    """Change a byte of each array's data in an archive whose checksums stay."""
    content = bytearray(path.read_bytes())
    for array in arrays:
        at = content.index(array.tobytes())
        content[at + array.nbytes // 2] ^= 1
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("order", ["C", "F"])
def test_damage_is_refused_and_all_of_it_told(tmp_path: Path, order: Any, jobs: int) -> None:
    """Even where both sides are damaged alike and so have the same bytes."""
    rng = np.random.default_rng(9)
    x, y, z = (np.asarray(rng.standard_normal((300, 400)), order=order) for _ in range(3))
    a, b = tmp_path / "a.npz", tmp_path / "b.npz"
    for path in (a, b):
        np.savez(path, x=x, y=y, z=z)
        damaged(path, x.T if order == "F" else x)
    damaged(b, z.T if order == "F" else z)
    with pytest.raises(convert.CorruptError, match="CRC-32 mismatch") as caught:
        convert.diff(a, b, jobs=jobs)
    assert {(Path(problem.path or "").name, problem.tensor) for problem in caught.value.problems} >= {("b.npz", "z")}
    assert "x" in {problem.tensor for problem in caught.value.problems}
    assert convert.diff(a, b, exclude=["x", "z"]).same


def test_damage_of_tensors_that_are_not_compared_is_found_with_the_name(tmp_path: Path) -> None:
    """Candidates for a rename are read, and checked."""
    x = np.random.default_rng(9).standard_normal(5000)
    a = write(tmp_path / "a.npz", {"x": x})
    b = damaged(write(tmp_path / "b.npz", {"y": x}), x)
    with pytest.raises(convert.CorruptError, match="tensor 'y': CRC-32 mismatch"):
        convert.diff(a, b)


def test_a_tensor_without_elements_owes_its_checksum(tmp_path: Path) -> None:
    """There is nothing to compare, and yet it is damaged."""
    path = write(tmp_path / "a.npz", {"w": np.zeros((0, 3))})
    with zipfile.ZipFile(path) as archive:
        crc = archive.infolist()[0].CRC
    content = path.read_bytes()
    assert content.count(crc.to_bytes(4, "little")) == 2
    path.write_bytes(content.replace(crc.to_bytes(4, "little"), (crc ^ 1).to_bytes(4, "little")))
    with pytest.raises(convert.CorruptError, match="CRC-32 mismatch"):
        convert.diff(path, path)


@pytest.mark.parametrize("sizes", [(1, 2), (5, 7), (6, 4), (100, 1), (3, 100)])
def test_chunks_of_any_size_are_read_side_by_side(sizes: tuple[int, int]) -> None:
    """Whole units of 3 and 2 bytes, equally many of both, and everything to the end."""
    data = bytes(range(60)), bytes(range(100, 140))

    def pieces(whole: bytes, size: int) -> Iterator[memoryview]:
        return (memoryview(whole[at : at + size]) for at in range(0, len(whole), size))

    chunks = pieces(data[0], sizes[0]), pieces(data[1], sizes[1])
    joined = [b"", b""]
    for parts in side_by_side(chunks[0], chunks[1], 3, 2):
        assert len(parts[0]) // 3 == len(parts[1]) // 2 > 0
        joined = [before + bytes(part) for before, part in zip(joined, parts, strict=True)]
    assert tuple(joined) == data
    assert [next(rest, None) for rest in chunks] == [None, None]


def test_both_sides_problems_come_together(tmp_path: Path) -> None:
    """Members that cannot be read, on either side."""
    paths = []
    for name in "ab":
        path = write(tmp_path / f"{name}.npz", {"w": np.arange(3), "v": np.arange(3)})
        content = bytearray(path.read_bytes())
        content[content.index(b"\x93NUMPY")] = 0
        path.write_bytes(content)
        paths.append(path)
    with pytest.raises(convert.InputError) as caught:
        convert.diff(*paths)
    assert [Path(problem.path or "").name for problem in caught.value.problems] == ["a.npz", "b.npz"]
    assert convert.diff(*paths, exclude=["w"]).same


# --- the command line --------------------------------------------------------------------------------------------


def program(*argv: object, columns: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run `convert diff`."""
    env = (
        {**os.environ, "COLUMNS": str(columns)} if columns else {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    )
    command = [sys.executable, "-m", "convert", "diff", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two files with differences of every kind, names that are long or odd among them."""
    a: dict[str, Array] = {
        "layer.0.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "a-rather-long-name." * 6: np.zeros(2),
        "odd \x1b[31m": np.zeros(3), "kept": np.ones(4), "gone": np.ones(5), "old": np.arange(6),
        "bent": np.ones((2, 3)), "cast": np.ones(3, np.float32), "nan": np.array([np.nan, 1]),
    }  # fmt: skip
    b = {name: array.copy() for name, array in a.items() if name not in ("gone", "old", "bent", "cast")}
    b |= {"new": a["old"], "bent": np.ones((3, 2)), "cast": np.ones(3, np.float64), "added": np.zeros(9, bool)}
    b["layer.0.weight"][1, 2] += 0.5
    b["a-rather-long-name." * 6][1] = -0.0
    b["odd \x1b[31m"][0] = 1
    b["nan"][0] = 3
    return write(tmp_path / "a.npz", a), write(tmp_path / "b.safetensors", b)


def test_the_same_is_one_line(two: tuple[Path, Path]) -> None:
    """And status 0."""
    done = program(two[0], two[0])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "same: 9 tensors, 284 B\n"
    quiet = program(two[0], two[0], "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")


def test_differences_are_a_table(two: tuple[Path, Path]) -> None:
    """A line or two each, and a summary; status 6."""
    done = program(*two)
    assert (done.returncode, done.stderr) == (6, "")
    text = done.stdout
    assert "layer.0.weight" in text
    assert "max abs 0.5  max rel 0.07692  ULPs 1048576  first at [1, 2]: 6.0 | 6.5" in text
    for words in ("only in A: float64 5", "only in B: bool 9", "name, 'new' in B", "shape 2x3 | 3x2",
                  "dtype float32 | float64", "bits, not values", "NaN on one side 1"):  # fmt: skip
        assert words in text, words
    assert "\x1b" not in text
    assert text.endswith("different: 6 not equal, 1 only in A, 1 only in B, 1 renamed, 1 identical\n")
    quiet = program(*two, "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (6, "", "")


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_table_fits_the_terminal(two: tuple[Path, Path], columns: int) -> None:
    """No line of it is wider."""
    lines = program(*two, columns=columns).stdout.splitlines()[2:-1]
    assert len(lines) > 10
    assert max(map(len, lines)) <= columns


def test_json_has_everything(two: tuple[Path, Path]) -> None:
    """One object, with numbers that JSON has."""
    done = program(*two, "--json")
    found = json.loads(done.stdout, parse_constant=pytest.fail)
    assert done.returncode == 6
    assert found["same"] is False
    assert len(found["differences"]) == 9
    weight = found["differences"][0]
    assert weight["first"] == {"index": [1, 2], "a": "6.0", "b": "6.5"}
    assert (weight["bits"], weight["count"], weight["max_abs_error"]) == (1, 12, 0.5)
    assert json.loads(program(two[0], two[0], "--json").stdout)["same"] is True


def test_tolerances_on_the_command_line(two: tuple[Path, Path]) -> None:
    """What they forgive is said in the summary."""
    done = program(*two, "--include", "layer*", "--rtol", "0.1")
    assert done.returncode == 0
    assert done.stdout == "same: 1 tensor, 48 B, 1 of them not bit for bit (max abs 0.5, max rel 0.07692)\n"
    done = program(*two, "--include", "cast", "--ignore-dtype")
    assert done.returncode == 0


def test_options_reach_the_library(two: tuple[Path, Path]) -> None:
    """--rename, --exclude, --policy, --metadata, --jobs."""
    done = program(*two, "--include", "new", "--rename", "^old$=new", "--jobs", "1")
    assert (done.returncode, done.stdout) == (0, "same: 1 tensor, 48 B\n")
    other = two[0].with_name("c.safetensors")
    save_with_reference(other, {"kept": np.ones(4)}, {"format": "pt"})
    done = program(two[0], other, "--include", "kept")
    assert done.returncode == 0
    assert "metadata 'format': none in A, 'pt' in B (does not count without --metadata)\n" in done.stdout
    done = program(two[0], other, "--include", "kept", "--metadata", "--exclude", "nothing", "--policy", "strict")
    assert done.returncode == 6
    assert "note: --exclude nothing matched nothing\n" in done.stderr


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["missing.npz", "missing.npz"], 3, "cannot be read"),
        (["--rtol", "x"], 2, "--rtol takes a number, 1e-5 for one (found 'x')"),
        (["--atol", "-1"], 2, "atol must be a number from 0 up (found -1.0)"),
        (["--policy", "V2=no"], 2, "unknown action 'no'"),
        (["--rename", "x"], 2, "--rename takes REGEX=REPLACEMENT"),
        (["--jobs", "0"], 2, "jobs must be from 1"),
        (["--policy", "longdouble=what"], 2, "unknown action"),
    ],
)
def test_refusals_have_their_status(two: tuple[Path, Path], argv: list[str], status: int, words: str) -> None:
    """One message on stderr, or as JSON."""
    arguments = argv if argv[0][0] != "-" else [*two, *argv]
    done = program(*arguments)
    assert done.returncode == status
    assert words in done.stderr
    assert done.stdout == ""
    shown = json.loads(program(*arguments, "--json").stdout)
    assert shown["error"]["exit_status"] == status


def test_one_file_is_too_few(two: tuple[Path, Path]) -> None:
    """What is missing is named."""
    done = program(two[0])
    assert done.returncode == 2
    assert "Missing argument 'B'" in done.stderr


def test_a_comparison_of_equal_files_loads_no_numpy(two: tuple[Path, Path], tmp_path: Path) -> None:
    """Bytes are compared without it."""
    code = (
        "import sys\nfrom convert.cli.main import run\nstatus = run(sys.argv[1:])\n"
        "assert 'numpy' not in sys.modules and 'rich' not in sys.modules\nsys.exit(status)"
    )
    command = [sys.executable, "-c", code, "diff", str(two[0]), str(two[0])]
    assert subprocess.run(command, capture_output=True, text=True, check=False).returncode == 0


def test_progress_counts_up_to_its_total(two: tuple[Path, Path]) -> None:
    """Candidates for a rename are read too; raising in it cancels."""
    calls: list[tuple[int, int, str]] = []
    convert.diff(*two, progress=lambda done, total, name: calls.append((done, total, name)))
    assert calls[-1][0] == calls[-1][1] > 0

    def cancel(done: int, total: int, name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert.diff(*two, progress=cancel)


# --- memory ------------------------------------------------------------------------------------------------------

PEAK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from convert.cli.main import run
status = run(sys.argv[1:])
for line in open("/proc/self/status"):
    if line.startswith("VmHWM:"):
        print(line.split()[1])
sys.exit(status)
"""
ROWS, COLUMNS = 1 << 12, 1 << 15


def sparse(path: Path, descr: str, fortran: bool, last: bytes) -> Path:
    """A .npy file of 512 MiB, zeros but for its last element."""
    text = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': ({ROWS}, {COLUMNS}), }}"
    with path.open("wb") as file:
        file.write(b"\x93NUMPY\x01\x00v\x00" + text.ljust(117).encode() + b"\n")
        file.truncate(128 + 4 * ROWS * COLUMNS - 4)
        file.seek(0, os.SEEK_END)
        file.write(last)
    return path


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads the peak from /proc")
@pytest.mark.parametrize(
    ("first", "second"),
    [(("<f4", False), ("<f4", False)), (("<f4", True), (">f4", False)), (("<f4", True), ("<f4", True)),
     (("<i4", False), ("<f4", False))],
    ids=["equal bytes", "one turned", "both turned", "all looked at"],
)  # fmt: skip
def test_memory_does_not_grow_with_the_tensor(
    tmp_path: Path, first: tuple[str, bool], second: tuple[str, bool]
) -> None:
    """512 MiB on either side, and a difference at its very end, in less than 128 MiB."""
    paths = [
        sparse(tmp_path / f"{name}.npy", descr, fortran, last)
        for name, (descr, fortran), last in (("a", first, b"\0\0\0\0"), ("b", second, b"\1\1\1\1"))
    ]
    command = [sys.executable, "-c", PEAK, "diff", *map(str, paths), "--jobs", "2", "--quiet"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    )
    assert done.returncode == 6, done.stderr
    assert int(done.stdout) < 128 << 10
