"""x87 long doubles to float64: against numpy's own casts, and against exact integer arithmetic.

The second half is about the proof that 16 bytes are x87, against IEEE binary128 and double-double made by bit
arithmetic and fractions.
"""

from __future__ import annotations

import io
import math
import random
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import convert as toolkit
from convert.errors import CorruptError, PolicyError
from convert.longdouble import longdouble_to_float64, prove_x87

from . import oracle

INTEGER_BIT = 1 << 63
MASK = INTEGER_BIT - 1
LARGEST = int(np.finfo(np.float64).max)
needs_x87 = pytest.mark.skipif(
    np.finfo(np.longdouble).nmant != 63 or np.dtype(np.longdouble).itemsize != 16,
    reason="np.longdouble is not x87 in 16 bytes here",
)


def item(sig: int, exponent: int, sign: int = 0, item_bytes: int = 16, padding: bytes = b"") -> bytes:
    return (struct.pack("<QH", sig, sign << 15 | exponent) + padding).ljust(item_bytes, b"\0")


def from_ratio(value: Fraction, item_bytes: int = 16) -> bytes:
    """The x87 normal number at or next below the magnitude of `value`."""
    sign, value = int(value < 0), abs(value)
    exponent = 16383 + 63
    while value >= 1 << 64:
        value, exponent = value / 2, exponent + 1
    while value < INTEGER_BIT:
        value, exponent = value * 2, exponent - 1
    return item(int(value), exponent, sign, item_bytes)


def convert(data: bytes, mode: Literal["exact", "round"] = "round", inf: bool = False, size: int = 16) -> int:
    """Bits of a single converted value."""
    out = longdouble_to_float64(data, size, mode=mode, inf=inf)
    assert out.dtype == np.float64
    assert out.shape == (1,)
    return int(out.view(np.uint64)[0])


def bits(value: float) -> int:
    return int.from_bytes(struct.pack("<d", value), "little")


def rounded(sig: int, exponent: int, sign: int) -> int | None:
    """float64 bits of a finite x87 value by Python integers and fractions alone, None if it overflows."""
    value = Fraction(sig) * Fraction(2) ** (max(exponent, 1) - 16383 - 63)
    # Spacing of float64 around the value: never below 2**-1074.
    spacing = max(max(exponent, 1) - 16383 - 52, -1074)
    steps = round(value / Fraction(2) ** spacing)  # Fraction rounds halves to even
    result = steps * Fraction(2) ** spacing
    if result > LARGEST:
        return None
    return sign << 63 | bits(float(result))


x87 = st.tuples(
    st.one_of(
        st.integers(0, MASK),
        st.sampled_from([0, 1, 1 << 10, (1 << 10) + 1, (1 << 10) - 1, 3 << 10, MASK, MASK - (1 << 10), MASK - 0x7FF]),
        st.integers(0, (1 << 52) - 1).map(lambda fraction: fraction << 11),
        st.integers(0, (1 << 52) - 1).map(lambda fraction: fraction << 11 | 1 << 10),
    ),
    st.one_of(st.integers(0, 0x7FFE), st.integers(15300, 15362), st.integers(17400, 17410), st.integers(16380, 16390)),
    st.integers(0, 1),
)


@given(x87, st.sampled_from([12, 16]))
@example((0, 15360 - 52, 0), 16)
@example((MASK, 17406, 1), 12)
def test_every_finite_value_is_rounded_once(parts: tuple[int, int, int], size: int) -> None:
    """Finite values go to the nearest float64, ties to even; overflow is refused or infinite; exact means exact."""
    fraction, exponent, sign = parts
    sig = fraction | (INTEGER_BIT if exponent else 0)
    data = item(sig, exponent, sign, size)
    expected = rounded(sig, exponent, sign)
    if expected is None:
        with pytest.raises(PolicyError, match="within float64"):
            convert(data, size=size)
        assert convert(data, inf=True, size=size) == sign << 63 | bits(float("inf"))
    else:
        assert convert(data, size=size) == expected
        magnitude = struct.unpack("<d", struct.pack("<Q", expected & MASK))[0]
        if Fraction(magnitude) == Fraction(sig) * Fraction(2) ** (max(exponent, 1) - 16383 - 63):
            assert convert(data, "exact", size=size) == expected
            return
    with pytest.raises(PolicyError, match="holds exactly"):
        convert(data, "exact", size=size)


