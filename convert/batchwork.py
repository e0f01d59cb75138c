"""One file of a batch, from claim to digest; runs in the process that is asked to, here or elsewhere.

Everything here can be pickled and imported by a fresh interpreter, so that any `concurrent.futures` executor will do.
"""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import json
import os
import shutil
import stat
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from convert.batchlog import Entry, claim, hold_run
from convert.batchtree import FOLDER_FORMAT, INDEX_SUFFIX, STATE, Item, Stamp
from convert.errors import ConvertError, InputError, OutputError, PolicyError
from convert.files import SourceFile, unreadable, unwritable
from convert.output import OutputFile, committed, target_exists

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

    from convert.report import Report

_COPY_BYTES = 1 << 20


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


@dataclass(frozen=True)
class Job:
    """One file to do, and what the journal knows of it."""

    order: Order
    item: Item
    known: Entry | None = None
    begun: bool = False
    wait: bool = False
    jobs: int | None = 1


@dataclass
class FileReport:
    """What became of one file.

    Attributes:
        source: Relative to the source folder.
        target: Relative to the target folder.
        status: 'done', 'skipped' (finished before), 'failed', or 'stopped' (to be done by another run of the batch).
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


class BusyError(Exception):
    """Another run is at this file."""


class StoppedError(Exception):
    """The batch was told to stop."""


Watch = Callable[[int, int, str], None]

_stop: Event | None = None


def start_worker(stop: Event, run: str) -> None:
    """Prepare a fresh process: Ctrl-C is for the parent, whose end is ours too."""
    import multiprocessing
    import signal

    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    if os.name != "nt":
        with contextlib.suppress(OSError):
            hold_run(run)


def _follow(parent: Any) -> None:
    parent.join()
    os._exit(1)


def ready() -> bool:
    """Answered by a worker that could be started."""
    return True


def _stopped(_: int, __: int, ___: str) -> None:
    if _stop is not None and _stop.is_set():
        raise StoppedError


def do_chunk(jobs: Sequence[Job]) -> list[FileReport]:
    """Several small files, one after another."""
    return [do_file(job) for job in jobs]


def do_file(job: Job, watch: Watch = _stopped) -> FileReport:
    """One file; whatever goes wrong with it is in the report, and its target is as it was."""
    began = time.perf_counter()
    item = job.item
    report = FileReport(item.source, item.target, copied=item.copy, source_bytes=item.stamp.size)
    try:
        watch(0, 0, "")
        with claim(os.path.join(job.order.dst, STATE), item.target, wait=job.wait) as held:
            if not held:
                raise BusyError
            _do(job, report, watch)
    except BusyError:
        report.status = "busy"
    except StoppedError:
        report.status = "stopped"
    except Exception as err:  # one bad file, or bug, stops no other
        report.fail(err)
    report.seconds = round(time.perf_counter() - began, 6)
    return report


def _do(job: Job, report: FileReport, watch: Watch) -> None:
    order, item = job.order, job.item
    stamp = stamp_of([os.path.join(order.src, path) for path in (item.source, *item.parts)], item.source)
    report.source_bytes = stamp.size
    source_sha256 = None
    if order.checksum:
        source_sha256 = sha256_of([os.path.join(order.src, path) for path in (item.source, *item.parts)])
    if job.known is not None and is_finished(job, job.known, stamp, source_sha256):
        _as_before(job, report, job.known, stamp)
        return
    target = _target(job)
    report.target = os.path.relpath(target, order.dst).replace(os.sep, "/")
    os.makedirs(os.path.dirname(target), exist_ok=True)
    there = outputs(target)
    if not there and not os.path.lexists(target):
        made = _make(job, target, False, watch)
    elif order.overwrite or _is_ours(job, target):
        made = _make(job, target, True, watch)
    elif job.begun:
        made = _adopt(job, target, watch)
    else:
        raise target_exists(target)
    if stamp_of([os.path.join(order.src, path) for path in (item.source, *item.parts)], item.source) != stamp:
        raise InputError("the file changed while it was read", path=os.path.join(order.src, item.source))
    _describe(job, report, made, target, stamp, source_sha256)


def _as_before(job: Job, report: FileReport, known: Entry, stamp: Stamp) -> None:
    """Finished by an earlier run. The journal gets the times of today where only they have changed."""
    report.status = "skipped"
    report.target, report.target_bytes, report.sha256 = known.target, known.written.size, known.sha256
    written = stamp_of(outputs(os.path.join(job.order.dst, known.target)), known.target)
    if job.order.checksum and (stamp, written) != (known.source, known.written):
        report.entry = known._replace(source=stamp, written=written)
    report.verified = known.proven


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
    return _stamp(files) == known.written


def settings_of(order: Order, item: Item) -> str:
    """Fingerprint for an item; options do not matter to a copy."""
    return "copy" if item.copy else order.settings


def _is_ours(job: Job, target: str) -> bool:
    """Whether the target is what an earlier run wrote, unchanged since."""
    known = job.known
    if known is None or os.path.join(job.order.dst, known.target) != target:
        return False
    files = outputs(target)
    written = _stamp(files)
    return written == known.written or (written.size == known.written.size and sha256_of(files) == known.sha256)


def _target(job: Job) -> str:
    """Path of the target: a folder where one file cannot hold all tensors."""
    from convert.api import convert_file

    order, item = job.order, job.item
    target = os.path.join(order.dst, *item.target.split("/"))
    if item.copy or order.to != FOLDER_FORMAT:
        return target
    source = os.path.join(order.src, item.source)
    options = {**order.options, "to": order.to, "dry_run": True, "verify": False, "progress": None}
    try:
        convert_file(source, target, **options)
    except PolicyError:
        folder = os.path.splitext(target)[0]
        convert_file(source, folder + "/", **options)
        return folder
    return target


def _make(job: Job, target: str, overwrite: bool, watch: Watch) -> Report | None:
    """Convert, or copy, one file."""
    from convert.api import convert_file

    order = job.order
    source = os.path.join(order.src, *job.item.source.split("/"))
    if job.item.copy:
        _copy(source, target, overwrite, order.fsync, watch)
        return None
    options = dict(order.options)
    if options.get("jobs") is None:
        options["jobs"] = job.jobs
    folder = order.to == FOLDER_FORMAT and not target.endswith(os.path.splitext(job.item.target)[1])
    return convert_file(
        source,
        target + "/" if folder else target,
        to=order.to,
        overwrite=overwrite,
        fsync=order.fsync,
        verify=order.delete_source or bool(options.pop("verify", False)),
        progress=watch,
        **options,
    )


def _copy(source: str, target: str, overwrite: bool, fsync: bool, watch: Watch) -> None:
    """Copy a file's bytes, whole or not at all."""
    file = SourceFile(source)
    try:
        output = OutputFile(target, overwrite=overwrite)
        buffer = memoryview(bytearray(_COPY_BYTES))
        with committed(output):
            for offset in range(0, file.size, _COPY_BYTES):
                part = buffer[: min(_COPY_BYTES, file.size - offset)]
                file.readinto(offset, part)
                output.write_at(offset, part)
                watch(offset + len(part), file.size, source)
            file.check_unchanged()
            output.commit(fsync=fsync)
    finally:
        file.close()


