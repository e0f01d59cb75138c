"""Writing tensors that do not fit together in memory: what they are is said first, their bytes come piece by piece.

Where all places in the target are known beforehand, a piece goes straight there. Where they are not (deflate, shards,
folders, URLs), or the target is to be read back, pieces wait in a nameless temporary file beside the target, and the
conversion runs when all are there.
"""

from __future__ import annotations

import difflib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import lcm, prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from convert import api, formats, options
from convert.codec import crc32
from convert.errors import ConvertError, UsageError, gather, printable, quoted
from convert.files import Spool, is_url, local_path
from convert.limits import DEFAULT, Limits
from convert.output import committed, is_there, target_exists
from convert.plan import Plan, make_plan
from convert.policy import Policy
from convert.progress import Callback, Progress
from convert.report import Report
from convert.steps import aligned, pipe_of
from convert.tensor import Checkpoint, Extent, Tensor
from convert.transfer import CHUNK_BYTES, Slot
from convert.writing import Begun, Settings

if TYPE_CHECKING:
    from typing_extensions import Buffer


class TensorSpec(NamedTuple):
    """What a tensor will be: its type, by numpy's or ml_dtypes' name or as a dtype object, and its shape."""

    dtype: Any
    shape: tuple[int, ...]


class SpecLike(Protocol):
    """Anything with a dtype and a shape: a `TensorSpec`, a `Tensor`, an array, a `jax.ShapeDtypeStruct`."""

    @property
    def dtype(self) -> Any: ...

    @property
    def shape(self) -> Sequence[int]: ...


def writer(
    target: str | os.PathLike[str],
    specs: Mapping[str, SpecLike],
    *,
    to: str | None = None,
    policy: Policy | None = None,
    metadata: Mapping[str, str] | None = None,
    compress: int | bool | None = None,
    align: int = 1,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    verify: bool = False,
    fsync: bool = False,
    jobs: int | None = None,
    progress: Callback | None = None,
    limits: Limits = DEFAULT,
) -> Writer:
    """Begin a file whose tensors are written piece by piece; use it in a `with` block.

    Args:
        target: Path or URL; its suffix tells the format.
        specs: What each tensor will be: all of them, in the order of the target where its format leaves one.
        to: These and the others are those of `convert_file`. Where pieces wait in a temporary file (see the module),
            `progress` counts what is done when the block ends.

    Raises:
        UsageError: A spec that is none.
        PolicyError: A type the format cannot hold, or a policy that has to see the values first.
        OutputError: The target exists, or cannot be written.
    """
    settings: dict[str, Any] = {
        "to": to, "policy": policy, "metadata": metadata, "compress": compress, "align": align, "jobs": jobs,
        "max_shard_size": max_shard_size, "overwrite": overwrite, "verify": verify, "fsync": fsync,
        "progress": progress, "limits": limits,
    }  # fmt: skip
    path = local_path(target)
    checkpoint = Checkpoint("memory", "memory", [_announced(name, spec) for name, spec in specs.items()])
    return Writer(_direct(path, checkpoint, **settings) or _Waiting(path, checkpoint, settings), checkpoint)


def _announced(name: str, spec: SpecLike) -> Tensor:
    """The tensor of a spec, its bytes still to come."""
    from convert import arrays

    if not isinstance(name, str):
        raise UsageError(f"names must be texts (found {name!r})")
    try:
        dtype, shape = arrays.dtype_from(spec.dtype), tuple(map(int, spec.shape))
    except (AttributeError, TypeError, ValueError) as err:
        what = f"not the type and shape of a tensor: {printable(err)}"
        raise UsageError(what, tensor=name, hint="give convert.TensorSpec('float32', (3, 4)) for one") from err
    except ConvertError as err:
        raise err.at(None, name) from None
    if min(shape, default=0) < 0 or (dtype.item_bytes == 0 and prod(shape) * dtype.bits % 8):
        raise UsageError(f"no {dtype} tensor has the shape {shape}", tensor=name)
    return Tensor(name, dtype, shape, _Coming(dtype.nbytes(prod(shape))))


class _Coming:
    """Stands for bytes that are not there yet."""

    path = "memory"

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def chunks(self, chunk_bytes: int) -> Iterator[Buffer]:
        raise UsageError(
            "the policy has to see the values, which are not there yet",
            hint="choose one that does not, or save the array with convert.save",
        )


class _Way(Protocol):
    """How pieces get into the target."""

    def slots(self, tensor: Tensor) -> list[Slot]:
        """Where the bytes of an announced tensor go."""
        ...

    def count(self, nbytes: int, name: str) -> None: ...

    def finish(self) -> Report:
        """All bytes are there: give the target its name."""
        ...

    def discard(self) -> None: ...


