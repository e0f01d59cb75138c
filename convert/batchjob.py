"""What a batch says about one file: the job, its report, and the facts by which a finished one is known."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from convert.batchlog import Entry
from convert.batchtree import Item, Stamp
from convert.errors import ConvertError, InputError, OutputError
from convert.files import unreadable
from convert.version import __version__


@dataclass(frozen=True)
class Order:
    """What is the same for all files of a batch.

    Attributes:
        src: The source folder.
        dst: The target folder.
        to: Format of the targets.
        options: For `convert_file`.
        settings: Fingerprint of what decides about the bytes.
        overwrite: Replace targets that are not ours too.
        fsync: Force everything to the disk.
        checksum: Tell by digests, not by sizes and times, what is finished.
        delete_source: Sources will be removed; so targets must be proven.
        run: File that is there as long as the run lives, where others may do its work; a worker must see it.
        version: Of the program that asks.
    """

    src: str
    dst: str
    to: str
    options: Mapping[str, Any]
    settings: str
    overwrite: bool
    fsync: bool
    checksum: bool
    delete_source: bool
    run: str | None = None
    version: str = __version__


@dataclass(frozen=True)
class Job:
    """One file to do, and what the journal knows of it.

    Attributes:
        order: The batch's.
        item: The file.
        known: What an earlier run has noted.
        begun: A run that died may have written the target.
        fresh: There was no target when this was handed over: what is found there, an earlier try has made.
        wait: Until another run that is at this file is done with it.
        jobs: Threads; None for all cores of the machine where it is done.
    """

    order: Order
    item: Item
    known: Entry | None = None
    begun: bool = False
    fresh: bool = False
    wait: bool = False
    jobs: int | None = 1


@dataclass
class FileReport:
    """What became of one file.

    Attributes:
        source: Relative to the source folder.
        target: Relative to the target folder.
        status: 'done', 'skipped' (finished before), 'failed', or 'stopped' (the next run will do it).
        copied: It was no tensor file.
        source_bytes: Size of the source and of the files it names.
        target_bytes: Size of the target, all files of a folder together.
        sha256: Of the target; of several files, of the lines that sha256sum would print for them.
        seconds: Wall time.
        changes: Tensors that a policy or cast changed.
        left_out: Tensors and members that were left out.
        notes: What else is worth knowing.
        problems: Why it failed.
        exit_status: 0, or that of a program that had converted this file alone.
        verified: The target was read back and compared.
        deleted: The source was removed.
    """

    source: str
    target: str
    status: str = "done"
    copied: bool = False
    source_bytes: int = 0
    target_bytes: int = 0
    sha256: str | None = None
    seconds: float = 0.0
    changes: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)
    exit_status: int = 0
    verified: bool = False
    deleted: bool = False
    entry: Entry | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {name: value for name, value in vars(self).items() if name != "entry"}

    def fail(self, err: BaseException) -> None:
        """Note why it failed."""
        self.status = "failed"
        if isinstance(err, ConvertError):
            self.exit_status = err.exit_code
            found = err.problems
            self.problems = [
                {"kind": type(one).__name__, "path": one.path, "tensor": one.tensor, "message": one.message,
                 "hint": one.hint, "text": str(one)}
                for one in found
            ]  # fmt: skip
            return
        self.exit_status = 1
        trace = "".join(traceback.format_exception(err))
        text = f"{self.source}: {type(err).__name__}: {err}"
        self.problems = [
            {"kind": type(err).__name__, "path": self.source, "tensor": None, "message": str(err), "hint": None,
             "text": text, "trace": trace}
        ]  # fmt: skip


def is_finished(job: Job, known: Entry, stamp: Stamp, source_sha256: str | None) -> bool:
    """Whether a journal's entry still holds for source, settings and target."""
    order = job.order
    if known.settings != settings_of(order, job.item):
        return False
    if order.delete_source and not known.proven and not job.item.copy:
        return False
    files = outputs(os.path.join(order.dst, known.target))
    if not files and not os.path.isdir(os.path.join(order.dst, known.target)):
        return False
    if source_sha256 is not None and known.source_sha256 is not None:
        if source_sha256 != known.source_sha256:
            return False
    elif stamp != known.source:
        return False
    if order.checksum:
        return sha256_of(files) == known.sha256
    return added_up(files) == known.written


