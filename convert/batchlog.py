"""What a batch remembers in its target: a journal of finished files, reports, and locks that die with their process.

All of it lies in `TARGET/.convert/`. The journal is JSON Lines, only ever appended to; a line that a crash has torn is
ignored, and every record begins with a line feed so that it cannot run into a torn one.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from convert.batchfiles import Stamp
from convert.batchtree import STATE
from convert.files import BINARY, is_url, real_path, unwritable
from convert.locks import is_named, lock

_PATIENCE_SECONDS = 10.0


class Entry(NamedTuple):
    """A finished file.

    Attributes:
        source: Of the source when it was converted.
        settings: Fingerprint of the options and our version.
        target: Relative path of what was written.
        written: Of the target when it was written.
        sha256: Of the target.
        source_sha256: Of the source, or None where it was not asked for.
        proven: The target was read back and compared, and holds all there was.
    """

    source: Stamp
    settings: str
    target: str
    written: Stamp
    sha256: str
    source_sha256: str | None
    proven: bool


def fingerprint(facts: Mapping[str, Any]) -> str:
    """A short digest of settings; equal settings give equal ones, in every process."""
    return hashlib.sha256(repr(sorted(facts.items())).encode("utf-8", "surrogatepass")).hexdigest()[:24]


class Journal:
    """Finished and begun files of one source folder and format; `refresh` reads what other runs have added."""

    def __init__(self, dst: str, root: tuple[str, str], run: str, *, fsync: bool) -> None:
        self._path = os.path.join(dst, STATE, "journal.jsonl")
        self._root = short(f"{real_path(root[0])}\0{root[1]}")
        self._run = run
        self._fsync = fsync
        self._read_bytes = 0
        self.finished: dict[str, Entry] = {}
        self.begun: dict[str, str] = {}
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | BINARY, 0o666)
        except OSError as err:
            raise unwritable(self._path, err) from err
        self.refresh()

    def refresh(self) -> None:
        """Take notice of all complete lines."""
        with open(self._path, "rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read_bytes += len(line)
                with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                    self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        source = line["source"]
        if line["root"] != self._root or not isinstance(source, str):
            return
        if line["what"] == "begun":
            if line["run"] != self._run:  # what this run begins is no news to it
                self.begun[source] = str(line["target"])
            return
        if line["what"] == "done":
            self.finished[source] = entry_from(line)
        self.begun.pop(source, None)

    def announce(self, places: Iterable[tuple[str, str]]) -> None:
        """All that this run is about to do; here, each is said when it is begun."""

    def end(self) -> None:
        """All of it came to an end."""

    def begin(self, places: Iterable[tuple[str, str]]) -> None:
        """Say of sources and targets that they are about to be written: from now on a target may be ours."""
        self._append([{"what": "begun", "source": source, "target": target} for source, target in places])
        if self._fsync:
            os.fsync(self._fd)

    def failed(self, source: str) -> None:
        """It came to an end and left its target as it was."""
        self._append([{"what": "failed", "source": source}])

    def done(self, source: str, entry: Entry, *, sync: bool = False) -> None:
        """It is finished."""
        self._append([{"what": "done", "source": source, **entry_record(entry)}])
        if sync:
            os.fsync(self._fd)

    def _append(self, lines: list[dict[str, Any]]) -> None:
        records = [{**line, "root": self._root, "run": self._run} for line in lines]
        append(self._fd, self._path, records)
        for record in records:
            self._take(record)

    def close(self) -> None:
        os.close(self._fd)


def entry_record(entry: Entry) -> dict[str, Any]:
    """An entry as JSON has it; `entry_from` is the other way."""
    return {
        "source_bytes": entry.source.size, "source_mtime_ns": entry.source.mtime_ns, "settings": entry.settings,
        "target": entry.target, "target_bytes": entry.written.size, "target_mtime_ns": entry.written.mtime_ns,
        "sha256": entry.sha256, "source_sha256": entry.source_sha256, "proven": entry.proven,
    }  # fmt: skip


def entry_from(record: Mapping[str, Any]) -> Entry:
    """ValueError, TypeError or KeyError if it is none."""
    return Entry(
        Stamp(int(record["source_bytes"]), int(record["source_mtime_ns"])),
        str(record["settings"]),
        str(record["target"]),
        Stamp(int(record["target_bytes"]), int(record["target_mtime_ns"])),
        str(record["sha256"]),
        record["source_sha256"],
        record["proven"] is True,
    )


def append(fd: int, path: str, records: list[dict[str, Any]]) -> None:
    """Add lines of JSON to a file that is open for appending.

    Raises:
        OutputError: They cannot be written.
    """
    data = "".join(f"\n{json.dumps(record)}\n" for record in records).encode("ascii")
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError as err:
        raise unwritable(path, err) from err


class Lines:
    """A report that grows by a line per file."""

    def __init__(self, dst: str) -> None:
        now = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        start = os.path.join(dst, STATE, f"report-{now}-{os.getpid()}")
        for number in itertools.count(1):  # a process may run several batches in a second
            self.path = f"{start}.jsonl" if number == 1 else f"{start}-{number}.jsonl"
            try:
                self._file = open(self.path, "xb", buffering=0)
                return
            except FileExistsError:
                continue
            except OSError as err:
                raise unwritable(self.path, err) from err

    def add(self, record: dict[str, Any]) -> None:
        """One line, written through to the system."""
        try:
            self._file.write(json.dumps(record).encode("ascii") + b"\n")
        except OSError as err:
            raise unwritable(self.path, err) from err

    def close(self) -> None:
        self._file.close()


# --- locks -------------------------------------------------------------------------------------------------------


def short(key: str) -> str:
    """A name for a file about a target."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]


