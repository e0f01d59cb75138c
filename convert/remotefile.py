"""Reading a remote file by ranges, with the interface of a local one.

Two ways to read, for two ways of asking:

- headers: a few bytes here and there. What was fetched is kept for a while; a read that goes on where the last one
  ended fetches twice as much, so that many small neighbours cost few requests and a listing reads no data;
- tensors: whoever moves one says with `ahead` which bytes will be read in order, and these are fetched in long
  requests, several at once, and nothing beyond.

A web server that does not serve ranges sends everything from the first byte. It is read once, into a nameless
temporary file, since an archive's directory is at its end.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from convert import remote
from convert.errors import CorruptError, InputError
from convert.files import Spool, is_url
from convert.remote import Place, ShortBodyError

LEAST_BYTES = 64 << 10
"""A request takes as long as sending this much, or longer."""
MOST_BYTES = 2 << 20
"""The longest request; several threads hold one each, and the library beneath holds it twice."""
KEPT_BYTES = 16 << 20
MOST_RUNS = 8
"""Of tensors, or parts of them, that are being moved at once; one more than this ends the oldest."""
_STREAM_BYTES = 1 << 20
_PACKET_BYTES = 32 << 10
"""What every SFTP server sends at once."""
_NO_RANGES = "support range requests"
"""What fsspec's ValueError says when a web server sends everything instead of a range."""


class _Run:
    """Bytes `[begin, end)` that are being read in order, and what was fetched of them last."""

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self.at, self.data = begin, b""
        self.lock = threading.Lock()

    def has(self, offset: int) -> bool:
        return self.at <= offset < self.at + len(self.data)