@needs_x87
@pytest.mark.parametrize("seed", range(3))
def test_random_patterns_equal_numpys_casts(seed: int) -> None:
    """Rounding equals the processor's own, NaNs included, on patterns dense around the limits of float64."""
    rng = np.random.default_rng(seed)
    count = 50_000
    near = np.where(rng.random(count) < 0.5, rng.integers(15290, 15370, count), rng.integers(17390, 17412, count))
    exponent = np.where(rng.random(count) < 0.5, near, rng.integers(0, 1 << 15, count))
    exponent[:1000] = 0x7FFF
    sig = rng.integers(0, INTEGER_BIT, count, dtype=np.uint64)
    sig[::3] &= np.uint64(MASK - 0x3FF)
    sig[::5] &= np.uint64(MASK - 0x7FF)
    sig[::7] = np.uint64(MASK) - (sig[::7] & np.uint64(0xFFF))
    items = np.zeros(count, np.dtype([("sig", "<u8"), ("head", "<u2"), ("padding", "<u2", 3)]))
    items["sig"] = sig | np.where(exponent != 0, np.uint64(INTEGER_BIT), np.uint64(0))
    items["head"] = exponent | rng.integers(0, 2, count) << 15
    data = items.tobytes()
    ours = longdouble_to_float64(data, 16, mode="round", inf=True)
    with np.errstate(all="ignore"):
        numpys = np.frombuffer(data, np.longdouble).astype(np.float64)
    assert ours.tobytes() == numpys.tobytes()


@needs_x87
@given(st.lists(st.floats(width=64), max_size=20))
def test_float64_values_come_back_bit_for_bit(values: list[float]) -> None:
    """What was a float64 before it became a long double is the same float64 afterwards, in both modes."""
    with np.errstate(all="ignore"):
        before = np.array(values, np.float64).astype(np.longdouble)
        expected = before.astype(np.float64).tobytes()  # numpy quiets signalling NaNs on the way
    data = before.tobytes()
    assert longdouble_to_float64(data, 16, mode="exact").tobytes() == expected
    assert longdouble_to_float64(data, 16, mode="round").tobytes() == expected


TINY = Fraction(1, 1 << 1074)
ULP = Fraction(1 << 971)
EPSILON = Fraction(1, 1 << 1110)


@pytest.mark.parametrize("size", [12, 16])
@pytest.mark.parametrize(
    ("value", "expected", "exact"),
    [
        (Fraction(LARGEST), float(LARGEST), True),
        (-Fraction(LARGEST), -float(LARGEST), True),
        (LARGEST + ULP / 4, float(LARGEST), False),
        (LARGEST + ULP / 2, float("inf"), False),
        (LARGEST + ULP, float("inf"), False),
        (Fraction(2) ** 16000, float("inf"), False),
        (Fraction(1) + Fraction(1, 1 << 53), 1.0, False),
        (Fraction(1) + Fraction(3, 1 << 53), 1 + 2.0**-51, False),
        (Fraction(1) + Fraction(1, 1 << 53) + Fraction(1, 1 << 63), 1 + 2.0**-52, False),
        (Fraction(2) - Fraction(1, 1 << 63), 2.0, False),
        (TINY, 5e-324, True),
        (-TINY, -5e-324, True),
        (TINY / 2, 0.0, False),
        (TINY / 2 + EPSILON, 5e-324, False),
        (TINY / 2 - EPSILON, 0.0, False),
        (TINY * 3 / 2, 1e-323, False),
        (TINY * 5 / 2, 1e-323, False),
        (-TINY / 4, -0.0, False),
        (Fraction(1, 1 << 1022) - TINY / 2, 2.0**-1022, False),
        (Fraction(1, 1 << 1022) - TINY, 2.0**-1022 - 5e-324, True),
        (Fraction(1, 1 << 16000), 0.0, False),
    ],
)
def test_edges(size: int, value: Fraction, expected: float, exact: bool) -> None:
    """Halves, the largest and the smallest values round as IEEE 754 says and are exact only when they are."""
    data = from_ratio(value, size)
    assert convert(data, inf=True, size=size) == bits(expected)
    if exact:
        assert convert(data, "exact", size=size) == bits(expected)
    else:
        with pytest.raises(PolicyError, match="at element 0"):
            convert(data, "exact", size=size)


