"""One run of a batch: what is in flight, what is to be tried again, and the bookkeeping."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from convert import formats
from convert.batchfiles import is_there, join, outputs, stamps_below
from convert.batchjob import FileReport, Job, Order, chunked, is_finished, remove_source
from convert.batchlog import Journal, Lines, Run, sweep
from convert.batchpool import Alone, Crew, Hands, WorkerDiedError, failed, workers
from convert.batchtree import Item, Tree
from convert.batchwork import StoppedError, do_file
from convert.errors import ConvertError, OutputError, without_secrets
from convert.files import is_url
from convert.progress import Callback

if TYPE_CHECKING:
    from convert.batchremote import RemoteJournal

HUGE_BYTES = 64 << 20
"""From here on a file is worth all cores by itself; docs/decisions/0007 has the reason."""
SPREAD_BYTES = 1 << 30
"""From here on it is worth all workers of a cluster."""
CHUNK_FILES, CHUNK_BYTES = 16, 16 << 20
"""Small files go to a process in groups of about this many."""
_FILES_PER_WORKER, _BYTES_PER_WORKER = 64, 128 << 20
"""A process takes a while to start; with less than this it would not pay."""
GRAVITY = (1, 5, 3, 4, 2)
"""Exit statuses, the worst first."""


@dataclass
class BatchReport:
    """The outcome of a batch.

    Attributes:
        src: Source folder as given.
        dst: Target folder as given.
        to: Format of the targets.
        done: Files converted, or copied, now.
        skipped: Files finished by an earlier run.
        failed: Files that could not be converted.
        stopped: Files that were not tried, after a failure with `fail_fast`.
        deleted: Sources removed.
        source_bytes: Of the sources that were done.
        target_bytes: Of the targets that were written.
        seconds: Wall time.
        failures: Reports of the files that failed, each with its problems.
        notes: What else is worth knowing.
        report_path: File with a line per source, or None in a dry run.
        plan: What there is to do: sources and targets.
        free_bytes: Room where the targets go; None where that cannot be known.
        dry_run: Nothing was written.
    """

    src: str
    dst: str
    to: str
    done: int = 0
    skipped: int = 0
    failed: int = 0
    stopped: int = 0
    deleted: int = 0
    source_bytes: int = 0
    target_bytes: int = 0
    seconds: float = 0.0
    failures: list[FileReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    report_path: str | None = None
    plan: list[Item] = field(default_factory=list)
    free_bytes: int | None = None
    dry_run: bool = False

    @property
    def exit_status(self) -> int:
        """0, or the gravest of the files': 1 a bug, 5 output, 3 input, 4 policy, 2 usage."""
        found = {report.exit_status for report in self.failures}
        return next((status for status in GRAVITY if status in found), 0)

    @property
    def plan_bytes(self) -> int:
        """Bytes of all planned sources."""
        return sum(item.stamp.size for item in self.plan)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; without the plan, which may be long."""
        found = {name: value for name, value in vars(self).items() if name not in ("plan", "failures")}
        return {**found, "exit_status": self.exit_status, "planned": len(self.plan), "planned_bytes": self.plan_bytes}


def _remote() -> ModuleType:
    from convert import batchremote

    return batchremote


def unreachable(path: str, err: ConvertError) -> FileReport:
    report = FileReport(path, "")
    report.fail(err)
    return report


class Batch:
    """One run: what is in flight, what is to be tried again, and the bookkeeping."""

    def __init__(
        self,
        order: Order,
        report: BatchReport,
        fail_fast: bool,
        progress: Callback | None,
        on_file: Callable[[FileReport], None] | None,
    ) -> None:
        self._order = order
        self._report = report
        self._fail_fast = fail_fast
        self._progress = progress
        self._on_file = on_file
        self._later: list[Job] = []
        self._settled_bytes = 0
        self._flying: dict[str, None] = {}
        self._total_bytes = 0
        self._cancelled: Exception | None = None
        self._hands: Hands | None = None
        self._crew = Crew(self._begin, self._settle, self._halted)

    def run(self, tree: Tree, cores: int, hands: Hands | None, space_check: bool) -> None:
        """Do everything there is, here or by other hands."""
        with contextlib.ExitStack() as stack:
            far = _remote() if is_url(self._order.dst) else None
            run = Run(self._order.dst) if far is None else far.RemoteRun(self._order.dst)
            stack.callback(run.close)
            if hands is not None:
                self._hands = hands
                self._order = replace(self._order, run=run.path)
            order = self._order
            root = (order.src, order.to)
            if far is None:
                self._journal: Journal | RemoteJournal = Journal(order.dst, root, run.name, fsync=order.fsync)
            else:
                self._journal = far.RemoteJournal(order.dst, root, run.name)
            stack.callback(self._journal.close)
            if run.alone:
                sweep(order.dst, self._journal.begun.values())
            self._lines = Lines(order.dst) if far is None else far.RemoteLines(order.dst)
            stack.callback(self._lines.close)
            self._report.report_path = without_secrets(self._lines.path)
            for path, err in tree.failures:
                self._finish(unreachable(path, err))
            jobs = self._open_jobs(tree.items)
            self._journal.announce((job.item.source, job.item.target) for job in jobs)
            if space_check and far is None:
                self._check_space(jobs)
            self._total_bytes = sum(job.item.stamp.size for job in jobs)
            if hands is not None:
                self._elsewhere(jobs, hands, cores)
            else:
                self._here(jobs, cores, run.path)
            self._journal.end()
        settled = self._report.done + self._report.skipped + self._report.failed - len(tree.failures)
        self._report.stopped = len(tree.items) - settled

    def _open_jobs(self, items: list[Item]) -> list[Job]:
        """Jobs that are not finished, the largest first; finished ones are reported."""
        jobs = []
        seen = stamps_below(self._order.dst)
        for item in items:
            job = Job(self._order, item, self._journal.finished.get(item.source))
            if job.known is None or self._order.checksum or not is_finished(job, job.known, item.stamp, None, seen):
                jobs.append(job)
                continue
            known = job.known
            report = FileReport(
                item.source, known.target, "skipped", item.copy, item.stamp.size, known.written.size, known.sha256,
                verified=known.proven,
            )  # fmt: skip
            if self._order.delete_source:
                self._delete(job, report)
            self._finish(report)
        return sorted(jobs, key=lambda job: -job.item.stamp.size)

    def _check_space(self, jobs: list[Job]) -> None:
        needed = sum(job.item.stamp.size for job in jobs)
        free = shutil.disk_usage(self._order.dst).free
        if needed > free:
            raise OutputError(
                f"there is not enough room (expected {needed} bytes, as the sources take, found {free})",
                path=self._order.dst,
                hint="free some space, or --no-space-check (space_check=False) if the targets will be smaller",
            )

    # --- where the work is done

    def _here(self, jobs: list[Job], cores: int, run: str | None) -> None:
        huge = [job for job in jobs if job.item.stamp.size >= HUGE_BYTES]
        small = jobs[len(huge) :]
        self._in_turn(huge, cores)
        nbytes = sum(job.item.stamp.size for job in small)
        count = min(cores, max(len(small) // _FILES_PER_WORKER, nbytes // _BYTES_PER_WORKER))
        while small and count > 1 and not self._halted():
            with workers(count, run, self._crew) as pool:
                if pool is None:
                    break
                lost, small = self._crew.drive(pool, chunked(small, CHUNK_FILES, CHUNK_BYTES))
            self._find_culprit([replace(job, begun=True) for job in lost], lambda: workers(1, run, self._crew))
        self._in_turn(small, 1)
        self._do_later(lambda later: self._in_turn(later, cores))

    def _find_culprit(self, jobs: list[Job], one_pair: Callable[[], AbstractContextManager[Hands | None]]) -> None:
        """Do each alone; the one whose worker dies again has failed."""
        while jobs and not self._halted():
            with one_pair() as hands:
                if hands is None:
                    raise OutputError("no worker process can be started any more", path=self._order.dst)
                lost, jobs = self._crew.drive(Alone(hands), [[job] for job in jobs])
            for job in lost:
                died = WorkerDiedError("the process that was to convert it has ended: killed, or out of memory")
                sweep(self._order.dst, [job.item.target])
                self._settle(job, failed(job, died))

    def _in_turn(self, jobs: Iterable[Job], threads: int, hands: Hands | None = None) -> list[Job]:
        """One file after another from this process, each with so many threads, or with the workers of `hands`.

        Returns:
            Those that cannot be shared out among workers.
        """
        whole = []
        for job in jobs:
            if self._halted():
                break
            (begun,) = self._begin([job])
            begun = replace(begun, jobs=threads)
            if hands is None:
                report = do_file(begun, self._watch(begun))
            else:
                from convert.spread import Spread

                report = do_file(begun, self._watch(begun), Spread(hands, self._order))
            if self._cancelled is not None:
                raise self._cancelled
            if report.status == "whole":
                whole.append(job)
            else:
                self._settle(begun, report)
        return whole

    def _elsewhere(self, jobs: list[Job], hands: Hands, cores: int) -> None:
        """All by workers: the largest by all of them, other large ones with all cores of the machine they get to."""
        if jobs:
            hands.probe(jobs)
        jobs = [replace(job, jobs=None) if job.item.stamp.size >= HUGE_BYTES else job for job in jobs]
        shared = [job for job in jobs if hands.threads > 1 and self._may_be_shared(job)]
        others = [job for job in jobs if hands.threads <= 1 or not self._may_be_shared(job)]
        whole = self._in_turn(shared, cores, hands)
        try:
            self._drive([*whole, *others], hands)
            self._do_later(lambda later: self._drive(later, hands))
        except BaseException:
            self._crew.collect()
            raise

    def _may_be_shared(self, job: Job) -> bool:
        """Whether it is large, and one file comes out whose tensors have places that are known beforehand."""
        options = self._order.options
        return (
            job.item.stamp.size >= SPREAD_BYTES
            and not job.item.copy
            and not options.get("compress")
            and options.get("max_shard_size") is None
            and self._order.to in {row.name for row in formats.BUILT_IN}
            and not is_url(self._order.dst)
            and not is_url(self._order.src)
        )

    def _drive(self, jobs: list[Job], hands: Hands) -> None:
        while jobs and not self._halted():
            lost, jobs = self._crew.drive(hands, chunked(jobs, CHUNK_FILES, CHUNK_BYTES))
            self._find_culprit(lost, lambda: contextlib.nullcontext(hands))

    def _do_later(self, do: Callable[[list[Job]], object]) -> None:
        """What another run was at: wait for it, and finish what it did not."""
        later, self._later = self._later, []
        do([replace(job, wait=True) for job in later])

    # --- bookkeeping

    def _halted(self) -> bool:
        return self._fail_fast and self._report.failed > 0

    def _begin(self, jobs: list[Job]) -> list[Job]:
        """What is known of them by now; and a word in the journal that they are begun."""
        self._journal.refresh()
        finished, begun = self._journal.finished, self._journal.begun
        made = [
            replace(job, known=finished.get(job.item.source), begun=job.begun or job.item.source in begun)
            for job in jobs
        ]
        if self._hands is not None:  # a worker may die after it has written a target, and another find it there
            made = [replace(job, fresh=job.fresh or not self._is_there(job)) for job in made]
        self._journal.begin((job.item.source, job.item.target) for job in made)
        self._flying.update((job.item.source, None) for job in made)
        return made

    def _is_there(self, job: Job) -> bool:
        """Whether there is a target, in any of its forms."""
        target = join(self._order.dst, job.item.target)
        return bool(outputs(target)) or (job.item.may_be_folder and is_there(os.path.splitext(target)[0]))

    def _settle(self, job: Job, report: FileReport) -> None:
        """Take in a file's report."""
        self._flying.pop(job.item.source, None)
        if report.status == "stopped":
            return
        if report.status == "busy" or self._is_news(job, report):
            self._later.append(job)
            return
        if report.status == "failed":
            told = job.begun or job.fresh  # then the target may have got its name
            if report.exit_status in (2, 3, 4) and not told:
                self._journal.failed(job.item.source)
        elif report.entry is not None:
            self._journal.done(job.item.source, report.entry, sync=self._order.delete_source)
        if self._order.delete_source and report.status != "failed":
            self._delete(job, report)
        self._settled_bytes += job.item.stamp.size
        self._finish(report)
        if self._progress is not None:
            self._progress(self._settled_bytes, self._total_bytes, self._in_flight() or report.source)

    def _is_news(self, job: Job, report: FileReport) -> bool:
        """Whether the target was refused because it exists, and another run turns out to be who wrote it."""
        if job.wait or {one["kind"] for one in report.problems} != {"TargetExistsError"}:
            return False
        self._journal.refresh()
        source = job.item.source
        return self._journal.finished.get(source) != job.known or (source in self._journal.begun and not job.begun)

    def _delete(self, job: Job, report: FileReport) -> None:
        entry = self._journal.finished.get(job.item.source)
        try:
            report.deleted = entry is not None and remove_source(self._order, job.item, entry)
        except ConvertError as err:
            report.fail(err)
            return
        if not report.deleted and not job.item.copy:
            report.notes.append("the source was kept: not all of it is proven to be in the target")

    def _finish(self, report: FileReport) -> None:
        """Count and tell."""
        total = self._report
        if report.status == "failed":
            total.failed += 1
            total.failures.append(report)
        elif report.status == "skipped":
            total.skipped += 1
        else:
            total.done += 1
            total.source_bytes += report.source_bytes
            total.target_bytes += report.target_bytes
        total.deleted += report.deleted
        self._lines.add(report.to_dict())
        if self._on_file is not None:
            self._on_file(report)

    def _in_flight(self) -> str:
        """The first of the files that are being done, and how many others are."""
        first, others = next(iter(self._flying), ""), len(self._flying) - 1
        return f"{first} and {others} more" if others > 0 else first

    def _watch(self, job: Job) -> Callback:
        """Bytes of one file as bytes of the batch."""
        progress, size = self._progress, job.item.stamp.size

        def watch(done: int, total: int, _: str) -> None:
            if progress is None or not total:
                return
            try:
                progress(self._settled_bytes + size * min(done, total) // total, self._total_bytes, self._in_flight())
            except Exception as err:  # the caller wants to stop; for the file this is no failure
                self._cancelled = err
                raise StoppedError from err

        return watch
