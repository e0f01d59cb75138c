"""Writing so that a half-written file is never seen."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from binascii import crc32
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from convert.errors import OutputError, TargetExistsError
from convert.files import BINARY, Positioned, is_url, unwritable
from convert.locks import claim, lock

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from convert.writing import Settings

_PREALLOCATE_BYTES = 1 << 20
"""Below this a file is written too quickly for its blocks to be worth reserving."""


class Output(Protocol):
    """Something written beside its target, complete or not; nobody sees it before `commit`."""

    def readable(self) -> str | list[str]:
        """A path to what was written so far, or several."""
        ...

    def size(self) -> int:
        """Bytes written so far."""
        ...

    def commit(self, *, fsync: bool = False) -> None:
        """Give it its name."""
        ...

    def discard(self) -> None:
        """Remove everything written; harmless when already committed."""
        ...


class FileOutput(Output, Protocol):
    """One file being written, of this machine or a remote one, from `open_output`."""

    @property
    def target(self) -> str:
        """As the caller gave it."""
        ...

    @property
    def path(self) -> str:
        """Where it will be."""
        ...

    @property
    def sequential(self) -> bool:
        """Whether it can only be written from the first byte to the last."""
        ...

    def reserve(self, size: int) -> None:
        """How large it will be, headers and the like left out."""
        ...

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write bytes at their place; in order where it is `sequential`."""
        ...


def open_output(target: str, settings: Settings) -> FileOutput:
    """A file to be written, wherever it will be.

    Raises:
        OutputError: It may not be written, or is there already.
    """
    if is_url(target):
        from convert.remoteoutput import RemoteOutput

        return RemoteOutput(target, overwrite=settings.overwrite, verify=settings.verify)
    return OutputFile(target, overwrite=settings.overwrite, named=settings.spread is not None)


