"""Compressed members of an archive as checked streams of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from convert.codec import INFLATE_ERRORS, Inflater, crc32, inflater
from convert.errors import ConvertError, CorruptError, LimitError
from convert.files import Source, read_ahead

if TYPE_CHECKING:
    from readers.zipdir import Entry

_READ_BYTES = 64 << 10
_SMALL_BYTES = 64 << 10
_MAX_DICTIONARY_BYTES = 128 << 20
"""xz's strongest preset uses 64 MiB; a larger dictionary is a claim on memory, not a need."""


class Method(NamedTuple):
    """A compression method: how to start it, which bytes precede its stream, what it raises."""

    name: str
    start: Callable[[bytes], Inflater]
    header_bytes: int
    errors: tuple[type[Exception], ...]


def _bzip2(_: bytes) -> Inflater:
    import bz2

    return bz2.BZ2Decompressor()


def _lzma(header: bytes) -> Inflater:
    """The header is APPNOTE 5.8.8's: version (2), length of properties (2), lc/lp/pb (1), dictionary size (4)."""
    import lzma

    dictionary = int.from_bytes(header[5:9], "little")
    if header[2:4] != b"\x05\0" or header[4] >= 9 * 5 * 5:
        raise CorruptError(f"invalid lzma properties (found {header!r})")
    if dictionary > _MAX_DICTIONARY_BYTES:
        raise LimitError(
            f"the lzma dictionary is too large (expected at most {_MAX_DICTIONARY_BYTES} bytes, found {dictionary})"
        )
    packed, lc = divmod(header[4], 9)
    pb, lp = divmod(packed, 5)
    filters = [{"id": lzma.FILTER_LZMA1, "dict_size": dictionary, "lc": lc, "lp": lp, "pb": pb}]
    return lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=filters)


METHODS: dict[int, Method] = {
    8: Method("deflate", lambda _: inflater(), 0, (*INFLATE_ERRORS, ValueError)),
    12: Method("bzip2", _bzip2, 0, (OSError, ValueError)),
    14: Method("lzma", _lzma, 9, (Exception,)),
}
_OTHER_METHODS = {
    1: "shrink", 6: "implode", 9: "deflate64", 10: "dcl implode", 18: "terse", 19: "lz77", 93: "zstandard",
    94: "mp3", 95: "xz", 96: "jpeg", 97: "wavpack", 98: "ppmd", 99: "encrypted",
}  # fmt: skip


def method_name(number: int) -> str:
    return _OTHER_METHODS.get(number, "unknown")


def _no_memory(method: Method) -> LimitError:
    """lzma takes as much as its dictionary is long; that there is not so much is no damage of the file."""
    return LimitError(
        f"there is not enough memory to inflate the {method.name} stream",
        hint="end other programs, or unpack the archive where there is more memory",
    )


class Compressed:
    """The bytes of a member after its first `skip`; only in order, inflated anew each time.

    Attributes:
        path: The archive.
        nbytes: How many bytes there are.
    """

    __slots__ = ("_begin", "_crc", "_file", "_method", "_packed_size", "_size", "_skip", "nbytes", "path")

    def __init__(self, file: Source, begin: int, entry: Entry, method: Method, skip: int) -> None:
        self.path = file.path
        self.nbytes = entry.size - skip
        self._file = file
        self._begin = begin
        self._crc = entry.crc
        self._packed_size = entry.packed_size
        self._size = entry.size
        self._method = method
        self._skip = skip

    @property
    def compression(self) -> str:
        """Name of the method."""
        return self._method.name

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the compressed stream."""
        return self._packed_size

    def start(self, count: int) -> bytes:
        """The member's first bytes, `skip` included; fewer than `count` only if it is shorter."""
        count = min(count, self._size)
        out = b""
        for piece in self._inflated(count, count):
            out += piece
            if len(out) >= count:
                break
        return out[:count]

    def chunks(self, chunk_bytes: int) -> Iterator[memoryview]:
        """See `convert.tensor.Stream`."""
        if self._size <= _SMALL_BYTES and chunk_bytes >= self.nbytes:
            whole = b"".join(self._inflated(_SMALL_BYTES, None))
            self._check(crc32(whole))
            if self.nbytes:
                yield memoryview(whole)[self._skip :]
            return
        room = memoryview(bytearray(max(min(chunk_bytes, self.nbytes), 1)))
        held, crc, skip = 0, 0, self._skip
        waiting = False
        for piece in self._inflated(len(room), None):
            crc = crc32(piece, crc)
            view = memoryview(piece)
            if skip:
                drop = min(skip, len(view))
                skip -= drop
                view = view[drop:]
            while len(view):
                if waiting:
                    yield room
                    waiting, held = False, 0
                take = min(len(view), len(room) - held)
                room[held : held + take] = view[:take]
                held += take
                view = view[take:]
                waiting = held == len(room)
        self._check(crc)
        if held:
            yield room[:held]

    def _check(self, crc: int) -> None:
        if crc != self._crc:
            raise CorruptError(
                f"CRC-32 mismatch: the stored bytes are damaged (expected {self._crc:08x}, found {crc:08x})",
                hint="copy or download the file again; --exclude leaves this tensor out",
            )

    def _inflated(self, piece_bytes: int, stop: int | None) -> Iterator[bytes]:
        """The whole member in pieces, then proof that it ends there; with `stop`, just its first bytes."""
        method = self._method
        at, end = self._begin, self._begin + self._packed_size
        if method.header_bytes > self._packed_size:
            raise CorruptError("the compressed member is cut short")
        header = self._file.read(at, method.header_bytes) if method.header_bytes else b""
        at += method.header_bytes
        try:
            stream = method.start(header)
        except ConvertError:
            raise
        except MemoryError as err:
            raise _no_memory(method) from err
        except method.errors as err:
            raise CorruptError(f"the {method.name} stream cannot be begun ({err}; found {header!r})") from err
        if stop is None:
            read_ahead(self._file, at, end)
        produced = 0
        read_bytes = _READ_BYTES if stop is None else min(_READ_BYTES, stop + 1024)
        while not stream.eof:
            fed = b""
            if stream.needs_input:
                fed = self._file.read(at, min(read_bytes, end - at))
                at += len(fed)
                if not fed:
                    if produced == self._size and method.name == "lzma":
                        break  # an end mark is optional there
                    raise CorruptError(
                        f"the compressed member ends early (expected {self._size} bytes, found {produced})"
                    )
            try:
                # One byte more than is owed, so that a member which inflates past its size is caught at once.
                out = stream.decompress(fed, max(min(piece_bytes, self._size - produced), 1))
            except MemoryError as err:
                raise _no_memory(method) from err
            except method.errors as err:
                raise CorruptError(f"the {method.name} stream is damaged ({err})") from err
            produced += len(out)
            if produced > self._size:
                raise CorruptError(f"the member inflates past its declared size (expected {self._size} bytes)")
            if out:
                yield out
            elif not fed and not stream.needs_input and not stream.eof:
                raise CorruptError(f"the {method.name} stream is damaged (it neither ends nor goes on)")
            if stop is not None and produced >= stop:
                return
        if produced != self._size:
            raise CorruptError(f"the member inflates to another size (expected {self._size} bytes, found {produced})")
        left = end - at + len(stream.unused_data if stream.eof else b"")
        if left:
            raise CorruptError(f"{left} bytes follow the compressed stream of the member")
