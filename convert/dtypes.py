"""The element types, one row each, and the parametrised ones numpy adds.

Names are numpy's and ml_dtypes'. The safetensors codes are those of the format's README, the npy type strings
those of numpy's "NPY format"; a type without one cannot be held by that format and is a matter for the policy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class Field(NamedTuple):
    """One field of a structured type; `shape` is that of a subarray, `big` its stored byte order."""

    name: str
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    big: bool


@dataclass(frozen=True, slots=True)
class DType:
    """What one element is and how it is written down.

    Attributes:
        name: numpy's or ml_dtypes' name: 'float32', 'bfloat16', 'datetime64[ns]', 'S5', 'V24' ...
        kind: 'plain' if every format holds it, else the policy kind that speaks for it.
        bits: Size of one element; sub-byte types are packed without gaps.
        swap: Bytes of the component that byte order reverses; 1 where order has no meaning.
        safetensors: Code in a safetensors header, or None.
        descr: npy type string without its byte order (void types keep their mark), or None.
        fields: Fields of a structured type, in order, padding left out.
        layout: The whole descr of a structured type as it is written in a npy header.
    """

    name: str
    kind: str
    bits: int
    swap: int = 1
    safetensors: str | None = None
    descr: str | None = field(default=None, compare=False)
    fields: tuple[Field, ...] = ()
    layout: object = field(default=None, compare=False)

    def __str__(self) -> str:
        return self.name

    @property
    def item_bytes(self) -> int:
        """Whole bytes of one element; 0 for the sub-byte types, which have none."""
        return self.bits // 8 if self.bits % 8 == 0 else 0

    def nbytes(self, count: int) -> int:
        """Bytes of `count` elements, packed."""
        return (count * self.bits + 7) // 8

    def npy_descr(self, big: bool = False) -> object:
        """The `descr` entry of a npy header."""
        if self.layout is not None:
            return self.layout
        if self.descr is None:
            raise ValueError(f"{self.name} has no npy type string")
        if self.descr[0] in "<|":
            return self.descr
        return ("|" if self.swap == 1 else ">" if big else "<") + self.descr

    def numpy(self) -> np.dtype[Any]:
        """The little-endian numpy dtype; ml_dtypes' for those numpy lacks (sub-byte: one element a byte)."""
        import numpy as np

        if self.layout is not None:
            layout: Any = self.layout
            return np.lib.format.descr_to_dtype(layout)
        if self.kind in ("bfloat16", "float8", "subbyte"):
            import ml_dtypes

            return np.dtype(getattr(ml_dtypes, self.name))  # type: ignore[no-any-return]
        if self.kind == "blob":
            return np.dtype("u1")
        return np.dtype(str(self.npy_descr()))


def _plain(name: str, bits: int, swap: int, code: str, descr: str) -> DType:
    return DType(name, "plain", bits, swap, code, descr)


CANONICAL: tuple[DType, ...] = (
    _plain("bool", 8, 1, "BOOL", "b1"),
    DType("float4_e2m1fn", "subbyte", 4, 1, "F4"),
    DType("float6_e2m3fn", "subbyte", 6, 1, "F6_E2M3"),
    DType("float6_e3m2fn", "subbyte", 6, 1, "F6_E3M2"),
    _plain("uint8", 8, 1, "U8", "u1"),
    _plain("int8", 8, 1, "I8", "i1"),
    DType("float8_e5m2", "float8", 8, 1, "F8_E5M2"),
    DType("float8_e4m3fn", "float8", 8, 1, "F8_E4M3"),
    DType("float8_e8m0fnu", "float8", 8, 1, "F8_E8M0"),
    DType("float8_e4m3fnuz", "float8", 8, 1, "F8_E4M3FNUZ"),
    DType("float8_e5m2fnuz", "float8", 8, 1, "F8_E5M2FNUZ"),
    _plain("int16", 16, 2, "I16", "i2"),
    _plain("uint16", 16, 2, "U16", "u2"),
    _plain("float16", 16, 2, "F16", "f2"),
    DType("bfloat16", "bfloat16", 16, 2, "BF16"),
    _plain("int32", 32, 4, "I32", "i4"),
    _plain("uint32", 32, 4, "U32", "u4"),
    _plain("float32", 32, 4, "F32", "f4"),
    _plain("complex64", 64, 4, "C64", "c8"),
    _plain("float64", 64, 8, "F64", "f8"),
    _plain("int64", 64, 8, "I64", "i8"),
    _plain("uint64", 64, 8, "U64", "u8"),
    DType("complex128", "complex128", 128, 8, None, "c16"),
)
"""Every plain type, in the order in which the safetensors library ranks its codes (ascending alignment)."""

OBJECT = DType("object", "object", 0, 1, None, "O")
BLOB = DType("blob", "blob", 8)
BROKEN = DType("unreadable", "broken", 0)

BY_NAME: dict[str, DType] = {dtype.name: dtype for dtype in CANONICAL}
BY_CODE: dict[str, DType] = {dtype.safetensors: dtype for dtype in CANONICAL if dtype.safetensors}
ONE_BYTE: tuple[str, ...] = tuple(dtype.name for dtype in CANONICAL if dtype.bits == 8)

_LONG_DOUBLES = {
    # name: (npy type string, bytes). x87 only: 80 bits in 12 or 16 bytes, and pairs of them.
    "float96": ("f12", 12),
    "float128": ("f16", 16),
    "complex192": ("c24", 24),
    "complex256": ("c32", 32),
}
LONG_DOUBLES: dict[str, DType] = {
    name: DType(name, "longdouble", size * 8, size if name[0] == "f" else size // 2, None, descr)
    for name, (descr, size) in _LONG_DOUBLES.items()
}

_TIME_UNIT = re.compile(r"(datetime64|timedelta64)(?:\[([0-9]*(?:Y|M|W|D|h|m|s|ms|us|μs|ns|ps|fs|as|generic))\])?")
_SIZED = re.compile(r"([SUV])([0-9]{1,18})")


def time(kind: str, unit: str) -> DType:
    """datetime64 or timedelta64; `unit` as in 'ns' or '25s', empty for generic."""
    suffix = f"[{unit}]" if unit else ""
    return DType(kind + suffix, kind, 64, 8, None, ("M8" if kind == "datetime64" else "m8") + suffix)


def sized(letter: str, length: int, mark: str = "|") -> DType:
    """S (bytes), U (UCS-4 code points) or V (raw void) of a length; `mark` is how a void type spells its order."""
    if letter == "S":
        return DType(f"S{length}", "bytes", 8 * length, 1, None, f"S{length}")
    if letter == "U":
        return DType(f"U{length}", "str", 32 * length, 4, None, f"U{length}")
    kind = {1: "V1", 2: "V2"}.get(length, "void")
    return DType(f"V{length}", kind, 8 * length, 1, None, f"{mark}V{length}")


def structured(fields: tuple[Field, ...], item_bytes: int, layout: object) -> DType:
    """A record; `layout` is its descr in a npy header."""
    return DType("structured", "structured", 8 * item_bytes, 1, None, None, fields, layout)


def by_name(name: str) -> DType | None:
    """The type of that name, parametrised ones included; None if there is none."""
    found = BY_NAME.get(name) or LONG_DOUBLES.get(name)
    if found is not None:
        return found
    if name == "blob":
        return BLOB
    if match := _TIME_UNIT.fullmatch(name):
        return time(match[1], match[2] or "")
    if match := _SIZED.fullmatch(name):
        return sized(match[1], int(match[2]), "<" if name in ("V1", "V2") else "|")
    return None