class _Straight:
    """To their places in the target."""

    def __init__(self, checkpoint: Checkpoint, plan: Plan, begun: Begun, settings: Settings) -> None:
        self._checkpoint = checkpoint
        self._plan = plan
        self._begun = begun
        self._settings = settings
        self._slots = list(begun.slots)
        self._by_data: dict[int, list[Slot]] = {}
        for slot in self._slots:
            self._by_data.setdefault(id(slot.tensor.data), []).append(slot)

    def slots(self, tensor: Tensor) -> list[Slot]:
        return self._by_data.get(id(tensor.data), [])

    def count(self, nbytes: int, name: str) -> None:
        if self._settings.progress is not None:
            self._settings.progress.add(nbytes, name)

    def finish(self) -> Report:
        begun = self._begun
        for slot in self._slots if begun.head is not None else ():
            slot.out.write_at(slot.offset - slot.head_bytes, begun.head(slot))  # type: ignore[misc]
        begun.finish()
        report = api.report_of(self._checkpoint, ["memory"], self._plan)
        api.finish(begun.output, self._checkpoint, self._plan, None, report, self._settings, DEFAULT)
        return report

    def discard(self) -> None:
        self._begun.output.discard()


def _direct(
    target: str, checkpoint: Checkpoint, *, to: str | None, compress: int | bool | None, align: int, overwrite: bool,
    max_shard_size: int | str | None, verify: bool, fsync: bool, jobs: int | None, progress: Callback | None,
    **wishes: Any,
) -> _Straight | None:  # fmt: skip
    """The straight way, if there is one."""
    row = formats.by_name(to) if to is not None else formats.for_target(target)
    begin: Callable[[Plan, Settings], Begun | None] | None = getattr(row.load_writer(), "begin", None)
    if begin is None or is_url(target) or verify or max_shard_size is not None or formats.is_index(target):
        return None
    level = options.level(compress, row)
    options.check_align(align, row)
    options.check_jobs(jobs)
    plan = make_plan(checkpoint, target, row.name, row.load_writer(), options.wishes(row, **wishes))
    counter = None if progress is None else Progress(progress, plan.nbytes)
    settings = Settings(overwrite=overwrite, level=level, align=align, fsync=fsync, progress=counter)
    begun = begin(plan, settings)
    if begun is None:
        return None
    with committed(begun.output):
        return _Straight(checkpoint, plan, begun, settings)


class _Waiting:
    """To a temporary file, from which the target is made at the end."""

    def __init__(self, target: str, checkpoint: Checkpoint, settings: dict[str, Any]) -> None:
        api.convert_checkpoint(checkpoint, ["memory"], target, **{**settings, "dry_run": True})
        if not is_url(target) and not settings["overwrite"] and is_there(target) and not os.path.isdir(target):
            raise target_exists(target)
        folder = None if is_url(target) else os.path.dirname(os.path.abspath(target.rstrip("/")))
        self._target = target
        self._settings = settings
        self._spool = Spool(folder)
        self._tensors: list[Tensor] = []
        at = 0
        self._places: dict[int, int] = {}
        for tensor in checkpoint.tensors:
            self._places[id(tensor)] = at
            self._tensors.append(tensor.changed(data=Extent(self._spool, at, tensor.data.nbytes)))
            at += tensor.data.nbytes

    def slots(self, tensor: Tensor) -> list[Slot]:
        return [Slot(tensor, self._spool, self._places[id(tensor)])]

    def count(self, nbytes: int, name: str) -> None:
        pass

    def finish(self) -> Report:
        with self._spool:
            checkpoint = Checkpoint("memory", "memory", self._tensors)
            return api.convert_checkpoint(checkpoint, ["memory"], self._target, **self._settings)

    def discard(self) -> None:
        self._spool.close()


class _Inlet:
    """One tensor as it comes in."""

    def __init__(self, tensor: Tensor, slots: list[Slot], count: Callable[[int, str], None]) -> None:
        self.tensor = tensor
        self.lock = threading.Lock()
        self.got = 0
        """Bytes taken so far."""
        self._count = count
        self._sinks = [(slot, pipe_of(slot.tensor)) for slot in slots]
        self._unit = lcm(*(pipe.unit_in for _, pipe in self._sinks))
        self._rest = b""
        """The end of what was taken, where it is less than a unit of the steps."""
        for slot in slots:
            slot.crc = slot.seed or 0

    @property
    def nbytes(self) -> int:
        return self.tensor.data.nbytes

    def put(self, pieces: Iterator[memoryview]) -> None:
        for piece in pieces:
            self.got += len(piece)
            data = piece if not self._rest else memoryview(self._rest + piece)
            whole = len(data) if self.got == self.nbytes else len(data) // self._unit * self._unit
            self._put(data[:whole], self.got - len(data))
            self._rest = bytes(data[whole:])

    def _put(self, data: memoryview, offset: int) -> None:
        for slot, pipe in self._sinks:
            # Steps may change what they are given, which here is the caller's.
            content = memoryview(pipe.apply(memoryview(bytearray(data)), offset) if pipe.steps else data).cast("B")
            if slot.seed is not None:
                slot.crc = crc32(content, slot.crc)
            slot.out.write_at(slot.offset + pipe.out(offset), content)
            self._count(len(content), slot.tensor.name)


