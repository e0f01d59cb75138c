"""How far values differ: numpy and ml_dtypes are the oracles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import convert
from convert.comparison import Facts
from tests.comparing import Array, compared, needs_x87, tally, whats

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
