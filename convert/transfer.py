"""Moving tensor bytes: read a chunk that stays in cache, check it, change it there, write it at its place.

Two ways: `chunks` gives one tensor's bytes in order, for whoever takes them in order (deflate, `--verify`, the
library); `fill` puts many tensors at known offsets, several threads at once, in any order. Memory is a few buffers
per thread, whatever the tensors' sizes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, pairwise
from math import lcm
from typing import TYPE_CHECKING, cast

from convert.codec import crc32, crc32_combine
from convert.errors import ConvertError, CorruptError, InputError, PolicyError, gather
from convert.files import Spool, read_ahead
from convert.steps import Pipe, aligned, own_swapper, pipe_of
from convert.tensor import Extent, Tensor
from convert.threads import BUFFER_BYTES, Work, check_stopped, new_buffer, run

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from convert.output import FileOutput
    from convert.progress import Progress
    from convert.writing import Spreading

CHUNK_BYTES = BUFFER_BYTES
"""One read and one write. Small enough to stay in a core's own cache between them."""
SPAN_BYTES = 16 << 20
"""A large tensor is cut into spans of this size, so that several threads share it."""
SMALL_BYTES = 64 << 10
"""Tensors up to this size are read whole, and neighbours in the output written together."""


def needs_turn(tensor: Tensor) -> bool:
    """Whether the stored order and the order handed out differ in their bytes."""
    shape = tensor.stored_shape
    if tensor.stored_fortran == tensor.fortran or len(shape) < 2:
        return False
    return 0 not in shape and sum(size > 1 for size in shape) > 1


# --- one tensor, in order ----------------------------------------------------------------------------------------