@pytest.mark.parametrize("mode", ["exact", "round"])
@pytest.mark.parametrize("size", [12, 16])
def test_zeros_and_infinities(mode: Literal["exact", "round"], size: int) -> None:
    """Both zeros and both infinities keep their sign; an infinity is no overflow."""
    for sign, text in ((0, ""), (1, "-")):
        assert convert(item(0, 0, sign, size), mode, size=size) == bits(float(text + "0"))
        assert convert(item(INTEGER_BIT, 0x7FFF, sign, size), mode, size=size) == bits(float(text + "inf"))


@given(st.integers(1, (1 << 52) - 1), st.integers(0, 1), st.integers(0, 0x7FF))
def test_nan_payloads(payload: int, sign: int, low: int) -> None:
    """Exact keeps payload and signalling bit or refuses; round gives a quiet NaN with what fits of the payload."""
    data = item(INTEGER_BIT | payload << 11 | low, 0x7FFF, sign)
    nan = sign << 63 | 0x7FF << 52 | payload
    assert convert(data) == nan | 1 << 51
    if low == 0:
        assert convert(data, "exact") == nan
    else:
        with pytest.raises(PolicyError, match="nan with payload"):
            convert(data, "exact")


def test_nan_whose_payload_is_all_cut_off_stays_nan() -> None:
    """A signalling NaN with low payload bits only does not become an infinity."""
    assert convert(item(INTEGER_BIT | 1, 0x7FFF)) == 0x7FF8 << 48


@pytest.mark.parametrize("mode", ["exact", "round"])
@pytest.mark.parametrize("size", [12, 16])
@pytest.mark.parametrize(
    ("sig", "exponent"),
    [(0, 16383), (1 << 62, 16383), (0, 1), (0, 0x7FFF), (1 << 62, 0x7FFF), (INTEGER_BIT, 0), (INTEGER_BIT | 1, 0)],
    ids=["unnormal 0", "unnormal", "least unnormal", "pseudo-infinity", "pseudo-NaN", "pseudo-denormal", "pseudo-2"],
)
def test_patterns_no_x87_makes_are_refused(mode: Literal["exact", "round"], size: int, sig: int, exponent: int) -> None:
    """An integer bit that contradicts the exponent is refused in both modes."""
    data = item(INTEGER_BIT, 16383, 0, size) + item(sig, exponent, 1, size)
    with pytest.raises(PolicyError, match="integer bit") as caught:
        longdouble_to_float64(data, size, mode=mode, first=40)
    assert "at element 41" in caught.value.message
    assert ("binary128" in caught.value.message) == (size == 16)
    assert caught.value.hint is not None
    assert "longdouble=bytes" in caught.value.hint


@pytest.mark.parametrize("mode", ["exact", "round"])
@pytest.mark.parametrize("size", [12, 16])
def test_padding_is_ignored(mode: Literal["exact", "round"], size: int) -> None:
    """The conversion takes what is in the padding for nothing."""
    data = item(INTEGER_BIT, 16383, 1, size, padding=b"\xab\xcd\xef\x01\xff\x3f"[: size - 10])
    assert longdouble_to_float64(data, size, mode=mode).tolist() == [-1.0]


def test_messages_name_value_and_element() -> None:
    """A refusal shows the value in full, its flat index, and the policies that help."""
    data = item(INTEGER_BIT, 16383) + item(INTEGER_BIT | 1, 16383, 1) + item(INTEGER_BIT, 20000)
    with pytest.raises(PolicyError) as caught:
        longdouble_to_float64(data, 16, mode="exact", first=10)
    assert "found -1.00000000000000000011 at element 11" in caught.value.message
    assert caught.value.hint is not None
    assert "--policy longdouble=round" in caught.value.hint
    assert "--policy longdouble=bytes" in caught.value.hint
    with pytest.raises(PolicyError) as caught:
        longdouble_to_float64(data, 16, mode="round", first=10)
    assert "at element 12" in caught.value.message
    assert "--cast-overflow inf" in (caught.value.hint or "")
    assert longdouble_to_float64(data, 16, mode="round", inf=True).tolist() == [1.0, -1.0, float("inf")]


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
@pytest.mark.parametrize("size", [12, 16])
def test_any_buffer_at_any_alignment(offset: int, size: int) -> None:
    """bytes, bytearray and unaligned memoryviews give the same, and are left as they were; empty gives empty."""
    data = b"".join(from_ratio(Fraction(n, 7), size) for n in range(1, 9))
    expected = np.arange(1, 9) / 7
    holder = bytearray(bytes(offset) + data)
    view = memoryview(holder)[offset:]
    assert longdouble_to_float64(view, size, mode="round").tolist() == expected.tolist()
    assert longdouble_to_float64(bytearray(data), size, mode="round").tolist() == expected.tolist()
    assert bytes(view) == data
    assert longdouble_to_float64(b"", size, mode="exact").shape == (0,)


