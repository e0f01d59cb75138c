"""Filling slots of targets that cannot seek: tensor after tensor, each byte once, in order.

Several threads read, check and change pieces at once; they are written one after the other. A slot's header is written
before its data, so it cannot hold the checksum; `tail` gives what follows instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from convert.codec import crc32, crc32_combine
from convert.errors import ConvertError, InputError, PolicyError, gather
from convert.steps import aligned, pipe_of
from convert.tensor import Extent
from convert.threads import in_order
from convert.transfer import SMALL_BYTES, check_crc, chunks, needs_turn

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from convert.progress import Progress
    from convert.transfer import Head, Slot

PIECE_BYTES = 2 << 20
"""What one thread reads, and a remote source is asked for, at once."""
_MOST_READERS = 2
"""One upload cannot keep more of them busy, and each holds its pieces."""


@dataclass(slots=True)
class _Piece:
    """Small slots, or stored bytes `[begin, end)` of a large one, on their way.

    Attributes:
        slots: One, or several small ones.
        room: Where the stored bytes are, or will be read to; None for small slots.
        is_read: Whether they are there already.
        parts: What will be written, in order.
        problems: Why it cannot be.
        crc_in: Checksum as stored.
        crc_out, out_bytes: Checksum and length as written.
    """

    slots: list[Slot]
    begin: int = 0
    end: int = 0
    room: memoryview | None = None
    is_read: bool = False
    parts: list[Buffer] = field(default_factory=list)
    problems: list[ConvertError] = field(default_factory=list)
    crc_in: int = 0
    crc_out: int = 0
    out_bytes: int = 0


class InOrder:
    """See `convert.transfer.fill`."""

    def __init__(self, slots: Iterable[Slot], head: Head | None, tail: Head | None, progress: Progress | None) -> None:
        self._head = head
        self._tail = tail
        self._progress = progress
        self._problems: list[ConvertError] = []
        self._pieces = self._cut(slots)
        self._last: Slot | None = None
        self._bad: Slot | None = None
        self._at = 0
        self._crc_in = self._crc_out = 0

    def fill(self, jobs: int) -> None:
        """All of it; bad input does not stop the reading, so that all of it is reported."""
        in_order(self._draw, self._work, self._sink, min(jobs, _MOST_READERS))
        if self._problems:
            raise gather(self._problems)

    def _cut(self, slots: Iterable[Slot]) -> Iterator[_Piece]:
        """Pieces; those that are read already are valid until the next."""
        group: list[Slot] = []
        group_bytes = 0
        for slot in slots:
            tensor, data = slot.tensor, slot.tensor.data
            turn = needs_turn(tensor)
            if data.nbytes <= SMALL_BYTES and not turn:
                group.append(slot)
                group_bytes += slot.head_bytes + tensor.nbytes
                if group_bytes >= PIECE_BYTES // 4:
                    yield _Piece(group)
                    group, group_bytes = [], 0
                continue
            if group:
                yield _Piece(group)
                group, group_bytes = [], 0
            if isinstance(data, Extent) and not turn:
                step = aligned(PIECE_BYTES, pipe_of(tensor).unit_in)
                for begin in range(0, data.nbytes, step):
                    yield _Piece([slot], begin, min(begin + step, data.nbytes))
                continue
            at = 0
            try:
                for chunk in chunks(tensor, PIECE_BYTES):
                    yield _Piece([slot], at, at + len(chunk), chunk, is_read=True)
                    at += len(chunk)
            except (InputError, PolicyError) as err:
                self._problems += err.problems
        if group:
            yield _Piece(group)

    def _draw(self, buffer: bytearray) -> _Piece | None:
        piece = next(self._pieces, None)
        if piece is None or piece.end == 0:
            return piece
        count = piece.end - piece.begin
        if len(buffer) < count:
            try:
                buffer.extend(bytes(count - len(buffer)))
            except BufferError:  # the traceback of a problem, which is kept, may lead to a piece of this buffer
                buffer = bytearray(count)
        room = memoryview(buffer)[:count]
        if piece.room is not None:
            room[:] = piece.room
        piece.room = room
        return piece

    # --- by several threads --------------------------------------------------------------------------------------

    def _work(self, piece: _Piece) -> _Piece:
        try:
            if piece.room is None:
                self._small(piece)
            else:
                self._large(piece, piece.room)
        except (InputError, PolicyError) as err:
            tensor = piece.slots[0].tensor
            piece.problems += [problem.at(tensor.path, tensor.name) for problem in err.problems]
        return piece

    def _large(self, piece: _Piece, room: memoryview) -> None:
        slot = piece.slots[0]
        content: Buffer = room
        if not piece.is_read:
            data, pipe = slot.tensor.data, pipe_of(slot.tensor)
            assert isinstance(data, Extent)
            data.file.readinto(data.offset + piece.begin, room)
            if data.crc is not None:
                piece.crc_in = crc32(room)
            if pipe.steps:
                content = pipe.apply(room, piece.begin)
        piece.out_bytes = memoryview(content).nbytes
        if slot.seed is not None:
            piece.crc_out = crc32(content)
        piece.parts.append(content)

    def _small(self, piece: _Piece) -> None:
        """Each read whole, with its header and what follows it."""
        for slot in piece.slots:
            tensor, data = slot.tensor, slot.tensor.data
            content: Buffer = b""
            try:
                if isinstance(data, Extent):
                    content = data.file.read(data.offset, data.nbytes)
                    if data.crc is not None:
                        check_crc(data, crc32(content, data.seed))
                else:
                    content = b"".join(data.chunks(SMALL_BYTES))
                if tensor.steps or tensor.stored_big or tensor.big:
                    content = pipe_of(tensor).apply(memoryview(bytearray(content)), 0)
            except (InputError, PolicyError) as err:
                piece.problems += [problem.at(tensor.path, tensor.name) for problem in err.problems]
                continue
            if slot.seed is not None:
                slot.crc = crc32(content, slot.seed)
            piece.parts.append(self._before(slot) + bytes(content) + self._after(slot))

    def _before(self, slot: Slot) -> bytes:
        return b"" if self._head is None else self._head(slot)

    def _after(self, slot: Slot) -> bytes:
        return b"" if self._tail is None else self._tail(slot)

    # --- one after the other -------------------------------------------------------------------------------------

    def _sink(self, piece: _Piece) -> None:
        self._problems += piece.problems
        if piece.room is None:
            if not self._problems:
                for slot, part in zip(piece.slots, piece.parts, strict=True):
                    self._put(slot, slot.offset - slot.head_bytes, part)
            return
        slot = piece.slots[0]
        if piece.begin == 0:
            self._at = slot.offset
            self._crc_in, self._crc_out = getattr(slot.tensor.data, "seed", 0), slot.seed or 0
            self._put(slot, slot.offset - slot.head_bytes, self._before(slot))
        if piece.problems:
            self._bad = slot
        if slot is self._bad:
            return  # what is missing would be taken for a wrong checksum
        self._put(slot, self._at, piece.parts[0])
        self._at += piece.out_bytes
        if slot.seed is not None:
            self._crc_out = crc32_combine(self._crc_out, piece.crc_out, piece.out_bytes)
        data = slot.tensor.data
        is_last = piece.end == (slot.tensor.nbytes if piece.is_read else data.nbytes)
        if not piece.is_read and isinstance(data, Extent) and data.crc is not None:
            self._crc_in = crc32_combine(self._crc_in, piece.crc_in, piece.end - piece.begin)
            if is_last:
                self._check(slot, data)
        if is_last:
            slot.crc = self._crc_out
            self._put(slot, self._at, self._after(slot))

    def _check(self, slot: Slot, data: Extent) -> None:
        try:
            check_crc(data, self._crc_in)
        except InputError as err:
            self._problems.append(err.at(slot.tensor.path, slot.tensor.name))

    def _put(self, slot: Slot, offset: int, content: Buffer) -> None:
        """Write, unless something went wrong; the end of a file is sent as soon as the next begins."""
        if self._problems:
            return
        if self._last is not None and self._last.out is not slot.out:
            park = getattr(self._last.out, "park", None)
            if park is not None:
                park()
        self._last = slot
        slot.out.write_at(offset, content)
        if self._progress is not None:
            self._progress.add(memoryview(content).nbytes, slot.tensor.name)
