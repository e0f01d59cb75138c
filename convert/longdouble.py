"""x87 80-bit extended floats to float64, in integer arithmetic only, and the proof that 16 bytes are x87.

`np.longdouble` is never used: it is x87 on one machine, IEEE binary128 or plain float64 on another, and the
result of a conversion must not depend on where it runs. What is proof, and why: `docs/decisions/0003-long-double.md`.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, sections 4.2.2 "Floating-Point Data
Types" and 8.2.2 "Unsupported Double Extended-Precision Floating-Point Encodings"; IEEE 754-2019, section 4.3.1.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Context, Decimal
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from convert.errors import PolicyError

Buffer = bytes | bytearray | memoryview

_BIAS = 16383  # of x87 and of IEEE binary128
_RANGE = 1100  # powers of two around 1 that hold every float64, subnormals included, with room
_INTEGER_BIT = np.uint64(1 << 63)
_INFINITY = np.uint64(0x7FF << 52)
_QUIET = np.uint64(1 << 51)
_LOST_BITS = np.uint64(0x7FF)  # 64 significand bits less the 53 of float64
_ONE = np.uint64(1)
# 21 digits tell all 64-bit significands apart.
_DECIMAL = Context(prec=21, Emin=-999999, Emax=999999)


def longdouble_to_float64(
    data: Buffer,
    item_bytes: int,
    *,
    mode: Literal["exact", "round"],
    inf: bool = False,
    first: int = 0,
) -> NDArray[np.float64]:
    """Convert x87 extended floats, or refuse what does not survive.

    Items of 16 bytes must be known to be x87, see `prove_x87`; what is in their padding does not matter. Complex long
    doubles are pairs of these: pass the same buffer, and `first` counts components.

    Args:
        data: Whole elements, little-endian, any alignment; not modified.
        item_bytes: Size of an element with its padding, 12 or 16.
        mode: `exact` refuses every value that float64 does not hold exactly; `round` rounds to nearest, ties to even.
        inf: With `round`, finite values beyond float64 become infinities instead of being refused.
        first: Flat index of the chunk's first element, for messages.

    Returns:
        float64, one per element, a new array. The sign of zero is kept. NaN stays NaN: `exact` keeps payload and
        signalling bit and refuses payloads that do not fit; `round` cuts the payload and sets the quiet bit.

    Raises:
        PolicyError: A value that is not exact, or overflows. In both modes: an integer bit that contradicts the
            exponent, which no x87 produces.
    """
    sig, head = _fields(_items(data, item_bytes), first)
    exponent = (head & np.uint16(0x7FFF)).astype(np.int64)
    sign = (head >> np.uint16(15)).astype(np.uint64) << np.uint64(63)
    special = exponent == 0x7FFF
    biased = exponent - (_BIAS - 1023)

    # Subnormal results shift further right. The low four bits are folded into one sticky bit first, which changes no
    # rounding decision (at least seven more bits go) and keeps every shift below 64.
    shift = (np.clip(12 - biased, 11, 66) - 4).astype(np.uint64)
    folded = (sig >> np.uint64(4)) | ((sig & np.uint64(15)) != 0)
    kept = folded >> shift
    rest = folded & ((_ONE << shift) - _ONE)
    half = _ONE << (shift - _ONE)
    up = (rest > half) | ((rest == half) & ((kept & _ONE) == _ONE))
    # The implicit bit of `kept` adds one to the exponent; so does a carry out of the fraction, up to infinity.
    bits = ((np.clip(biased, 1, 2047) - 1).astype(np.uint64) << np.uint64(52)) + kept + up
    over = (bits >= _INFINITY) & ~special
    bits[over] = _INFINITY
    if special.any():
        fraction = (sig[special] & ~_INTEGER_BIT) >> np.uint64(11)
        if mode == "round":
            fraction[(sig[special] & ~_INTEGER_BIT) != 0] |= _QUIET
        bits[special] = _INFINITY | fraction
    result: NDArray[np.float64] = (bits | sign).view(np.float64)

    if mode == "exact":
        lost = np.where(special, (sig & _LOST_BITS) != 0, (rest != 0) | over)
        if lost.any():
            at = int(lost.argmax())
            raise PolicyError(
                f"expected long doubles that float64 holds exactly, found {_shown(sig[at], head[at])}"
                f" at element {first + at}",
                hint="--policy longdouble=round rounds to nearest; --policy longdouble=bytes keeps every bit",
            )
    elif not inf and over.any():
        at = int(over.argmax())
        raise PolicyError(
            f"expected long doubles within float64, found {_shown(sig[at], head[at])} at element {first + at}"
            " (the largest float64 is 1.7976931348623157e+308)",
            hint="--cast-overflow inf makes it an infinity; --policy longdouble=bytes keeps every bit",
        )
    return result


def prove_x87(chunks: Iterable[Buffer], item_bytes: int) -> None:
    """Refuse a tensor of 16-byte long doubles unless its bytes show that they are x87.

    Nothing else tells x87 from IEEE binary128 (Linux on aarch64) or double-double (POWER). Proof is one element that
    is an ordinary number as x87, and as binary128 would be below 2**-16382 and not zero. A tensor of zero bytes alone
    needs none: it is the same in each format.

    Args:
        chunks: All bytes of the tensor, in any order of elements; each chunk holds whole items. Not read further than
            the proof, which is the first chunk in nearly all files. Memory is a few times that of a chunk.
        item_bytes: 12 or 16. Only x87 has items of 12 bytes.

    Raises:
        PolicyError: The bytes are not x87, or do not tell. Elements after the proof are not looked at here;
            `longdouble_to_float64` refuses those that no x87 produces.
    """
    if item_bytes == 12:
        return
    first, blank = 0, True
    for chunk in chunks:
        items = _items(chunk, 16)
        sig, head = _fields(items, first)
        exponent = (head & np.uint16(0x7FFF)).astype(np.int32)
        known = (np.abs(exponent - _BIAS) <= _RANGE) | (exponent == 0x7FFF) | ((sig == 0) & (head == 0x8000))
        if (known & (items["padding"][:, 2] & np.uint16(0x7FFF) == 0)).any():
            return
        blank = blank and not np.frombuffer(chunk, np.uint8).any()
        first += sig.size
    if not blank:
        raise PolicyError(
            "expected x87 80-bit floats, found long doubles that may as well be IEEE binary128 from another platform"
            " (x87 leaves stray memory in its padding, and here that looks like part of the values)",
            hint="--policy longdouble=bytes keeps every bit; or save it as float64 where it was written",
        )


def _items(data: Buffer, item_bytes: int) -> NDArray[np.void]:
    padding = {12: "<u2", 16: "(3,)<u2"}[item_bytes]
    return np.frombuffer(data, np.dtype([("sig", "<u8"), ("head", "<u2"), ("padding", padding)]))


def _fields(items: NDArray[np.void], first: int) -> tuple[NDArray[np.uint64], NDArray[np.uint16]]:
    """Significands, and signs with exponents, of elements that x87 can produce; anything else is refused."""
    sig = items["sig"].astype(np.uint64)
    head = items["head"].astype(np.uint16)
    # The integer bit is set exactly where the exponent is not zero: no unnormals, no pseudo-denormals, -infinities,
    # -NaNs. Processors since the 80387 never produce one, and treat most as invalid.
    wrong = (sig >= _INTEGER_BIT) != ((head & np.uint16(0x7FFF)) != 0)
    if wrong.any():
        at = int(wrong.argmax())
        doubt = "; this may be IEEE binary128 from another platform" if items.itemsize == 16 else ""
        raise PolicyError(
            "expected x87 80-bit floats (integer bit set for every normal number), "
            f"found bytes {items[at].tobytes().hex()} at element {first + at}{doubt}",
            hint="--policy longdouble=bytes keeps every bit",
        )
    return sig, head


def _shown(sig: np.uint64, head: np.uint16) -> str:
    """One x87 value in decimal, with all digits that matter."""
    exponent = int(head) & 0x7FFF
    sign = "-" if int(head) >> 15 else ""
    if exponent == 0x7FFF:
        return f"{sign}nan with payload {int(sig) & (1 << 63) - 1:#x}"
    scale = _DECIMAL.power(Decimal(2), Decimal(max(exponent, 1) - _BIAS - 63))
    return f"{sign}{_DECIMAL.multiply(Decimal(int(sig)), scale)}"
