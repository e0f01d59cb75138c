"""Writing so that a half-written file, or folder, is never seen."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from convert.errors import OutputError, TargetExistsError
from convert.files import BINARY, Positioned, is_url, unwritable

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
    process leaves anything behind. Elsewhere it is a hidden sibling, removed on every failure.
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
        except OSError:
            old = None
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
        if old is not None and hasattr(os, "fchmod"):
            try:
                os.fchmod(self._io.fd, stat.S_IMODE(old.st_mode))
            except OSError as err:
                self.discard()
                raise unwritable(self.target, err) from err

    def _create(self) -> int:
        nameless = getattr(os, "O_TMPFILE", None)
        if not self._named and nameless is not None and os.path.isdir("/proc/self/fd"):
            try:
                return os.open(self._folder, os.O_RDWR | nameless | BINARY, 0o666)
            except OSError as err:
                if err.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                    raise
        self._temporary = self._sibling()
        return os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | BINARY, 0o666)

    def _sibling(self) -> str:
        return sibling_of(self._folder, os.path.basename(self._real))

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
        return os.fstat(self._io.fd).st_size

    def commit(self, *, fsync: bool = False) -> None:
        """Give the file its name; the old target stays until this very moment."""
        try:
            if fsync:
                os.fsync(self._io.fd)
            if self._temporary is None:
                self._link()
                self._io.close()
            else:
                self._io.close()
                self._rename(self._temporary)
            if fsync:
                sync_folder(self._folder)
        except FileExistsError as err:
            self.discard()
            raise target_exists(self.target) from err
        except OSError as err:
            self.discard()
            raise unwritable(self.target, err) from err
        self._temporary = None

    def _link(self) -> None:
        source = f"/proc/self/fd/{self._io.fd}"
        if not self._overwrite:
            self._link_to(source, self._real)
            return
        self._temporary = self._sibling()
        self._link_to(source, self._temporary)
        self._rename(self._temporary)

    def _link_to(self, source: str, target: str) -> None:
        # A folder descriptor, though unused with an absolute path, makes Python call linkat, which alone can follow.
        os.link(source, target, src_dir_fd=self._io.fd, follow_symlinks=True)

    def _rename(self, temporary: str) -> None:
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
                if os.path.lexists(self._real):
                    raise FileExistsError(self._real) from None
                os.replace(temporary, self._real)
            else:
                os.unlink(temporary)

    def discard(self) -> None:
        """Remove everything written; harmless when already committed."""
        with contextlib.suppress(OSError):
            self._io.close()
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
            self._temporary = None


def sibling_of(folder: str, name: str) -> str:
    # Names may be 255 bytes long, a character up to 4 of them; a long one is cut so that the temporary still fits.
    return os.path.join(folder, f".{name[:50]}.{os.urandom(6).hex()}.convert-tmp")


def sync_folder(folder: str) -> None:
    if os.name == "nt":  # folders cannot be opened there, and need not be
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class OutputFolder:
    """A folder of files built beside its target and renamed as a whole."""

    def __init__(self, target: str | os.PathLike[str], *, overwrite: bool, suffix: str) -> None:
        self.target = os.fspath(target).rstrip("/\\") or os.fspath(target)
        self._real = os.path.realpath(self.target) if os.path.islink(self.target) else self.target
        self._overwrite = overwrite
        self._suffix = suffix
        self._check_old()
        self.building = sibling_of(*os.path.split(os.path.abspath(self._real)))
        try:
            os.mkdir(self.building)
        except OSError as err:
            raise unwritable(self.target, err) from err

    def _check_old(self) -> bool:
        """Whether there is a folder already; OutputError if it may not be replaced."""
        if not os.path.lexists(self._real):
            return False
        if not os.path.isdir(self._real):
            raise OutputError("the target is a file (expected a folder)", path=self.target, hint="give another path")
        stray = None
        found = False
        for folder, folders, files in os.walk(self._real):
            for file in (*files, *(name for name in folders if os.path.islink(os.path.join(folder, name)))):
                found = True
                if not file.endswith(self._suffix):
                    stray = stray or os.path.join(folder, file)
        if found and not self._overwrite:
            raise target_exists(self.target)
        if stray is not None:
            raise OutputError(
                f"the folder holds more than {self._suffix} files, {stray!r} for one, which overwriting would lose",
                path=self.target,
                hint="give another folder, or move that file away",
            )
        return True

    def commit(self, *, fsync: bool = False) -> None:
        """Put the folder in place; an old one is kept aside until then."""
        aside = None
        try:
            if fsync:
                for folder, _, _ in os.walk(self.building):
                    sync_folder(folder)
            if self._check_old():  # once more: much may have happened since
                shutil.copymode(self._real, self.building)
                aside = self.building + "-old"
            try:
                if aside is not None:
                    os.rename(self._real, aside)
                os.rename(self.building, self._real)
            except BaseException:  # an interrupt too
                if aside is not None and os.path.lexists(aside) and not os.path.lexists(self._real):
                    os.rename(aside, self._real)
                raise
            if fsync:
                sync_folder(os.path.dirname(os.path.abspath(self._real)))
        except OutputError:
            self.discard()
            raise
        except OSError as err:
            self.discard()
            raise unwritable(self.target, err) from err
        if aside is not None:
            _remove_tree(aside)

    def add_folder(self, name: str) -> None:
        """A folder below, with those above it; harmless when it is there."""
        try:
            os.makedirs(os.path.join(self.building, name), exist_ok=True)
        except OSError as err:
            raise unwritable(self.target, err) from err

    def readable(self) -> str:
        """A path to what was written so far; for `--verify`."""
        return self.building

    def size(self) -> int:
        """Bytes written so far."""
        files = (os.path.join(folder, name) for folder, _, names in os.walk(self.building) for name in names)
        return sum(os.path.getsize(file) for file in files)

    def discard(self) -> None:
        _remove_tree(self.building)


def _remove_tree(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)


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
