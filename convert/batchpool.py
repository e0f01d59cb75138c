"""Handing work to an executor: a window of chunks in flight, and what to do when a worker dies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from contextlib import contextmanager
from typing import Any, Protocol

from convert.batchjob import FileReport, Job
from convert.batchwork import do_chunk, ready, start_worker
from convert.errors import ConvertError, OutputError

WAKE_SECONDS = 1.0
"""A wait without end could not be interrupted on Windows."""


class Executor(Protocol):
    """What is asked of an executor; those of `concurrent.futures`, dask and others have it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Run a function somewhere, some time."""
        ...


WINDOW_OF_OTHERS = 1024
"""Chunks handed to an executor before it has answered, where it is not known how many workers it has."""
_MOST_RETURNS = 10_000
"""Chunks that may come back undone, one after another, before that counts as the end."""


class Hands:
    """An executor, and what is known about it.

    Attributes:
        losses: What its futures raise when a worker died, as against work that failed.
        threads: Of all its workers together, now; 0 where that is not known.
    """

    losses: tuple[type[BaseException], ...] = (BrokenExecutor,)
    threads = 0

    def __init__(self, executor: Executor, window: int = WINDOW_OF_OTHERS) -> None:
        self._executor = executor
        self._window = window

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Run a function on a worker; RuntimeError if there can be none any more."""
        return self._executor.submit(fn, *args)

    def window(self) -> int:
        """How many pieces of work to hand over before one is done."""
        return self._window

    def check(self) -> None:
        """Called about once a second while work is in flight; OutputError if nobody will ever do it."""

    def probe(self, jobs: list[Job]) -> None:
        """OutputError if a worker could not do any of these."""


class Alone(Hands):
    """The same, one piece of work at a time."""

    def __init__(self, hands: Hands) -> None:
        super().__init__(hands, 1)
        self.losses, self.check = hands.losses, hands.check  # type: ignore[method-assign]


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
        self._returned: deque[Chunk] = deque()
        self._in_vain = 0

    def drive(self, hands: Hands, chunks: Iterable[Chunk]) -> tuple[list[Job], list[Job]]:
        """Do all chunks, as many at a time as `hands` wants.

        Returns:
            Jobs that were in flight when a worker died, and those not handed over then; none if all went well.

        Raises:
            OutputError: Nobody does them any more, or a worker cannot do any.
        """
        lost: list[Job] = []
        queue = iter(chunks)
        chunk = next(queue, None)
        try:
            while chunk is not None or self._flying:
                while chunk is not None and len(self._flying) < hands.window() and not self._halted() and not lost:
                    if not self._launch(hands, self._begin(chunk)):
                        lost += chunk
                    chunk = self._returned.popleft() if self._returned else next(queue, None)
                if self._halted():
                    self.cancel()
                if not self._flying:
                    break
                done, _ = wait(self._flying, timeout=WAKE_SECONDS, return_when=FIRST_COMPLETED)
                hands.check()
                for future in done:
                    lost += self._land(future, hands.losses)
                if chunk is None and self._returned:
                    chunk = self._returned.popleft()
        except BaseException:
            self.cancel()
            raise
        rest = [*(chunk or ()), *(job for later in (*self._returned, *queue) for job in later)] if lost else []
        self._returned.clear()
        return lost, rest

    def _launch(self, hands: Hands, chunk: Chunk) -> bool:
        try:
            self._flying[hands.submit(do_chunk, chunk)] = chunk
        except RuntimeError:  # broken, or shut down
            return False
        return True

    def _land(self, future: Future[list[FileReport]], losses: tuple[type[BaseException], ...]) -> list[Job]:
        """Settle what a future brought; returns its jobs if its worker died."""
        chunk = self._flying.pop(future)
        if future.cancelled():  # not by us: a cluster does so when it starts anew
            self._in_vain += 1
            if self._in_vain > _MOST_RETURNS:
                raise OutputError("the executor gives all work back undone", hint="look at the logs of its workers")
            self._returned.append(chunk)
            return []
        err = future.exception()
        if isinstance(err, losses):
            return chunk
        if err is None:
            self._in_vain = 0
            for job, report in zip(chunk, future.result(), strict=True):
                self._settle(job, report)
            return []
        if isinstance(err, ConvertError):  # about the worker, not about a file
            raise err
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
            if future.done() and not future.cancelled():
                self._land(future, (Exception,))


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
def _deaf() -> Iterator[None]:
    """Processes started here never hear Ctrl-C, not even while they start; it is their parent's."""
    import signal
    import threading

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def workers(count: int, run: str | None, crew: Crew) -> Iterator[Hands | None]:
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
            with _deaf():
                answers = [pool.submit(ready) for _ in range(count)]
            for answer in answers:
                answer.result()
        except BrokenExecutor:
            yield None
            return
        yield Hands(pool, 2 * count)
    except BaseException:
        stop.set()
        crew.cancel()
        pool.shutdown(wait=True, cancel_futures=True)
        crew.collect()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
