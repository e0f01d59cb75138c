"""Threads that share pieces of work, stop together, and report all bad input together."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

from convert.errors import ConvertError, InputError, PolicyError, UsageError, gather

MAX_JOBS = 32
"""More threads than this only add memory: each holds its buffers."""
BUFFER_BYTES = 256 << 10
"""What each thread holds for its reads; docs/decisions/0002 has the figures behind the size."""

_Item = TypeVar("_Item")
_Done = TypeVar("_Done")


_PAGES_BYTES = 64 << 10
# Windows knows no flags.
_PRIVATE: dict[str, Any] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


def new_buffer(nbytes: int) -> memoryview:
    """Memory to read files into; a large one begins with a page.

    malloc lets it begin 16 bytes behind a page. There the kernel's copy from data that begins with a page, as a whole
    file and `--align 4096` do, takes three times as long on AMD's processors: docs/decisions/0002.
    """
    if nbytes < _PAGES_BYTES:
        return memoryview(bytearray(nbytes))
    try:
        return memoryview(mmap.mmap(-1, nbytes, **_PRIVATE))
    except OSError as err:
        raise MemoryError from err


def default_jobs() -> int:
    """What the environment variable CONVERT_JOBS says, else the cores this process may use.

    Affinity and the control group's quota are respected.

    Raises:
        UsageError: CONVERT_JOBS is no number of threads.
    """
    wanted = os.environ.get("CONVERT_JOBS")
    if wanted:
        if not wanted.isdecimal() or not 1 <= int(wanted) <= MAX_JOBS:
            raise UsageError(f"CONVERT_JOBS must be from 1 to {MAX_JOBS} (found {wanted!r})")
        return int(wanted)
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # no affinity on this system
        cores = os.cpu_count() or 1
    return max(1, min(cores, _quota_cores(cores), MAX_JOBS))


_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),  # version 2: quota and period, or max
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),  # version 1: -1 for no quota
)


def _quota_cores(cores: int) -> int:
    """Cores that the control group's quota amounts to, rounded up; `cores` where there is none."""
    for paths in _QUOTAS:
        try:
            quota, period = " ".join(Path(path).read_text() for path in paths).split()[:2]
            return cores if quota in ("max", "-1") else -(-int(quota) // int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return cores


Work = Callable[[memoryview], None]
"""A piece of work; it gets a buffer of BUFFER_BYTES that is its own while it runs."""


def run(work: Iterator[Work], jobs: int) -> None:
    """Do all pieces, `jobs` at a time. Bad input does not stop the others, so that all of it is reported."""
    crew = _Crew(work)
    first = next(work, None)
    second = next(work, None) if first is not None else None
    if first is None:
        return
    waiting = [piece for piece in (second, first) if piece is not None]
    crew.waiting = waiting
    crew.call(crew.loop, 1 if second is None else jobs)


class StoppedError(Exception):
    """Raised in work that takes long, when the threads it belongs to have stopped; never seen outside."""


_own = threading.local()


def check_stopped() -> None:
    """Called between the chunks of what may take minutes, so that Ctrl-C and failures elsewhere end it soon.

    Raises:
        StoppedError: This thread is one of several, and they have stopped.
    """
    team: _Team | None = getattr(_own, "team", None)
    if team is not None and team.stopped():
        raise StoppedError


class _Team:
    """Threads that stop together at the first failure or interrupt, which is then raised in the caller.

    A piece of work may have a team of its own, which stops with the one it works for.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._outer: _Team | None = getattr(_own, "team", None)
        self.lock = threading.Lock()
        self.failure: BaseException | None = None

    def stopped(self) -> bool:
        """Whether nothing new is to be begun."""
        return self._stop.is_set() or (self._outer is not None and self._outer.stopped())

    def _guarded(self, loop: Callable[[], None]) -> None:
        _own.team = self
        try:
            loop()
        except BaseException as err:
            self.fail(err)

    def fail(self, err: BaseException) -> None:
        with self.lock:
            self.failure = self.failure or err
            self._stop.set()

    def call(self, loop: Callable[[], None], jobs: int) -> None:
        if jobs <= 1:
            loop()
            return
        threads = [threading.Thread(target=self._guarded, args=(loop,), daemon=True) for _ in range(jobs)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(1.0)  # a join without end could not be interrupted on Windows
        except BaseException as err:  # Ctrl-C reaches the main thread only
            self.fail(err)
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            raise
        if self.failure is not None:
            raise self.failure
        if self.stopped():
            raise StoppedError


class _Crew(_Team):
    def __init__(self, work: Iterator[Work]) -> None:
        super().__init__()
        self._work = work
        self._feed = threading.Lock()
        self.waiting: list[Work] = []
        self._problems: list[ConvertError] = []
        self._seen: set[tuple[str | None, str | None]] = set()

    def _next(self) -> Work | None:
        with self._feed:
            return self.waiting.pop() if self.waiting else next(self._work, None)

    def call(self, loop: Callable[[], None], jobs: int) -> None:
        super().call(loop, jobs)
        if self._problems:
            # Threads find them in any order; the same damage is always reported the same way.
            raise gather(sorted(self._problems, key=lambda problem: (problem.path or "", problem.tensor or "")))

    def loop(self) -> None:
        buffer = new_buffer(BUFFER_BYTES)
        while not self.stopped():
            piece = self._next()
            if piece is None:
                return
            try:
                piece(buffer)
            except (InputError, PolicyError) as err:
                with self.lock:
                    # One problem per tensor: its other pieces mostly repeat the first.
                    for problem in err.problems:
                        where = (problem.path, problem.tensor)
                        if where not in self._seen:
                            self._seen.add(where)
                            self._problems.append(problem)


def in_order(
    draw: Callable[[bytearray], _Item | None],
    work: Callable[[_Item], _Done],
    sink: Callable[[_Done], None],
    jobs: int,
) -> None:
    """`sink(work(item))` for each item in order, with the work itself done by `jobs` threads.

    `draw(buffer)` gives the next item, or None at the end. It is called by one thread at a time and may keep in the
    buffer what its item needs: the buffer is left alone until that item is sunk. So at most one item per thread is in
    flight, and memory does not grow with their number.
    """
    line = _Line(draw, work, sink)
    line.call(line.loop, jobs)


class _Line(_Team):
    def __init__(
        self,
        draw: Callable[[bytearray], _Item | None],
        work: Callable[[_Item], _Done],
        sink: Callable[[_Done], None],
    ) -> None:
        super().__init__()
        self._draw = draw
        self._work = cast("Callable[[object], object]", work)
        self._sink = cast("Callable[[object], None]", sink)
        self._feed = threading.Lock()
        self._turn = threading.Condition()
        self._drawn = self._sunk = 0

    def fail(self, err: BaseException) -> None:
        super().fail(err)
        with self._turn:
            self._turn.notify_all()

    def loop(self) -> None:
        buffer = bytearray()
        while not self.stopped():
            with self._feed:
                item = self._draw(buffer)
                number = self._drawn
                self._drawn += 1
            if item is None:
                return
            done = self._work(item)
            with self._turn:
                while self._sunk != number:
                    if self._stop.is_set():
                        return
                    self._turn.wait()
                self._sink(done)
                self._sunk += 1
                self._turn.notify_all()
            del item, done  # what still refers to the buffer would keep it from growing
