"""What is accepted before a file is refused: settings with names, to bound hostile files and leave honest ones alone.

Every limit is a field of `Limits`, an option of the command line, and named by the message of whatever exceeds it.
docs/limits.md tells what each bounds, and what is bounded by nature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

from convert.errors import LimitError, UsageError

if TYPE_CHECKING:
    from convert.tensor import Tensor

_DEEPEST = 100
"""What recursion over types can stand."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a reader accepts before it refuses with `LimitError`.

    Attributes:
        header_bytes: Longest npy header; those over 512 bytes in one archive may take 16 times that together.
        json_bytes: Longest safetensors header, or index of shards; 100 MB as the reference library has it.
        directory_bytes: Longest central directory of an archive; it is held in memory.
        tensors: Most tensors of a source, or members of an archive; each takes about 1 KB of memory.
        ratio: How many times an archive's own size its members may inflate to, beyond the first 64 MiB. Deflate gives
            at most 1032, for zeros.
        total_bytes: Most bytes of all tensors together.
        name_bytes: Longest name of a tensor, in UTF-8.
        dimensions: Most dimensions of a tensor; numpy itself has 64.
        depth: Deepest nesting of a structured type; at most 100.
        text_bytes: Longest 0-d string that `str=metadata` moves into the metadata.
        pickle_bytes: Longest pickle that `object=unpickle` reads; it is held in memory.
        pickle_leaves: Most arrays, numbers and strings in one pickle; it may take 32 opcodes for each.
        pickle_depth: Most containers inside each other in a pickle.
        pickle_memo: Most objects a pickle may keep to refer to them again.

    Raises:
        UsageError: A limit that is no whole number from 1 on, or a depth over 100.
    """

    header_bytes: int = 1 << 20
    json_bytes: int = 100_000_000
    directory_bytes: int = 256 << 20
    tensors: int = 500_000
    ratio: int = 1_100
    total_bytes: int = 1 << 63
    name_bytes: int = 0xFFFF
    dimensions: int = 255
    depth: int = 16
    text_bytes: int = 1 << 20
    pickle_bytes: int = 1 << 30
    pickle_leaves: int = 200_000
    pickle_depth: int = 64
    pickle_memo: int = 2_000_000

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if type(value) is not int or value < 1:
                raise UsageError(f"the limit {each.name} must be a whole number from 1 on (found {value!r})")
        if self.depth > _DEEPEST:
            raise UsageError(f"the limit depth must be at most {_DEEPEST} (found {self.depth})")


DEFAULT = Limits()


class Setting(NamedTuple):
    """How a limit is set on the command line: its option, the unit to count in, a line for people."""

    option: str
    unit: str
    about: str


SETTINGS: dict[str, Setting] = {
    "header_bytes": Setting("--max-header", "SIZE", "Longest npy header."),
    "json_bytes": Setting("--max-json", "SIZE", "Longest safetensors header, or index of shards."),
    "directory_bytes": Setting("--max-directory", "SIZE", "Longest directory of a npz."),
    "tensors": Setting("--max-tensors", "N", "Most tensors, or members of a npz; 1 KB of memory each."),
    "ratio": Setting("--max-ratio", "N", "How many times its size a npz may inflate to, beyond 64 MiB."),
    "total_bytes": Setting("--max-total", "SIZE", "Most bytes of all tensors together."),
    "name_bytes": Setting("--max-name", "SIZE", "Longest name of a tensor."),
    "dimensions": Setting("--max-dimensions", "N", "Most dimensions of a tensor."),
    "depth": Setting("--max-depth", "N", "Deepest nesting of a structured type, at most 100."),
    "text_bytes": Setting("--max-text", "SIZE", "Longest string that goes into the metadata."),
    "pickle_bytes": Setting("--max-pickle", "SIZE", "Longest pickle to unpickle; it is held in memory."),
    "pickle_leaves": Setting("--max-pickle-leaves", "N", "Most arrays, numbers and strings in a pickle."),
    "pickle_depth": Setting("--max-pickle-depth", "N", "Most containers inside each other in a pickle."),
    "pickle_memo": Setting("--max-pickle-memo", "N", "Most objects a pickle may refer to again."),
}


def exceeded(
    limit: str, what: str, expected: int, found: int | None = None, *, needed: int | None = None
) -> LimitError:
    """The refusal that names a limit and the option that allows more.

    Args:
        limit: Field of `Limits`.
        what: What is too long, too many or too deep.
        expected: The most that was allowed.
        found: How much there is, if it is known.
        needed: Value of the limit that would do, where it counts something else than `expected` does.
    """
    setting = SETTINGS[limit]
    unit = " bytes" if setting.unit == "SIZE" else ""
    more = "" if found is None else f", found {found}"
    value = needed or found or 2 * expected
    if limit == "depth":
        value = min(value, _DEEPEST)
    return LimitError(
        f"{what} (expected at most {expected}{unit}{more})",
        hint=f"if you trust the file: {setting.option} {value}, or limits=Limits({limit}={value}) in the library",
    )


class Budget:
    """How much more may be used of something; `spend` refuses when it is used up.

    Args:
        amount: How much there is.
        what: What there is too much of, for the message.
        limit: Field of `Limits` that decides, if one does.
        value: The limit's own value, where `amount` is some multiple of it.
    """

    __slots__ = ("_amount", "_left", "_limit", "_value", "_what")

    def __init__(self, amount: int, what: str, limit: str | None = None, value: int = 0) -> None:
        self._amount = self._left = amount
        self._what = what
        self._limit = limit
        self._value = value or amount

    def spend(self, amount: int) -> None:
        self._left -= amount
        if self._left >= 0:
            return
        if self._limit is None:
            raise LimitError(self._what)
        raise exceeded(self._limit, self._what, self._amount, needed=2 * self._value)


def check_tensors(tensors: Sequence[Tensor], limits: Limits) -> None:
    """LimitError if these tensors of one source are too many, too large together, or one's name is too long.

    What a reader must bound before it has tensors (headers, dimensions, members) it checks itself.
    """
    for tensor in tensors:
        if 4 * len(tensor.name) > limits.name_bytes:
            found = len(tensor.name.encode("utf-8", "surrogatepass"))
            if found > limits.name_bytes:
                raise exceeded("name_bytes", "the name is too long", limits.name_bytes, found).at(None, tensor.name)
    if len(tensors) > limits.tensors:
        raise exceeded("tensors", "too many tensors", limits.tensors, len(tensors))
    if limits.total_bytes < DEFAULT.total_bytes:
        total = sum(tensor.nbytes for tensor in tensors)
        if total > limits.total_bytes:
            raise exceeded("total_bytes", "the tensors are too large together", limits.total_bytes, total)
