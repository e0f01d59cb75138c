"""Reading at offsets: from files, from memory, from a spool on disk.

POSIX positioned I/O is used where there is one (`preadv`, `pwrite`: many threads, one descriptor); elsewhere a lock
around seek and read does the same, more slowly.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from convert.errors import CorruptError, InputError, OutputError

if TYPE_CHECKING:
    from typing_extensions import Buffer

BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_POSITIONED = hasattr(os, "preadv") and hasattr(os, "pwrite")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?:::[A-Za-z0-9+.-]+)*://")
"""Two letters or more before the colon, so that no Windows drive is one."""


class Source(Protocol):
    """What readers read from: a file of this machine or a remote one, from `open_source`.

    Attributes:
        path: As the caller gave it.
        size: Bytes when it was opened; finding fewer is an error.
        notes: What a user may want to know about how it was read.
        is_remote: Each read may be a request: many short ones are better avoided.
    """

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def notes(self) -> Sequence[str]: ...

    @property
    def is_remote(self) -> bool: ...

    def park(self) -> None: ...

    def readinto(self, offset: int, view: memoryview) -> None: ...

    def read(self, offset: int, count: int) -> bytes: ...

    def check_unchanged(self) -> None: ...

    def is_same(self, path: str | os.PathLike[str]) -> bool: ...

    def close(self) -> None: ...


def open_source(path: str | os.PathLike[str]) -> Source:
    """A file for reading at offsets, wherever it is.

    Raises:
        InputError: It cannot be read.
    """
    if is_url(path):
        from convert.remotefile import RemoteFile

        return path if isinstance(path, RemoteFile) else RemoteFile(os.fspath(path))
    return SourceFile(path)


def read_ahead(file: object, begin: int, end: int) -> None:
    """Tell a file, if it is remote, that `[begin, end)` will be read in order."""
    ahead = getattr(file, "ahead", None)
    if ahead is not None:
        ahead(begin, end)


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether it is the URL of something remote; `local_path` has made paths of those of this machine."""
    return _URL.match(os.fspath(path)) is not None


def local_path(path: str | os.PathLike[str]) -> str:
    """The path as text, that of a `file://` URL without its scheme."""
    text = os.fspath(path)
    if text[:7].lower() != "file://":
        return text
    from urllib.request import url2pathname

    return url2pathname(text[7:].removeprefix("localhost"))


def is_folder(path: str) -> bool:
    """Whether a path means a folder; a URL does when it ends in a slash."""
    return path.endswith("/") if is_url(path) else os.path.isdir(path)


def real_path(path: str) -> str:
    """One spelling for each place."""
    if is_url(path):
        from convert.remote import normal

        return normal(path)
    return os.path.realpath(path)


def name_part(path: str) -> str:
    """The path without the query of a web address, so that its end is the name of a file."""
    return re.split(r"[?#]", path, maxsplit=1)[0] if path[:4].lower() == "http" and is_url(path) else path


def beside(path: str, name: str) -> str:
    """The path of another file in the same folder; a web address keeps its query."""
    if not is_url(path):
        return os.path.join(os.path.dirname(path), name)
    start = name_part(path)
    return f"{start.rpartition('/')[0]}/{name}{path[len(start) :]}"


def names_beside(path: str) -> list[str]:
    """Names of the files in the folder of a file, sorted; none if it may not be listed."""
    if is_url(path):
        from convert.remote import names_in_folder_of

        return names_in_folder_of(path)
    try:
        return sorted(os.listdir(os.path.dirname(path) or os.curdir))
    except OSError:  # files can be opened in a folder that may not be listed
        return []


