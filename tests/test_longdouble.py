"""x87 long doubles to float64: against numpy's own casts, and against exact integer arithmetic."""

from __future__ import annotations

import struct
from fractions import Fraction
from typing import Literal

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from convert.errors import PolicyError
from convert.longdouble import longdouble_to_float64

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
    assert longdouble_to_float64(data, 16, mode="exact", x87=True).tobytes() == expected
    assert longdouble_to_float64(data, 16, mode="round", x87=True).tobytes() == expected


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
    """An integer bit that contradicts the exponent is refused in both modes, even when the caller vouches for x87."""
    data = item(INTEGER_BIT, 16383, 0, size) + item(sig, exponent, 1, size)
    with pytest.raises(PolicyError, match="integer bit") as caught:
        longdouble_to_float64(data, size, mode=mode, first=40, x87=True)
    assert "at element 41" in caught.value.message
    assert ("binary128" in caught.value.message) == (size == 16)
    assert caught.value.hint is not None
    assert "longdouble=bytes" in caught.value.hint


@pytest.mark.parametrize("mode", ["exact", "round"])
@pytest.mark.parametrize("position", range(6))
def test_padding(mode: Literal["exact", "round"], position: int) -> None:
    """Padding in 16 bytes must be zero unless the caller knows that it is x87."""
    data = item(INTEGER_BIT, 16383) + item(INTEGER_BIT, 16384, padding=bytes(position) + b"\x01")
    with pytest.raises(PolicyError, match=r"zero padding.*at element 1.*binary128"):
        longdouble_to_float64(data, 16, mode=mode)
    assert longdouble_to_float64(data, 16, mode=mode, x87=True).tolist() == [1.0, 2.0]


def test_padding_of_twelve_bytes_is_ignored() -> None:
    """Twelve bytes are never binary128, and numpy leaves stray memory in the padding."""
    data = item(INTEGER_BIT, 16383, 1, 12, padding=b"\xab\xcd")
    assert longdouble_to_float64(data, 12, mode="exact").tolist() == [-1.0]


@pytest.mark.parametrize(
    "data",
    [
        bytes(14) + b"\xff\x3f",  # 1.0
        bytes(13) + b"\x80\xff\xbf",  # -1.5
        bytes.fromhex("9a99999999999999999999999999fb3f"),  # 0.1
        bytes.fromhex("5555555555555555555555555555fd3f"),  # 1/3
    ],
)
def test_binary128_is_refused(data: bytes) -> None:
    """IEEE quadruple precision is never taken for x87."""
    with pytest.raises(PolicyError, match="binary128"):
        convert(data)


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
