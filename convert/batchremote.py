"""What a batch remembers in a remote target: nothing can be appended there, nor locked.

All of it lies in `TARGET/.convert/`. A finished file is a small object, `done/ID.json`; a run is one, `runs/NAME.json`,
with the targets it is about to write, which goes when the run ends. Uploads appear whole, and the bytes are the same
whoever writes them, so two runs at once do some work twice, and no harm.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from convert import remote
from convert.batchfiles import join, make_dirs, put, read_small
from convert.batchlog import Entry, entry_from, entry_record, run_name, short
from convert.batchtree import STATE
from convert.errors import ConvertError, OutputError
from convert.files import real_path, unwritable

_RECORD_BYTES = 1 << 20
_RUN_BYTES = 1 << 30
_READERS = 16
"""Requests at once, for many small objects."""


class RemoteRun:
    """This run among others; see `convert.batchlog.Run`.

    Attributes:
        name: Host, process and a random part.
        path: None: there is no file that others could look at.
        alone: Never known.
    """

    path = None
    alone = False

    def __init__(self, dst: str) -> None:
        self.name = run_name()

    def close(self) -> None:
        """Nothing is held."""


class RemoteJournal:
    """Finished and begun files of one source folder and format; see `convert.batchlog.Journal`."""

    def __init__(self, dst: str, root: tuple[str, str], run: str) -> None:
        self._root = short(f"{real_path(root[0])}\0{root[1]}")
        self._done = join(dst, f"{STATE}/done-{self._root}")
        self._runs = join(dst, f"{STATE}/runs")
        self._mine = join(self._runs, f"{run}.json")
        self.finished: dict[str, Entry] = {}
        self.begun: dict[str, str] = {}
        make_dirs(self._done)
        make_dirs(self._runs)
        self._before: list[str] = []
        for _, line in _records(self._done, _RECORD_BYTES):
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                self.finished[str(line["source"])] = entry_from(line)
        for url, line in _records(self._runs, _RUN_BYTES):
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                if line["root"] == self._root:
                    self._before.append(url)
                    self.begun.update({str(source): str(target) for source, target in line["begun"]})

    def announce(self, places: Iterable[tuple[str, str]]) -> None:
        """All that this run is about to write."""
        record = {"root": self._root, "begun": [list(place) for place in places]}
        put(remote.locate(self._mine, OutputError), json.dumps(record).encode("ascii"))

    def refresh(self) -> None:
        """What others do meanwhile is not looked at."""

    def begin(self, places: Iterable[tuple[str, str]]) -> None:
        """Announced already."""

    def failed(self, source: str) -> None:
        """It came to an end and left its target as it was."""
        self.begun.pop(source, None)

    def done(self, source: str, entry: Entry, *, sync: bool = False) -> None:
        """It is finished."""
        record = json.dumps({"source": source, **entry_record(entry)}).encode("ascii")
        put(remote.locate(join(self._done, f"{short(source)}.json"), OutputError), record)
        self.finished[source] = entry
        self.begun.pop(source, None)

    def end(self) -> None:
        """All came to an end: nothing is there, of this run or those before, that is not noted."""
        for url in (*self._before, self._mine):
            with contextlib.suppress(ConvertError):
                remote.remove(url)

    def close(self) -> None:
        """Nothing is held."""


def _records(folder: str, most_bytes: int) -> list[tuple[str, dict[str, Any]]]:
    """URL and content of all objects in a folder; the content is empty where it cannot be understood."""
    urls = [url for _, url, _ in remote.files_below(folder, required=False)]

    def read(url: str) -> dict[str, Any]:
        try:
            found = json.loads(read_small(url, most_bytes) or b"")
        except (ConvertError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    with ThreadPoolExecutor(_READERS) as pool:
        return list(zip(urls, pool.map(read, urls), strict=True))


class RemoteLines:
    """A report with a line per file; it is uploaded at the end."""

    def __init__(self, dst: str) -> None:
        now = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        self.path = join(dst, f"{STATE}/report-{now}-{os.getpid()}-{os.urandom(3).hex()}.jsonl")
        self._file = tempfile.TemporaryFile()

    def add(self, record: dict[str, Any]) -> None:
        """One line."""
        try:
            self._file.write(json.dumps(record).encode("ascii") + b"\n")
        except OSError as err:
            raise unwritable(tempfile.gettempdir(), err) from err

    def close(self) -> None:
        """Upload it."""
        with self._file:
            self._file.seek(0)
            put(remote.locate(self.path, OutputError), self._file.read())
