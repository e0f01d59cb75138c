"""Locks that die with their process: who holds one lives, and what nobody holds was left by a killed run."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator

from convert.files import BINARY

_TRIES = 3


def lock(fd: int, *, shared: bool = False, wait: bool = False, where_none: bool = True) -> bool:
    """Lock an open file until it is closed or its process ends; False if another holds it.

    Args:
        fd: Its descriptor; of a folder too, except on Windows.
        shared: Others may share it.
        wait: Until nobody else holds it.
        where_none: The answer on a file system without locks, where two runs at once are on their own.
    """
    if sys.platform == "win32":
        import msvcrt

        try:
            msvcrt.locking(fd, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except OSError as err:
        # All others come from file systems that have none, or none for folders.
        return False if err.errno in (errno.EWOULDBLOCK, errno.EACCES) else where_none
    return True


def is_named(fd: int, path: str) -> bool:
    """Whether `path` leads to this open file, and not to another that has taken its name."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _locked(fd: int, path: str, *, wait: bool) -> bool:
    """Lock what has this name; closes it otherwise, for an open descriptor keeps its lock."""
    done = False
    try:
        done = sys.platform == "win32" or (lock(fd, wait=wait) and is_named(fd, path))
    finally:
        if not done:
            _close(fd)
    return done


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)


def claim(path: str, make: Callable[[str], int]) -> int | None:
    """Make a file or folder and hold its lock; what a dead run left there goes first.

    Args:
        path: Its name, the same in every run.
        make: Makes it and returns its descriptor; FileExistsError if it is there.

    Returns:
        The descriptor, or None if the name belongs to a run that lives, or that may.
    """
    for _ in range(_TRIES):
        try:
            fd = make(path)
        except FileExistsError:
            if not remove_dead(path):
                return None
            continue
        # Between making and locking it another run may have taken it for a dead one's.
        if _locked(fd, path, wait=False):
            return fd
    return None


def remove_dead(path: str) -> bool:
    """Remove a file or folder that nobody holds; False if somebody does, or if that cannot be told."""
    with contextlib.suppress(OSError):
        if sys.platform == "win32":
            os.unlink(path)  # which fails there while anybody has it open
            return True
        is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
        way = os.O_RDONLY if is_folder else os.O_RDWR
        fd = os.open(path, way | BINARY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not (lock(fd, where_none=False) and is_named(fd, path)):
                return False
            if is_folder:
                shutil.rmtree(path)
            else:
                os.unlink(path)
            return True
        finally:
            _close(fd)
    return False


@contextlib.contextmanager
def held(path: str) -> Iterator[None]:
    """A lock for one at a time, on a file that is there as long as somebody holds or wants it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | BINARY | getattr(os, "O_NOFOLLOW", 0), 0o666)
        if _locked(fd, path, wait=True):  # else its last holder has removed it meanwhile
            break
    try:
        yield
    finally:
        try:
            with contextlib.suppress(OSError):
                os.unlink(path)  # on Windows by the last one who has it open
        finally:
            _close(fd)