class Positioned:
    """An open descriptor that reads and writes at offsets, from any thread."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._lock = threading.Lock()

    def read_some(self, offset: int, view: memoryview) -> int:
        if _POSITIONED:
            return os.preadv(self.fd, [view], offset)
        with self._lock:
            os.lseek(self.fd, offset, os.SEEK_SET)
            data = os.read(self.fd, len(view))
        view[: len(data)] = data
        return len(data)

    def write_all(self, offset: int, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            if _POSITIONED:
                done = os.pwrite(self.fd, view, offset)
            else:
                with self._lock:
                    os.lseek(self.fd, offset, os.SEEK_SET)
                    done = os.write(self.fd, view)
            view = view[done:]
            offset += done

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class SourceFile:
    """A regular file for reading at offsets; safe to use from several threads.

    Attributes:
        path: As the caller gave it.
        size: Bytes when it was opened; finding fewer is an error.
    """

    __slots__ = ("_io", "_mtime_ns", "_place", "path", "size")  # a folder may hold 100,000 of them

    notes: Sequence[str] = ()
    is_remote = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        if is_url(self.path):
            raise InputError("the reader of this format reads files of this machine only", path=path)
        self._io: Positioned | None = self._open()
        try:
            opened = os.fstat(self._io.fd)
        except OSError as err:
            self.close()
            raise unreadable(self.path, err) from err
        if not stat.S_ISREG(opened.st_mode):
            self.close()
            what = "a folder" if stat.S_ISDIR(opened.st_mode) else "not a regular file"
            raise InputError(
                f"is {what} (expected a regular file)",
                path=path,
                hint="save the stream to a file first, then convert it",
            )
        self.size = opened.st_size
        self._mtime_ns = opened.st_mtime_ns
        self._place = (opened.st_dev, opened.st_ino)

    def _open(self) -> Positioned:
        try:
            return Positioned(os.open(self.path, os.O_RDONLY | BINARY | getattr(os, "O_NONBLOCK", 0)))
        except OSError as err:
            raise unreadable(self.path, err) from err

    def park(self) -> None:
        """Give the descriptor back; from now on each read opens the file again. For folders of many files."""
        self.close()

    def readinto(self, offset: int, view: memoryview) -> None:
        """Fill the view from `offset`; CorruptError if the file is shorter."""
        io = self._io
        if io is None:
            io = self._open()
            try:
                self._check_same(os.fstat(io.fd))
                self._fill(io, offset, view)
            except OSError as err:
                raise unreadable(self.path, err) from err
            finally:
                _close_read(io)
        else:
            self._fill(io, offset, view)

    def _fill(self, io: Positioned, offset: int, view: memoryview) -> None:
        while len(view):
            try:
                done = io.read_some(offset, view)
            except OSError as err:
                raise unreadable(self.path, err) from err
            if done == 0:
                raise CorruptError(
                    f"the file ends early (expected {len(view)} more bytes at byte {offset})",
                    path=self.path,
                    hint="is another program still writing it? run again when it is done",
                )
            view = view[done:]
            offset += done

    def read(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes from `offset`."""
        if self._io is not None and _POSITIONED:
            try:
                data = os.pread(self._io.fd, count, offset)
            except OSError as err:
                raise unreadable(self.path, err) from err
            if len(data) == count:
                return data
        buffer = bytearray(count)
        self.readinto(offset, memoryview(buffer))
        return bytes(buffer)

    def reader_at(self, begin: int) -> Callable[[int, memoryview], None]:
        """`readinto` with offsets counted from `begin`, for very many short reads."""
        io, slow = self._io, self.readinto
        if io is None or not _POSITIONED:
            return lambda offset, view: slow(begin + offset, view)
        fd, preadv = io.fd, os.preadv

        def read(offset: int, view: memoryview) -> None:
            try:
                done = preadv(fd, (view,), begin + offset)
            except OSError as err:
                raise unreadable(self.path, err) from err
            if done != len(view):
                slow(begin + offset, view)

        return read

    def check_unchanged(self) -> None:
        """InputError if the file was modified since it was opened."""
        try:
            self._check_same(os.stat(self.path) if self._io is None else os.fstat(self._io.fd))
        except OSError as err:
            raise unreadable(self.path, err) from err

    def _check_same(self, now: os.stat_result) -> None:
        if (now.st_size, now.st_mtime_ns) != (self.size, self._mtime_ns):
            raise InputError(
                f"the file changed while it was read (expected {self.size} bytes, found {now.st_size})",
                path=self.path,
                hint="run again when no other program writes to it",
            )

    def is_same(self, path: str | os.PathLike[str]) -> bool:
        """Whether `path` leads to this very file."""
        try:
            found = os.stat(path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._place

    def close(self) -> None:
        io, self._io = self._io, None
        if io is not None:
            _close_read(io)


def _close_read(io: Positioned) -> None:
    """Nothing can be lost by closing what was only read."""
    with contextlib.suppress(OSError):
        io.close()


class MemoryFile:
    """Bytes in memory behind the reading half of `SourceFile`."""

    def __init__(self, data: Buffer, path: str = "memory") -> None:
        self._view = memoryview(data).cast("B")
        self.path = path
        self.size = len(self._view)

    def readinto(self, offset: int, view: memoryview) -> None:
        view[:] = self._view[offset : offset + len(view)]

    def read(self, offset: int, count: int) -> bytes:
        return bytes(self._view[offset : offset + count])


class Spool:
    """A nameless temporary file for what must be put in another order before it is written."""

    def __init__(self, folder: str | None) -> None:
        import tempfile

        try:
            self._file = tempfile.TemporaryFile(dir=folder)
        except OSError as err:
            raise unwritable(folder or tempfile.gettempdir(), err) from err
        self._io = Positioned(self._file.fileno())
        self.path = f"temporary file in {folder or tempfile.gettempdir()}"
        self.size = 0

    def write_at(self, offset: int, data: Buffer) -> None:
        try:
            self._io.write_all(offset, data)
        except OSError as err:
            raise unwritable(self.path, err) from err

    def readinto(self, offset: int, view: memoryview) -> None:
        while len(view):
            try:
                done = self._io.read_some(offset, view)
            except OSError as err:
                raise unwritable(self.path, err) from err
            if done == 0:
                raise OutputError("the temporary file is shorter than what was written", path=self.path)
            view, offset = view[done:], offset + done

    def read(self, offset: int, count: int) -> bytes:
        data = bytearray(count)
        self.readinto(offset, memoryview(data))
        return bytes(data)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_READ_HINTS = {
    errno.ENOENT: "check the spelling; a path with spaces needs quotes",
    errno.EACCES: "check its permissions: ls -l shows them",
    errno.EIO: "the disk reports a fault; copy the file from a backup",
}


def unreadable(path: str | os.PathLike[str], err: OSError) -> InputError:
    return InputError(f"cannot be read: {err.strerror or err}", path=Path(path), hint=_READ_HINTS.get(err.errno or 0))


_WRITE_HINTS = {
    errno.ENOSPC: "free some space, or choose a target on another disk; nothing was left behind",
    errno.EDQUOT: "your quota is used up; choose a target elsewhere",
    errno.EACCES: "choose a folder you may write to",
    errno.EROFS: "that file system is read-only; choose another target",
    errno.ENOENT: "create the folder first: mkdir -p",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EFBIG: "that file system, or a limit on this process, allows no file this large",
}


def unwritable(path: str | os.PathLike[str], err: OSError) -> OutputError:
    return OutputError(
        f"cannot be written: {err.strerror or err}", path=os.fspath(path), hint=_WRITE_HINTS.get(err.errno or 0)
    )