# The proof that 16-byte items are x87.

Array = np.ndarray[Any, Any]
FLOATS = np.random.default_rng(3).standard_normal(2000)


def binary128(values: Array) -> bytes:
    """IEEE quadruple precision of float64 values (no subnormals), bit for bit."""
    source = np.ascontiguousarray(values, np.float64).reshape(-1).view(np.uint64)
    exponent, fraction = source >> np.uint64(52) & np.uint64(0x7FF), source & np.uint64((1 << 52) - 1)
    assert not ((exponent == 0) & (fraction != 0)).any()
    wide = np.where(exponent == 0, 0, np.where(exponent == 0x7FF, 0x7FFF, exponent + np.uint64(16383 - 1023)))
    high = source >> np.uint64(63) << np.uint64(63) | wide.astype(np.uint64) << np.uint64(48) | fraction >> np.uint64(4)
    return np.stack((fraction << np.uint64(60), high), axis=1).astype("<u8").tobytes()


def quad(value: Fraction) -> bytes:
    """IEEE quadruple precision of any normal value, rounded to nearest even: as if computed in it."""
    if value == 0:
        return bytes(16)
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    significand = round(size / Fraction(2) ** (exponent - 112))
    if significand == 1 << 113:
        significand, exponent = significand >> 1, exponent + 1
    return ((value < 0) << 127 | exponent + 16383 << 112 | significand - (1 << 112)).to_bytes(16, "little")


def test_binary128_by_two_ways_is_the_same() -> None:
    """The two encoders of these tests agree, and on values known from elsewhere."""
    assert binary128(FLOATS) == b"".join(quad(Fraction(value)) for value in FLOATS)
    assert binary128(np.array([1.0, -2.0])).hex() == "0" * 28 + "ff3f" + "0" * 28 + "00c0"
    assert quad(Fraction(1, 10)).hex() == "9a99999999999999999999999999fb3f"


def x87_of(values: Array, padding: bytes | Array = bytes(6)) -> bytes:
    """x87 of float64 values (no subnormals), every element with the same padding, or each with its own."""
    source = np.ascontiguousarray(values, np.float64).reshape(-1).view(np.uint64)
    exponent, fraction = source >> np.uint64(52) & np.uint64(0x7FF), source & np.uint64((1 << 52) - 1)
    wide = np.where(exponent == 0, 0, np.where(exponent == 0x7FF, 0x7FFF, exponent + np.uint64(16383 - 1023)))
    items = np.zeros(source.size, np.dtype([("sig", "<u8"), ("head", "<u2"), ("padding", "u1", 6)]))
    items["sig"] = np.where(exponent == 0, 0, np.uint64(INTEGER_BIT) | fraction << np.uint64(11))
    items["head"] = source >> np.uint64(63) << np.uint64(15) | wide.astype(np.uint64)
    items["padding"] = np.frombuffer(padding, np.uint8) if isinstance(padding, bytes) else padding
    return items.tobytes()


POINTER = bytes.fromhex("7f5512340000")
"""The upper bytes of an address on x86-64, in which the two highest are zero."""
STALE: Array = FLOATS.view(np.uint8).reshape(-1, 8)[:, 2:]
"""The upper bytes of float64 values, as an earlier array leaves them: they read like a sign and exponent."""


def proven(data: bytes, chunk_bytes: int = 1 << 20) -> bool:
    try:
        prove_x87((data[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes)), 16)
    except PolicyError:
        return False
    return True