def chunks(tensor: Tensor, chunk_bytes: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """The tensor's bytes in order; see `Tensor.chunks`."""
    if tensor.problem is not None:
        raise tensor.problem
    try:
        if needs_turn(tensor):
            from convert.turning import turned_chunks

            yield from turned_chunks(tensor, chunk_bytes)
            return
        pipe = pipe_of(tensor)
        offset = 0
        whole = lcm(pipe.unit_in, max(tensor.stored.item_bytes, 1))  # chunks hold whole elements
        unit = whole if whole <= CHUNK_BYTES else pipe.unit_in
        for chunk in stored_chunks(tensor.data, aligned(chunk_bytes, unit)):
            yield memoryview(pipe.apply(memoryview(chunk), offset) if pipe.steps else chunk).cast("B")
            offset += len(memoryview(chunk))
    except ConvertError as err:
        err.at(tensor.path, tensor.name)
        raise


def stored_chunks(data: object, chunk_bytes: int) -> Iterator[Buffer]:
    """Stored bytes in order, checked: the last chunk comes only when the checksum was right."""
    if not isinstance(data, Extent):
        for chunk in data.chunks(chunk_bytes):  # type: ignore[attr-defined]
            check_stopped()
            yield chunk
        return
    # New pages cost more than they save for what is soon read.
    large = data.nbytes > SPAN_BYTES
    buffer = new_buffer(chunk_bytes) if large else memoryview(bytearray(min(chunk_bytes, data.nbytes)))
    crc, offset = data.seed, 0
    read_ahead(data.file, data.offset, data.offset + data.nbytes)
    while offset < data.nbytes:
        check_stopped()
        part = buffer[: min(chunk_bytes, data.nbytes - offset)]
        data.file.readinto(data.offset + offset, part)
        offset += len(part)
        if data.crc is not None:
            crc = crc32(part, crc)
            if offset == data.nbytes:
                check_crc(data, crc)
        yield part
    if data.nbytes == 0 and data.crc is not None:
        check_crc(data, crc)


def check_crc(data: Extent, crc: int) -> None:
    if crc != data.crc:
        raise CorruptError(
            f"CRC-32 mismatch: the stored bytes are damaged (expected {data.crc:08x}, found {crc:08x})",
            hint="copy or download the file again; --exclude leaves this tensor out",
        )


# --- many tensors, at their places -------------------------------------------------------------------------------


class Slot:
    """Where one tensor goes.

    Attributes:
        tensor: What.
        out: The file it goes to.
        offset: Place of its first data byte there.
        head_bytes: Room before the data for a header that is written once the checksum is known.
        seed: CRC-32 of what the target's checksum covers before the data, or None if none is kept.
        crc: The target's checksum, once filled.
        tag: Whatever the writer wants to find again in `Head`.
    """

    __slots__ = ("crc", "head_bytes", "offset", "out", "seed", "tag", "tensor")

    def __init__(
        self,
        tensor: Tensor,
        out: FileOutput | Spool,
        offset: int,
        head_bytes: int = 0,
        seed: int | None = None,
        tag: object = None,
    ) -> None:
        self.tensor = tensor
        self.out = out
        self.offset = offset
        self.head_bytes = head_bytes
        self.seed = seed
        self.crc = 0
        self.tag = tag


Head = Callable[[Slot], bytes]
"""The header of a filled slot, exactly `head_bytes` long."""


def fill(
    slots: Iterable[Slot],
    jobs: int,
    *,
    head: Head | None = None,
    tail: Head | None = None,
    progress: Progress | None = None,
    spread: Spreading | None = None,
) -> None:
    """Put every tensor at its place, `jobs` threads at once.

    Args:
        slots: In the order of their places, where their files are sequential.
        jobs: Threads.
        head: The header of a slot; its checksum is known, unless the file is sequential.
        tail: What follows a slot's data in a sequential file, when its checksum is known.
        progress: Counts bytes written.
        spread: Copies parts of large tensors elsewhere.

    Raises:
        ConvertError: Something could not be read, written or mapped; all damaged tensors are named together.
    """
    slots = iter(slots)
    first = next(slots, None)
    if first is None:
        return
    slots = chain((first,), slots)
    if getattr(first.out, "sequential", False):
        from convert.sequence import InOrder

        InOrder(slots, head, tail, progress).fill(jobs)
    else:
        run(Filler(head, progress, jobs, spread).work(slots), jobs)
        if spread is not None:
            spread.run(progress)


class Filler:
    """Cuts the filling of slots into independent pieces of work."""

    def __init__(
        self, head: Head | None, progress: Progress | None, jobs: int, spread: Spreading | None = None
    ) -> None:
        self._head = head
        self._spread = spread
        self._progress = progress
        self._jobs = jobs

    def work(self, slots: Iterable[Slot]) -> Iterator[Work]:
        """Pieces of work, made as they are asked for."""
        group: list[Slot] = []
        group_bytes, group_end = 0, -1
        for slot in slots:
            tensor = slot.tensor
            data = tensor.data
            turn = tensor.stored_fortran and needs_turn(tensor)
            if data.nbytes <= SMALL_BYTES and not turn:
                begin = slot.offset - slot.head_bytes
                if group and (begin != group_end or group_bytes > CHUNK_BYTES or slot.out is not group[0].out):
                    yield partial(self._small, group)
                    group, group_bytes = [], 0
                group.append(slot)
                nbytes = tensor.nbytes
                group_end = slot.offset + nbytes
                group_bytes += slot.head_bytes + nbytes
                continue
            if turn:
                from convert.turning import turn_work

                yield from turn_work(slot, self.finish, self._count, self._jobs)
            elif isinstance(data, Extent):
                yield from self._spans(slot, data)
            else:
                yield partial(self._stream, slot)
        if group:
            yield partial(self._small, group)

    def _small(self, group: list[Slot], buffer: memoryview) -> None:
        """Small neighbours: read each whole, write all at once."""
        parts: list[Buffer] = []
        head = self._head
        problems: list[ConvertError] = []
        for slot in group:
            tensor = slot.tensor
            data = tensor.data
            content: Buffer = b""
            try:
                if isinstance(data, Extent):
                    content = data.file.read(data.offset, data.nbytes)
                    if data.crc is not None and (crc := crc32(content, data.seed)) != data.crc:
                        check_crc(data, crc)
                else:
                    content = b"".join(data.chunks(SMALL_BYTES))
                if tensor.steps or tensor.stored_big or tensor.big:
                    content = pipe_of(tensor).apply(memoryview(bytearray(content)), 0)
            except (InputError, PolicyError) as err:
                problems += [problem.at(tensor.path, tensor.name) for problem in err.problems]
            if slot.seed is not None:
                slot.crc = crc32(content, slot.seed)
            if head is not None:
                parts.append(head(slot))
            parts.append(content)
        if problems:
            raise gather(problems)
        first, last = group[0], group[-1]
        begin = first.offset - first.head_bytes
        first.out.write_at(begin, b"".join(parts))
        if self._progress is not None:
            self._progress.add(last.offset + last.tensor.nbytes - begin, last.tensor.name)

    def _spans(self, slot: Slot, data: Extent) -> Iterator[Work]:
        pipe = pipe_of(slot.tensor)
        cuts = [*range(0, data.nbytes, aligned(SPAN_BYTES, pipe.unit_in)), data.nbytes]
        elsewhere = range(0)
        if self._spread is not None:
            cuts, elsewhere = self._spread.cut(slot, data, pipe, cuts)
        parts = Parts(slot, len(cuts) - 1, self.finish)
        for index, (begin, end) in enumerate(pairwise(cuts)):
            if self._spread is not None and index in elsewhere:
                self._spread.add(parts, data, pipe, index, begin, end)
            else:
                yield partial(self._span, parts, data, pipe, index, begin, end)

    def _span(
        self, parts: Parts, data: Extent, pipe: Pipe, index: int, begin: int, end: int, buffer: memoryview
    ) -> None:
        """Part of a large tensor: chunk by chunk from its place in the source to its place in the target."""
        slot, progress = parts.slot, self._progress
        count = None if progress is None else partial(progress.add, name=slot.tensor.name)
        at, keep = slot.offset + pipe.out(begin), slot.seed is not None
        read_ahead(data.file, data.offset + begin, data.offset + end)
        with parts.named():
            sums = copy_span(data, pipe, begin, end, slot.out.write_at, at, keep, buffer, count)
        parts.done(index, end - begin, *sums)

    def _stream(self, slot: Slot, buffer: memoryview) -> None:
        """A tensor that comes only in order."""
        at, crc = slot.offset, slot.seed
        for chunk in chunks(slot.tensor):
            slot.out.write_at(at, chunk)
            at += len(chunk)
            if crc is not None:
                crc = crc32(chunk, crc)
            if self._progress is not None:
                self._progress.add(len(chunk), slot.tensor.name)
        slot.crc = crc or 0
        self.finish(slot)

    def _count(self, nbytes: int, name: str) -> None:
        if self._progress is not None:
            self._progress.add(nbytes, name)

    def finish(self, slot: Slot) -> None:
        """Write the header of a slot whose data and checksum are complete."""
        if self._head is not None:
            slot.out.write_at(slot.offset - slot.head_bytes, self._head(slot))


def copy_span(
    data: Extent,
    pipe: Pipe,
    begin: int,
    end: int,
    write: Callable[[int, Buffer], None],
    at: int,
    keep: bool,
    buffer: memoryview,
    count: Callable[[int], None] | None,
) -> tuple[int, int, int]:
    """Copy stored bytes `[begin, end)` of an extent through a pipe, chunk by chunk.

    Args:
        data: Whose bytes; its checksum is looked at only to see whether one is owed.
        pipe: What is done to them on the way.
        begin: First byte, a multiple of the pipe's unit.
        end: Behind the last byte.
        write: Takes a place in the target, and bytes.
        at: Place of the first byte in the target.
        keep: Whether a checksum of what is written is wanted.
        buffer: Of CHUNK_BYTES.
        count: Called with the bytes of each chunk when they are written.

    Returns:
        CRC-32 of what was read, the number of bytes written, and their CRC-32; a CRC nobody wants is 0.
    """
    owed = data.crc is not None
    crc_in = crc_out = 0
    first = at
    chunk_bytes = aligned(CHUNK_BYTES, pipe.unit_in)
    swapper = own_swapper(pipe.swap, chunk_bytes) if pipe.swap else None
    if swapper is not None:
        buffer = swapper.view
    elif chunk_bytes > len(buffer):
        buffer = new_buffer(chunk_bytes)
    readinto = data.file.readinto
    for offset in range(begin, end, chunk_bytes):
        check_stopped()
        content: Buffer = buffer[: min(chunk_bytes, end - offset)]
        readinto(data.offset + offset, content)  # type: ignore[arg-type]
        if owed or (keep and not pipe.steps):
            crc_in = crc32(content, crc_in)
        if pipe.steps:
            if swapper is not None and end - offset >= chunk_bytes:
                swapper.swap()
            else:
                content = pipe.apply(content, offset)  # type: ignore[arg-type]
            if keep:
                crc_out = crc32(content, crc_out)
        write(at, content)
        done = memoryview(content).nbytes
        at += done
        if count is not None:
            count(done)
    return crc_in, at - first, crc_out if pipe.steps else crc_in


class Parts:
    """The pieces of one tensor, done in any order: joins their checksums when the last one ends."""

    def __init__(self, slot: Slot, count: int, finish: Callable[[Slot], None]) -> None:
        self.slot = slot
        self._left = count
        self._finish = finish
        self._sums: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)] * count
        self._lock = threading.Lock()

    def named(self) -> _Named:
        return _Named(self.slot.tensor)

    def done(self, index: int, in_bytes: int, crc_in: int, out_bytes: int, crc_out: int) -> None:
        """A piece has ended; the last one to do so checks the sum and finishes the slot."""
        self._sums[index] = (in_bytes, crc_in, out_bytes, crc_out)
        with self._lock:
            self._left -= 1
            if self._left:
                return
        slot, data = self.slot, cast(Extent, self.slot.tensor.data)
        if data.crc is not None:
            crc = data.seed
            for in_bytes, crc_in, _, _ in self._sums:
                crc = crc32_combine(crc, crc_in, in_bytes)
            with self.named():
                check_crc(data, crc)
        if slot.seed is not None:
            slot.crc = slot.seed
            for _, _, out_bytes, crc_out in self._sums:
                slot.crc = crc32_combine(slot.crc, crc_out, out_bytes)
        self._finish(slot)


class _Named:
    """Errors that leave the block say which tensor they are about."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, err: object, trace: object) -> None:
        if isinstance(err, (InputError, PolicyError)):
            err.at(self._tensor.path, self._tensor.name)
