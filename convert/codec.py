"""CRC-32 and deflate: isal where it is installed, zlib elsewhere, one interface.

isal computes a CRC-32 and deflates many times faster than zlib. Its levels stop at 3; `--compress` 7 to 9 go to zlib
for those who want its ratio. Output depends on which library is there, never on the number of threads.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from typing_extensions import Buffer

isal_zlib: Any = None
igzip_lib: Any = None
with contextlib.suppress(ImportError):  # a platform without isal wheels
    from isal import igzip_lib, isal_zlib

crc32: Callable[..., int] = zlib.crc32 if isal_zlib is None else isal_zlib.crc32

DEFAULT_LEVEL = 6
_ISAL_LEVELS = {1: 1, 2: 1, 3: 2, 4: 2, 5: 2, 6: 2}
"""isal levels for our 1 to 6: 2 is as fast as 1 and never larger; 3 gains too little for half the speed."""


def _combine(crc1: int, crc2: int, length2: int) -> int:
    """CRC-32 of A+B from those of A and B and the length of B.

    Appending `length2` zero bytes to A multiplies its CRC by x**(8*length2) modulo the CRC polynomial.
    """
    return _multiply(_power_of_x(8 * length2), crc1) ^ crc2


_POLYNOMIAL = 0xEDB88320


def _multiply(a: int, b: int) -> int:
    """Product of two polynomials over GF(2) modulo the CRC polynomial, bit-reversed as CRC-32 keeps them."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return product


def _power_of_x(exponent: int) -> int:
    power, square = 1 << 31, 1 << 30  # x**0 and x**1
    while exponent:
        if exponent & 1:
            power = _multiply(power, square)
        square = _multiply(square, square)
        exponent >>= 1
    return power


crc32_combine: Callable[[int, int, int], int] = getattr(isal_zlib, "crc32_combine", _combine)


_own = threading.local()


def deflate_block(data: memoryview, level: int, before: bytes = b"") -> bytes:
    """`data` as byte-aligned, non-final blocks of a raw deflate stream.

    Args:
        data: A piece of what is to be deflated.
        level: 1 to 9.
        before: The last `WINDOW_BYTES` of the piece before, or nothing at the beginning of a stream.

    Returns:
        Blocks that, joined in order and closed by `DEFLATE_END`, are one valid stream: each piece may refer back to the
        one before, as inflating will have it at hand, and yet they can be deflated all at once.
    """
    reusable = getattr(isal_zlib, "_ParallelCompress", None)
    if reusable is not None and level in _ISAL_LEVELS:
        # What isal's own threaded gzip uses: it keeps its state and buffer from block to block. Without it every block
        # costs several large allocations, and the kernel more time than the deflating.
        room = len(data) + len(data) // 8 + 4096
        kept: tuple[int, int, Any] = getattr(_own, "compressor", (0, 0, None))
        kept_level, kept_room, compressor = kept
        if kept_level != level or kept_room < room:
            compressor = reusable(buffersize=room, level=_ISAL_LEVELS[level])
            _own.compressor = (level, room, compressor)
        block: bytes = compressor.compress_and_crc(data, before)[0]
        return block
    dictionary: dict[str, Any] = {"zdict": before} if before else {}
    if isal_zlib is not None and level in _ISAL_LEVELS:
        deflater = isal_zlib.compressobj(_ISAL_LEVELS[level], isal_zlib.DEFLATED, -15, **dictionary)
        packed: bytes = deflater.compress(data) + deflater.flush(isal_zlib.Z_SYNC_FLUSH)
        return packed
    slow = zlib.compressobj(level, zlib.DEFLATED, -15, **dictionary)
    return slow.compress(data) + slow.flush(zlib.Z_SYNC_FLUSH)


WINDOW_BYTES = 32 << 10
"""How far back deflate can refer."""
DEFLATE_END = b"\x03\x00"
"""An empty final block."""


class Inflater(Protocol):
    """The interface of the standard library's incremental decompressors (`bz2.BZ2Decompressor` …)."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: Buffer, max_length: int = -1) -> bytes: ...


class _ZlibInflater:
    """zlib's raw inflate behind that interface."""

    def __init__(self) -> None:
        self._inflater = zlib.decompressobj(-15)
        self._last = b""

    @property
    def eof(self) -> bool:
        return self._inflater.eof

    @property
    def unused_data(self) -> bytes:
        return self._inflater.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._inflater.unconsumed_tail and not self._last

    def decompress(self, data: Buffer, max_length: int = -1) -> bytes:
        waiting = self._inflater.unconsumed_tail
        out = self._inflater.decompress(waiting + bytes(data) if waiting else data, max(max_length, 0))
        # zlib may hold output back without any tail: a full answer means "ask again".
        self._last = out if len(out) == max_length else b""
        return out


def inflater() -> Inflater:
    """A decompressor for one raw deflate stream."""
    if igzip_lib is not None:
        found: Any = igzip_lib.IgzipDecompressor(igzip_lib.DECOMP_DEFLATE)
        return found  # type: ignore[no-any-return]
    return _ZlibInflater()


INFLATE_ERRORS: tuple[type[Exception], ...] = (zlib.error, getattr(igzip_lib, "IsalError", zlib.error))
