"""Elementwise kernels: casts between types, float32 as a carrier of small floats, and packing of sub-byte codes.

Every function takes one chunk (whole elements, little-endian, dense, any alignment, never modified) and returns a new
C-contiguous array; memory is a few times the chunk. Rounding to bfloat16 and float8 is ml_dtypes'; what
is added here makes sure that it happens once. The arrays are in the byte order of the machine: a little-endian one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from convert.errors import PolicyError, UsageError

Buffer = bytes | bytearray | memoryview
Array = NDArray[Any]

_COMPONENT = {"complex64": "float32", "complex128": "float64"}
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_WITHOUT_INFINITY = ("float8_e4m3fn", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz")
_FLOAT8 = ("float8_e5m2", *_WITHOUT_INFINITY)
_CASTABLE = frozenset(("bool", *_INTEGERS, "float16", "bfloat16", "float32", "float64", *_FLOAT8, *_COMPONENT))
# Codes of one element, kept one per byte.
_CODE_COUNT = {"float4_e2m1fn": 16, "float6_e2m3fn": 64, "float6_e3m2fn": 64, **dict.fromkeys(_FLOAT8, 256)}
# What numpy calls the codes of types it does not have, or whose bytes must be looked at first.
_STORED = {"bool": "u1", "bfloat16": "<u2", **dict.fromkeys(_CODE_COUNT, "u1")}
_QUIET_NAN = np.uint32(0x7FC00000)
# Half-way between the smallest value of float8_e8m0fnu, 2**-127, and the 2**-128 that would come next.
_E8M0_LEAST = 1.5 * 2.0**-128


@dataclass(frozen=True)
class _Job:
    """What a refusal tells about one chunk: the two types and the first element; and whether values may overflow."""

    source: str
    target: str
    first: int
    inf: bool = False
    components: int = 1  # array items per element: 2 for complex

    def refuse(self, bad: NDArray[np.bool_], values: Array, expected: str, hint: str | None) -> None:
        """Refuse the first of `values` that is marked in `bad`, if any is."""
        if bad.any():
            at = int(bad.argmax())
            raise PolicyError(
                f"cast to {self.target}: expected {expected}, found {self.source} {values[at].item()!r}"
                f" at element {self.first + at // self.components}",
                hint=hint,
            )


def castable(source: str, target: str) -> bool:
    """Whether `cast` knows both types; a value may still be refused."""
    return source in _CASTABLE and target in _CASTABLE


def cast(data: Buffer, source: str, target: str, *, inf: bool = False, first: int = 0) -> Array:
    """Convert elements to another type, each rounded at most once, or refuse what does not survive.

    To a float: to nearest, ties to even. float8_e8m0fnu holds powers of two only, so both neighbours of a tie are odd
    and the larger is taken, as IEEE 754-2019 section 4.3.1 rules for one-digit precision and ml_dtypes and torch do.
    NaN stays NaN, its payload may change. -0.0 stays, except in the fnuz types, which have none: there it becomes 0.0,
    which IEEE 754 compares equal. To an integer or bool: only values that the target holds exactly (-0.0 is 0).
    To complex: the imaginary part is 0. From complex to real: only if all imaginary parts are 0.0 or -0.0.
    The same type gives a copy.

    Args:
        data: Whole elements of `source`.
        source: Canonical name, see `castable`.
        target: Canonical name.
        inf: Let finite values overflow to infinity, in types that have one.
        first: Flat index of the chunk's first element, for messages.

    Returns:
        Elements of `target`; for bfloat16 and float8 their codes, as uint16 and uint8 (numpy hands out no buffer of
        ml_dtypes arrays).

    Raises:
        PolicyError: Overflow without `inf`, or into a type without infinity; an infinity into such a type; zero,
            negative or too small values into float8_e8m0fnu; a value an integer or bool does not hold; an imaginary
            part into a real type; bool bytes other than 0 and 1.
        UsageError: A type that `castable` does not know.
    """
    if not castable(source, target):
        raise UsageError(f"no cast from {source} to {target} (known types: {', '.join(sorted(_CASTABLE))})")
    job = _Job(source, target, first, inf)
    if source in _COMPONENT:
        parts = _values(data, _COMPONENT[source], job)
        if target in _COMPONENT:
            return _to_real(parts, _COMPONENT[target], replace(job, components=2)).view(target)
        expected = "imaginary parts that are all zero"
        job.refuse(parts[1::2] != 0, _raw(data, source), expected, "complex64 and complex128 keep them")
        values = parts[::2]
    elif source == target and source != "bool":
        return _raw(data, source).copy()
    else:
        values = _values(data, source, job)
    if target in _COMPONENT:
        real = _to_real(values, _COMPONENT[target], job)
        out = np.zeros(real.size, target)
        out.real = real
        return out
    return _to_real(values, target, job)


def complex128_to_complex64(data: Buffer, *, exact: bool, inf: bool = False, first: int = 0) -> NDArray[np.complex64]:
    """Convert complex128 to complex64, exactly or rounded to nearest, ties to even.

    Args:
        data: Whole complex128 elements.
        exact: Refuse unless every component comes back bit for bit, NaN payloads included.
        inf: Without `exact`, let finite components overflow to infinity.
        first: Flat index of the chunk's first element, for messages.

    Returns:
        complex64, one per element.

    Raises:
        PolicyError: A component that does not come back, or that overflows.
    """
    if not exact:
        rounded: NDArray[np.complex64] = cast(data, "complex128", "complex64", inf=inf, first=first)
        return rounded
    parts = np.frombuffer(data, "<f8")
    with np.errstate(all="ignore"):
        out = parts.astype(np.float32)
        lost = out.astype(np.float64).view(np.uint64) != parts.view(np.uint64)
    if lost.any():
        at = int(lost.argmax()) // 2
        shown = complex(parts[2 * at], parts[2 * at + 1])
        raise PolicyError(
            f"expected complex128 values that complex64 holds exactly, found {shown!r} at element {first + at}",
            hint="--policy complex128=pair keeps every bit; --policy complex128=round rounds to nearest",
        )
    return out.view(np.complex64)


def _raw(data: Buffer, name: str) -> Array:
    """Elements as stored, aligned; a view of the buffer where possible."""
    return np.require(np.frombuffer(data, _STORED.get(name, name)), requirements="A")


def _values(data: Buffer, source: str, job: _Job) -> Array:
    """Elements of a real type as integers, float32 or float64 that numpy computes with; always exact."""
    if source == "bfloat16" or source in _FLOAT8:
        return widen(data, source)
    raw = _raw(data, source)
    if source == "bool":
        job.refuse(raw > 1, raw, "bytes 0 and 1", None)
    elif source == "float16":
        with np.errstate(all="ignore"):
            return raw.astype(np.float32)
    return raw


def _to_real(values: Array, target: str, job: _Job) -> Array:
    if target == "bool":
        job.refuse((values != 0) & (values != 1), values, "only 0 and 1", "cast to a wider type")
        return values.astype(np.bool_)
    return _to_integer(values, target, job) if target in _INTEGERS else _to_float(values, target, job)


def _to_integer(values: Array, target: str, job: _Job) -> Array:
    least, greatest = int(np.iinfo(target).min), int(np.iinfo(target).max)
    if values.dtype.kind == "f":
        # Both limits are powers of two, which float32 holds exactly; the largest int64 is not.
        ok = (values >= float(least)) & (values < float(greatest + 1)) & (np.trunc(values) == values)
    else:
        own = np.iinfo(values.dtype)
        ok = (values >= max(least, int(own.min))) & (values <= min(greatest, int(own.max)))
    job.refuse(~ok, values, f"whole numbers from {least} to {greatest}", "cast to a float or a wider integer")
    return values.astype(target)


def _to_float(values: Array, target: str, job: _Job) -> Array:
    """Round real values once to a float type and refuse what leaves its range."""
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, target, target))
    if target == "float8_e8m0fnu":
        expected = "positive values of at least 2**-127 (no zero and no sign)"
        job.refuse(values < _E8M0_LEAST, values, expected, "bfloat16 holds the same range and zero")
    with np.errstate(all="ignore"):
        if target in ("float64", "float32"):
            rounded = values.astype(dtype)
        elif target == "float16":
            # numpy rounds float32 and float64 to float16 once; integers go through float64.
            rounded = (values if values.dtype.kind == "f" else _exact_or_odd(values)).astype(dtype)
        else:
            # ml_dtypes casts everything through float32, and so rounds float64 and wide integers twice.
            single = _float32_to_odd(values)
            if target == "float8_e8m0fnu":
                # ml_dtypes 0.6 rounds subnormal float32 just above 2**-127 up to 2**-126.
                single = np.where(single < np.float32(1.5 * 2.0**-127), np.float32(2.0**-127), single)
            rounded = single.astype(dtype)
        beyond = ~np.isfinite(rounded)
        if beyond.any():
            finfo: Any = ml_dtypes.finfo
            expected = f"values up to {float(finfo(dtype).max)!r}"
            if target in _WITHOUT_INFINITY:
                hint = "float8_e5m2, float16 and bfloat16 have an infinity"
                job.refuse(beyond & ~np.isnan(values), values, f"{expected} (no infinity)", hint)
            elif not job.inf:
                hint = "--cast-overflow inf makes it an infinity"
                job.refuse(beyond & np.isfinite(values), values, expected, hint)
    return rounded.view(_STORED[target]) if target in _STORED else rounded


def _exact_or_odd(values: Array) -> NDArray[np.float64]:
    """Integers as float64: exact, or where 53 bits do not suffice rounded to odd.

    Round to odd takes the neighbour whose last bit is one. Rounding that again to two or more bits less equals
    rounding the exact value once (S. Boldo, G. Melquiond, "When double rounding is odd", 2005).
    """
    if values.dtype.itemsize == 8:
        wide = values.dtype.type(1 << 53)
        large = values >= wide if values.dtype.kind == "u" else (values >= wide) | (values <= -wide)
        low = values.dtype.type((1 << 11) - 1)
        odd = (values & ~low) | np.where((values & low) != 0, low + values.dtype.type(1), values.dtype.type(0))
        values = np.where(large, odd, values)
    return values.astype(np.float64)


def _float32_to_odd(values: Array) -> NDArray[np.float32]:
    """Any real values as float32: exact, or rounded to odd (see `_exact_or_odd`); never overflows to infinity."""
    if values.dtype == np.float32 or values.dtype.itemsize <= 2:
        return values.astype(np.float32, copy=False)
    exact = values if values.dtype.kind == "f" else _exact_or_odd(values)
    nearest = exact.astype(np.float32)
    back = nearest.astype(np.float64)
    bits = nearest.view(np.uint32)
    bits -= np.abs(back) > np.abs(exact)  # towards zero; from infinity to the largest float32
    bits |= back != exact
    return nearest


@cache
def _table(source: str) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """float32 bits of every code of a small type, and the code for the upper 16 of those bits.

    The upper half tells all codes apart but the NaNs, which carry their code in the lowest byte of a quiet NaN.
    """
    codes = np.arange(_CODE_COUNT[source], dtype=np.uint8)
    with np.errstate(all="ignore"):
        bits = codes.view(getattr(ml_dtypes, source)).astype(np.float32).view(np.uint32)
    bits = np.where(np.isnan(bits.view(np.float32)), _QUIET_NAN | codes.astype(np.uint32), bits)
    inverse = np.zeros(1 << 16, np.uint8)
    inverse[bits >> np.uint32(16)] = codes
    return bits, inverse


def widen(data: Buffer, source: str, *, first: int = 0) -> NDArray[np.float32]:
    """Represent a small float type in float32 so that `narrow` gives every code back, NaNs included.

    Args:
        data: Codes of bfloat16 (two bytes each), a float8, or one byte each of float4_e2m1fn, float6_e2m3fn and
            float6_e3m2fn (see `unpack4`, `unpack6`).
        source: Canonical name of the type.
        first: Flat index of the chunk's first element, for messages.

    Returns:
        float32, one per element, equal in value. A bfloat16 is the upper half of its float32, bit for bit.
        A float8 NaN is a quiet NaN with the code in its lowest byte.

    Raises:
        PolicyError: A byte that is no code of a sub-byte type.
    """
    if source == "bfloat16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    codes = np.frombuffer(data, np.uint8)
    _check_codes(codes, _CODE_COUNT[source], first)
    return _table(source)[0].take(codes, mode="clip").view(np.float32)


def narrow(data: Buffer, target: str, *, first: int = 0) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """Turn float32 made by `widen` back into codes, exactly.

    Args:
        data: Whole float32 elements.
        target: Canonical name of a type that `widen` takes.
        first: Flat index of the chunk's first element, for messages.

    Returns:
        Codes, uint16 for bfloat16, else uint8 (one per element, also for sub-byte types).

    Raises:
        PolicyError: A float32 that `widen` does not produce, and that would have to be rounded.
    """
    bits = np.frombuffer(data, "<u4")
    upper = (bits >> np.uint32(16)).astype(np.uint16)
    if target == "bfloat16":
        lost = (bits & np.uint32(0xFFFF)) != 0
        codes: NDArray[np.uint8] | NDArray[np.uint16] = upper
    else:
        table, inverse = _table(target)
        codes = np.where(upper == _QUIET_NAN >> np.uint32(16), bits.astype(np.uint8), inverse.take(upper))
        lost = table.take(codes, mode="clip") != bits
    if lost.any():
        at = int(lost.argmax())
        raise PolicyError(
            f"expected float32 values that {target} holds exactly, found {float(bits.view(np.float32)[at])!r}"
            f" (bits {int(bits[at]):#010x}) at element {first + at}",
            hint="the values changed since they were widened: leave them float32"
            + (f", or --cast float32={target} rounds them" if target in _CASTABLE else ""),
        )
    return codes


def unpack4(data: Buffer) -> NDArray[np.uint8]:
    """Split bytes into 4-bit codes, two per byte, the low nibble first.

    Source: safetensors' README packs F4 two to a byte and leaves the order open; this is the low-bits-first
    convention of `torch.float4_e2m1fn_x2`.
    """
    packed = np.frombuffer(data, np.uint8)
    return np.stack((packed & np.uint8(15), packed >> np.uint8(4)), axis=1).reshape(-1)


def pack4(data: Buffer) -> NDArray[np.uint8]:
    """Join 4-bit codes, one per byte, into half as many bytes; the inverse of `unpack4`, with the same bit order.

    Raises:
        PolicyError: A byte above 15, or an odd number of codes.
    """
    low, high = _groups(data, 16, 2)
    packed: NDArray[np.uint8] = low | (high << np.uint8(4))
    return packed


def unpack6(data: Buffer) -> NDArray[np.uint8]:
    """Split groups of three bytes into four 6-bit codes: code i is bits 6*i to 6*i+5 of the little-endian group.

    Source: safetensors' README packs F6 four to three bytes and leaves the order open; this is the low-bits-first
    convention of `torch.float4_e2m1fn_x2`.

    Raises:
        PolicyError: A number of bytes that is no multiple of 3.
    """
    packed = np.frombuffer(data, np.uint8)
    if packed.size % 3:
        raise PolicyError(f"expected groups of 3 bytes of 6-bit codes, found {packed.size} bytes")
    low, middle, high = packed.reshape(-1, 3).T
    mask = np.uint8(63)
    second = (low >> np.uint8(6)) | (middle << np.uint8(2)) & mask
    third = (middle >> np.uint8(4)) | (high << np.uint8(4)) & mask
    return np.stack((low & mask, second, third, high >> np.uint8(2)), axis=1).reshape(-1)


def pack6(data: Buffer) -> NDArray[np.uint8]:
    """Join 6-bit codes, one per byte, into three bytes for every four; the inverse of `unpack6`, same bit order.

    Raises:
        PolicyError: A byte above 63, or a number of codes that is no multiple of 4.
    """
    a, b, c, d = _groups(data, 64, 4)
    low = a | (b << np.uint8(6))
    middle = (b >> np.uint8(2)) | (c << np.uint8(4))
    high = (c >> np.uint8(4)) | (d << np.uint8(2))
    return np.stack((low, middle, high), axis=1).reshape(-1)


def _groups(data: Buffer, code_count: int, size: int) -> NDArray[np.uint8]:
    """Codes in rows: row i holds the i-th of every group."""
    codes = np.frombuffer(data, np.uint8)
    if codes.size % size:
        raise PolicyError(f"expected groups of {size} codes that fill whole bytes, found {codes.size} codes")
    _check_codes(codes, code_count, 0)
    return codes.reshape(-1, size).T


def _check_codes(codes: NDArray[np.uint8], code_count: int, first: int) -> None:
    if code_count < 256 and codes.size and int(codes.max()) >= code_count:
        at = int((codes >= code_count).argmax())
        raise PolicyError(
            f"expected codes from 0 to {code_count - 1}, found {int(codes[at])!r} at element {first + at}"
        )
