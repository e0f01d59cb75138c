"""A file system double: the functions of `os` that touch one folder are counted, and any call can be made to fail.

The real functions do the work, so that what is on the disk after a fault is what a user would find there. Calls that
concern other folders (modules being imported, /proc) are neither counted nor touched.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

FUNCTIONS = (
    "open", "close", "dup", "pread", "preadv", "pwrite", "fsync", "ftruncate", "posix_fallocate", "fchmod", "chmod",
    "stat", "lstat", "fstat", "scandir", "listdir", "mkdir", "link", "rename", "replace", "unlink", "rmdir",
)  # fmt: skip
TWO_PATHS = ("link", "rename", "replace")
REMOVING = ("unlink", "rmdir", "scandir", "lstat", "open", "fstat", "stat", "close")
"""What removing a temporary needs: if one of these fails, it may stay until the next run."""


@dataclass
class Fault:
    """What goes wrong, and when.

    Attributes:
        at: Number of the call, from 0.
        error: What it raises; or what is done before the call goes on.
        after: The call does its work first, as when an answer is lost or a signal arrives on the way back.
        lasting: All later calls of that function fail too, as on a full disk.
        happened: Name of the function whose call failed; empty if there were fewer calls.
    """

    at: int
    error: BaseException | Callable[[], object]
    after: bool = False
    lasting: bool = False
    happened: str = ""


@dataclass
class Watched:
    """Calls that were made, by function, in order; reads and writes cut short if asked."""

    folder: str
    fault: Fault | None = None
    short: bool = False
    calls: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    real: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def concerns(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Whether a call is about something in the folder."""
        paths = args[: 2 if name in TWO_PATHS else 1]
        return any(self._within(value) for value in (*paths, options.get("dir_fd")))

    def _within(self, value: object) -> bool:
        if isinstance(value, bool) or value is None:
            return False
        if isinstance(value, int):
            try:
                value = os.readlink(f"/proc/self/fd/{value}")
            except OSError:
                return False
        try:
            path = os.fsdecode(value)  # type: ignore[arg-type]
        except TypeError:
            return False
        return path == self.folder or path.startswith(self.folder + "/")

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Do what a function of `os` does, or fail."""
        real = self.real[name]
        if not self.concerns(name, args, options):
            return real(*args, **options)
        with self.lock:
            number = len(self.calls)
            self.calls.append(name)
        fault = self.fault
        if self.short and name in ("pread", "preadv", "pwrite"):
            args = (args[0], _cut(name, args[1]), *args[2:])
        if fault is None or not (number == fault.at or (fault.lasting and name == fault.happened)):
            return real(*args, **options)
        fault.happened = name
        if not isinstance(fault.error, BaseException):
            fault.error()
            return real(*args, **options)
        if name == "close" or fault.after:
            done = real(*args, **options)  # a descriptor is gone even when closing it fails
            if name in ("open", "dup"):
                self.real["close"](done)  # as when the process ends
            elif name == "scandir":
                done.close()
        raise fault.error


def _cut(name: str, value: Any) -> Any:
    if name == "pread":
        return max(value // 2, 1)
    if name == "preadv":
        return [value[0][: max(len(value[0]) // 2, 1)]]
    view = memoryview(value).cast("B")
    return view[: max(len(view) * 2 // 3, 1)]


@contextlib.contextmanager
def watched(folder: Path, fault: Fault | None = None, *, short: bool = False) -> Iterator[Watched]:
    """Count the calls about a folder, and let one fail."""
    seen = Watched(os.path.realpath(folder), fault, short)
    seen.real = {name: getattr(os, name) for name in FUNCTIONS if hasattr(os, name)}
    with contextlib.ExitStack() as stack:
        for name in seen.real:

            def double(*args: Any, _name: str = name, **options: Any) -> Any:
                return seen.call(_name, *args, **options)

            stack.enter_context(mock.patch.object(os, name, double))
        yield seen


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder, hidden or not: relative path -> content, None for a folder."""
    return {
        path.relative_to(folder).as_posix(): None if stat.S_ISDIR(path.lstat().st_mode) else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def visible(found: dict[str, bytes | None]) -> dict[str, bytes | None]:
    """Without our temporaries."""
    return {name: data for name, data in found.items() if "convert-tmp" not in name}


def descriptors() -> int:
    """How many this process has open."""
    return len(os.listdir("/proc/self/fd"))


def listing(folder: Path) -> list[str]:
    """Every name in a folder, hidden ones too."""
    return sorted(os.listdir(folder))
