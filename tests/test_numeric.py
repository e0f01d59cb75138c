"""Casts, float32 carriers and packing: against exact fractions, exhaustively where the types are small."""

from __future__ import annotations

import bisect
import itertools
import math
import struct
from fractions import Fraction
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from convert.errors import PolicyError, UsageError
from convert.numeric import (
    cast,
    castable,
    complex128_to_complex64,
    narrow,
    pack4,
    pack6,
    unpack4,
    unpack6,
    widen,
)

Array = NDArray[Any]

WITHOUT_INFINITY = ["float8_e4m3fn", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"]
FLOAT8 = ["float8_e5m2", *WITHOUT_INFINITY]
SMALL = ["float16", "bfloat16", *FLOAT8]
FLOATS = [*SMALL, "float32", "float64"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
ALL = ["bool", *INTEGERS, *FLOATS, "complex64", "complex128"]
SUBBYTE = {"float4_e2m1fn": 16, "float6_e2m3fn": 64, "float6_e3m2fn": 64}

# Exponent bits, fraction bits, bias, largest finite value: from the definitions of the types, not from a library.
LAYOUT = {
    "float16": (5, 10, 15, Fraction(65504)),
    "bfloat16": (8, 7, 127, Fraction(255 << 120)),
    "float32": (8, 23, 127, Fraction((1 << 24) - 1) * 2**104),
    "float64": (11, 52, 1023, Fraction((1 << 53) - 1) * 2**971),
    "float8_e5m2": (5, 2, 15, Fraction(57344)),
    "float8_e4m3fn": (4, 3, 7, Fraction(448)),
    "float8_e4m3fnuz": (4, 3, 8, Fraction(240)),
    "float8_e5m2fnuz": (5, 2, 16, Fraction(57344)),
    "float8_e8m0fnu": (8, 0, 127, Fraction(2) ** 127),
}


def itemsize(name: str) -> int:
    return int(np.dtype(getattr(ml_dtypes, name, name)).itemsize)


def codes_of(out: Array) -> Array:
    """Any result as unsigned integers."""
    return out.view(f"u{out.itemsize}")


def every_code(name: str) -> Array:
    size = itemsize(name)
    return np.arange(1 << 8 * size, dtype=f"u{size}")


def value_of(code: int, name: str) -> Fraction | float:
    """The value of a code from the bit layout; NaN and infinities as float."""
    exponent_bits, fraction_bits, bias, largest = LAYOUT[name]
    if name == "float8_e8m0fnu":
        return math.nan if code == 255 else Fraction(2) ** (code - bias)
    sign = -1 if code >> (exponent_bits + fraction_bits) else 1
    exponent = code >> fraction_bits & (1 << exponent_bits) - 1
    fraction = code & (1 << fraction_bits) - 1
    if name.endswith("fnuz") and sign < 0 and exponent == fraction == 0:
        return math.nan
    steps = fraction if exponent == 0 else fraction + (1 << fraction_bits)
    value = sign * steps * Fraction(2) ** (max(exponent, 1) - bias - fraction_bits)
    if abs(value) <= largest:
        return value
    if name in WITHOUT_INFINITY or fraction:
        return math.nan
    return sign * math.inf


@cache
def values_of(name: str) -> list[Fraction | float]:
    return [value_of(int(code), name) for code in every_code(name)]


@cache
def grid(name: str) -> tuple[list[Fraction], list[int]]:
    """All non-negative finite values in order and their codes, and one value beyond, which stands for overflow."""
    codes = [int(code) for code in every_code(name)]
    positive = codes if name == "float8_e8m0fnu" else codes[: len(codes) // 2]
    pairs = sorted((value, code) for code in positive if isinstance(value := values_of(name)[code], Fraction))
    values, ordered = [value for value, _ in pairs], [code for _, code in pairs]
    beyond = values[-1] * 2 if name == "float8_e8m0fnu" else 2 * values[-1] - values[-2]
    return [*values, beyond], [*ordered, ordered[-1] + 1]


def nearest(value: Fraction, negative: bool, name: str) -> int | str:
    """The code nearest to a value, ties to even; `overflow`, or `refused` for what float8_e8m0fnu cannot say."""
    values, codes = grid(name)
    magnitude = abs(value)
    if name == "float8_e8m0fnu":
        # No zero and no sign. Below the least value the next would be 2**-128; the tie goes up.
        if negative or magnitude < values[0] * Fraction(3, 4):
            return "refused"
        negative = False
    if magnitude >= values[-1]:
        return "overflow"
    at = bisect.bisect_right(values, magnitude) - 1
    if at < 0:
        at = 0
    elif magnitude != values[at]:
        middle = (values[at] + values[at + 1]) / 2
        tie_up = codes[at] & 1 or name == "float8_e8m0fnu"  # powers of two are all odd: IEEE 754 takes the larger
        if magnitude > middle or (magnitude == middle and tie_up):
            at += 1
    if at == len(values) - 1:
        return "overflow"
    code = codes[at]
    sign = 1 << (8 * itemsize(name) - 1)
    if negative and not (name.endswith("fnuz") and code == 0):
        code |= sign
    return code


def is_nan(codes: Array, name: str) -> Array:
    return np.isnan(codes.view(getattr(ml_dtypes, name, name)))


def check_cast(source: str, data: Array, values: list[Fraction | float], negative: list[bool], target: str) -> None:
    """Compare a cast to a small float type with the nearest fractions: what is refused, and every code."""
    expected = np.zeros(len(values), np.int64)
    kind = np.zeros(len(values), np.int8)  # 0 value, 1 NaN, 2 overflow, 3 refused
    for i, value in enumerate(values):
        if isinstance(value, float) and math.isnan(value):
            kind[i] = 1
        elif isinstance(value, float):
            kind[i] = 3 if target in WITHOUT_INFINITY else 0
            infinity = 0 if kind[i] else grid(target)[1][-1]
            expected[i] = infinity | (negative[i] << (8 * itemsize(target) - 1))
        else:
            code = nearest(value, negative[i], target)
            if isinstance(code, int):
                expected[i] = code
            else:
                kind[i] = 3 if code == "refused" or target in WITHOUT_INFINITY else 2
                expected[i] = grid(target)[1][-1] | (negative[i] << (8 * itemsize(target) - 1))
    fine = kind <= 1
    out = cast(data[fine].tobytes(), source, target)
    assert out.flags.c_contiguous
    got = codes_of(out).astype(np.int64)
    nan = kind[fine] == 1
    assert is_nan(codes_of(out)[nan], target).all()
    wrong = np.flatnonzero((got != expected[fine]) & ~nan)
    assert not wrong.size, [(values[np.flatnonzero(fine)[i]], got[i], expected[fine][i]) for i in wrong[:5]]
    over = kind == 2
    assert codes_of(cast(data[over].tobytes(), source, target, inf=True)).tolist() == expected[over].tolist()
    # Everything else is refused; a few hundred of them, one by one, suffice.
    single = data.itemsize
    raw = data.tobytes()
    for i in np.flatnonzero(kind >= 2)[:: max(1, int((kind >= 2).sum()) // 200)]:
        with pytest.raises(PolicyError, match=rf"at element {7 + i}\b") as caught:
            cast(raw[i * single : (i + 1) * single], source, target, first=7 + int(i), inf=bool(kind[i] == 3))
        assert caught.value.hint is not None
        assert ("cast-overflow" in caught.value.hint) == (kind[i] == 2)


@pytest.mark.parametrize("target", SMALL)
@pytest.mark.parametrize("source", SMALL)
def test_every_small_float_to_every_small_float(source: str, target: str) -> None:
    """All codes of the 8- and 16-bit types, to each other: the nearest value, or refused."""
    if source == target:
        return
    codes = every_code(source)
    values = values_of(source)
    signed = source != "float8_e8m0fnu"
    negative = [signed and bool(int(code) >> (8 * itemsize(source) - 1)) for code in codes]
    check_cast(source, codes, values, negative, target)


def interesting(target: str, seed: int) -> NDArray[np.float64]:
    """Every value of a small type, every half-way point, the float64 and float32 neighbours of both, random bits."""
    values = [float(value) for value in grid(target)[0]]
    if len(values) > 1000:
        values = values[:300] + values[-300:] + values[300:-300:97]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    points = np.array(values + middles + [values[0] * 0.75, values[0] / 2], np.float64)
    single = points.astype(np.float32)
    up32, down32 = np.nextafter(single, np.float32(np.inf)), np.nextafter(single, np.float32(0))
    rng = np.random.default_rng(seed)
    random64 = rng.integers(0, 1 << 64, 4000, dtype=np.uint64).view(np.float64)
    random32 = rng.integers(0, 1 << 32, 4000, dtype=np.uint32).view(np.float32)
    ordinary = rng.standard_normal(4000) * np.exp2(rng.integers(-30, 20, 4000))
    special = np.array([0.0, np.inf, np.nan, 5e-324, 1e-45, 1e-46, 1.7976931348623157e308, 3.4028235677973366e38])
    with np.errstate(all="ignore"):
        parts = (points, np.nextafter(points, np.inf), np.nextafter(points, 0), up32, down32, random32, random64)
        out = np.concatenate([np.concatenate(parts, dtype=np.float64), ordinary, special])
    return np.concatenate([out, -out])


@pytest.mark.parametrize("source", ["float32", "float64"])
@pytest.mark.parametrize("target", SMALL)
def test_wide_floats_to_small_ones_are_rounded_once(source: str, target: str) -> None:
    """Half-way points, their neighbours and random bits go to the nearest value; no double rounding."""
    with np.errstate(all="ignore"):
        data = interesting(target, 1).astype(source)
    values = [Fraction(float(x)) if math.isfinite(x) else float(x) for x in data.tolist()]
    check_cast(source, data, values, np.signbit(data).tolist(), target)


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("target", SMALL)
def test_integers_to_small_floats_are_rounded_once(source: str, target: str) -> None:
    """Integers around all half-way points and limits go to the nearest value; no double rounding."""
    data = integers(source, target)
    check_cast(source, data, [Fraction(x) for x in data.tolist()], (data < 0).tolist(), target)


def integers(source: str, target: str) -> Array:
    info = np.iinfo(source)
    fraction_bits = LAYOUT[target][1]
    rng = np.random.default_rng(2)
    points = {int(x) for x in rng.integers(info.min, info.max, 2000, dtype=source, endpoint=True)}
    for power in range(65):
        for step in (*rng.integers(0, 1 << (fraction_bits + 1), 20).tolist(), 0, 1, 2, 3):
            # A value with one bit more than the target has, so half-way for odd steps.
            value = ((1 << (fraction_bits + 1)) + step) << power >> (fraction_bits + 1)
            points.update(value + d for d in (-2049, -2048, -1025, -1024, -2, -1, 0, 1, 2, 1023, 1024, 2047, 2048))
    points.update((info.min, info.max, 0))
    points |= {-p for p in points}
    return np.array(sorted(p for p in points if info.min <= p <= info.max), source)


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("target", ["float32", "float64"])
def test_integers_to_wide_floats_are_nearest(source: str, target: str) -> None:
    """int64 and uint64 to float32 and float64: nearest, ties to even, in exact arithmetic."""
    data = integers(source, target)
    out = cast(data.tobytes(), source, target)
    precision = LAYOUT[target][1] + 1
    for value, got in zip(data.tolist(), out.tolist(), strict=True):
        step = 1 << max(0, abs(value).bit_length() - precision)
        assert Fraction(got) == round(Fraction(value, step)) * step


def test_float64_to_float32_is_nearest() -> None:
    """Random float64 and float32 half-way points go to the nearest float32 or are refused."""
    rng = np.random.default_rng(3)
    single = (rng.integers(0, 0x7F800000, 20_000, dtype=np.uint32)).view(np.float32)
    middles = (single.astype(np.float64) + np.nextafter(single, np.float32(0)).astype(np.float64)) / 2
    limit = float(LAYOUT["float32"][3]) + 2.0**103  # half-way to the next: the first that overflows
    data = np.concatenate([middles, np.nextafter(middles, 0), np.nextafter(middles, np.inf), [np.nextafter(limit, 0)]])
    data = np.concatenate([data, -data])
    out = cast(data.tobytes(), "float64", "float32")
    for value, got in zip(data.tolist(), out.tolist(), strict=True):
        step = Fraction(2) ** max(math.frexp(value)[1] - 24, -149)
        assert Fraction(got) == round(Fraction(value) / step) * step
    with pytest.raises(PolicyError, match=r"values up to 3.4028234663852886e\+38"):
        cast(np.array([limit]).tobytes(), "float64", "float32")
    assert cast(np.array([-limit]).tobytes(), "float64", "float32", inf=True).tolist() == [-np.inf]


@pytest.mark.parametrize("source", SMALL)
@pytest.mark.parametrize("target", ["float32", "float64"])
def test_small_floats_widen_exactly(source: str, target: str) -> None:
    """All codes of every small type keep their value and the sign of zero; NaN stays NaN."""
    codes = every_code(source)
    out = cast(codes.tobytes(), source, target)
    for code, got in zip(codes.tolist(), out.tolist(), strict=True):
        value = values_of(source)[code]
        if isinstance(value, float):
            assert math.isnan(got) if math.isnan(value) else got == value
        else:
            assert Fraction(got) == value
            if value == 0:
                assert math.copysign(1, got) == (-1 if code else 1)


@pytest.mark.parametrize("source", ALL)
@pytest.mark.parametrize("target", ALL)
def test_every_pair_casts_small_numbers(source: str, target: str) -> None:
    """1 is 1 in every type, results are fresh contiguous buffers, an empty chunk stays empty."""
    assert castable(source, target)
    one = np.ones(3, getattr(ml_dtypes, source, source)).tobytes()
    wanted = np.ones(3, getattr(ml_dtypes, target, target)).tobytes()
    out = cast(one, source, target)
    assert out.shape == (3,)
    assert out.flags.c_contiguous
    assert bytes(out.data) == wanted
    out[:] = 0  # not a view of the input
    assert cast(one, source, target).tobytes() == wanted
    assert cast(b"", source, target).shape == (0,)
    for offset in (1, 3):
        buffer = bytearray(bytes(offset) + one)
        assert cast(memoryview(buffer)[offset:], source, target).tobytes() == wanted
        assert bytes(buffer) == bytes(offset) + one


def test_unknown_types() -> None:
    """Types outside the table are not castable, and casting them is a usage error."""
    for name in ("float4_e2m1fn", "longdouble", "float8_e4m3", ""):
        assert not castable(name, "float32")
        assert not castable("float32", name)
        with pytest.raises(UsageError, match="no cast"):
            cast(b"", "float32", name)


@pytest.mark.parametrize("name", [name for name in ALL if name != "bool"])
def test_same_type_is_a_copy(name: str) -> None:
    """Casting to the same type keeps all bits, signalling NaNs included."""
    data = np.random.default_rng(5).bytes(4096) + b"\x01\x00\xa0\x7f" * 4 + b"\x01\0\0\0\0\0\xf4\x7f" * 2
    assert cast(data, name, name).tobytes() == data


@pytest.mark.parametrize("source", ["float32", "float64", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"])
@pytest.mark.parametrize("target", [t for t in FLOATS if t != "float8_e8m0fnu"])
def test_minus_zero(source: str, target: str) -> None:
    """-0.0 keeps its sign, except where the type has none: there it is 0.0, never NaN."""
    size = itemsize(source)
    out = codes_of(cast((1 << 8 * size - 1).to_bytes(size, "little"), source, target))
    assert int(out[0]) == (0 if target.endswith("fnuz") else 1 << 8 * itemsize(target) - 1)


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, 2.0**-128, float("inf"), float("-inf"), 1.5 * 2.0**127, -1e-300])
@pytest.mark.parametrize("source", ["float32", "float64"])
def test_e8m0_has_no_zero_no_sign_no_infinity(value: float, source: str) -> None:
    """float8_e8m0fnu refuses zero, negative values, infinities and what is out of its range, even with inf."""
    with pytest.raises(PolicyError, match="at element 5"):
        cast(np.array([1, value], source).tobytes(), source, "float8_e8m0fnu", first=4, inf=True)


EDGES = sorted(
    {s * (1 << p) + d for p in (0, 7, 8, 15, 16, 31, 32, 53, 62, 63, 64) for s in (1, -1) for d in (-1, 0, 1)} | {0}
)


@pytest.mark.parametrize("source", [*INTEGERS, "bool", "float16", "float32", "float64", "complex128"])
@pytest.mark.parametrize("target", [*INTEGERS, "bool"])
def test_to_integers_is_exact_or_refused(source: str, target: str) -> None:
    """Every edge value comes out as the same integer or is refused by name."""
    for edge in EDGES:
        if source in INTEGERS and not np.iinfo(source).min <= edge <= np.iinfo(source).max:
            continue
        if source == "bool" and edge not in (0, 1):
            continue
        with np.errstate(over="ignore"):
            item = np.array([edge if source in INTEGERS else float(edge)]).astype(source)
        number = item.real.item()
        low, high = (0, 1) if target == "bool" else (int(np.iinfo(target).min), int(np.iinfo(target).max))
        if math.isfinite(number) and low <= int(number) <= high:
            out = cast(item.tobytes(), source, target)
            assert out.dtype == target
            assert out.tolist() == [int(number)]
        else:
            with pytest.raises(PolicyError, match=r"at element 9\b") as caught:
                cast(item.tobytes(), source, target, first=9, inf=True)
            assert repr(number) in caught.value.message


@pytest.mark.parametrize("source", ["float16", "float32", "float64", "bfloat16", "float8_e5m2"])
@pytest.mark.parametrize("target", [*INTEGERS, "bool"])
@pytest.mark.parametrize("value", [0.5, -1.5, float("nan"), float("inf"), float("-inf"), 2.0**-14])
def test_to_integers_refuses_fractions_and_what_is_not_finite(source: str, target: str, value: float) -> None:
    """No fraction, NaN or infinity becomes an integer."""
    item = np.array([0, 1, value, value], getattr(ml_dtypes, source, source))
    with pytest.raises(PolicyError, match=rf"found {source} .* at element 2\b"):
        cast(item.tobytes(), source, target)


@given(st.floats(), st.sampled_from(INTEGERS))
@example(2.0**63, "int64")
@example(2.0**63 - 1024, "int64")
@example(2.0**64 - 2048, "uint64")
@example(-0.0, "uint8")
def test_float64_to_integers(value: float, target: str) -> None:
    """Any float64 is the same number as an integer, or refused."""
    data = struct.pack("<d", value)
    info = np.iinfo(target)
    if math.isfinite(value) and value == int(value) and info.min <= int(value) <= info.max:
        assert cast(data, "float64", target).tolist() == [int(value)]
    else:
        with pytest.raises(PolicyError):
            cast(data, "float64", target)


@pytest.mark.parametrize("target", ALL)
def test_bool_bytes_other_than_0_and_1_are_refused(target: str) -> None:
    """A bool is one of two bytes; any other is named with its index, also when nothing is cast."""
    with pytest.raises(PolicyError, match="found bool 2 at element 12"):
        cast(b"\x00\x01\x02\x03", "bool", target, first=10)


def test_complex_parts_round_like_reals() -> None:
    """complex128 to complex64 rounds both parts, keeps signs of zero, and names the element of an overflow."""
    z = np.array([1 + 2.0**-30 - 0.0j, complex(-0.0, np.inf), complex(np.nan, 1)])
    out = cast(z.tobytes(), "complex128", "complex64")
    assert out.dtype == np.complex64
    assert out.view(np.float32).tobytes() == z.view(np.float64).astype(np.float32).tobytes()
    bad = np.array([1, 1, complex(1, -1e39)])
    with pytest.raises(PolicyError, match=r"found complex128 -1e[+]39 at element 102"):
        cast(bad.tobytes(), "complex128", "complex64", first=100)
    assert cast(bad.tobytes(), "complex128", "complex64", inf=True)[2] == complex(1, -np.inf)


def test_real_to_complex_and_back() -> None:
    """Reals get a zero imaginary part; only zero imaginary parts may be dropped; overflow rules apply."""
    x = np.array([1.5, -0.0, 3e38], np.float32)
    out = cast(x.tobytes(), "float32", "complex128")
    assert out.view(np.float64).tolist() == [1.5, 0, -0.0, 0, float(x[2]), 0]
    assert math.copysign(1, out.real[1]) == -1
    assert cast(out.tobytes(), "complex128", "float32").tobytes() == x.tobytes()
    with pytest.raises(PolicyError, match=r"float64 1e[+]39 at element 1"):
        cast(np.array([0, 1e39]).tobytes(), "float64", "complex64")
    for bad in (1e-320j, complex(0, np.nan), complex(0, np.inf)):
        with pytest.raises(PolicyError, match=r"imaginary.* at element 6"):
            cast(np.array([complex(1, -0.0), bad]).tobytes(), "complex128", "float64", first=5)


@given(st.lists(st.tuples(st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1)), max_size=8))
@example([(0x7FF8 << 48 | 1, 0)])
@example([(0x7FF8 << 48 | 1 << 29, 1 << 63)])
@example([(0x7FF0 << 48, 0x36A0 << 48)])
def test_complex128_to_complex64_exact(parts: list[tuple[int, int]]) -> None:
    """Exact gives every bit back on the way to complex128 again, or refuses."""
    data = b"".join(struct.pack("<QQ", *pair) for pair in parts)
    with np.errstate(all="ignore"):
        narrowed = np.frombuffer(data).astype(np.float32)
        survives = narrowed.astype(np.float64).tobytes() == data
    if survives:
        assert complex128_to_complex64(data, exact=True).tobytes() == narrowed.tobytes()
        return
    with pytest.raises(PolicyError, match="at element") as caught:
        complex128_to_complex64(data, exact=True)
    assert "--policy complex128=pair" in (caught.value.hint or "")
    assert "complex128=round" in (caught.value.hint or "")


def test_complex128_to_complex64_rounds_only_when_asked() -> None:
    """0.1 is refused when exact, rounded otherwise; overflow needs inf."""
    z = np.array([1 + 1j, 0.1]).tobytes()
    with pytest.raises(PolicyError, match=r"\(0.1\+0j\) at element 5"):
        complex128_to_complex64(z, exact=True, first=4)
    assert complex128_to_complex64(z, exact=False).tolist() == np.array([1 + 1j, np.float32(0.1)]).tolist()
    with pytest.raises(PolicyError, match="at element 0"):
        complex128_to_complex64(np.array([1e300j]).tobytes(), exact=False)
    assert complex128_to_complex64(np.array([1e300j]).tobytes(), exact=False, inf=True).tolist() == [complex(0, np.inf)]


@pytest.mark.parametrize("name", ["bfloat16", *FLOAT8, *SUBBYTE])
def test_widen_and_narrow_are_inverse_for_every_code(name: str) -> None:
    """All codes, NaNs included, are different float32 of equal value, and come back bit for bit."""
    codes = np.arange(SUBBYTE[name], dtype=np.uint8) if name in SUBBYTE else every_code(name)
    wide = widen(codes.tobytes(), name)
    assert wide.dtype == np.float32
    assert len(set(wide.view(np.uint32).tolist())) == len(codes)
    with np.errstate(all="ignore"):
        reference = codes.view(getattr(ml_dtypes, name)).astype(np.float32)
    nan = np.isnan(reference)
    assert np.isnan(wide[nan]).all()
    assert wide[~nan].tobytes() == reference[~nan].tobytes()
    if name == "bfloat16":
        assert (wide.view(np.uint32) == codes.astype(np.uint32) << 16).all()
    else:
        assert (wide[nan].view(np.uint32) & 0x7FC00000 == 0x7FC00000).all()  # quiet
    back = narrow(wide.tobytes(), name)
    assert back.dtype == codes.dtype
    assert back.tobytes() == codes.tobytes()


@pytest.mark.parametrize("name", ["bfloat16", *FLOAT8, *SUBBYTE])
def test_narrow_refuses_everything_else(name: str) -> None:
    """Any float32 that widen does not produce is refused, and named by value, bits and index."""
    codes = np.arange(SUBBYTE[name], dtype=np.uint8) if name in SUBBYTE else every_code(name)
    good = widen(codes.tobytes(), name)
    known = set(good.view(np.uint32).tolist())
    rng = np.random.default_rng(6)
    tried = rng.integers(0, 1 << 32, 500, dtype=np.uint32).tolist()
    tried += [int(x) ^ 1 << int(b) for x in rng.choice(good.view(np.uint32), 300) for b in rng.integers(0, 32, 2)]
    tried += [0x7FC00000, 0x7FC000FF, 0x7FC00100, 0xFFC00080, 0x7F800001, 0x7F800000, 0, 0x80000000]
    for bits in tried:
        data = good[:2].tobytes() + struct.pack("<I", bits)
        if bits in known:
            assert widen(narrow(data, name).tobytes(), name).tobytes() == data
        else:
            with pytest.raises(PolicyError, match=rf"bits {bits:#010x}.*at element 32\b") as caught:
                narrow(data, name, first=30)
            assert name in caught.value.message
            assert ("--cast" in (caught.value.hint or "")) == (name not in SUBBYTE)


@pytest.mark.parametrize("name", SUBBYTE)
def test_widen_refuses_stray_bits(name: str) -> None:
    """A byte that is no code of a sub-byte type is refused."""
    with pytest.raises(PolicyError, match=f"found {SUBBYTE[name]} at element 21"):
        widen(bytes([0, SUBBYTE[name]]), name, first=20)


def bit_list(data: bytes, width: int) -> list[int]:
    """Fields of `width` bits from the low end of one large little-endian integer."""
    whole = int.from_bytes(data, "little")
    return [whole >> width * i & (1 << width) - 1 for i in range(len(data) * 8 // width)]


@given(st.binary(max_size=60))
def test_four_bit_codes(data: bytes) -> None:
    """4-bit codes unpack low nibble first and pack to the same bytes."""
    codes = unpack4(data)
    assert codes.tolist() == bit_list(data, 4)
    assert pack4(codes.tobytes()).tobytes() == data


@given(st.binary(max_size=60).map(lambda data: data[: len(data) // 3 * 3]))
def test_six_bit_codes(data: bytes) -> None:
    """6-bit codes unpack from the low end of each 24 bits and pack to the same bytes."""
    codes = unpack6(data)
    assert codes.tolist() == bit_list(data, 6)
    assert pack6(codes.tobytes()).tobytes() == data


def test_packing_order() -> None:
    """The order is written down: element 0 in the low bits."""
    assert unpack4(b"\x21").tolist() == [1, 2]
    assert pack4(bytes([1, 2])).tobytes() == b"\x21"
    group = (1 | 2 << 6 | 3 << 12 | 62 << 18).to_bytes(3, "little")
    assert unpack6(group).tolist() == [1, 2, 3, 62]
    assert pack6(bytes([1, 2, 3, 62])).tobytes() == group


def test_packing_refuses_stray_bits_and_broken_groups() -> None:
    """Codes with high bits, and counts that do not fill whole bytes, are refused."""
    with pytest.raises(PolicyError, match="found 16 at element 1"):
        pack4(bytes([0, 16]))
    with pytest.raises(PolicyError, match="found 64 at element 3"):
        pack6(bytes([0, 63, 63, 64]))
    with pytest.raises(PolicyError, match="found 3 codes"):
        pack4(bytes(3))
    with pytest.raises(PolicyError, match="found 6 codes"):
        pack6(bytes(6))
    with pytest.raises(PolicyError, match="found 4 bytes"):
        unpack6(bytes(4))