SHAPES: dict[str, Callable[[int], Array]] = {
    "zeros": np.zeros,
    "minus zeros": lambda n: -np.zeros(n),
    "ones": np.ones,
    "halves": lambda n: np.full(n, -0.5),
    "constant": lambda n: np.full(n, 0.1),
    "third": lambda n: np.full(n, 2 / 3),
    "integers": lambda n: np.arange(1.0, n + 1),
    "large integers": lambda n: np.arange(2.0**52, 2.0**52 + n),
    "linspace": lambda n: np.linspace(0, 1, n),
    "random": lambda n: FLOATS[:n],
    "float32": lambda n: FLOATS[:n].astype(np.float32).astype(np.float64),
    "small": lambda n: FLOATS[:n] * 1e-300,
    "large": lambda n: FLOATS[:n] * 1e300,
    "infinities": lambda n: np.full(n, -np.inf),
    "nans": lambda n: np.full(n, np.nan),
    "mixed": lambda n: np.where(np.arange(n) % 3, FLOATS[:n], 0),
}
SIZES = [*range(1, 10), 100, 2000]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SHAPES)
def test_binary128_of_float64_is_never_taken_for_x87(name: str, size: int) -> None:
    """Refused whatever the values, but for zeros, whose bytes are the same in each format."""
    assert proven(binary128(SHAPES[name](size))) == (name == "zeros" or (name in ("linspace", "mixed") and size == 1))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("padding", [bytes(6), POINTER], ids=["clean", "pointer"])
def test_x87_with_clean_or_tiny_padding_is_proven(name: str, size: int, padding: bytes) -> None:
    """Any one ordinary value is proof where the padding reads as the least of exponents; +0.0 is none."""
    values = SHAPES[name](size)
    only_zeros = not values.view(np.uint64).any()
    assert proven(x87_of(values, padding)) == (not only_zeros or padding == bytes(6))
    if not only_zeros:
        for mode in ("exact", "round"):
            back = longdouble_to_float64(x87_of(values, padding), 16, mode=mode)
            assert back.tobytes() == np.ascontiguousarray(values).tobytes()


def test_one_proof_is_enough() -> None:
    """Where the padding of all others reads like a value, one element settles it, wherever it is."""
    padding = STALE[:100].copy()
    assert not proven(x87_of(FLOATS[:100], padding))
    for at in (0, 57, 99):
        clean = padding.copy()
        clean[at] = 0
        for chunk_bytes in (16, 48, 1 << 20):
            assert proven(x87_of(FLOATS[:100], clean), chunk_bytes)


@pytest.mark.parametrize("field", [1, 16383 - 1100, 16383, 16383 + 1100, 16383 + 5000, 0x7FFE, 0x7FFF])
@pytest.mark.parametrize("sign", [0, 0x8000])
def test_what_the_last_bytes_say_as_binary128(field: int, sign: int) -> None:
    """Only an exponent of zero is proof: values beyond float64 are what people take quadruple precision for."""
    assert not proven(x87_of(np.array([0.1]), POINTER[:4] + (sign | field).to_bytes(2, "little")))
    assert proven(x87_of(np.array([0.1]), POINTER[:4] + sign.to_bytes(2, "little")))


@pytest.mark.parametrize(
    ("sig", "exponent", "sign", "proof"),
    [
        (INTEGER_BIT, 16383 - 1100, 0, True),
        (INTEGER_BIT, 16383 - 1101, 0, False),
        (INTEGER_BIT | 5, 16383 + 1100, 1, True),
        (INTEGER_BIT | 5, 16383 + 1101, 1, False),
        (INTEGER_BIT, 0x7FFF, 0, True),
        (INTEGER_BIT | 1 << 62, 0x7FFF, 1, True),
        (0, 0, 1, True),
        (1, 0, 1, False),
        (1, 0, 0, False),
        (1 << 62, 0, 0, False),
    ],
)
def test_only_ordinary_values_are_proof(sig: int, exponent: int, sign: int, proof: bool) -> None:
    """Infinities, NaNs and -0.0 are; values beyond float64 are not, as other formats might hold them by accident."""
    assert proven(item(sig, exponent, sign)) == proof


