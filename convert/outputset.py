"""Several files that appear together: shards, then the index that names them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from convert.errors import ConvertError, OutputError, TargetExistsError, gather
from convert.files import BINARY, Positioned, is_url, unwritable
from convert.locks import held
from convert.output import (
    FileOutput,
    Output,
    OutputFile,
    committed,
    fixed_sibling_of,
    is_there,
    sibling_of,
    target_exists,
)
from convert.outputfolder import HiddenFolder

if TYPE_CHECKING:
    from convert.writing import Settings

MANY_FILES = 64
"""A set of more files than this does not keep them all open."""


class _ParkedFile(OutputFile):
    """One of very many: its descriptor is given back once it is written, so it has a name from the start.

    Nobody could tell from such a file whether a run still needs it, so it lies in a hidden folder, which tells.
    """

    def __init__(self, target: str, *, overwrite: bool, hidden: str) -> None:
        self._hidden = hidden
        super().__init__(target, overwrite=overwrite)

    def _create(self) -> int:
        folder, name = os.path.split(os.path.abspath(self.path))
        here = folder == os.path.dirname(self._hidden)  # elsewhere, where a link leads, it could not be renamed to
        self._temporary = os.path.join(self._hidden, name) if here else sibling_of(folder, name)
        return os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | BINARY, 0o666)

    def park(self) -> None:
        try:
            self._io.close()
        except OSError as err:
            raise unwritable(self.target, err) from err

    def size(self) -> int:
        try:
            return os.path.getsize(self.readable())
        except OSError as err:
            raise unwritable(self.target, err) from err

    def commit(self, *, fsync: bool = False) -> None:
        self._io = Positioned(os.open(self.readable(), os.O_RDWR | BINARY))
        super().commit(fsync=fsync)


class SetOutput(Output, Protocol):
    """Several files that appear together, from `open_set`."""

    def add(self) -> FileOutput:
        """Begin the next part."""
        ...

    def park(self) -> None:
        """All parts begun so far are written."""
        ...


def open_set(
    parts: Sequence[str],
    index: tuple[str, bytes] | None,
    stale: Iterable[str],
    settings: Settings,
    own: Collection[str],
) -> SetOutput:
    """A set of files to be written, wherever it will be; see `OutputSet` for the arguments."""
    if is_url(parts[0]):
        from convert.remoteoutput import RemoteSet

        return RemoteSet(parts, index, stale, overwrite=settings.overwrite, own=own, verify=settings.verify)
    return OutputSet(parts, index, stale, overwrite=settings.overwrite, own=own)


class OutputSet:
    """Files that belong together: all complete before the first gets its name, the index, if there is one, the last.

    If a commit fails, all names lead again to what they led to before. A process killed between two commits leaves the
    old set as it was, or, where new parts have names of old ones, no index: never one whose parts are of two sets.
    """

    def __init__(
        self,
        parts: Sequence[str],
        index: tuple[str, bytes] | None,
        stale: Iterable[str],
        *,
        overwrite: bool,
        own: Collection[str] = (),
    ) -> None:
        """Check all names; TargetExistsError names every file that may not go.

        Args:
            parts: Paths of the files, in the order in which `add` will be called.
            index: Path and content of the index.
            stale: Further files that would contradict the new ones; they are removed when those are in place.
            overwrite: Replace and remove what is there.
            own: Real paths of files that may go without `overwrite`, as they are the source.
        """
        self._parts, self._overwrite, self._own = parts, overwrite, own
        self._stale = [path for path in stale if _is_there(path)]
        names = [*parts, *(() if index is None else index[:1])]
        taken = [target_exists(path) for path in names if _is_there(path) and not self._may_go(path)]
        what = "the file exists already, is of an older set, and would contradict the new one"
        taken += [target_exists(path, what) for path in self._stale if not self._may_go(path)]
        if taken:
            raise gather([*taken])
        self.files: list[OutputFile] = []
        self._index: OutputFile | None = None
        self._hidden: HiddenFolder | None = None
        if index is not None:
            self._content = index[1]
            self._index = OutputFile(index[0], overwrite=self._may_go(index[0]))
            with committed(self):
                self._index.write_at(0, self._content)
        if len(parts) > MANY_FILES:
            with committed(self):
                try:
                    self._hidden = HiddenFolder(names[-1] + ".parts")
                except OSError as err:
                    raise unwritable(names[-1], err) from err

    def _may_go(self, path: str) -> bool:
        return self._overwrite or os.path.realpath(path) in self._own

    def add(self) -> OutputFile:
        """Begin the next part."""
        path = self._parts[len(self.files)]
        may_go = self._may_go(path)
        if self._hidden is None:
            self.files.append(OutputFile(path, overwrite=may_go))
        else:
            self.files.append(_ParkedFile(path, overwrite=may_go, hidden=self._hidden.path))
        return self.files[-1]

    def park(self) -> None:
        """All parts begun so far are written; if there will be very many, give their descriptors back."""
        for file in self.files:
            if isinstance(file, _ParkedFile):
                file.park()

    def _all(self) -> list[OutputFile]:
        return self.files if self._index is None else [*self.files, self._index]

    def readable(self) -> list[str]:
        """Paths to the parts written so far; for `--verify`. The index is read back and compared at once."""
        if self._index is not None:
            found = bytearray(self._index.size())
            self._index.readinto(0, memoryview(found))
            if found != self._content:
                raise OutputError("the index reads back different", path=self._index.target)
        return [file.readable() for file in self.files]

    def size(self) -> int:
        """Bytes written so far."""
        return sum(file.size() for file in self._all())

    def commit(self, *, fsync: bool = False) -> None:
        """Give all files their names, then remove what is stale."""
        files = self._all()
        # Two runs at once would otherwise leave some parts of one and some of the other.
        lock = fixed_sibling_of(*_split(files[-1].path), "lock")
        old = {file.path: fixed_sibling_of(*_split(file.path), "old") for file in files}
        kept: dict[str, str] = {}
        tried: list[OutputFile] = []
        try:
            with held(lock):
                try:
                    self._keep_old(old, kept)
                    for file in files:
                        tried.append(file)
                        file.commit(fsync=fsync)
                except BaseException as err:  # an interrupt too
                    _roll_back(tried, kept)
                    if isinstance(err.__cause__, OSError) and not isinstance(err, TargetExistsError):
                        raise err.__cause__ from None  # what became of one file alone is not true any more
                    raise
                try:
                    _remove([*old.values(), *self._stale])
                except KeyboardInterrupt:  # it came too late
                    _remove([*old.values(), *self._stale])
                    raise
        except OSError as err:
            told = unwritable(files[-1].target, err)
            if left := [path for path in kept.values() if os.path.lexists(path)]:
                told.hint = f"old files could not get their names back, and are kept as {', '.join(left)}"
            raise told from err
        finally:
            self.discard()

    def _keep_old(self, old: dict[str, str], kept: dict[str, str]) -> None:
        """Second names for the files that will be replaced; an index whose parts will be, loses its first one."""
        parts = [file.path for file in self.files if _is_there(file.path)]
        index = [self._index.path] if self._index is not None and _is_there(self._index.path) else []
        for path in (*index, *parts):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(old[path])  # of a killed run
            kept[path] = old[path]
            if path in index and parts:
                os.rename(path, old[path])
                continue
            try:
                os.link(path, old[path])
            except OSError:  # a file system without hard links
                os.rename(path, old[path])

    def discard(self) -> None:
        """Remove everything written; harmless when already committed."""
        for file in self._all():
            file.discard()
        if self._hidden is not None:
            self._hidden.remove()


def _is_there(path: str) -> bool:
    try:
        return is_there(path)
    except OSError as err:
        raise unwritable(path, err) from err


def _split(path: str) -> tuple[str, str]:
    return os.path.split(os.path.abspath(path))


def _roll_back(tried: list[OutputFile], kept: dict[str, str]) -> None:
    for file in tried:
        if file.path not in kept and file.is_in_place():  # else another program's, made since
            with contextlib.suppress(OSError):
                os.unlink(file.path)
    for path, aside in kept.items():
        with contextlib.suppress(OSError):
            os.replace(aside, path)
        with contextlib.suppress(OSError):
            if os.path.samefile(aside, path):  # two names of one file stay two when one is renamed to the other
                os.unlink(aside)


def _remove(paths: Iterable[str]) -> None:
    """Delete files of an older set, as the new one is in place."""
    problems: list[ConvertError] = []
    for path in paths:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as err:
            what = f"the new files are in place, but this old one could not be removed: {err.strerror}"
            problems.append(OutputError(what, path=path, hint="remove it: programs may take it for current"))
    if problems:
        raise gather(problems)