class Writer:
    """A file being written piece by piece, from `writer`.

    Leaving the `with` block gives the target its name; leaving it by an exception, or with bytes missing, leaves no
    trace. Several threads may write at once, each its own tensors.
    """

    def __init__(self, way: _Way, checkpoint: Checkpoint) -> None:
        self._way = way
        self._report: Report | None = None
        self._is_open = True
        self._failure: BaseException | None = None
        with ExitStack() as discarded:
            discarded.callback(way.discard)
            self._inlets = {tensor.name: _Inlet(tensor, way.slots(tensor), way.count) for tensor in checkpoint.tensors}
            discarded.pop_all()

    def write(self, name: str, chunk: Any) -> None:
        """Append to a tensor.

        Args:
            name: One of those announced, in any order.
            chunk: An array of the tensor's type, in any layout, whose elements follow those written before in row-major
                order: flat, or with the sizes of the tensor's last axes (some rows, a row, a part of one); or a bytes
                object, bytearray or memoryview of little-endian row-major bytes, cut anywhere. It may be reused as
                soon as this returns.

        Raises:
            UsageError: An unknown name, another type, a shape that does not fit, more bytes than announced. Nothing of
                the chunk was taken; writing may go on.
            ConvertError: It could not be written, or not be held exactly; leaving the block will raise it again.
        """
        inlet = self._inlets.get(name)
        if inlet is None:
            close = difflib.get_close_matches(str(name), self._inlets, 1)
            hint = f"did you mean {quoted(close[0])}?" if close else "every tensor must be announced to convert.writer"
            raise UsageError("no tensor of this name was announced", tensor=str(name), hint=hint)
        with inlet.lock:
            if not self._is_open:
                raise UsageError("the writer is closed", tensor=name, hint="write inside its with block")
            nbytes, pieces = _pieces(inlet.tensor, chunk)
            if inlet.got + nbytes > inlet.nbytes:
                found = f"expected {inlet.nbytes} bytes in all, found {inlet.got + nbytes}"
                raise UsageError(f"more than was announced ({found})", tensor=name)
            try:
                inlet.put(pieces)
            except BaseException as err:
                self._failure = self._failure or err
                if isinstance(err, ConvertError):
                    err.at(None, name)
                raise

    @property
    def report(self) -> Report:
        """What was written; known when the block has ended."""
        if self._report is None:
            raise UsageError("nothing is written yet", hint="ask for the report after the with block")
        return self._report

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, err: BaseException | None, traceback: object) -> None:
        if not self._is_open:
            return
        self._is_open = False
        with ExitStack() as discarded, ExitStack() as locks:
            discarded.callback(self._way.discard)
            for inlet in self._inlets.values():
                locks.enter_context(inlet.lock)  # what other threads are still writing ends first
            if err is not None:
                return
            if self._failure is not None:
                raise self._failure
            missing: list[ConvertError] = [
                UsageError(f"bytes are missing (expected {inlet.nbytes}, found {inlet.got})", tensor=name)
                for name, inlet in self._inlets.items()
                if inlet.got < inlet.nbytes
            ]
            if missing:
                raise gather(missing)
            self._report = self._way.finish()


def _pieces(tensor: Tensor, chunk: Any) -> tuple[int, Iterator[memoryview]]:
    """How many bytes a chunk has, and they themselves."""
    if isinstance(chunk, (bytes, bytearray, memoryview)):
        view = memoryview(chunk)
        if view.ndim != 1 or view.format not in ("B", "b", "c") or not view.c_contiguous:
            raise UsageError(
                f"a memoryview of bytes is needed (found format {view.format!r}, {view.ndim} dimensions)",
                tensor=tensor.name,
                hint="give the array itself, or memoryview(...).cast('B')",
            )
        view = view.cast("B")
        return len(view), (view[at : at + CHUNK_BYTES] for at in range(0, len(view), CHUNK_BYTES))
    from convert import arrays

    array = arrays.from_array(tensor.name, chunk)
    if array.dtype != tensor.dtype:
        what = f"the chunk has another type (expected {tensor.dtype}, found {array.dtype})"
        raise UsageError(what, tensor=tensor.name, hint="cast it first, or announce its type")
    axes = len(array.shape)
    if axes > max(len(tensor.shape), 1) or array.shape[1:] != tensor.shape[len(tensor.shape) - axes + 1 :]:
        raise UsageError(
            f"the chunk has another shape (expected (n, {', '.join(map(str, tensor.shape[1:]))}), a part of that, or a "
            f"flat array; found {array.shape})",
            tensor=tensor.name,
        )
    return array.nbytes, array.chunks(aligned(CHUNK_BYTES, max(array.dtype.item_bytes, 1)))
