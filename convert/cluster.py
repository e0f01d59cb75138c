"""A cluster of dask.distributed behind the interface of an executor.

Source: distributed 2026.8, `client.py` and `cfexecutor.py`: its futures are those of concurrent.futures; work whose
worker dies is done again elsewhere, and fails with `KilledWorker` when that has happened too often; when the scheduler
is lost, all futures are cancelled and the client tries for a while to find it again.
"""

from __future__ import annotations

import contextlib
import logging
import pkgutil
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future
from typing import TYPE_CHECKING, Any

from convert.batchfiles import stamp_of
from convert.batchjob import Job, sources_of
from convert.batchpool import Executor, Hands
from convert.batchwork import check_place
from convert.errors import ConvertError, InputError, OutputError, UsageError
from convert.version import __version__

if TYPE_CHECKING:
    from distributed import Client

_VERSION = (pkgutil.resolve_name, "convert.version:__version__")
_CONNECT_SECONDS = 10.0
FIRST_WORKER_SECONDS = 60.0
"""How long to wait for the first worker; clusters that grow on demand begin with none."""
NO_WORKER_SECONDS = 300.0
"""How long to wait for others when all have died."""
_LOOK_SECONDS = 5.0
_PER_THREAD = 2
"""Pieces of work handed over for each thread, so that none waits for the next."""


@contextlib.contextmanager
def hands(executor: Executor | Client | str) -> Iterator[Hands]:
    """What the caller gave as an executor: one, a dask client or its executor, or the address of a scheduler.

    Raises:
        UsageError: It is none of these.
        OutputError: The scheduler does not answer, or has no workers.
    """
    if isinstance(executor, str):
        with _connected(executor) as client:
            yield Cluster(client, {})
        return
    given: Any = executor
    client = given if _is_dasks(given, "Client") else getattr(given, "_client", None)
    if _is_dasks(client, "Client"):
        yield Cluster(client, getattr(given, "_kwargs", {}))
    elif hasattr(given, "submit"):
        yield Hands(given)
    else:
        raise UsageError(
            f"the executor has no submit (found {type(executor).__name__})",
            hint="give a concurrent.futures executor, a dask client, or the address of a scheduler",
        )


