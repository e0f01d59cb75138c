"""One file of a batch, from claim to digest; runs in the process that is asked to, here or elsewhere.

Everything here can be pickled and imported by a fresh interpreter, so that any `concurrent.futures` executor will do.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from convert.batchfiles import (
    Stamp,
    added_up,
    below,
    is_there,
    join,
    make_dirs,
    outputs,
    remove_all_below,
    remove_if_can,
    same_bytes,
    sha256_of,
    share,
    stamp_of,
)
from convert.batchjob import FileReport, Job, is_finished, settings_of, sources_of
from convert.batchlog import Entry, claim, hold_run, short
from convert.batchtree import FOLDER_FORMAT, STATE
from convert.errors import OutputError, PolicyError, TargetExistsError
from convert.files import is_url, open_source, unwritable
from convert.output import committed, open_output, target_exists
from convert.threads import new_buffer
from convert.version import __version__
from convert.writing import Settings, WholeError

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

    from convert.batchjob import Order
    from convert.report import Report
    from convert.writing import Spreading

_COPY_BYTES = 1 << 20
_LOOK_SECONDS = 1.0
"""How often a worker elsewhere looks whether its work is still wanted."""


class BusyError(Exception):
    """Another run is at this file."""


class StoppedError(Exception):
    """The batch was told to stop."""


Watch = Callable[[int, int, str], None]

_stop: Event | None = None


def start_worker(stop: Event, run: str | None) -> None:
    """Prepare a fresh process: Ctrl-C is for the parent, whose end is ours too."""
    import multiprocessing
    import signal

    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    if os.name != "nt" and run is not None:
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


def following(run: str | None, watch: Watch = _stopped) -> Watch:
    """Watches a run from elsewhere: StoppedError soon after its file is gone, as it is when the run ends in any way."""
    if run is None:
        return watch
    next_look = 0.0

    def look(done: int, total: int, name: str) -> None:
        nonlocal next_look
        watch(done, total, name)
        now = time.monotonic()
        if now >= next_look:
            next_look = now + _LOOK_SECONDS
            if not os.path.exists(run):
                raise StoppedError

    return look


def check_place(order: Order) -> None:
    """What is true on the machine that asked must be true here.

    Raises:
        OutputError: This is another version of the program, or another machine that has not the same folders.
    """
    from socket import gethostname

    if order.run is None:
        return
    here = f"the worker of process {os.getpid()} on {gethostname()}"
    if order.version != __version__:
        raise OutputError(
            f"{here} has another version of tensor-convert (expected {order.version}, found {__version__})",
            hint=f"install version {order.version} there, and start it again",
        )
    for path, wanted in ((order.src, order.src), (order.dst, order.run)):
        if not os.path.exists(wanted):
            raise OutputError(
                f"{here} does not see this folder", path=path, hint="all workers need it under the same path; mount it"
            )


def do_chunk(jobs: Sequence[Job]) -> list[FileReport]:
    """Several small files, one after another; OutputError if this is no place to do them."""
    order = jobs[0].order
    check_place(order)
    return [do_file(job, following(order.run)) for job in jobs]


def do_file(job: Job, watch: Watch = _stopped, spread: Spreading | None = None) -> FileReport:
    """One file; whatever goes wrong with it is in the report, and its target is as it was.

    Args:
        job: What.
        watch: Called as work goes on; StoppedError ends it.
        spread: Has its bytes copied elsewhere; the status is 'whole' where they cannot be.
    """
    began = time.perf_counter()
    item = job.item
    report = FileReport(item.source, item.target, copied=item.copy, source_bytes=item.stamp.size)
    try:
        watch(0, 0, "")
        with claim(os.path.join(job.order.dst, STATE), item.target, wait=job.wait) as held:
            if not held:
                raise BusyError
            _do(job, report, _Maker(job, watch, spread))
    except BusyError:
        report.status = "busy"
    except WholeError:
        report.status = "whole"
    except StoppedError:
        report.status = "stopped"
    except Exception as err:  # one bad file, or bug, stops no other
        report.fail(err)
    report.seconds = round(time.perf_counter() - began, 6)
    return report


def _do(job: Job, report: FileReport, maker: _Maker) -> None:
    order, item = job.order, job.item
    sources = sources_of(order, item)
    stamp = stamp_of(sources)
    report.source_bytes = stamp.size
    source_sha256 = sha256_of(sources) if order.checksum else None
    if job.known is not None and is_finished(job, job.known, stamp, source_sha256):
        _as_before(job, report, job.known, stamp)
        return
    target = _target(job)
    if not item.may_be_folder and os.path.basename(target) != os.path.basename(item.target):
        raise OutputError(
            "several tensors need a folder, which other files of this batch have as theirs",
            path=target,
            hint="convert this file by itself",
        )
    report.target = below(order.dst, target)
    try:
        make_dirs(os.path.dirname(target))
    except OSError as err:
        raise unwritable(os.path.dirname(target), err) from err
    there = outputs(target)
    if share(sources, there):
        raise OutputError("the target is the source itself", path=target, hint="remove that link, or convert it alone")
    ours = _unchanged(job)
    if order.overwrite or (there and set(there) <= set(ours)):
        made = maker.make(target, True)
    elif job.begun or job.fresh or (item.copy and there):
        made = maker.adopt(target)
    elif there or is_there(target):
        raise target_exists(target)
    else:
        made = maker.make(target, False)
    if ours:  # other shards, or a file where there is a folder now
        for path in sorted(set(ours) - set(outputs(target))):
            remove_if_can(path)
    _describe(job, report, made, target, stamp, source_sha256)


def _as_before(job: Job, report: FileReport, known: Entry, stamp: Stamp) -> None:
    """Finished by an earlier run. The journal gets the times of today where only they have changed."""
    report.status = "skipped"
    report.target, report.target_bytes, report.sha256 = known.target, known.written.size, known.sha256
    written = stamp_of(outputs(join(job.order.dst, known.target)))
    if job.order.checksum and (stamp, written) != (known.source, known.written):
        report.entry = known._replace(source=stamp, written=written)
    report.verified = known.proven


def _unchanged(job: Job) -> list[str]:
    """Files that an earlier run wrote for this source and nobody has changed since."""
    known = job.known
    if known is None:
        return []
    files = outputs(join(job.order.dst, known.target))
    written = added_up(files)
    same = written == known.written or (written.size == known.written.size and sha256_of(files) == known.sha256)
    return files if same else []


def _target(job: Job) -> str:
    """Path of the target: a folder where one file cannot hold all tensors."""
    from convert.api import convert_file

    order, item = job.order, job.item
    target = join(order.dst, item.target)
    if item.copy or order.to != FOLDER_FORMAT:
        return target
    source = join(order.src, item.source)
    options = {**order.options, "to": order.to, "dry_run": True, "verify": False, "progress": None}
    try:
        convert_file(source, target, **options)
    except PolicyError:
        folder = os.path.splitext(target)[0]
        convert_file(source, folder + "/", **options)
        return folder
    return target


class _Maker:
    """Writes the target of one job."""

    def __init__(self, job: Job, watch: Watch, spread: Spreading | None) -> None:
        self._job = job
        self._watch = watch
        self._spread = spread

    def make(self, target: str, overwrite: bool) -> Report | None:
        """Convert, or copy, one file."""
        from convert.api import convert_file

        job, order = self._job, self._job.order
        source = join(order.src, job.item.source)
        if job.item.copy:
            _copy(source, target, overwrite, order.fsync, self._watch)
            return None
        options = dict(order.options)
        verify = bool(options.pop("verify", False)) or order.delete_source
        folder = os.path.basename(target) != os.path.basename(job.item.target)
        return convert_file(
            source,
            target + "/" if folder else target,
            to=order.to,
            overwrite=overwrite,
            fsync=order.fsync,
            verify=verify,
            jobs=job.jobs,
            progress=self._watch,
            spread=self._spread,
            **options,
        )

    def adopt(self, target: str) -> Report | None:
        """Somebody who died may have written this target, or part of it; what is there must be what we would write.

        Raises:
            TargetExistsError: It is not, so it is not ours.
        """
        there = outputs(target)
        if not there and not is_there(target):
            try:
                return self.make(target, False)
            except TargetExistsError:
                pass  # parts are there, or whoever was taken for dead has just finished
        folder = join(self._job.order.dst, f"{STATE}/again/{short(self._job.item.target)}")
        remove_all_below(folder)
        try:
            make_dirs(folder)
        except OSError as err:
            raise unwritable(folder, err) from err
        try:
            return self._compare(target, join(folder, os.path.basename(target)))
        finally:
            remove_all_below(folder)

    def _compare(self, target: str, again: str) -> Report | None:
        """Made once more beside it, it must come out equal."""
        made = self.make(again, False)
        wanted = {_moved(path, again, target): path for path in outputs(again)}
        there = {path for path in (*wanted, *outputs(target), target) if is_there(path)}
        if os.path.isdir(target):
            there.discard(target)
        if not all(path in wanted and same_bytes(path, wanted[path]) for path in there):
            raise target_exists(target)
        return made if there == set(wanted) else self.make(target, True)


def _copy(source: str, target: str, overwrite: bool, fsync: bool, watch: Watch) -> None:
    """Copy a file's bytes, whole or not at all."""
    file = open_source(source)
    try:
        output = open_output(target, Settings(overwrite=overwrite))
        buffer = new_buffer(_COPY_BYTES)
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


def _moved(path: str, one: str, other: str) -> str:
    """A file of one target as it is called in another."""
    return join(os.path.dirname(other), below(os.path.dirname(one), path))


def _describe(
    job: Job, report: FileReport, made: Report | None, target: str, stamp: Stamp, source_sha256: str | None
) -> None:
    files = outputs(target)
    written = added_up(files)
    report.target_bytes = written.size
    if not is_url(target) or job.order.checksum or job.order.delete_source:  # else it would be downloaded again
        report.sha256 = sha256_of(files)
    proven = False
    if made is not None:
        report.changes = [change._asdict() for change in made.changes]
        report.left_out = [skip._asdict() for skip in made.skipped]
        report.notes, report.verified = list(made.notes), made.verified
        proven = made.verified and not made.skipped and not made.notes
    settings = settings_of(job.order, job.item)
    report.entry = Entry(stamp, settings, report.target, written, report.sha256 or "", source_sha256, proven)
