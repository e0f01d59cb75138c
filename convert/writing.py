"""How to write, apart from what."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from convert.progress import Progress

if TYPE_CHECKING:
    from convert.output import FileOutput
    from convert.plan import Plan
    from convert.steps import Pipe
    from convert.tensor import Extent
    from convert.transfer import Head, Parts, Slot


class WholeError(Exception):
    """A conversion that cannot be spread: it has to be done as a whole, in one place."""


class Spreading(Protocol):
    """Has parts of large tensors copied elsewhere, from file to file."""

    def check(self, plan: Plan) -> None:
        """WholeError if that cannot be done, or would not pay."""
        ...

    def cut(self, slot: Slot, data: Extent, pipe: Pipe, cuts: list[int]) -> tuple[list[int], range]:
        """Borders of the pieces of a tensor, given those that threads here would take, and which go elsewhere."""
        ...

    def add(self, parts: Parts, data: Extent, pipe: Pipe, index: int, begin: int, end: int) -> None:
        """One piece for elsewhere."""
        ...

    def run(self, progress: Progress | None) -> None:
        """Have all pieces copied that were added; ConvertError as from `fill`."""
        ...


@dataclass(frozen=True)
class Settings:
    """For writers.

    Attributes:
        overwrite: Replace an existing target.
        level: Deflate level 1 to 9 for npz, or None to store.
        align: Data begins at a multiple of this many bytes; 1 for the format's own choice.
        jobs: Threads.
        fsync: Force the bytes to the disk before the target gets its name.
        verify: The target will be read back before it gets its name.
        progress: Counts bytes written.
        spread: Copies parts of large tensors elsewhere; the target needs a name from the start.
    """

    overwrite: bool = False
    level: int | None = None
    align: int = 1
    jobs: int = 1
    fsync: bool = False
    verify: bool = False
    progress: Progress | None = None
    spread: Spreading | None = None


class Begun(NamedTuple):
    """A file whose tensors have their places before their bytes are known; what a writer's `begin` returns.

    Attributes:
        output: The file.
        slots: The places.
        head: What is written before a slot's data when its checksum is known; see `fill`.
        tail: What is written behind it, in a file that is sequential.
        finish: Writes what is left when all slots are filled.
    """

    output: FileOutput
    slots: Iterable[Slot]
    head: Head | None = None
    tail: Head | None = None
    finish: Callable[[], None] = lambda: None
