"""One large file copied by many workers: each takes ranges whose places in source and target are known beforehand.

The coordinator plans, lays the target out under a temporary name that all can open, and has whole blocks of large
tensors copied by workers, straight from file to file. What is left, headers, small tensors and the edges between
blocks, it writes itself: no block is ever written by two machines, as network file systems may mix up such writes.
The workers' checksums are joined as if threads had done it. A range that is copied twice, as its worker was taken for
dead, is copied with the same bytes to the same place.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, NamedTuple

from convert.batchfiles import Stamp, added_up
from convert.batchjob import Order
from convert.batchpool import WAKE_SECONDS, Hands
from convert.batchwork import check_place, following
from convert.errors import ConvertError, InputError, OutputError, PolicyError, gather
from convert.files import BINARY, Positioned, SourceFile, unwritable
from convert.output import OutputFile
from convert.steps import Pipe, pipe_of
from convert.tensor import Extent, Tensor
from convert.threads import BUFFER_BYTES, new_buffer
from convert.transfer import Parts, Slot, copy_span, needs_turn
from convert.writing import WholeError

if TYPE_CHECKING:
    from convert.plan import Plan
    from convert.progress import Progress

RANGE_BYTES = 64 << 20
"""What a worker copies at a time."""
LEAST_BYTES = 8 << 20
"""Smaller tensors are not worth sending."""
BLOCK_BYTES = 64 << 10
"""A multiple of what file systems write at once."""
_TRIES = 3
"""How often a range is handed over; each time the cluster itself tries several workers."""


class Range(NamedTuple):
    """What a worker copies.

    Attributes:
        order: The batch's.
        source: Absolute path.
        stamp: Of the source; another one means that it has changed.
        offset: First byte there.
        nbytes: How many.
        target: Absolute path of the file that is being written.
        at: Place of the first byte there.
        pipe: At most a swap of bytes.
        owed: Whether a checksum of what is read is wanted.
        keep: Whether a checksum of what is written is wanted.
    """

    order: Order
    source: str
    stamp: Stamp
    offset: int
    nbytes: int
    target: str
    at: int
    pipe: Pipe
    owed: bool
    keep: bool


def copy_range(piece: Range) -> tuple[int, int, int]:
    """Copy it; run by a worker.

    Returns:
        As `convert.transfer.copy_span`.

    Raises:
        InputError: The source cannot be read, or is no longer what it was.
        OutputError: The target cannot be written, or this is no place to do it.
        StoppedError: The batch has ended.
    """
    check_place(piece.order)
    watch = following(piece.order.run)
    file = SourceFile(piece.source)
    try:
        _check_same(piece)
        out = Positioned(os.open(piece.target, os.O_WRONLY | BINARY))
        try:
            data = Extent(file, piece.offset, piece.nbytes, 0 if piece.owed else None)
            buffer = new_buffer(BUFFER_BYTES)
            sums = copy_span(
                data, piece.pipe, 0, piece.nbytes, out.write_all, piece.at, piece.keep, buffer,
                lambda count: watch(count, 0, ""),
            )  # fmt: skip
            if piece.order.fsync:
                os.fsync(out.fd)
        finally:
            out.close()
        _check_same(piece)
    except OSError as err:  # reading raises an InputError
        raise unwritable(piece.target, err) from err
    finally:
        file.close()
    return sums


def _check_same(piece: Range) -> None:
    found = added_up((piece.source,))
    if found != piece.stamp:
        raise InputError(
            f"the file changed while it was read (expected {piece.stamp.size} bytes, found {found.size})",
            path=piece.source,
            hint="run again when no other program writes to it",
        )


class Spread:
    """Has the large tensors of one conversion copied by workers; see `convert.writing.Spreading`."""

    def __init__(self, hands: Hands, order: Order) -> None:
        self._hands = hands
        self._order = order
        self._waiting: deque[tuple[Parts, int, Range, int]] = deque()
        self._flying: dict[Future[tuple[int, int, int]], tuple[Parts, int, Range, int]] = {}
        self._problems: list[ConvertError] = []

    def check(self, plan: Plan) -> None:
        """WholeError if a large tensor has to be turned, cast or inflated, or if most bytes are in small ones."""
        large = [tensor for tensor in plan.tensors if tensor.data.nbytes >= LEAST_BYTES]
        if 2 * sum(tensor.nbytes for tensor in large) < plan.nbytes or not all(map(_is_copied, large)):
            raise WholeError

    def cut(self, slot: Slot, data: Extent, pipe: Pipe, cuts: list[int]) -> tuple[list[int], range]:
        """Whole blocks of the target, in pieces of RANGE_BYTES, and the edges."""
        first = -slot.offset % BLOCK_BYTES
        last = first + (data.nbytes - first) // BLOCK_BYTES * BLOCK_BYTES
        if data.nbytes < LEAST_BYTES or first >= last:
            return cuts, range(0)
        if first % pipe.unit_in or not _is_open_to_others(slot):
            raise WholeError
        begins = range(first, last, RANGE_BYTES)
        borders = sorted({0, *begins, last, data.nbytes})
        at = borders.index(first)
        return borders, range(at, at + len(begins))

    def add(self, parts: Parts, data: Extent, pipe: Pipe, index: int, begin: int, end: int) -> None:
        """One piece for a worker."""
        slot = parts.slot
        assert isinstance(slot.out, OutputFile)
        source = os.path.abspath(data.file.path)
        target = os.path.abspath(slot.out.readable())
        piece = Range(
            self._order, source, added_up((source,)), data.offset + begin, end - begin, target, slot.offset + begin,
            pipe, data.crc is not None, slot.seed is not None,
        )  # fmt: skip
        self._waiting.append((parts, index, piece, 0))

    def run(self, progress: Progress | None) -> None:
        """Have all pieces copied.

        Raises:
            ConvertError: Something could not be read or written; all damaged tensors are named together.
        """
        try:
            while self._waiting or self._flying:
                while self._waiting and len(self._flying) < self._hands.window():
                    self._launch(self._waiting.popleft())
                done, _ = wait(self._flying, timeout=WAKE_SECONDS, return_when=FIRST_COMPLETED)
                self._hands.check()
                for future in done:
                    self._land(future, progress)
        except BaseException:
            for future in self._flying:
                future.cancel()
            raise
        if self._problems:
            raise gather(sorted(self._problems, key=lambda problem: (problem.path or "", problem.tensor or "")))

    def _launch(self, work: tuple[Parts, int, Range, int]) -> None:
        try:
            self._flying[self._hands.submit(copy_range, work[2])] = work
        except RuntimeError as err:
            raise OutputError(f"no worker takes any work: {err}", path=work[2].target) from err

    def _land(self, future: Future[tuple[int, int, int]], progress: Progress | None) -> None:
        parts, index, piece, tries = self._flying.pop(future)
        tensor = parts.slot.tensor
        err = None if future.cancelled() else future.exception()
        if future.cancelled() or isinstance(err, self._hands.losses):
            if tries + 1 == _TRIES:
                what = "the workers died, again and again, while they copied a part of it"
                raise OutputError(what, path=tensor.path, tensor=tensor.name, hint="look at the logs of the workers")
            self._waiting.append((parts, index, piece, tries + 1))
            return
        try:
            if err is not None:
                raise err
            parts.done(index, piece.nbytes, *future.result())
        except (InputError, PolicyError) as found:
            self._problems += [problem.at(tensor.path, tensor.name) for problem in found.problems]
        if progress is not None:
            progress.add(piece.nbytes, tensor.name)


def _is_copied(tensor: Tensor) -> bool:
    """Whether its bytes are those of a local file, at most swapped."""
    data = tensor.data
    if not isinstance(data, Extent) or not isinstance(data.file, SourceFile):
        return False
    pipe = pipe_of(tensor)
    return not (tensor.stored_fortran and needs_turn(tensor)) and (not pipe.steps or bool(pipe.swap))


def _is_open_to_others(slot: Slot) -> bool:
    """Whether the file that is being written has a name, and may be written by whoever knows it."""
    return isinstance(slot.out, OutputFile) and slot.out.is_named and os.access(slot.out.readable(), os.W_OK)
