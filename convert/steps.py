"""Elementwise steps between stored bytes and the bytes handed out, and their composition."""

from __future__ import annotations

import array
import threading
from functools import partial
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

from convert.tensor import Step, Tensor

if TYPE_CHECKING:
    from typing_extensions import Buffer

_SWAP_CODES = {2: "H", 4: "I", 8: "Q"}


def swap_step(width: int) -> Step:
    """Reverse every `width` bytes. The standard library's array swaps as fast as memory allows, without numpy."""
    return Step(width, width, partial(_swap, _SWAP_CODES[width]))


def _swap(code: str, view: memoryview, first: int) -> Buffer:
    swapped = array.array(code)
    swapped.frombytes(view)
    swapped.byteswap()
    return memoryview(swapped).cast("B")


_own = threading.local()
_NOTHING = bytes(1024)


class Swapper:
    """A buffer that swaps itself: read into `view`, `swap`, write from `view`; nothing is copied in between."""

    def __init__(self, width: int, count: int) -> None:
        self._array = array.array(_SWAP_CODES[width], bytes(count))
        self.view = memoryview(self._array).cast("B")

    def swap(self) -> None:
        """Reverse the components of the whole buffer."""
        # isal's CRC leaves the upper halves of the vector registers in use, and on x86-64 the swap takes three times as
        # long until they are cleared, which the C library does at the end of its search for a byte.
        _NOTHING.find(b"\x01")
        self._array.byteswap()


def own_swapper(width: int, count: int) -> Swapper:
    """This thread's buffer of `count` bytes for components of a width."""
    kept: dict[tuple[int, int], Swapper] = _own.__dict__.setdefault("swappers", {})
    if (width, count) not in kept:
        kept[width, count] = Swapper(width, count)
    return kept[width, count]


class Pipe(NamedTuple):
    """All steps of a tensor: every `unit_in` stored bytes become `unit_out` bytes."""

    unit_in: int
    unit_out: int
    steps: tuple[Step, ...]
    swap: int = 0
    """Width of the component, if all there is to do is to swap bytes."""

    def out(self, stored_bytes: int) -> int:
        return stored_bytes // self.unit_in * self.unit_out

    def apply(self, view: memoryview, offset: int) -> Buffer:
        """Run the steps over whole units that begin at stored byte `offset`."""
        data: Buffer = view
        for step in self.steps:
            data = step.apply(memoryview(data).cast("B"), offset // step.in_bytes)
            offset = offset // step.in_bytes * step.out_bytes
        return data


_PLAIN = Pipe(1, 1, ())


def pipe_of(tensor: Tensor) -> Pipe:
    """The steps from stored bytes to the bytes handed out, byte order included."""
    steps = tensor.steps
    if steps:
        if tensor.stored_big and tensor.stored.swap > 1:
            steps = (swap_step(tensor.stored.swap), *steps)
        if tensor.big and tensor.dtype.swap > 1:
            steps = (*steps, swap_step(tensor.dtype.swap))
    elif tensor.stored_big != tensor.big and tensor.stored.swap > 1:
        width = tensor.stored.swap
        return Pipe(width, width, (swap_step(width),), width)
    else:
        return _PLAIN
    unit_in = unit_out = steps[0].in_bytes
    for step in steps:
        whole = lcm(unit_out, step.in_bytes)
        unit_in, unit_out = unit_in * whole // unit_out, whole // step.in_bytes * step.out_bytes
    return Pipe(unit_in, unit_out, steps)


def aligned(chunk_bytes: int, unit: int) -> int:
    """The largest multiple of `unit` within `chunk_bytes`, at least one unit."""
    return max(chunk_bytes // unit, 1) * unit