class OutputFile:
    """A file being written beside its target; nobody sees it before `commit`.

    Where the system can (Linux `O_TMPFILE`), the file has no name until it is complete, so that not even a killed
    process leaves anything behind. Elsewhere it is a hidden sibling, removed on every failure; what a killed process
    left is removed by the next one with the same target.
    """

    sequential = False

    def __init__(self, target: str | os.PathLike[str], *, overwrite: bool, named: bool = False) -> None:
        """Begin; `named` is for a file that others shall open while it is written.

        Raises:
            OutputError: It may not be written, or is there already.
        """
        self.target = os.fspath(target)
        self._named = named
        if is_url(self.target):
            raise OutputError("the writer of this format writes files of this machine only", path=target)
        self._real = os.path.realpath(self.target) if os.path.islink(self.target) else self.target
        self._folder = os.path.dirname(self._real) or os.curdir
        self._overwrite = overwrite
        self._temporary: str | None = None
        try:
            old = os.stat(self._real)
        except FileNotFoundError:
            old = None
        except OSError as err:
            raise unwritable(self.target, err) from err
        if old is not None:
            if not stat.S_ISREG(old.st_mode):
                kind = "a folder" if stat.S_ISDIR(old.st_mode) else "not a regular file"
                raise OutputError(f"the target is {kind}", path=self.target, hint="give the path of a file")
            if not overwrite:
                raise target_exists(self.target)
        try:
            self._io = Positioned(self._create())
        except OSError as err:
            raise unwritable(self.target, err) from err
        self._replaces, self._committed = old is not None, False
        self._made: os.stat_result | None = None
        try:
            if old is not None and hasattr(os, "fchmod"):
                os.fchmod(self._io.fd, stat.S_IMODE(old.st_mode))
            self._made = os.fstat(self._io.fd)
        except BaseException as err:  # an interrupt too
            self.discard()
            if isinstance(err, OSError):
                raise unwritable(self.target, err) from err
            raise

    def _create(self) -> int:
        nameless = getattr(os, "O_TMPFILE", None)
        if not self._named and nameless is not None and os.path.isdir("/proc/self/fd"):
            try:
                return os.open(self._folder, os.O_RDWR | nameless | BINARY, 0o666)
            except OSError as err:
                if err.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                    raise
        return self._sibling(_create_new)

    def _sibling(self, make: Callable[[str], int]) -> int:
        self._temporary, fd = make_sibling(self._folder, os.path.basename(self._real), make)
        return fd

    @property
    def path(self) -> str:
        return self._real

    @property
    def is_named(self) -> bool:
        """Whether others can open it, by what `readable` returns."""
        return self._temporary is not None

    def reserve(self, size: int) -> None:
        """Take the disk space now, so that a full disk is known before any work."""
        try:
            if size >= _PREALLOCATE_BYTES and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._io.fd, 0, size)
            else:
                os.ftruncate(self._io.fd, size)
        except OSError as err:
            raise unwritable(self.target, err) from err

    def write_at(self, offset: int, data: Buffer) -> None:
        try:
            self._io.write_all(offset, data)
        except OSError as err:
            raise unwritable(self.target, err) from err

    def readinto(self, offset: int, view: memoryview) -> None:
        while len(view):
            try:
                done = self._io.read_some(offset, view)
            except OSError as err:
                raise unwritable(self.target, err) from err
            if done == 0:
                raise OutputError(f"the file ends at byte {offset} while it is being written", path=self.target)
            view, offset = view[done:], offset + done

    def readable(self) -> str:
        """A path to what was written so far; for `--verify`."""
        return self._temporary or f"/proc/self/fd/{self._io.fd}"

    def size(self) -> int:
        """Bytes written so far."""
        try:
            return os.fstat(self._io.fd).st_size
        except OSError as err:
            raise unwritable(self.target, err) from err

    def commit(self, *, fsync: bool = False) -> None:
        """Give the file its name; the old target stays until this very moment."""
        try:
            if fsync:
                os.fsync(self._io.fd)
            # Network file systems may tell only now, as for any closed descriptor, that a write has failed.
            os.close(os.dup(self._io.fd))
            if self._temporary is None:
                self._link()
            else:
                self._rename(self._temporary)
            if fsync:
                sync_folder(self._folder)
        except OSError as err:
            late = self._replaces and self.is_in_place()
            self.discard()
            if isinstance(err, FileExistsError):
                raise target_exists(self.target) from err
            if late:
                what = f"the new file is in place, but its name may not outlast a power cut: {err.strerror}"
                raise OutputError(what, path=self.target) from err
            raise unwritable(self.target, err) from err
        self._temporary, self._committed = None, True
        with contextlib.suppress(OSError):
            self._io.close()

    def is_in_place(self) -> bool:
        """Whether the target's name leads to this very file."""
        try:
            return self._made is not None and os.path.samestat(os.lstat(self._real), self._made)
        except OSError:
            return False

    def _link(self) -> None:
        """Give a nameless file its name; one that is taken can only be replaced by way of another name."""
        if self._overwrite:
            lock(self._io.fd)  # before: if another run removed it for a dead one's, it could not be linked again
            os.close(self._sibling(self._link_to))
            assert self._temporary is not None
            os.replace(self._temporary, self._real)
        else:
            os.close(self._link_to(self._real))

    def _link_to(self, path: str) -> int:
        fd = os.dup(self._io.fd)
        try:
            # A folder descriptor, though unused with an absolute path, makes Python call linkat: it alone can follow.
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _rename(self, temporary: str) -> None:
        if os.name == "nt":  # which renames no open file
            self._io.close()
        try:
            self._rename_to_target(temporary)
        except PermissionError:  # nor do some file systems that Linux can mount
            if self.is_in_place():
                raise
            self._io.close()
            self._rename_to_target(temporary)

    def _rename_to_target(self, temporary: str) -> None:
        if self._overwrite:
            os.replace(temporary, self._real)
        elif os.name == "nt":
            os.rename(temporary, self._real)  # fails if the target exists
        else:
            try:
                os.link(temporary, self._real)  # fails if the target exists
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links
                if is_there(self._real):
                    raise FileExistsError(self._real) from None
                os.replace(temporary, self._real)
            else:
                os.unlink(temporary)

    def discard(self) -> None:
        """Remove everything written; harmless when already committed."""
        if self._committed:
            return
        with contextlib.suppress(OSError):
            if not self._replaces and self.is_in_place():  # stopped just after it got its name
                os.unlink(self._real)
        with contextlib.suppress(OSError):
            self._io.close()
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
            self._temporary = None
        self._made = None  # others may get its number now


def _create_new(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | BINARY, 0o666)


def make_sibling(folder: str, name: str, make: Callable[[str], int]) -> tuple[str, int]:
    """A hidden sibling of a target, locked while its descriptor is open.

    Each run tries one and the same name first, so that what a killed run left there is found, without a search, and
    removed. If a run that lives has it, another name will do.

    Args:
        folder: Where.
        name: Of the target.
        make: Makes a file or folder and returns its descriptor.

    Returns:
        Its path, and the descriptor.
    """
    path = fixed_sibling_of(folder, name)
    fd = claim(path, make)
    if fd is None:
        path = sibling_of(folder, name)
        fd = make(path)
        lock(fd)
    return path, fd


def fixed_sibling_of(folder: str, name: str, what: str = "") -> str:
    """The same in every run; `what` tells several apart."""
    return sibling_of(folder, name, f"{crc32(os.fsencode(name + what)):012x}")


def sibling_of(folder: str, name: str, key: str | None = None) -> str:
    # Names may be 255 bytes long, a character up to 4 of them; a long one is cut so that the temporary still fits.
    return os.path.join(folder, f".{name[:50]}.{key or os.urandom(6).hex()}.convert-tmp")


def is_there(path: str) -> bool:
    """Whether anything has that name, a link that leads nowhere too; OSError where that cannot be told."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def sync_folder(folder: str) -> None:
    if os.name == "nt":  # folders cannot be opened there, and need not be
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def committed(output: Output) -> Iterator[None]:
    """Discard the output on any way out but success; the body commits."""
    try:
        yield
    except BaseException:
        output.discard()
        raise


def target_exists(target: str, what: str = "the target exists already") -> TargetExistsError:
    return TargetExistsError(what, path=target, hint="--overwrite replaces it (overwrite=True in the library)")