@contextlib.contextmanager
def claim(state: str, key: str, *, wait: bool) -> Iterator[bool]:
    """Hold a target for one process at a time; yields False if another has it. The lock's file goes away after.

    A remote one cannot be held: who is second writes the same once more.
    """
    if is_url(state):
        yield True
        return
    path = os.path.join(state, "claims", short(key))
    try:
        if not os.path.isdir(os.path.dirname(path)):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | BINARY, 0o666)
            held = lock(fd, wait=wait)
            if not held or is_named(fd, path):
                break
            os.close(fd)  # its last holder has removed it meanwhile
    except OSError as err:
        raise unwritable(path, err) from err
    try:
        yield held
    finally:
        if held and os.name != "nt":
            with contextlib.suppress(OSError):
                os.unlink(path)
        os.close(fd)
        if held and os.name == "nt":
            with contextlib.suppress(OSError):
                os.unlink(path)


def run_name() -> str:
    """Of this run: host, process, and a random part."""
    import socket

    host = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())[:60]
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


class Run:
    """This run among others on the same target: a file that stays locked while any of its processes lives.

    Attributes:
        name: Host, process and a random part.
        path: The file; a worker locks it too.
        alone: No other run was alive when this one began.
    """

    def __init__(self, dst: str) -> None:
        self.name = run_name()
        host = self.name.rsplit("-", 2)[0]
        self._folder = os.path.join(dst, STATE, "runs")
        self.path = os.path.join(self._folder, f"{self.name}.lock")
        try:
            os.makedirs(self._folder, exist_ok=True)
            gate = os.open(os.path.join(self._folder, "gate"), os.O_RDWR | os.O_CREAT | BINARY, 0o666)
            try:
                lock(gate, wait=True)  # so that nobody takes a file that is not locked yet for a dead one
                self.alone = not self._others(host)
                self._fd = hold_run(self.path)
            finally:
                os.close(gate)
        except OSError as err:
            raise unwritable(dst, err) from err

    def _others(self, host: str) -> list[str]:
        """Files of other runs that live; those of dead ones are removed."""
        alive = []
        for name in sorted(os.listdir(self._folder)):
            path = os.path.join(self._folder, name)
            match = re.fullmatch(r"(.+)-(\d+)-[0-9a-f]+\.lock", name)
            if match is None:
                continue
            if match[1] == host and self._is_dead(path, int(match[2])):
                with contextlib.suppress(OSError):
                    os.unlink(path)
            else:
                alive.append(name)
        return alive

    def _is_dead(self, path: str, pid: int) -> bool:
        """Whether no process of that run holds its file; workers of a killed run get a moment to notice."""
        until = time.monotonic() + _PATIENCE_SECONDS
        while True:
            fd = os.open(path, os.O_RDWR | BINARY)
            try:
                if lock(fd):
                    return True
            finally:
                os.close(fd)
            if _lives(pid) or time.monotonic() > until:
                return False
            time.sleep(0.01)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        os.close(self._fd)


def hold_run(path: str) -> int:
    """Lock a run's file together with its other processes; kept until the descriptor is closed."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | BINARY, 0o666)
    lock(fd, shared=True)
    return fd


def _lives(pid: int) -> bool:
    if os.name == "nt":
        return True  # a signal 0 would end it there
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


# --- what dead runs left -----------------------------------------------------------------------------------------

_HEX = r"\.[0-9a-f]{12}\.convert-tmp"
_STEM_CHARACTERS = 50
"""Of a target's name in that of its temporary."""


def sweep(dst: str, targets: Iterable[str]) -> int:
    """Remove temporaries of targets that a dead run had begun; only for a run that is alone. Returns how many."""
    if is_url(dst):
        return 0
    removed = 0
    state = os.path.join(dst, STATE)
    for target in targets:
        with claim(state, target, wait=False) as held:
            if held:  # else a worker of a dead run still lives somewhere
                shutil.rmtree(os.path.join(state, "again", short(target)), ignore_errors=True)
                removed += _sweep_one(dst, target)
    return removed


def _sweep_one(dst: str, target: str) -> int:
    folder, base = os.path.split(os.path.join(dst, target))
    stem = os.path.splitext(base)[0]
    start = re.escape(stem[:_STEM_CHARACTERS])
    temporary = re.compile(rf"\.{start}([.-].*)?{_HEX}" if len(stem) < _STEM_CHARACTERS else rf"\.{start}.*{_HEX}")
    aside = re.compile(rf"\.{start}{_HEX}-old")
    removed = 0
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(folder)):
            path = os.path.join(folder, name)
            if aside.fullmatch(name) and len(stem) <= _STEM_CHARACTERS:
                _put_back(path, os.path.join(folder, stem))
            elif temporary.fullmatch(name):
                _remove(path)
            else:
                continue
            removed += 1
    return removed


def _put_back(aside: str, target: str) -> None:
    """An old folder, caught between the two renames that replace it."""
    if os.path.lexists(target):
        _remove(aside)
    else:
        os.rename(aside, target)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        os.unlink(path)
