"""What a batch says about one file: the job, its report, and the facts by which a finished one is known."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from convert.batchfiles import Stamp, added_up, is_dir, join, outputs, remove, sha256_of, share, sync
from convert.batchlog import Entry
from convert.batchtree import Item
from convert.errors import ConvertError, OutputError
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


def is_finished(
    job: Job, known: Entry, stamp: Stamp, source_sha256: str | None, seen: Mapping[str, Stamp] | None = None
) -> bool:
    """Whether a journal's entry still holds for source, settings and target.

    Args:
        job: The file.
        known: What the journal says.
        stamp: Of the source now.
        source_sha256: Of the source now, if it is known.
        seen: Of targets, by relative path, where they were listed together.
    """
    order = job.order
    if known.settings != settings_of(order, job.item):
        return False
    if order.delete_source and not known.proven and not job.item.copy:
        return False
    target = join(order.dst, known.target)
    listed = None if seen is None or order.checksum else seen.get(known.target)
    files = outputs(target) if listed is None else [target]
    if not files and not is_dir(target):
        return False
    if source_sha256 is not None and known.source_sha256 is not None:
        if source_sha256 != known.source_sha256:
            return False
    elif stamp != known.source:
        return False
    if order.checksum:
        return sha256_of(files) == known.sha256
    return (added_up(files) if listed is None else listed) == known.written


def settings_of(order: Order, item: Item) -> str:
    """Fingerprint for an item; options do not matter to a copy."""
    return "copy" if item.copy else order.settings


def sources_of(order: Order, item: Item) -> list[str]:
    """Paths of a source and of the files it names."""
    return [join(order.src, path) for path in (item.source, *item.parts)]


def remove_source(order: Order, item: Item, entry: Entry) -> bool:
    """Remove a source whose target is proven and still there, byte for byte; False if anything speaks against it.

    Raises:
        OutputError: The target cannot be read, or the source not be removed.
    """
    paths = sources_of(order, item)
    if item.copy or not entry.proven or added_up(paths) != entry.source:
        return False
    files = outputs(join(order.dst, entry.target))
    if not files or share(paths, files) or sha256_of(files) != entry.sha256:
        return False
    try:
        for path in (*files, *{os.path.dirname(file) for file in files}):
            sync(path)
        for path in paths:
            remove(path)
    except OSError as err:
        raise OutputError(f"the source cannot be removed: {err.strerror or err}", path=err.filename) from err
    return True


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