class RemoteFile(os.PathLike[str]):
    """A remote file for reading at offsets; safe to use from several threads.

    A path-like object, so that a reader can be given what has been opened already.

    Attributes:
        path: Its URL.
        size: Bytes when it was opened.
        notes: How it was read, if that is worth knowing.
    """

    is_remote = True

    def __init__(self, url: str, found: dict[str, Any] | None = None) -> None:
        """Ask for size and version, unless a listing has told; no byte of it is read.

        Raises:
            InputError: There is no such file, or it may not be read.
        """
        self.path = url
        self._listed = found is not None
        self.notes: list[str] = []
        self._place = remote.locate(url)
        self._spool: Spool | None = None
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.RLock()
        self._runs: list[_Run] = []
        self._runs_lock = threading.Lock()
        self._failure: InputError | None = None
        found = found or remote.facts(self._place)
        if found.get("type") == "directory":
            raise InputError("is a folder (expected a file)", path=url, hint=f"a slash at its end says so: {url}/")
        self._opened = found
        size = found.get("size")
        if size is None or found.get("partial") is False:
            self.size = self._fetch_all(size)
        else:
            self.size = int(size)
        self._range: Callable[[int, int], bytes] | None = None

    def __fspath__(self) -> str:
        return self.path

    def __str__(self) -> str:
        return self.path

    def _ranger(self) -> Callable[[int, int], bytes]:
        """The call that gives the bytes of a range, `[begin, end)`."""
        fs, path = self._place.fs, self._place.path
        from fsspec.spec import AbstractBufferedFile

        if self._is_buffered():
            # The file objects of most stores fetch a range without seeking. That of S3 notices when the file has
            # changed, for one more request; that of the web when a server does not serve ranges, where `cat_file`
            # would take everything for the range.
            options = {"size": self.size} if self._place.is_web or self._listed else {}
            file = fs.open(path, "rb", cache_type="none", **options)
            if isinstance(file, AbstractBufferedFile):
                found: Callable[[int, int], bytes] = file._fetch_range
                return found
        if self._place.protocol in ("sftp", "ssh"):
            return self._sftp_range
        return lambda begin, end: bytes(fs.cat_file(path, start=begin, end=end))

    def _sftp_range(self, begin: int, end: int) -> bytes:
        """Many packets asked for at once: one after the other, each would wait for the one before."""
        with self._place.fs.open(self._place.path, "rb") as file:
            steps = range(begin, end, _PACKET_BYTES)
            return b"".join(file.readv([(at, min(_PACKET_BYTES, end - at)) for at in steps]))

    def _is_buffered(self) -> bool:
        """Whether opening it costs no more than asking for its size; SFTP would open a session's file each time."""
        return bool(getattr(self._place.fs, "async_impl", False)) or self._place.protocol == "hf"

    # --- reading -------------------------------------------------------------------------------------------------

    def park(self) -> None:
        """Let go of what is kept. For folders of many files."""
        with self._lock:
            self._kept.clear()
        with self._runs_lock:
            self._runs = []

    def ahead(self, begin: int, end: int) -> None:
        """`[begin, end)` will be read in order."""
        with self._runs_lock:
            self._runs = [*(run for run in self._runs if run.begin != begin), _Run(begin, end)][-MOST_RUNS:]

    def readinto(self, offset: int, view: memoryview) -> None:
        """Fill the view from `offset`; CorruptError if the file is shorter."""
        if offset + len(view) > self.size:
            raise CorruptError(
                f"the file ends early (expected {offset + len(view) - self.size} more bytes at byte {self.size})",
                path=self.path,
                hint="is another program still writing it? run again when it is done",
            )
        while len(view):
            part = self._some(offset, len(view))
            take = min(len(part), len(view))
            view[:take] = part[:take]
            view, offset = view[take:], offset + take

    def read(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes from `offset`."""
        if offset + count <= self.size and count:
            part = self._some(offset, count)
            if len(part) >= count:
                return bytes(part[:count])
        buffer = bytearray(count)
        self.readinto(offset, memoryview(buffer))
        return bytes(buffer)

    def _some(self, offset: int, count: int) -> memoryview:
        """One byte or more from `offset`, at best `count`."""
        if self._spool is not None:
            return memoryview(self._spool.read(offset, min(count, MOST_BYTES)))
        with self._runs_lock:
            run = next((run for run in self._runs if run.begin <= offset < run.end), None)
        if run is not None:
            return self._some_of(run, offset, count)
        if count >= MOST_BYTES:
            return memoryview(self._fetch(offset, offset + MOST_BYTES))
        with self._lock:  # others may want the same
            for begin, data in reversed(self._kept.items()):
                if begin <= offset < begin + len(data):
                    self._kept.move_to_end(begin)
                    return memoryview(data)[offset - begin :]
            return memoryview(self._fetch_and_keep(offset, count))

    def _some_of(self, run: _Run, offset: int, count: int) -> memoryview:
        with run.lock:
            if not run.has(offset):
                run.data = b""  # before another is fetched
                run.data = self._fetch(offset, min(run.end, offset + MOST_BYTES))
                run.at = offset
            part = memoryview(run.data)[offset - run.at :]
        if offset + len(part) >= run.end and len(part) <= count:  # all of it was handed out
            with self._runs_lock:
                self._runs = [other for other in self._runs if other is not run]
        return part

    def _fetch_and_keep(self, offset: int, count: int) -> bytes:
        before = next((begin for begin, data in self._kept.items() if begin + len(data) == offset), None)
        wanted = LEAST_BYTES
        if before is not None:
            wanted = min(2 * len(self._kept.pop(before)), MOST_BYTES)
        end = min(offset + max(count, wanted), self.size)
        # What is kept already, at the end of an archive for one, is not fetched again.
        end = min([end, *(begin for begin in self._kept if offset + count <= begin < end)])
        data = self._fetch(offset, end)
        self._kept[offset] = data
        while sum(map(len, self._kept.values())) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return data

    def _fetch(self, begin: int, end: int) -> bytes:
        """Exactly the bytes of a range, tried again where it makes sense."""

        def ask() -> bytes:
            with self._place.alone:
                if self._range is None:
                    self._range = self._ranger()
                data = self._range(begin, end)
            if len(data) != end - begin:
                raise ShortBodyError(f"the server sent {len(data)} bytes of {end - begin} from byte {begin}")
            return data

        if self._failure is not None:  # others have tried long enough
            raise self._failure
        try:
            return remote.patiently(ask, self.path, InputError)
        except InputError as err:
            if not (self._place.is_web and isinstance(err.__cause__, ValueError) and _NO_RANGES in str(err.__cause__)):
                self._failure = err
                raise
        with self._lock:
            if self._spool is None:
                self._fetch_all(self.size)
            assert self._spool is not None
            return self._spool.read(begin, end - begin)

    # --- servers without ranges ----------------------------------------------------------------------------------

    def _fetch_all(self, size: int | None) -> int:
        """Everything, once, into a temporary file; how much it was."""
        spool = Spool(None)
        try:
            found = remote.patiently(lambda: _stream(self._place, spool, size), self.path, InputError)
        except BaseException:
            spool.close()
            raise
        self._spool = spool
        self.notes.append("the server does not serve ranges: the whole file was read into a temporary file first")
        return found

    # --- the file as a whole -------------------------------------------------------------------------------------

    def check_unchanged(self) -> None:
        """InputError if the file was modified since it was opened, as far as the store can tell."""
        found = remote.facts_if_any(self._place, InputError)
        if found is None or remote.is_changed(self._opened, found):
            raise InputError(
                "the file changed while it was read", path=self.path, hint="run again when nobody writes to it"
            )

    def is_same(self, path: str | os.PathLike[str]) -> bool:
        """Whether `path` is a URL of this very file."""
        return is_url(path) and (os.fspath(path) == self.path or remote.normal(os.fspath(path)) == self._place.key)

    def close(self) -> None:
        self.park()
        spool, self._spool = self._spool, None
        if spool is not None:
            spool.close()


def _stream(place: Place, spool: Spool, size: int | None) -> int:
    """The body of one request into the spool; its length."""
    at = 0
    with place.alone, contextlib.closing(place.fs.open(place.path, "rb", block_size=0)) as body:
        while True:
            chunk: Any = body.read(_STREAM_BYTES)
            if not chunk:
                break
            spool.write_at(at, chunk)
            at += len(chunk)
    if size is not None and at != size:
        raise ShortBodyError(f"the server sent {at} bytes of {size}")
    return at