def settings_of(order: Order, item: Item) -> str:
    """Fingerprint for an item; options do not matter to a copy."""
    return "copy" if item.copy else order.settings


def outputs(target: str) -> list[str]:
    """Files that a target consists of: itself, those of a folder, or an index and the shards it names; sorted."""
    if os.path.isdir(target):
        return sorted(os.path.join(folder, name) for folder, _, names in os.walk(target) for name in names)
    if os.path.lexists(target):
        return [target]
    index = f"{target}.index.json"
    try:
        with open(index, "rb") as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []
    return [index, *(os.path.join(os.path.dirname(target), name) for name in names)]


def sources_of(order: Order, item: Item) -> list[str]:
    """Paths of a source and of the files it names."""
    return [os.path.join(order.src, *path.split("/")) for path in (item.source, *item.parts)]


def share(some: Sequence[str], others: Sequence[str]) -> bool:
    """Whether a file is in both, under whatever name."""
    known = {(found.st_dev, found.st_ino) for found in map(os.stat, filter(os.path.exists, some))}
    return any((found.st_dev, found.st_ino) in known for found in map(os.stat, filter(os.path.exists, others)))


def stamp_of(paths: Sequence[str]) -> Stamp:
    """Sizes and times of files, added up.

    Raises:
        InputError: One cannot be looked at.
    """
    try:
        return added_up(paths, strict=True)
    except OSError as err:
        raise unreadable(str(err.filename), err) from err


def added_up(paths: Sequence[str], *, strict: bool = False) -> Stamp:
    size = mtime_ns = 0
    for path in paths:
        try:
            found = os.stat(path)
        except OSError:
            if strict:
                raise
            return Stamp(-1, -1)
        size += found.st_size if stat.S_ISREG(found.st_mode) else 0
        mtime_ns += found.st_mtime_ns
    return Stamp(size, mtime_ns)


def sha256_of(paths: Sequence[str]) -> str:
    """Digest of a file; of several, of the lines `sha256sum` prints for them in their common folder.

    Raises:
        OutputError: One cannot be read.
    """
    if len(paths) == 1:
        return _sha256(paths[0])
    top = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    lines = [f"{_sha256(path)}  {os.path.relpath(path, top)}\n" for path in paths]
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _sha256(path: str) -> str:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InputError("is not a regular file", path=path)
        with open(path, "rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as err:
        raise OutputError(f"cannot be read: {err.strerror or err}", path=path) from err


def remove_source(order: Order, item: Item, entry: Entry) -> bool:
    """Remove a source whose target is proven and still there, byte for byte; False if anything speaks against it.

    Raises:
        OutputError: The target cannot be read, or the source not be removed.
    """
    paths = sources_of(order, item)
    if item.copy or not entry.proven or added_up(paths) != entry.source:
        return False
    files = outputs(os.path.join(order.dst, entry.target))
    if not files or share(paths, files) or sha256_of(files) != entry.sha256:
        return False
    try:
        for path in (*files, *{os.path.dirname(file) for file in files}):
            _sync(path)
        for path in paths:
            os.unlink(path)
    except OSError as err:
        raise OutputError(f"the source cannot be removed: {err.strerror or err}", path=err.filename) from err
    return True


def _sync(path: str) -> None:
    """Force a file or folder to the disk."""
    if os.name == "nt" and os.path.isdir(path):
        return
    fd = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def chunked(jobs: Sequence[Job], count: int, nbytes: int) -> Iterator[list[Job]]:
    """Groups of at most `count` files and about `nbytes` bytes, in order."""
    group: list[Job] = []
    size = 0
    for job in jobs:
        if group and (len(group) >= count or size + job.item.stamp.size > nbytes):
            yield group
            group, size = [], 0
        group.append(job)
        size += job.item.stamp.size
    if group:
        yield group
