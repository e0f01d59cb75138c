"""x87 80-bit extended floats to float64, in integer arithmetic only.

`np.longdouble` is never used: it is x87 on one machine, IEEE binary128 or plain float64 on another, and the
result of a conversion must not depend on where it runs.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, sections 4.2.2 "Floating-Point Data
Types" and 8.2.2 "Unsupported Double Extended-Precision Floating-Point Encodings"; IEEE 754-2019, section 4.3.1.
"""

from __future__ import annotations

from decimal import Context, Decimal
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from convert.errors import PolicyError

Buffer = bytes | bytearray | memoryview

_EXPONENT_SHIFT = 16383 - 1023  # x87 bias minus float64 bias
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
    x87: bool = False,
) -> NDArray[np.float64]:
    """Convert x87 extended floats, or refuse what does not survive.

    Complex long doubles are pairs of these: pass the same buffer, and `first` counts components.

    Args:
        data: Whole elements, little-endian, any alignment; not modified.
        item_bytes: Size of an element with its padding, 12 or 16.
        mode: `exact` refuses every value that float64 does not hold exactly; `round` rounds to nearest, ties to even.
        inf: With `round`, finite values beyond float64 become infinities instead of being refused.
        first: Flat index of the chunk's first element, for messages.
        x87: The caller knows that the 16-byte items are x87, so padding may hold anything. (IEEE binary128 never
            has 12 bytes: there padding is ignored anyway.)

    Returns:
        float64, one per element, a new array. The sign of zero is kept. NaN stays NaN: `exact` keeps payload and
        signalling bit and refuses payloads that do not fit; `round` cuts the payload and sets the quiet bit.

    Raises:
        PolicyError: A value that is not exact, or overflows. In both modes: an integer bit that contradicts the
            exponent, which no x87 produces; 16-byte items with padding that is not zero, without `x87`. Both may be
            IEEE binary128. numpy 2.4 leaves whatever was in memory in the padding of most arrays it computes.
    """
    sig, head = _fields(data, item_bytes, first, x87)
    exponent = (head & np.uint16(0x7FFF)).astype(np.int64)
    sign = (head >> np.uint16(15)).astype(np.uint64) << np.uint64(63)
    special = exponent == 0x7FFF
    biased = exponent - _EXPONENT_SHIFT

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


def _fields(data: Buffer, item_bytes: int, first: int, x87: bool) -> tuple[NDArray[np.uint64], NDArray[np.uint16]]:
    """Significands, and signs with exponents, of data that can only be x87; anything else is refused."""
    padding = {12: "<u2", 16: "(3,)<u2"}[item_bytes]
    items = np.frombuffer(data, np.dtype([("sig", "<u8"), ("head", "<u2"), ("padding", padding)]))
    sig = items["sig"].astype(np.uint64)
    head = items["head"].astype(np.uint16)
    # The integer bit is set exactly where the exponent is not zero: no unnormals, no pseudo-denormals, -infinities,
    # -NaNs. Processors since the 80387 never produce one, and treat most as invalid.
    wrong = (sig >= _INTEGER_BIT) != ((head & np.uint16(0x7FFF)) != 0)
    expected = "x87 80-bit floats (integer bit set for every normal number)"
    doubt = "; this may be IEEE binary128 from another platform" if item_bytes == 16 else ""
    if item_bytes == 16 and not x87 and not wrong.any():
        wrong = items["padding"].any(axis=1)
        expected = "x87 80-bit floats with zero padding"
        doubt += ", or x87 with stray memory in the padding, as numpy leaves it"
    if wrong.any():
        at = int(wrong.argmax())
        raise PolicyError(
            f"expected {expected}, found bytes {items[at].tobytes().hex()} at element {first + at}{doubt}",
            hint="--policy longdouble=bytes keeps every bit",
        )
    return sig, head


def _shown(sig: np.uint64, head: np.uint16) -> str:
    """One x87 value in decimal, with all digits that matter."""
    exponent = int(head) & 0x7FFF
    sign = "-" if int(head) >> 15 else ""
    if exponent == 0x7FFF:
        return f"{sign}nan with payload {int(sig) & (1 << 63) - 1:#x}"
    scale = _DECIMAL.power(Decimal(2), Decimal(max(exponent, 1) - 16383 - 63))
    return f"{sign}{_DECIMAL.multiply(Decimal(int(sig)), scale)}"