def test_values_beyond_float64_are_converted_once_there_is_proof() -> None:
    """They are refused as what they are, not as another format."""
    data = item(INTEGER_BIT, 16383) + item(INTEGER_BIT, 20000) + item(1, 0)
    assert proven(data)
    assert longdouble_to_float64(data, 16, mode="round", inf=True).tolist() == [1.0, math.inf, 0.0]


def families() -> Iterator[tuple[str, list[Fraction]]]:
    """What people compute in quadruple precision: bits that repeat, that hardly differ, or that are random."""
    rng = random.Random(5)
    for _ in range(150):
        n = rng.randrange(1, 25)
        base, jitter = Fraction(rng.uniform(-5, 5)), Fraction(10) ** -rng.randrange(1, 12)
        divisor, start, offset = rng.randrange(3, 300), rng.randrange(10**9, 2 * 10**9), Fraction(rng.random())
        near = Fraction(rng.random()) / (1 << rng.randrange(60))
        yield "fractions", [Fraction(k, divisor) for k in range(1, n + 1)]
        yield "linspace", [base + Fraction(k, divisor) for k in range(n)]
        yield "close together", [base + near * k / n for k in range(n)]
        yield "times with jitter", [start + k + offset + jitter * Fraction(rng.random()) for k in range(n)]
        yield "nanoseconds", [Fraction(round((start + k + offset) * 10**9), 10**9) for k in range(n)]
        yield "integers", [Fraction(rng.randrange(1, 2**63)) for _ in range(n)]
        yield "products", [Fraction(rng.random()) * base for _ in range(n)]
        yield "roots", [Fraction(math.isqrt((divisor + k) << 240), 1 << 120) for k in range(n)]
        yield "decays", [Fraction(1, divisor) ** (k * 19) for k in range(1, min(n, 20))] or [base]
        yield "random", [Fraction(rng.getrandbits(113) | 1, 1 << 113) for _ in range(n)]


def test_binary128_computed_natively_is_never_taken_for_x87() -> None:
    """Nor values that need all bits of it: a count of elements that look like x87 would be fooled by some of these."""
    fooled = {name for name, values in families() if proven(b"".join(map(quad, values)))}
    assert fooled == set()


@pytest.mark.parametrize("size", [1, 2, 7, 100, 2000])
def test_double_double_is_never_taken_for_x87(size: int) -> None:
    """Two float64, the second the rest of the first, as POWER has it: with rest and without, of either sign."""
    high = FLOATS[:size]
    rest = high * 2.0**-54 * FLOATS[::-1][:size] / np.abs(FLOATS).max()
    for first, second in ((high, rest), (-np.abs(high), rest), (np.abs(high), rest * 0), (high, rest * -0.0)):
        assert not proven(np.stack((first, second), axis=1).astype("<f8").tobytes())


def test_what_no_x87_makes_is_refused_by_its_place() -> None:
    """A first half of binary128 that contradicts x87 is named, with its element, across chunks."""
    data = x87_of(FLOATS[:3], STALE[:3]) + quad(Fraction(1, 3))
    with pytest.raises(PolicyError, match=r"integer bit.*at element 3; this may be IEEE binary128") as caught:
        prove_x87((data[at : at + 16] for at in range(0, 64, 16)), 16)
    assert "longdouble=bytes" in (caught.value.hint or "")


def test_the_refusal_says_what_to_do() -> None:
    """The message names both formats and why the bytes do not tell; the hint keeps them."""
    with pytest.raises(PolicyError, match=r"IEEE binary128.*stray memory") as caught:
        prove_x87([binary128(np.ones(3))], 16)
    assert "longdouble=bytes" in (caught.value.hint or "")


def test_nothing_is_read_that_need_not_be() -> None:
    """Reading stops at the proof, and twelve bytes need none; no bytes at all are fine."""

    def chunks() -> Iterator[bytes]:
        yield x87_of(FLOATS[:8])
        raise AssertionError("read on")

    prove_x87(chunks(), 16)
    prove_x87((pytest.fail("read") for _ in range(1)), 12)
    prove_x87([], 16)


def test_memory_is_bounded_where_the_whole_tensor_is_read() -> None:
    """Zeros with dirty padding are read to the end, chunk by chunk."""
    chunk = x87_of(np.zeros(1 << 16), STALE[:1])
    tracemalloc.start()
    try:
        with pytest.raises(PolicyError):
            prove_x87((chunk for _ in range(32)), 16)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


