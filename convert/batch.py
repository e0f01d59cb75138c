"""A tree of files, each converted into another tree: whatever happens to one, the others are done; run again to resume.

`batchtree` finds the files, `batchrun` hands them out, `batchpool` has the processes, `cluster` has those of other
machines, `spread` shares out one large file among them, `batchwork` does one file, `batchlog` remembers; `batchjob` has
the words they share.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from convert import formats
from convert.batchjob import FileReport, Order
from convert.batchlog import fingerprint
from convert.batchpool import Executor, Hands
from convert.batchrun import Batch, BatchReport, unreachable
from convert.batchtree import (
    FOLDER_FORMAT,
    STATE,
    Rules,
    Tree,
    check_collisions,
    check_places,
    existing,
    folds_names,
    read_tree,
)
from convert.errors import ConvertError, PolicyError, UsageError, without_secrets
from convert.files import is_url, local_path, unwritable
from convert.progress import Callback
from convert.threads import MAX_JOBS, default_jobs
from convert.version import __version__

if TYPE_CHECKING:
    from distributed import Client

Path = str | os.PathLike[str]

_NOT_BYTES = ("overwrite", "verify", "fsync", "jobs", "limits")
"""Options that do not change what is written."""


def convert_folder(
    src: Path,
    dst: Path,
    *,
    to: str,
    executor: Executor | Client | str | None = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    copy_others: bool = False,
    delete_source: bool = False,
    overwrite: bool = False,
    checksum: bool = False,
    space_check: bool = True,
    fail_fast: bool = False,
    dry_run: bool = False,
    fsync: bool = True,
    jobs: int | None = None,
    progress: Callback | None = None,
    on_file: Callable[[FileReport], None] | None = None,
    **options: Any,
) -> BatchReport:
    """Convert every tensor file below a folder into the same place below another.

    Run it again after a crash, an interrupt or a full disk: what is finished is skipped, the rest is done.

    Args:
        src: Folder of the sources, or its URL.
        dst: Folder of the targets, or its URL; may not lie in `src` unless `exclude` says so.
        to: Format of the targets.
        executor: Where to run: anything with `submit` of `concurrent.futures`, a dask client or its `get_executor()`,
            or the address of a dask scheduler. Its workers must have both folders under the same paths.
            Default: processes and threads of this machine.
        include: Globs of relative paths, names or folders; only these are taken.
        exclude: Globs of what is left out.
        copy_others: Copy the other files too.
        delete_source: Remove each source once its target was read back and compared, unless something was left out.
        overwrite: Replace targets that are not from an earlier run.
        checksum: Tell by SHA-256, not by size and time, what is finished.
        space_check: Refuse if the target's disk has less room than the sources take.
        fail_fast: Start nothing more after the first failure.
        dry_run: Only plan.
        fsync: Force every file to the disk before it gets its name.
        jobs: Cores to use.
        progress: Called with bytes done, bytes in all and the files in flight; raise in it to stop.
        on_file: Called with the report of each file.
        **options: Those of `convert_file` that decide what is written: policy, compress, cast, rename, metadata,
            byteorder, order, align, cast_overflow, max_shard_size, verify, limits.

    Returns:
        Counts, and what failed; a file that fails raises nothing.

    Raises:
        UsageError: The folders or the options make no sense, or two sources have one target; nothing was written.
        OutputError: There is no room, or the journal cannot be written.
    """
    began = time.perf_counter()
    _check_not_a_worker()
    source, target = local_path(src), local_path(dst)
    if executor is not None:  # its workers may be elsewhere
        source, target = (path if is_url(path) else os.path.abspath(path) for path in (source, target))
    row = formats.by_name(to)
    settings = _checked(to, row, jobs, options)
    order = Order(source, target, to, options, settings, overwrite, fsync, checksum, delete_source)
    rules = Rules(tuple(include), tuple(exclude))
    check_places(source, target, rules)
    tree = read_tree(source, row, rules, copy_others=copy_others)
    tree.items = check_collisions(tree.items, target, folds=dry_run and folds_names(target, probe=False))
    report = BatchReport(
        without_secrets(source), without_secrets(target), to, notes=list(tree.notes), plan=tree.items, dry_run=dry_run
    )
    if not is_url(target):
        report.free_bytes = shutil.disk_usage(existing(target)).free
    if dry_run:
        report.failures = [unreachable(path, err) for path, err in tree.failures]
        report.failed = len(report.failures)
    else:
        batch = Batch(order, report, fail_fast, progress, on_file)
        with _hands(executor) as hands, _prepared(target, tree):
            batch.run(tree, jobs or default_jobs(), hands, space_check)
    report.seconds = time.perf_counter() - began
    return report


def _hands(executor: Executor | Client | str | None) -> AbstractContextManager[Hands | None]:
    """Who does the work; None for this machine."""
    if executor is None:
        return contextlib.nullcontext(None)
    from convert import cluster

    return cluster.hands(executor)


def _check_not_a_worker() -> None:
    """A script without a guard is run once more by each worker that it starts; that run ends here."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None and getattr(process.current_process(), "_inheriting", False):
        raise UsageError(
            "the script that called convert_folder was started again by its own worker",
            hint='put the call below: if __name__ == "__main__":',
        )


def _checked(to: str, row: formats.Format, jobs: int | None, options: dict[str, Any]) -> str:
    """Refuse at once what would be refused for every file; returns a fingerprint of what decides about the bytes."""
    from convert.api import save

    options.update({name: tuple(options[name]) for name in ("rename", "cast") if name in options})

    if jobs is not None and not 1 <= jobs <= MAX_JOBS:
        raise UsageError(f"jobs must be from 1 to {MAX_JOBS} (found {jobs})")
    row.load_writer()
    name = "x/" if to == FOLDER_FORMAT else f"x{row.suffixes[0]}"
    with contextlib.suppress(PolicyError):
        save({}, os.path.join(os.sep, "\0", name), to=to, **{**options, "dry_run": True})
    return fingerprint({**{k: v for k, v in options.items() if k not in _NOT_BYTES}, "to": to, "by": __version__})


@contextlib.contextmanager
def _prepared(dst: str, tree: Tree) -> Iterator[None]:
    """The target with its folder for what is remembered; taken back if the batch is refused."""
    if is_url(dst):  # an object makes its own
        yield
        return
    made = not os.path.isdir(dst)
    state = os.path.join(dst, STATE)
    try:
        os.makedirs(state, exist_ok=True)
    except OSError as err:
        raise unwritable(dst, err) from err
    try:
        if folds_names(dst, probe=True):
            tree.items = check_collisions(tree.items, dst, folds=True)
    except ConvertError:
        with contextlib.suppress(OSError):
            os.rmdir(state)
            if made:
                os.rmdir(dst)
        raise
    yield
