"""The library: open, load, save, convert_file. Nothing here prints or exits; every refusal is a ConvertError."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from convert import formats, options
from convert.errors import CorruptError, InputError, LimitError, UsageError, quoted, without_secrets
from convert.files import is_folder, is_url, local_path, open_source, real_path, unreadable
from convert.limits import DEFAULT, Limits, check_tensors, exceeded
from convert.output import Output, committed
from convert.plan import Plan, Wishes, make_plan
from convert.policy import Policy
from convert.progress import Callback, Progress
from convert.report import Report, Written
from convert.tensor import Checkpoint
from convert.threads import MAX_JOBS, default_jobs
from convert.writing import Settings, Spreading

if TYPE_CHECKING:
    import numpy as np

    from convert.keywords import Options

Path = str | os.PathLike[str]
_OPEN_FILES = 64
"""Sources with more files than this do not keep them all open."""
_REMOTE_JOBS = (4, 8)
"""Threads at least, where they mostly wait for a network, and at most, as each holds a long request."""


def open(source: Path | Sequence[Path], *, format: str | None = None, limits: Limits = DEFAULT) -> Checkpoint:
    """Open a file, several files, a folder of .npy files, or a checkpoint in shards; only headers are read.

    Args:
        source: One path or URL, or several whose tensors are gathered. A .npy file's tensor is named after its stem, in
            a folder after its relative path without the suffix. Shards are opened by their index, or its folder. The
            URL of a folder ends in a slash.
        format: Name of the format, where the content shall not decide.
        limits: What is accepted before a file is refused; see docs/limits.md.

    Returns:
        A mapping from name to `Tensor`. Use it in a `with` block: its tensors read from it until it is closed.

    Raises:
        InputError: A file cannot be read, breaks a rule of its format, or two tensors have the same name.
        LimitError: It is larger, longer or deeper than a limit allows.
        UsageError: An unknown format.
    """
    paths = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    if not paths:
        raise UsageError("no source was given")
    opened: list[Checkpoint] = []
    try:
        for path in map(local_path, paths):
            opened += _open_folder(path, limits) if is_folder(path) else [_open_file(path, format, limits)]
            if len(opened) > _OPEN_FILES:
                for file in opened[-1].files:
                    file.park()
        checkpoint = opened[0] if len(opened) == 1 else _gathered(opened, [os.fspath(path) for path in paths])
        try:
            check_tensors(checkpoint.tensors, limits)
        except LimitError as err:
            raise err.at(checkpoint.path) from None
        return checkpoint
    except BaseException:
        for checkpoint in opened:
            checkpoint.close()
        raise


def _open_file(source: Path, format: str | None, limits: Limits) -> Checkpoint:
    if format is not None:
        checkpoint: Checkpoint = formats.by_name(format).load_reader().open(source, limits)
        return checkpoint
    path = os.fspath(source)
    file = open_source(source)
    is_kept = False
    try:
        start = file.read(0, min(formats.SNIFF_BYTES, file.size))
        row, note = formats.detect(path, start, file.size)
        reader = row.load_reader()
        is_kept = file.is_remote
    finally:
        if not is_kept:
            file.close()
    checkpoint = reader.open(file if is_kept else path, limits)  # what is far away is not asked for twice
    if note:
        checkpoint.notes.insert(0, note)
    return checkpoint


def _open_folder(folder: str, limits: Limits) -> list[Checkpoint]:
    """Each .npy file below a folder, hidden ones left out, named by its path; in sorted order."""
    from urllib.parse import unquote

    found: list[Checkpoint] = []
    indexes: list[Path] = []
    others = 0
    for relative, path in _files_below(folder):
        if "/" not in relative and formats.is_index(relative):
            indexes.append(path)
        if not relative.lower().endswith(".npy"):
            others += 1
            continue
        checkpoint = _open_file(path, None, limits)
        checkpoint.files[0].park()
        name = unquote(relative[: -len(".npy")])
        checkpoint.tensors = [tensor.changed(name=name) for tensor in checkpoint.tensors]
        found.append(checkpoint)
        if len(found) > limits.tensors:
            raise exceeded("tensors", "too many files", limits.tensors).at(folder)
    if not found and len(indexes) == 1:
        return [_open_file(indexes[0], None, limits)]
    if not found:
        raise InputError(
            f"the folder holds no .npy files, nor one index of shards (found {others} other files)",
            path=folder,
            hint="give its files one by one, or another folder",
        )
    found.sort(key=lambda checkpoint: checkpoint.tensors[0].name)
    if others:
        found[0].notes.append(f"{others} files in {folder} are not .npy files and were left out")
    return found


def _files_below(folder: str) -> Iterator[tuple[str, Path]]:
    """Each file below a folder, hidden ones left out: its path there, with slashes, and what opens it."""
    if is_url(folder):
        from convert import remote
        from convert.remotefile import RemoteFile

        for relative, url, found in remote.files_below(folder):
            yield relative, RemoteFile(url, found)  # it need not ask for what the listing has told
        return

    def unlistable(err: OSError) -> None:  # it may hold tensors, which must not be missing without a word
        raise unreadable(err.filename or folder, err) from err

    for where, folders, files in os.walk(folder, onerror=unlistable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in sorted(files):
            if not file.startswith("."):
                path = os.path.join(where, file)
                yield os.path.relpath(path, folder).replace(os.sep, "/"), path


def _gathered(opened: list[Checkpoint], paths: list[str]) -> Checkpoint:
    """One checkpoint for several."""
    names: dict[str, Checkpoint] = {}
    metadata: dict[str, str] = {}
    for checkpoint in opened:
        for tensor in checkpoint.tensors:
            other = names.setdefault(tensor.name, checkpoint)
            if other is not checkpoint:
                raise CorruptError(
                    f"the name is taken by a tensor of {other.path}",
                    path=checkpoint.path,
                    tensor=tensor.name,
                    hint="convert the files one by one, or give their folder as the source",
                )
        for key, text in checkpoint.metadata.items():
            if metadata.setdefault(key, text) != text:
                raise CorruptError(
                    f"the sources differ in metadata {quoted(key)}",
                    path=checkpoint.path,
                    hint="convert the files one by one",
                )
    kinds = sorted({checkpoint.format for checkpoint in opened})
    return Checkpoint(
        " ".join(paths[:3]) + (" ..." if len(paths) > 3 else ""),
        "+".join(kinds),
        [tensor for checkpoint in opened for tensor in checkpoint.tensors],
        metadata,
        [note for checkpoint in opened for note in checkpoint.notes],
        [file for checkpoint in opened for file in checkpoint.files],
        ", ".join(sorted({checkpoint.version for checkpoint in opened if checkpoint.version})),
    )


def load(
    source: Path | Sequence[Path],
    *,
    policy: Policy | None = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    jobs: int | None = None,
    limits: Limits = DEFAULT,
) -> dict[str, np.ndarray[Any, Any]]:
    """All tensors as numpy arrays, in memory, read by as many threads as there are cores, or `jobs`.

    bfloat16 and the small floats come as ml_dtypes arrays. The policy decides about `<V2` (bfloat16 by default) and
    pickles (refused by default); whatever else numpy has comes as it is.

    Raises:
        InputError: The file is damaged.
        PolicyError: A tensor needs a decision.
    """
    from convert import arrays

    options.check_jobs(jobs)
    with open(source, limits=limits) as checkpoint:
        wishes = Wishes(policy or Policy(), include=tuple(include), exclude=tuple(exclude), limits=limits)
        plan = make_plan(checkpoint, checkpoint.path, "numpy", arrays, wishes)
        return arrays.to_arrays(plan.tensors, _jobs(jobs, _is_far(checkpoint)))


def save(tensors: Mapping[str, Any], target: Path, *, separator: str = ".", **settings: Unpack[Options]) -> Report:
    """Write arrays to a file, exactly, whatever their memory layout.

    Args:
        tensors: Arrays by name: numpy (any strides, byte order or subclass), ml_dtypes, torch, JAX, MLX, or anything
            with `__array__`; or dictionaries of them, as deep as you like. They are read while the file is written and
            must not change meanwhile. Those that share their memory are written in full, and noted in the report.
        target: Path of the file; its suffix tells the format.
        separator: Joins the keys of dictionaries within dictionaries to names.
        **settings: Those of `convert_file`: to, policy, metadata, compress, align, overwrite, verify, jobs ...

    Raises:
        PolicyError: A type the format cannot hold; nothing was written.
        UsageError: Two names become one when dictionaries are flattened.
        OutputError: The target exists, or cannot be written.
    """
    from convert import arrays

    taken, notes = arrays.from_arrays(tensors, separator)
    checkpoint = Checkpoint("memory", "memory", taken, notes=notes)
    return convert_checkpoint(checkpoint, ["memory"], os.fspath(target), **settings)


def convert_file(
    source: Path | Sequence[Path], target: Path, *, format: str | None = None, **settings: Unpack[Options]
) -> Report:
    """Convert a file, several files, or a folder of .npy files into one target.

    Args:
        source: See `open`.
        target: Path or URL; a slash at its end, or an existing folder, asks for one .npy file per tensor. The source
            is a possible target too.
        format: Format of the source, where the content shall not decide.
        **settings: Keyword arguments, all optional:
            to: Format of the target, where the suffix does not tell.
            policy: A `Policy`: what may happen to what the target cannot hold.
            byteorder: 'little', 'big', 'native' or 'keep' (npy and npz).
            order: 'C' or 'keep' (npy and npz).
            include, exclude: Globs of tensor names.
            rename: Pairs of regular expression and replacement.
            cast: Pairs of dtype names, or `Cast`s.
            cast_overflow: 'error', or 'inf' to let finite values become infinite.
            metadata: Texts added to the source's metadata.
            compress: Deflate level for npz, 1 to 9; True for the default, None to store.
            align: Data begins at a multiple of this many bytes, a power of two.
            max_shard_size: Split a safetensors target into files of at most this size: bytes, or text such as '5GB'.
            overwrite: Replace an existing target.
            verify: Read the target back and compare every byte before it gets its name.
            dry_run: Only plan; the report shows what would be written.
            fsync: Force the bytes to the disk.
            jobs: Threads; default the cores this process may use.
            progress: Called with bytes done, those read back included, bytes in all and a tensor's name; raise in it
                to cancel.
            limits: What is accepted of the source before it is refused; see docs/limits.md.

    Returns:
        What was written, changed and left out.

    Raises:
        ConvertError: Nothing was written; a target that was there before is as it was.
    """
    sources = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    with open(sources, format=format, limits=settings.get("limits", DEFAULT)) as checkpoint:
        return convert_checkpoint(checkpoint, [os.fspath(path) for path in sources], os.fspath(target), **settings)


def convert_checkpoint(
    checkpoint: Checkpoint,
    sources: list[str],
    target: str,
    *,
    to: str | None = None,
    compress: int | bool | None = None,
    align: int = 1,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    verify: bool = False,
    dry_run: bool = False,
    fsync: bool = False,
    jobs: int | None = None,
    progress: Callback | None = None,
    limits: Limits = DEFAULT,
    spread: Spreading | None = None,
    **wishes: Any,
) -> Report:
    """What is open, into a target; see `convert_file`. `sources` are for the report."""
    began = time.perf_counter()
    target = local_path(target)
    row = formats.by_name(to) if to is not None else formats.for_target(target)
    level = options.level(compress, row)
    options.check_align(align, row)
    options.check_jobs(jobs)
    made = options.wishes(row, limits=limits, **wishes)
    writer = row.load_writer()
    sharded = max_shard_size is not None or formats.is_index(target)
    if sharded and not hasattr(writer, "write_split"):
        raise UsageError(f"{row.name} has no shards (only safetensors has)", hint="--to safetensors, or another target")
    plan = make_plan(checkpoint, target, row.name, writer, made)
    split = writer.split(plan, max_shard_size) if sharded else None
    report = report_of(checkpoint, sources, plan)
    if dry_run:
        report.dry_run = True
        report.tensors = _written(plan)
        report.seconds = time.perf_counter() - began
        return report
    if spread is not None:
        spread.check(plan)
    in_place = any(file.is_same(target) for file in checkpoint.files)
    settings = Settings(
        overwrite=overwrite or (in_place and split is None),
        level=level,
        align=align,
        jobs=_jobs(jobs, is_url(target) or _is_far(checkpoint)),
        fsync=fsync,
        verify=verify,
        progress=None if progress is None else Progress(progress, plan.nbytes * (2 if verify else 1)),
        spread=spread,
    )
    output: Output
    if split is None:
        output = writer.write(plan, settings)
    else:  # in place, only what is read may go
        own = {real_path(file.path) for file in checkpoint.files if in_place}
        output = writer.write_split(plan, split, settings, own)
    finish(output, checkpoint, plan, row if verify else None, report, settings, limits)
    report.seconds = time.perf_counter() - began
    return report


def _is_far(checkpoint: Checkpoint) -> bool:
    return any(getattr(file, "is_remote", False) for file in checkpoint.files)


def _jobs(jobs: int | None, is_far: bool) -> int:
    least, most = _REMOTE_JOBS if is_far else (1, MAX_JOBS)
    return min(jobs or max(default_jobs(), least), most)


def finish(
    output: Output,
    checkpoint: Checkpoint,
    plan: Plan,
    verify: formats.Format | None,
    report: Report,
    settings: Settings,
    limits: Limits,
) -> None:
    """Give what was written its name, once it is sure to be what was read; `verify` is its format, to read it back."""
    with committed(output):
        for file in checkpoint.files:
            file.check_unchanged()
            report.notes += getattr(file, "notes", ())
        if verify is not None:
            from convert.verify import verified

            report.tensors = verified(plan, output, verify, partial(open, limits=limits), settings)
            report.verified = True
        report.target_bytes = output.size()
        checkpoint.close()  # an open file cannot be replaced everywhere
        output.commit(fsync=settings.fsync)
    if verify is None:
        report.tensors = _written(plan)


def _written(plan: Plan) -> list[Written]:
    return [Written(tensor.name, tensor.dtype.name, tensor.shape, tensor.nbytes) for tensor in plan.tensors]


def report_of(checkpoint: Checkpoint, sources: list[str], plan: Plan) -> Report:
    """The report of a conversion that is to come."""
    return Report(
        [without_secrets(source) for source in sources],
        without_secrets(plan.target),
        checkpoint.format.split("+"),
        plan.format,
        [],
        plan.changes,
        plan.skipped,
        plan.notes,
        plan.metadata,
        sum(file.size for file in checkpoint.files),
    )
