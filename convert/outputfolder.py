"""Folders of files that appear as a whole."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil

from convert.errors import OutputError
from convert.files import BINARY, unwritable
from convert.locks import held
from convert.output import fixed_sibling_of, is_there, make_sibling, sync_folder, target_exists


class HiddenFolder:
    """A folder beside a target, to build in; what a killed run left there is removed by the next one."""

    def __init__(self, target: str) -> None:
        self.path, self._fd = make_sibling(*os.path.split(os.path.abspath(target)), _make_folder)
        self._is_ours = True

    def unlock(self) -> None:
        """Close it, as some systems rename nothing that is open."""
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            os.close(fd)

    def keep(self) -> None:
        """It has got another name: there is nothing to remove any more."""
        self._is_ours = False
        self.unlock()

    def remove(self) -> None:
        """With all that is in it; harmless when that was done, or it was kept."""
        if self._is_ours:
            _remove_tree(self.path)
            self.keep()


def _make_folder(path: str) -> int:
    os.mkdir(path)
    try:
        return os.open(path if os.name != "nt" else os.devnull, os.O_RDONLY | BINARY)
    except OSError:
        os.rmdir(path)
        raise


class OutputFolder:
    """A folder of files built beside its target and renamed as a whole."""

    def __init__(self, target: str | os.PathLike[str], *, overwrite: bool, suffix: str) -> None:
        self.target = os.fspath(target).rstrip("/\\") or os.fspath(target)
        self._real = os.path.realpath(self.target) if os.path.islink(self.target) else self.target
        self._overwrite = overwrite
        self._suffix = suffix
        where = os.path.split(os.path.abspath(self._real))
        self._lock = fixed_sibling_of(*where, "lock")
        self._aside = fixed_sibling_of(*where) + "-old"
        hidden = None
        try:
            with held(self._lock):
                self._recover()
                self._check_old()
                hidden = HiddenFolder(self._real)
        except BaseException as err:  # an interrupt too, which may come after the folder was made
            if hidden is not None:
                hidden.remove()
            if isinstance(err, OSError):
                raise unwritable(self.target, err) from err
            raise
        self._hidden = hidden
        self.building = self._hidden.path

    def _recover(self) -> None:
        """A run that was killed in the middle of a swap left the old folder aside."""
        if is_there(self._aside):
            if is_there(self._real):
                _remove_tree(self._aside)
            else:
                os.rename(self._aside, self._real)

    def _check_old(self) -> bool:
        """Whether there is a folder already; OutputError if it may not be replaced."""
        if not is_there(self._real):
            return False
        if not os.path.isdir(self._real):
            raise OutputError("the target is a file (expected a folder)", path=self.target, hint="give another path")
        stray = None
        found = False
        for folder, folders, files in os.walk(self._real, onerror=fail):
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
        try:
            if fsync:
                for folder, _, _ in os.walk(self.building, onerror=fail):
                    sync_folder(folder)
            with held(self._lock):
                self._recover()
                old = self._check_old()  # once more: much may have happened since
                if old:
                    shutil.copymode(self._real, self.building)
                try:
                    self._hidden.unlock()
                    if old:
                        os.rename(self._real, self._aside)
                    os.rename(self.building, self._real)
                    if fsync:
                        sync_folder(os.path.dirname(os.path.abspath(self._real)))
                except BaseException:  # an interrupt too
                    self._undo()
                    self.discard()
                    raise
                self._hidden.keep()
                if old:
                    self._remove_old()
        except OSError as err:
            self.discard()
            raise self._unwritable(err) from err
        except BaseException:
            self.discard()
            raise

    def _undo(self) -> None:
        """Back to the old folder, or none."""
        with contextlib.suppress(OSError):
            if not is_there(self.building):
                os.rename(self._real, self.building)
        with contextlib.suppress(OSError):
            if not is_there(self._real):
                os.rename(self._aside, self._real)

    def _unwritable(self, err: OSError) -> OutputError:
        if err.errno in (errno.ENOTEMPTY, errno.EEXIST):  # made by another program just now
            return target_exists(self.target)
        told = unwritable(self.target, err)
        if os.path.lexists(self._aside):
            told.hint = f"the old folder is {self._aside}; the next run puts it back"
        return told

    def _remove_old(self) -> None:
        try:
            _remove_tree(self._aside)
        except BaseException:  # an interrupt: the new one is in place all the same
            _remove_tree(self._aside)
            raise
        if os.path.lexists(self._aside):
            what = "the new folder is in place, but the old one could not be removed"
            raise OutputError(what, path=self._aside, hint="remove it, or run again with --overwrite")

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
        try:
            return sum(
                os.path.getsize(os.path.join(folder, name))
                for folder, _, names in os.walk(self.building, onerror=fail)
                for name in names
            )
        except OSError as err:
            raise unwritable(self.target, err) from err

    def discard(self) -> None:
        """Remove everything written; harmless when already committed."""
        self._hidden.remove()


def fail(err: OSError) -> None:
    """For `os.walk`, which by itself passes over folders that it cannot read."""
    raise err


def _remove_tree(folder: str) -> None:
    with contextlib.suppress(OSError):  # of a failed close, in spite of what is asked
        shutil.rmtree(folder, ignore_errors=True)