REAL: dict[str, Callable[[int], Array]] = {
    "array of floats": lambda n: np.array(FLOATS[:n].tolist(), np.longdouble),
    "array of integers": lambda n: np.array(list(range(1, n + 1)), np.longdouble),
    "astype": lambda n: FLOATS[:n].astype(np.longdouble),
    "linspace": lambda n: np.linspace(np.longdouble(1), np.longdouble(2), n),
    "sqrt": lambda n: np.sqrt(np.arange(1, n + 1, dtype=np.longdouble)),
    "zeros plus one": lambda n: np.zeros(n, np.longdouble) + 1,
    "sum": lambda n: FLOATS[:n].astype(np.longdouble) + FLOATS[n : 2 * n],
    "full": lambda n: np.full(n, 0.5, np.longdouble),
}


def padded(array: Array, padding: bytes | Array) -> Array:
    """A copy whose padding is given, not left to chance."""
    copy = np.zeros(array.shape, array.dtype)
    copy[...] = array
    raw = copy.reshape(-1).view(np.uint8).reshape(-1, 16)
    raw[:, 10:] = np.frombuffer(padding, np.uint8) if isinstance(padding, bytes) else padding
    return copy


@needs_x87
@pytest.mark.parametrize("size", [*range(1, 8), 100, 1000])
@pytest.mark.parametrize("name", REAL)
def test_arrays_of_numpy_are_right_or_refused(name: str, size: int) -> None:
    """Proven and rounded as numpy does where the padding tells; refused only where all of it reads like values."""
    array = REAL[name](size)
    expected = array.astype(np.float64).tobytes()
    one_clean = STALE[:size].copy()
    one_clean[size // 2] = 0
    for padding in (bytes(6), POINTER, one_clean):
        data = padded(array, padding).tobytes()
        prove_x87([data], 16)
        assert longdouble_to_float64(data, 16, mode="round").tobytes() == expected
    assert not proven(padded(array, STALE[:size]).tobytes())
    # As it came: what is in its padding is chance, so it may be refused, but is never wrong.
    raw = array.tobytes()
    assert longdouble_to_float64(raw, 16, mode="round").tobytes() == expected
    high = np.frombuffer(raw, "<u2").reshape(-1, 8)[:, 7]
    assert proven(raw) == bool((high & 0x7FFF == 0).any())


# Through the whole toolkit.


def npy(data: bytes, shape: tuple[int, ...], descr: str = "<f16", *, fortran: bool = False) -> bytes:
    out = io.BytesIO()
    header: dict[str, Any] = {"descr": descr, "fortran_order": fortran, "shape": shape}
    np.lib.format.write_array_header_1_0(out, header)
    return out.getvalue() + data


def saved(path: Path, arrays: dict[str, bytes]) -> Path:
    """A .npy of one array, or a .npz, deflated if its name says so."""
    if path.suffix == ".npy":
        path.write_bytes(arrays["w"])
    else:
        with zipfile.ZipFile(
            path, "w", zipfile.ZIP_DEFLATED if "deflated" in path.name else zipfile.ZIP_STORED
        ) as file:
            for name, data in arrays.items():
                file.writestr(f"{name}.npy", data)
    return path


FILES = ["w.npy", "stored.npz", "deflated.npz"]


def converted(source: Path, action: str) -> dict[str, oracle.Entry]:
    target = source.with_name("out.safetensors")
    toolkit.convert_file(source, target, policy=toolkit.Policy.parse([action]), overwrite=True)
    return oracle.read_safetensors(target)[1]


@pytest.mark.parametrize("action", ["longdouble=exact", "longdouble=round"])
@pytest.mark.parametrize("fortran", [False, True])
@pytest.mark.parametrize("file", FILES)
def test_files_of_x87_are_converted(file: str, fortran: bool, action: str, tmp_path: Path) -> None:
    """The one proof is far behind the first chunk, amid stray memory."""
    values = np.where(np.arange(120_000) % 5, np.resize(FLOATS, 120_000), 0).reshape(300, 400)
    padding = np.resize(STALE, (120_000, 6)).copy()
    padding[100_001] = 0
    data = x87_of(values.T if fortran else values, padding)
    tensors = converted(saved(tmp_path / file, {"w": npy(data, (300, 400), fortran=fortran)}), action)
    assert tensors == {"w": ("F64", (300, 400), values.tobytes())}


@pytest.mark.parametrize("action", ["longdouble=exact", "longdouble=round"])
@pytest.mark.parametrize("fortran", [False, True])
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "zeros"])
@pytest.mark.parametrize("file", FILES)
def test_files_of_binary128_are_refused(file: str, name: str, fortran: bool, action: str, tmp_path: Path) -> None:
    """All such tensors of a file are named at once, nothing is written, and the bytes can be had."""
    data = npy(binary128(SHAPES[name](12)), (3, 4), fortran=fortran)
    source = saved(tmp_path / file, {"w": data, "v": data})
    with pytest.raises(PolicyError, match="longdouble=bytes") as caught:
        converted(source, action)
    names = {problem.tensor for problem in caught.value.problems}
    assert names == ({"w"} if file == "w.npy" else {"w", "v"})
    assert list(tmp_path.iterdir()) == [source]
    code, shape, kept = converted(source, "longdouble=bytes")["w"]
    assert (code, shape) == ("U8", (3, 4, 16))
    stored = np.frombuffer(data[-192:], np.uint8).reshape((4, 3, 16) if fortran else (3, 4, 16))
    assert kept == (stored.transpose(1, 0, 2) if fortran else stored).tobytes()