def _adopt(job: Job, target: str, watch: Watch) -> Report | None:
    """A run that died may have written this target, or someone else did: made once more, it must come out equal.

    Raises:
        TargetExistsError: It does not, so it is not ours.
    """
    key = hashlib.sha256(job.item.target.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    folder = os.path.join(job.order.dst, STATE, "again", key)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        os.makedirs(folder)
    except OSError as err:
        raise unwritable(folder, err) from err
    try:
        again = os.path.join(folder, os.path.basename(target))
        made = _make(job, again, False, watch)
        ours, theirs = outputs(again), outputs(target)
        names = [[os.path.relpath(path, os.path.dirname(top)) for path in paths] for top, paths in
                 ((again, ours), (target, theirs))]  # fmt: skip
        if names[0] != names[1] or not all(map(_same, ours, theirs)):
            raise target_exists(target)
        return made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _same(one: str, other: str) -> bool:
    return filecmp.cmp(one, other, shallow=False)


def _describe(
    job: Job, report: FileReport, made: Report | None, target: str, stamp: Stamp, source_sha256: str | None
) -> None:
    files = outputs(target)
    written = _stamp(files)
    report.target_bytes, report.sha256 = written.size, sha256_of(files)
    proven = made is None and report.sha256 == sha256_of([os.path.join(job.order.src, job.item.source)])
    if made is not None:
        report.changes = [change._asdict() for change in made.changes]
        report.left_out = [skip._asdict() for skip in made.skipped]
        report.notes, report.verified = list(made.notes), made.verified
        proven = made.verified and not made.skipped and not made.notes
    settings = settings_of(job.order, job.item)
    report.entry = Entry(stamp, settings, report.target, written, report.sha256, source_sha256, proven)


# --- files and their digests -------------------------------------------------------------------------------------


def outputs(target: str) -> list[str]:
    """Files that a target consists of: itself, those of a folder, or an index and the shards it names; sorted."""
    if os.path.isdir(target):
        return sorted(os.path.join(folder, name) for folder, _, names in os.walk(target) for name in names)
    if os.path.lexists(target):
        return [target]
    index = target + INDEX_SUFFIX
    try:
        with open(index, "rb") as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []
    return [index, *(os.path.join(os.path.dirname(target), name) for name in names)]


def stamp_of(paths: Sequence[str], name: str) -> Stamp:
    """Sizes and times of files, added up.

    Raises:
        InputError: One cannot be looked at.
    """
    try:
        return _stamp(paths, strict=True)
    except OSError as err:
        raise unreadable(name, err) from err


def _stamp(paths: Sequence[str], *, strict: bool = False) -> Stamp:
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
    """Remove a source whose target is proven and still there, byte for byte; False if anything speaks against it."""
    paths = [os.path.join(order.src, path) for path in (item.source, *item.parts)]
    if not entry.proven or _stamp(paths) != entry.source:
        return False
    files = outputs(os.path.join(order.dst, entry.target))
    if not files or sha256_of(files) != entry.sha256:
        return False
    for path in paths:
        os.unlink(path)
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
