"""`--verify`: what was written is read back before it gets its name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

from convert.comparepairs import digest
from convert.errors import CorruptError
from convert.formats import Format
from convert.output import Output
from convert.outputfolder import OutputFolder
from convert.plan import Plan
from convert.records import ordered_fields
from convert.report import Written
from convert.tensor import Checkpoint, Tensor
from convert.threads import Work, run
from convert.transfer import needs_turn
from convert.writing import Settings


def verified(
    plan: Plan, output: Output, row: Format, open_checkpoint: Callable[..., Checkpoint], settings: Settings
) -> list[Written]:
    """Read the output back through its reader; every digest must be that of the planned bytes.

    Raises:
        CorruptError: Something reads back different; it must not be kept.
    """
    with open_checkpoint(output.readable(), format=None if isinstance(output, OutputFolder) else row.name) as back:
        alone = len(plan.tensors) == 1 and len(back) == 1  # a .npy file has its name from its path
        digests: dict[str, str] = {}

        def work(turned: bool) -> Iterator[Work]:
            for tensor in plan.tensors:
                other = back.tensors[0] if alone else back.get(tensor.name)
                if turned == any(needs_turn(side) for side in (tensor.changed(fortran=False), other) if side):
                    pair = _Pair(plan.target, tensor, other, digests, settings)
                    yield from (partial(pair.take, 0), partial(pair.take, 1))

        run(work(turned=False), settings.jobs)
        run(work(turned=True), 1)  # each may need as much memory as there is for all of them
        # A string that went into the metadata reads back as the tensor it was.
        texts = sum(name in plan.text_origins for name in back)
        if len(back) - texts != len(plan.tensors):
            raise CorruptError("the target reads back with other tensors", path=plan.target)
    return [
        Written(tensor.name, tensor.dtype.name, tensor.shape, tensor.nbytes, digests[tensor.name])
        for tensor in plan.tensors
    ]


class _Pair:
    """A tensor as planned and as read back; the side that is done last compares them."""

    def __init__(
        self, target: str, tensor: Tensor, other: Tensor | None, digests: dict[str, str], settings: Settings
    ) -> None:
        self._target = target
        self._tensors = (tensor, other)
        self._facts: list[tuple[str, tuple[int, ...], str] | None] = [None, None]
        self._left = 2
        self._lock = threading.Lock()
        self._digests = digests
        self._settings = settings

    def take(self, index: int, _: memoryview) -> None:
        """Read one side; progress counts what is read back."""
        tensor = self._tensors[index]
        if tensor is not None:
            plain = tensor.changed(big=False, fortran=False)
            if plain.stored.fields and plain.dtype.fields:
                plain = ordered_fields(plain)
            found = digest(plain, self._settings.progress if index else None).hex()
            self._facts[index] = (tensor.dtype.name, tensor.shape, found)
        with self._lock:
            self._left -= 1
            if self._left:
                return
        name = self._tensors[0].name
        expected, there = self._facts
        if expected is None or expected != there:
            raise CorruptError(
                f"the target reads back different (expected {expected}, found {there})",
                path=self._target,
                tensor=name,
                hint="the disk or memory may be faulty; this was not kept",
            )
        self._digests[name] = expected[2]
