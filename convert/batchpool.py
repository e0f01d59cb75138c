"""Handing work to an executor: a window of chunks in flight, and what to do when a worker dies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from contextlib import contextmanager
from typing import Any, Protocol

from convert.batchjob import FileReport, Job
from convert.batchwork import do_chunk, ready, start_worker

_WAKE_SECONDS = 1.0
"""A wait without end could not be interrupted on Windows."""


class Executor(Protocol):
    """What is asked of an executor; those of `concurrent.futures`, dask and others have it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Run a function somewhere, some time."""
        ...


Chunk = list[Job]


class Crew:
    """Feeds an executor and takes back what it did.

    Args:
        begin: Called with a chunk just before it is handed over; returns the chunk to hand over.
        settle: Called with each job's report, in this thread.
        halted: Whether nothing further shall be handed over.
    """

    def __init__(
        self, begin: Callable[[Chunk], Chunk], settle: Callable[[Job, FileReport], None], halted: Callable[[], bool]
    ) -> None:
        self._begin = begin
        self._settle = settle
        self._halted = halted
        self._flying: dict[Future[list[FileReport]], Chunk] = {}

    def drive(self, executor: Executor, chunks: Iterable[Chunk], window: int) -> tuple[list[Job], list[Job]]:
        """Do all chunks, at most `window` at a time.

        Returns:
            Jobs that were in flight when a worker died, and those not handed over then; none if all went well.
        """
        lost: list[Job] = []
        queue = iter(chunks)
        chunk = next(queue, None)
        try:
            while chunk is not None or self._flying:
                while chunk is not None and len(self._flying) < window and not self._halted() and not lost:
                    if not self._launch(executor, self._begin(chunk)):
                        lost += chunk
                    chunk = next(queue, None)
                if self._halted():
                    self.cancel()
                if not self._flying:
                    break
                done, _ = wait(self._flying, timeout=_WAKE_SECONDS, return_when=FIRST_COMPLETED)
                for future in done:
                    lost += self._land(future)
        except BaseException:
            self.cancel()
            raise
        rest = [*(chunk or ()), *(job for later in queue for job in later)] if lost else []
        return lost, rest

    def _launch(self, executor: Executor, chunk: Chunk) -> bool:
        try:
            self._flying[executor.submit(do_chunk, chunk)] = chunk
        except BrokenExecutor:
            return False
        return True

    def _land(self, future: Future[list[FileReport]]) -> list[Job]:
        """Settle what a future brought; returns its jobs if its worker died."""
        chunk = self._flying.pop(future)
        if future.cancelled():
            return []
        err = future.exception()
        if isinstance(err, BrokenExecutor):
            return chunk
        if err is None:
            for job, report in zip(chunk, future.result(), strict=True):
                self._settle(job, report)
            return []
        for job in chunk:
            self._settle(job, failed(job, err))
        return []

    def cancel(self) -> None:
        """Take back what has not started."""
        for future in list(self._flying):
            if future.cancel():
                del self._flying[future]

    def collect(self) -> None:
        """Settle what has ended since an interrupt."""
        for future in list(self._flying):
            if future.done():
                self._land(future)


def failed(job: Job, err: BaseException) -> FileReport:
    """A report for a job that never answered."""
    report = FileReport(
        job.item.source, job.item.target, copied=job.item.copy, source_bytes=job.item.stamp.size, exit_status=1
    )
    report.fail(err)
    return report


class WorkerDiedError(Exception):
    """A worker process ended while it converted this file: out of memory, killed, or a bug in a library."""


@contextmanager
def workers(count: int, run: str, crew: Crew) -> Iterator[Executor | None]:
    """Fresh processes that end with this one; None where none can be started.

    A script that is not guarded by `if __name__ == "__main__"` cannot have any: each would run the script again.
    """
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    context = get_context("spawn")
    stop = context.Event()
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=start_worker, initargs=(stop, run))
    try:
        try:
            pool.submit(ready).result()
        except BrokenExecutor:
            yield None
            return
        yield pool
    except BaseException:
        stop.set()
        crew.cancel()
        pool.shutdown(wait=True, cancel_futures=True)
        crew.collect()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