@pytest.mark.parametrize("file", FILES)
def test_zeros_are_zeros_in_each_format(file: str, tmp_path: Path) -> None:
    """Nothing needs to be proven where every byte of every chunk is zero, nor where there is none."""
    assert proven(bytes(48), 16)
    assert not proven(binary128(np.array([1.0, 0.0])), 16)
    assert not proven(binary128(np.array([0.0, 1.0])), 16)
    for shape in ((3, 4), (0, 4)):
        source = saved(tmp_path / file, {"w": npy(bytes(16 * math.prod(shape)), shape)})
        assert converted(source, "longdouble=exact") == {"w": ("F64", shape, bytes(8 * math.prod(shape)))}


def test_complex_and_fields_are_proven_too(tmp_path: Path) -> None:
    """Pairs of long doubles, and long doubles inside records, whose neighbours say nothing about them."""
    good, bad = x87_of(FLOATS[:4]), binary128(np.ones(4))
    kinds = ["longdouble=exact", "complex128=pair", "structured=split"]
    policy = toolkit.Policy.parse(kinds)
    fields: Any = [("a", "<f16"), ("b", "<f8")]
    for data, fine in ((good, True), (bad, False)):
        record = np.zeros(4, [("a", "V16"), ("b", "<f8")])
        record["a"] = np.frombuffer(data, "V16")
        record["b"] = 2.0**-500
        for name, content in (("c", npy(data, (2,), "<c32")), ("r", npy(record.tobytes(), (4,), fields))):
            (tmp_path / "in.npy").write_bytes(content)
            target = tmp_path / f"{name}.safetensors"
            if not fine:
                with pytest.raises(PolicyError, match="binary128"):
                    toolkit.convert_file(tmp_path / "in.npy", target, policy=policy, overwrite=True)
                continue
            toolkit.convert_file(tmp_path / "in.npy", target, policy=policy)
            tensors = oracle.read_safetensors(target)[1]
            assert tensors["in" if name == "c" else "in.a"][2] == FLOATS[:4].tobytes()


def test_damage_behind_the_proof_is_still_found(tmp_path: Path) -> None:
    """Bytes no x87 makes, and a wrong checksum, end the conversion although the plan did not read that far."""
    many = x87_of(np.resize(FLOATS, 100_000))
    source = saved(tmp_path / "w.npy", {"w": npy(many + item(0, 16383), (100_001,))})
    with pytest.raises(PolicyError, match=r"integer bit.*at element 100000"):
        converted(source, "longdouble=round")
    archive = saved(tmp_path / "stored.npz", {"w": npy(many, (100_000,))})
    content = bytearray(archive.read_bytes())
    content[-1000] ^= 1
    archive.write_bytes(content)
    with pytest.raises(CorruptError, match="CRC-32"):
        converted(archive, "longdouble=round")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stored.npz", "w.npy"]