def _is_dasks(found: object, name: str) -> bool:
    """Whether it is an instance of a class of distributed, which need not be installed to find out."""
    return any(kind.__name__ == name and kind.__module__.startswith("distributed.") for kind in type(found).__mro__)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    """A client of our own, whose log is silent: what matters is raised."""
    try:
        import distributed
        from distributed.comm.addressing import resolve_address
    except ImportError as err:
        raise UsageError(
            f"a cluster needs dask.distributed, which is not installed ({err})",
            hint="pip install distributed",
        ) from err
    with _silence(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other versions of packages; ours is checked on each worker
        try:
            resolve_address(address)
            client = distributed.Client(address, timeout=_CONNECT_SECONDS, set_as_default=False)
        except OSError as err:
            raise OutputError(
                f"the scheduler does not answer: {err}",
                path=address,
                hint="dask scheduler --port 8786 starts one; is the address right, and its port open?",
            ) from err
        except ValueError as err:
            what = f"this is no scheduler's address: {err}"
            raise UsageError(what, path=address, hint="--scheduler tcp://HOST:8786") from err
        try:
            yield client
        finally:
            with contextlib.suppress(Exception):
                client.close(timeout=_CONNECT_SECONDS)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    names = [name for name in logging.root.manager.loggerDict if name.startswith(("distributed", "tornado"))]
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class Cluster(Hands):
    """The workers of a dask cluster, however many there are at the moment."""

    def __init__(self, client: Any, options: dict[str, Any]) -> None:
        """Wait for the first worker.

        Args:
            client: Connected.
            options: For its executor: workers, resources, retries ...

        Raises:
            OutputError: There is none.
        """
        from distributed import KilledWorker

        self.losses = (BrokenExecutor, KilledWorker)
        self._client = client
        # Equal calls shall be made anew: they are tries.
        super().__init__(client.get_executor(**{**options, "pure": False}))
        self._address = str(getattr(client.scheduler, "address", "the scheduler"))
        self._last_seen = self._next_look = 0.0
        try:  # it unpacks what it passes on, so it needs the program too
            found = client.run_on_scheduler(*_VERSION)
        except (ImportError, AttributeError) as err:
            found = err
        _check_version(found, self._address, "the scheduler")
        # A worker that cannot import what it is sent dies of it, so what is sent first is in the standard library.
        future = self.submit(*_VERSION)
        try:
            future.result(FIRST_WORKER_SECONDS)
        except TimeoutError as err:
            future.cancel()
            raise OutputError(
                f"the cluster has no workers (waited {FIRST_WORKER_SECONDS:g} s)",
                path=self._address,
                hint=f"dask worker {self._address} starts one",
            ) from err
        except (ImportError, AttributeError) as err:
            raise _no_package(self._address, "a worker", err) from err
        self._look()

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Run a function on some worker; BrokenExecutor when the scheduler is lost."""
        try:
            return super().submit(fn, *args)
        except Exception as err:
            raise BrokenExecutor(str(err)) from err

    def window(self) -> int:
        """Follows the number of threads, which may change at any time."""
        return _PER_THREAD * max(self.threads, 1)

    def check(self) -> None:
        """Count the threads; while the scheduler is lost, wait until it is found.

        Raises:
            OutputError: It was not found, or there have been no workers for long.
        """
        while self._client.status == "connecting":  # ends by itself; the client has a timeout
            time.sleep(0.05)
        if self._client.status != "running":
            raise OutputError(
                "the connection to the scheduler is lost",
                path=self._address,
                hint="when it runs again, the same command goes on from here",
            )
        now = time.monotonic()
        if now < self._next_look:
            return
        self._look()
        if not self.threads and now - self._last_seen > NO_WORKER_SECONDS:
            raise OutputError(
                f"the cluster has lost all its workers (waited {NO_WORKER_SECONDS:g} s for others)",
                path=self._address,
                hint="when there are some again, the same command goes on from here",
            )

    def _look(self) -> None:
        now = time.monotonic()
        self._next_look = now + _LOOK_SECONDS
        with contextlib.suppress(OSError):  # lost this very moment; the next check will tell
            self.threads = sum(self._client.nthreads().values())
            if self.threads:
                self._last_seen = now

    def probe(self, jobs: list[Job]) -> None:
        """Each worker must have this version of the program, see both folders, and find the sources as they are here.

        Raises:
            OutputError: One has not, or does not.
        """
        versions: dict[str, Any] = self._client.run(*_VERSION, on_error="return")
        for address, version in sorted(versions.items()):
            _check_version(version, address, "the worker")
        answers: dict[str, Any] = self._client.run(probe, jobs[:1], on_error="return")
        problems = [answers[address] for address in sorted(answers) if isinstance(answers[address], ConvertError)]
        if problems:
            first, more = problems[0], len(problems) - 1
            message = first.message + (f"; nor can {more} other workers work" if more else "")
            raise OutputError(message, path=first.path, hint=first.hint)


def probe(jobs: list[Job]) -> None:
    """Whether this worker could do these jobs; InputError or OutputError tells why not."""
    for job in jobs:
        check_place(job.order)
        paths = sources_of(job.order, job.item)
        if stamp_of(paths) != job.item.stamp:
            raise InputError("the worker finds another file here", path=paths[0], hint="mount the same folder")


def _check_version(found: object, address: str, who: str) -> None:
    """OutputError unless what was found is our version; it may be an exception."""
    if isinstance(found, Exception):
        raise _no_package(address, who, found) from found
    if found != __version__:
        raise OutputError(
            f"{who} has another version of tensor-convert (expected {__version__}, found {found})",
            path=address,
            hint=f"install version {__version__} there, and start it again",
        )


def _no_package(address: str, who: str, err: BaseException) -> OutputError:
    return OutputError(
        f"{who} does not have tensor-convert ({err})",
        path=address,
        hint=f"install version {__version__} there, and start it again",
    )
