"""How far the values of two tensors lie apart, a few thousand elements at a time.

Every number is held as one or two float64 whose exact sum it is, so that differences of 64-bit integers and of long
doubles are not lost in rounding. `np.longdouble` is not used; `convert/longdouble.py` says why.
"""

from __future__ import annotations

import math
from decimal import Decimal
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convert import numeric
from convert.comparison import Tally, Tolerance
from convert.dtypes import DType

Buffer = bytes | bytearray | memoryview
Array = NDArray[Any]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

BLOCK = 1 << 14
"""Elements looked at together: some twenty arrays of them are in memory at once."""
_SHOWN_CHARACTERS = 60
_TINY, _HUGE = math.ulp(0.0), float(np.finfo(np.float64).max)
_NUMBERS = ("plain", "complex128", "bfloat16", "float8", "subbyte")
_REAL = (
    "float16", "bfloat16", "float32", "float64", "float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip
_TIMES = ("datetime64", "timedelta64")
_NAT = np.iinfo(np.int64).min
_X87_BYTES = 10
_NO_TOLERANCE = Tolerance(0.0, 0.0)


def is_number(dtype: DType, x87: bool) -> bool:
    """Whether elements have values that errors can be computed for; long doubles have if they are known to be x87."""
    return dtype.kind in _NUMBERS or (dtype.kind == "longdouble" and x87)


class Comparer:
    """Compares elements of two types, which are the same or both numbers.

    Args:
        a: Type on one side.
        b: Type on the other.
        tolerance: What is alike although it is not equal; it holds for numbers only. None if every bit counts.
        x87: Whether long doubles are known to be x87, and not another platform's.
    """

    def __init__(self, a: DType, b: DType, tolerance: Tolerance | None, x87: bool = False) -> None:
        self._a = a
        self._b = b
        self._tolerance = tolerance
        self._x87 = x87
        self._numbers = is_number(a, x87) and is_number(b, x87)

    def tally(self, a: Buffer, b: Buffer, first: int) -> Tally:
        """What differs between chunks of equally many whole elements.

        Args:
            a: Little-endian bytes, sub-byte types packed; not modified.
            b: Those of the other side.
            first: Number of the first element, in row-major order.
        """
        found = Tally(bits=0 if self._a == self._b else None)
        codes_a, codes_b = _codes(a, self._a, self._x87), _codes(b, self._b, self._x87)
        with np.errstate(all="ignore"):
            for begin in range(0, len(codes_a), BLOCK):
                block = self._block(codes_a[begin : begin + BLOCK], codes_b[begin : begin + BLOCK])
                if block is None:
                    continue
                if block.first is not None and found.first is None:
                    at = begin + block.first
                    block.first = first + at
                    block.first_a, block.first_b = self._texts(a, b, at)
                else:
                    block.first = None
                found.add(block)
        return found

    def _block(self, a: Array, b: Array) -> Tally | None:
        if self._a != self._b:
            return self._numbers_tally(a, b, np.arange(len(a)))
        where = np.flatnonzero((a != b).any(axis=1))
        if where.size == 0:
            return None
        if where.size < len(a):
            a, b = a[where], b[where]
        if self._numbers:
            return self._numbers_tally(a, b, where)
        if self._a.kind in _TIMES:
            return _times_tally(a, b, where)
        count = int(where.size)
        return Tally(count, count, count, first=int(where[0]))

    def _numbers_tally(self, a: Array, b: Array, where: Array) -> Tally:
        """`where` are the numbers of the elements within the block."""
        same_type = self._a == self._b
        if self._a.name in _REAL and self._b.name in _REAL:
            found = self._finite_tally(a, b, where)
            if found is not None:
                return found
        (high_a, low_a), (high_b, low_b) = _parts(a, self._a), _parts(b, self._b)
        if high_a.shape != high_b.shape:  # complex against real
            high_a, low_a, high_b, low_b = (_widened(part, len(where)) for part in (high_a, low_a, high_b, low_b))
        gaps = high_a - high_b + (low_a - low_b)
        gaps[(high_a == high_b) & (low_a == low_b)] = 0  # infinities too
        if self._a.kind == "longdouble" and same_type:
            other = (a.reshape(len(a), -1, _X87_BYTES) != b.reshape(len(b), -1, _X87_BYTES)).any(axis=2)
            zeros = (high_a == 0) & (low_a == 0) & (high_b == 0) & (low_b == 0)
            gaps[(gaps == 0) & other & ~zeros] = _TINY  # apart by less than float64 can say, or beyond its range
        gap, size = _modulus(gaps), _modulus(high_b + low_b)
        finite = np.asarray(np.isfinite(high_b).all(axis=1))
        nan_a, nan_b = np.isnan(high_a).any(axis=1), np.isnan(high_b).any(axis=1)
        one_nan = nan_a != nan_b
        apart = (gap > 0) & ~nan_a & ~nan_b
        exact = _integer_gaps(a, b, self._a) if same_type else None
        gap = gap if exact is None else exact.astype(np.float64)
        beyond = one_nan | (apart & ~self._within(gap, size, finite, exact))
        counts = beyond if self._tolerance is not None else (apart | one_nan) if not same_type else None
        first = 0 if counts is None else int(counts.argmax()) if counts.any() else None
        found = Tally(
            len(where) if same_type else None,
            int(np.count_nonzero(apart | one_nan)),
            int(np.count_nonzero(beyond)),
            int(np.count_nonzero(one_nan)),
            first=None if first is None else int(where[first]),
        )
        numbers = ~nan_a & ~nan_b
        if numbers.any():
            found.max_abs_error = float(gap[numbers].max()) if exact is None else int(exact.max())
            relative = gap[apart] / size[apart]
            relative[np.isnan(relative)] = np.inf  # an infinite b
            found.max_rel_error = float(relative.max(initial=0.0))
            if same_type:
                found.max_ulps = _ulps(a[numbers], b[numbers], self._a)
        return found

    def _finite_tally(self, a: Array, b: Array, where: Array) -> Tally | None:
        """The common case, several times as fast: real floats, all of them finite; None if they are not."""
        same_type = self._a == self._b
        gap, size = _real(a, self._a), _real(b, self._b)
        np.abs(np.subtract(gap, size, out=gap), out=gap)
        largest = float(gap.max())
        if not math.isfinite(largest):
            return None
        np.abs(size, out=size)
        count = int(np.count_nonzero(gap))
        found = Tally(len(where) if same_type else None, count, count, 0, largest)
        counts = None if same_type else gap > 0
        if self._tolerance is not None:
            counts = gap > self._tolerance.atol + self._tolerance.rtol * size
            found.beyond = int(np.count_nonzero(counts))
        if counts is None or counts.any():
            found.first = int(where[0 if counts is None else counts.argmax()])
        relative = float(np.fmax.reduce(np.divide(gap, size, out=gap)))  # 0 / 0 is NaN, which fmax passes over
        found.max_rel_error = 0.0 if math.isnan(relative) else relative
        if same_type:
            found.max_ulps = _ulps(a, b, self._a)
        return found

    def _within(self, gap: Floats, size: Floats, finite: Bools, exact: NDArray[np.uint64] | None) -> Bools:
        rtol, atol = self._tolerance or _NO_TOLERANCE
        if exact is not None and rtol == 0:
            return np.asarray(exact <= np.uint64(min(math.floor(atol), 2**64 - 1)))
        return np.asarray((gap <= atol + rtol * size) & finite)

    def _texts(self, a: Buffer, b: Buffer, at: int) -> tuple[str, str]:
        raw_a, raw_b = _element(a, self._a, at), _element(b, self._b, at)
        text_a, text_b = _text(raw_a, self._a, self._x87), _text(raw_b, self._b, self._x87)
        if text_a == text_b:
            text_a, text_b = (f"{text_a} (0x{raw[::-1].hex()})" for raw in (raw_a, raw_b))
        return text_a, text_b


def _times_tally(a: Array, b: Array, where: Array) -> Tally:
    """Dates and durations of one unit: equal or not, and how many units apart. NaT is to them what NaN is."""
    nat = (a == _NAT) | (b == _NAT)  # the bits differ, so one of the two
    count = int(where.size)
    found = Tally(count, count, count, int(np.count_nonzero(nat)), first=int(where[0]))
    if not nat.all():
        found.max_abs_error = int(_distances(a, b)[~nat].max())
    return found


def _codes(data: Buffer, dtype: DType, x87: bool) -> Array:
    """A row for each element, in which every item takes part in what the element is; padding is left out."""
    if dtype.kind == "subbyte":
        return (numeric.unpack4 if dtype.bits == 4 else numeric.unpack6)(data).reshape(-1, 1)
    if dtype.kind in _NUMBERS:
        return np.frombuffer(data, f"<u{dtype.swap}").reshape(-1, dtype.item_bytes // dtype.swap)
    if dtype.kind in _TIMES:
        return np.frombuffer(data, "<i8").reshape(-1, 1)
    rows = np.frombuffer(data, np.uint8).reshape(-1, dtype.item_bytes)
    if dtype.kind == "longdouble" and x87:
        padded = rows.reshape(len(rows), -1, dtype.swap)
        return np.ascontiguousarray(padded[:, :, :_X87_BYTES]).reshape(len(rows), -1)
    return rows[:, _field_bytes(dtype)] if dtype.fields else rows


@cache
def _field_bytes(record: DType) -> Bools:
    """Which bytes of a record are not padding."""
    covered = np.zeros(record.item_bytes, np.bool_)
    for field in record.fields:
        inner = _field_bytes(field.dtype) if field.dtype.fields else np.ones(field.dtype.item_bytes, np.bool_)
        whole = np.tile(inner, math.prod(field.shape))
        covered[field.offset : field.offset + len(whole)] |= whole
    return covered


def _parts(codes: Array, dtype: DType) -> tuple[Floats, Floats]:
    """Numbers as exact sums of two float64, the larger first; a row has two columns for a complex number."""
    name, count = dtype.name, len(codes)
    if dtype.kind == "longdouble":
        return _x87_parts(codes)
    if dtype.kind in ("bfloat16", "float8", "subbyte"):
        values: Array = numeric.widen(codes.tobytes(), name).reshape(count, 1)
    else:
        component = {"complex64": "float32", "complex128": "float64", "bool": "uint8"}.get(name, name)
        values = codes.view(component)
    if values.dtype.kind == "f" or values.itemsize < 8:
        return values.astype(np.float64), np.zeros(values.shape)
    low = np.fmod(values, values.dtype.type(1 << 32))  # of the same sign
    return (values - low).astype(np.float64), low.astype(np.float64)


def _real(codes: Array, dtype: DType) -> Floats:
    """Values of a real float type, in a new array of one axis."""
    if dtype.kind == "plain":
        return codes.reshape(-1).view(dtype.name).astype(np.float64)
    return numeric.widen(codes.tobytes(), dtype.name).astype(np.float64)


def _x87_fields(codes: Array) -> tuple[NDArray[np.uint64], NDArray[np.int64], Bools]:
    """Significands, exponents as they are stored, and signs, a column for each component."""
    parts = codes.reshape(len(codes), -1, _X87_BYTES)
    sig = np.ascontiguousarray(parts[:, :, :8]).view("<u8")[:, :, 0]
    head = np.ascontiguousarray(parts[:, :, 8:]).view("<u2")[:, :, 0].astype(np.int64)
    return sig, head & 0x7FFF, head >> 15 == 1


def _x87_parts(codes: Array) -> tuple[Floats, Floats]:
    """Beyond the range of float64 the sum is only near: never zero nor infinite if the number is not."""
    sig, exponent, negative = _x87_fields(codes)
    scale = (np.maximum(exponent, 1) - 16383 - 63).astype(np.int32)
    low_bits = sig & np.uint64(0x7FF)
    high, low = (np.ldexp(part.astype(np.float64), scale) for part in (sig - low_bits, low_bits))
    beyond = np.isinf(high) | np.isinf(low)
    high[beyond], low[beyond] = _HUGE, _HUGE
    low[(high == 0) & (low == 0) & (sig != 0)] = _TINY
    special = exponent == 0x7FFF
    high[special] = np.where(sig[special] << np.uint64(1) == 0, np.inf, np.nan)
    low[special] = 0
    return np.where(negative, -high, high), np.where(negative, -low, low)


def _widened(part: Floats, count: int) -> Floats:
    """Real numbers get imaginary parts."""
    return part if part.shape[1] == 2 else np.hstack((part, np.zeros((count, 1))))


def _modulus(parts: Floats) -> Floats:
    found: Floats = np.abs(parts[:, 0]) if parts.shape[1] == 1 else np.hypot(parts[:, 0], parts[:, 1])
    return found


def _integer_gaps(a: Array, b: Array, dtype: DType) -> NDArray[np.uint64] | None:
    """|a - b| of integers, exactly; None for other types."""
    name = {"bool": "uint8"}.get(dtype.name, dtype.name)
    if not name.startswith(("int", "uint")):
        return None
    values_a, values_b = (codes.view(name) for codes in (a, b))
    if values_a.itemsize < 8:
        values_a, values_b = values_a.astype(np.int64), values_b.astype(np.int64)
    return _distances(values_a, values_b)[:, 0]


def _distances(a: Array, b: Array) -> NDArray[np.uint64]:
    """|a - b| of 64-bit integers: what overflows wraps around to the right result."""
    return np.asarray(np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64))


def _ulps(a: Array, b: Array, dtype: DType) -> int | None:
    """The most steps between two floats, NaNs excluded: 1 for neighbours, 0 for 0.0 and -0.0."""
    if dtype.kind == "longdouble":
        return _x87_ulps(a, b)
    if not dtype.name.startswith(("float", "bfloat", "complex")):
        return None
    bits = dtype.bits if dtype.item_bytes in (0, 1) else dtype.swap * 8
    if dtype.name in _REAL:
        signed_a, signed_b = (codes.view(f"i{codes.itemsize}") for codes in (a, b))
        if ((signed_a ^ signed_b) >= 0).all():  # equal signs, as nearly always: what they count is the size
            return int((np.maximum(signed_a, signed_b) - np.minimum(signed_a, signed_b)).max())
    return int(_distances(*(_ordinals(codes, bits, dtype.name == "float8_e8m0fnu") for codes in (a, b))).max())


def _ordinals(codes: Array, bits: int, unsigned: bool) -> NDArray[np.int64]:
    """Numbers of the values in ascending order; zero has number 0."""
    if unsigned:
        return codes.astype(np.int64)
    kind = codes.dtype.type
    size = (codes & kind((1 << bits - 1) - 1)).astype(np.int64)
    return np.asarray(np.where((codes >> kind(bits - 1)) & kind(1) != 0, -size, size))


def _x87_ulps(a: Array, b: Array) -> int:
    """The largest is found in float64 and counted exactly, in integers of Python: there are 2**79 values."""
    (sig_a, exponent_a, minus_a), (sig_b, exponent_b, minus_b) = (
        tuple(part.reshape(-1) for part in _x87_fields(codes)) for codes in (a, b)
    )
    fraction_a, fraction_b = ((sig & np.uint64((1 << 63) - 1)).astype(np.int64) for sig in (sig_a, sig_b))
    apart = (exponent_a - exponent_b) * 2.0**63 + (fraction_a - fraction_b)
    total = (exponent_a + exponent_b) * 2.0**63 + fraction_a.astype(np.float64) + fraction_b
    at = int(np.where(minus_a == minus_b, np.abs(apart), total).argmax())

    def ordinal(exponent: Array, fraction: Array, minus: Array) -> int:
        size = (int(exponent[at]) << 63) + int(fraction[at])
        return -size if minus[at] else size

    return abs(ordinal(exponent_a, fraction_a, minus_a) - ordinal(exponent_b, fraction_b, minus_b))


def _element(data: Buffer, dtype: DType, at: int) -> bytes:
    """The bytes of one element; a code of its own for a sub-byte type."""
    if dtype.kind == "subbyte":
        return bytes(_codes(data, dtype, False)[at])
    return bytes(memoryview(data)[at * dtype.item_bytes : (at + 1) * dtype.item_bytes])


def _text(raw: bytes, dtype: DType, x87: bool) -> str:
    """One element for people, cut short if it is long."""
    if dtype.kind == "subbyte":
        text = str(float(numeric.widen(raw, dtype.name)[0]))
    elif dtype.kind == "longdouble" and x87:
        high, low = _x87_parts(_codes(raw, dtype, True))
        parts = [_decimal(*pair) for pair in zip(high[0].tolist(), low[0].tolist(), strict=True)]
        text = parts[0] if len(parts) == 1 else f"({parts[0]}, {parts[1]})"
    elif dtype.kind in ("V1", "V2", "void", "longdouble"):
        text = raw.hex()
    else:
        try:
            value = np.frombuffer(raw, dtype.numpy())[0]
            text = repr(value.item()) if dtype.kind in ("bytes", "str", "structured") else str(value)
        except (TypeError, ValueError):  # a code that is no character, a record numpy cannot describe
            text = raw.hex()
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def _decimal(high: float, low: float) -> str:
    """The sum with the 21 digits that tell x87 numbers apart."""
    if not math.isfinite(high) or high == low == 0:
        return str(high)
    return f"{Decimal(high) + Decimal(low):.21g}"
