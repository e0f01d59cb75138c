"""Several files that appear together: shards, then the index that names them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from convert.errors import ConvertError, OutputError, TargetExistsError, gather
from convert.files import BINARY, Positioned, is_url, unwritable
from convert.output import FileOutput, Output, OutputFile, committed, sibling_of, target_exists

if TYPE_CHECKING:
    from convert.writing import Settings

MANY_FILES = 64
"""A set of more files than this does not keep them all open."""


class _ParkedFile(OutputFile):
    """One of very many: its descriptor is given back once it is written, so it has a name from the start."""

    def _create(self) -> int:
        self._temporary = self._sibling()
        return os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | BINARY, 0o666)

    def park(self) -> None:
        self._io.close()

    def size(self) -> int:
        return os.path.getsize(self.readable())

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
        self._stale = [path for path in stale if os.path.lexists(path)]
        names = [*parts, *(() if index is None else index[:1])]
        taken = [target_exists(path) for path in names if os.path.lexists(path) and not self._may_go(path)]
        what = "the file exists already, is of an older set, and would contradict the new one"
        taken += [target_exists(path, what) for path in self._stale if not self._may_go(path)]
        if taken:
            raise gather([*taken])
        self.files: list[OutputFile] = []
        self._index: OutputFile | None = None
        if index is not None:
            self._content = index[1]
            self._index = OutputFile(index[0], overwrite=self._may_go(index[0]))
            with committed(self):
                self._index.write_at(0, self._content)

    def _may_go(self, path: str) -> bool:
        return self._overwrite or os.path.realpath(path) in self._own

    def add(self) -> OutputFile:
        """Begin the next part."""
        path = self._parts[len(self.files)]
        kind = _ParkedFile if len(self._parts) > MANY_FILES else OutputFile
        self.files.append(kind(path, overwrite=self._may_go(path)))
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
        kept: dict[str, str] = {}
        tried: list[str] = []
        try:
            self._keep_old(kept)
            for file in self._all():
                tried.append(file.path)
                file.commit(fsync=fsync)
        except BaseException as err:  # an interrupt too
            if isinstance(err, TargetExistsError):
                tried.pop()  # another program's, made since
            _roll_back(tried, kept)
            self.discard()
            if isinstance(err, OSError):
                raise unwritable(self._all()[-1].target, err) from err
            raise
        _remove([*kept.values(), *self._stale])

    def _keep_old(self, kept: dict[str, str]) -> None:
        """Second names for the files that will be replaced; an index whose parts will be, loses its first one."""
        parts = [file.path for file in self.files if os.path.lexists(file.path)]
        index = [self._index.path] if self._index is not None and os.path.lexists(self._index.path) else []
        for path in (*index, *parts):
            kept[path] = aside = sibling_of(*os.path.split(os.path.abspath(path)))
            if path in index and parts:
                os.rename(path, aside)
                continue
            try:
                os.link(path, aside)
            except OSError:  # a file system without hard links
                os.rename(path, aside)

    def discard(self) -> None:
        """Remove everything written; harmless when already committed."""
        for file in self._all():
            file.discard()


def _roll_back(tried: list[str], kept: dict[str, str]) -> None:
    for path in tried:
        if path not in kept:
            with contextlib.suppress(OSError):
                os.unlink(path)
    for path, aside in kept.items():
        with contextlib.suppress(OSError):
            os.replace(aside, path)
            os.unlink(aside)  # two names of one file stay two when one is renamed to the other


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
