"""What two checkpoints have in common and where they differ, for people and programs; pure data."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Tolerance(NamedTuple):
    """Values are alike where |a - b| <= atol + rtol * |b|, as in numpy.isclose; NaNs are alike."""

    rtol: float
    atol: float


class Facts(NamedTuple):
    """Type and shape of a tensor on one side."""

    dtype: str
    shape: tuple[int, ...]


@dataclass
class Tally:
    """How the values of two tensors differ, added up.

    Attributes:
        bits: Elements whose bits differ; None where the types differ. Padding is no part of an element.
        values: Elements whose values differ. 0.0 equals -0.0, and NaN equals NaN.
        beyond: Of these, elements beyond the tolerance; all of them if there is none.
        nans: Elements that are NaN (or NaT) on one side only; they count for no error below.
        max_abs_error: Largest |a - b|: the least `atol` that would do. None where there is no such number.
        max_rel_error: Largest |a - b| / |b|: the least `rtol` that would do, infinite where b is 0.
        max_ulps: Most steps from a to b through the values the type has; floats only.
        first: Index, counted in row-major order, of the first element that makes a difference; None if none does.
        first_a: Its value in A, as text.
        first_b: Its value in B.
    """

    bits: int | None = 0
    values: int = 0
    beyond: int = 0
    nans: int = 0
    max_abs_error: float | int | None = None
    max_rel_error: float | None = None
    max_ulps: int | None = None
    first: int | None = None
    first_a: str = ""
    first_b: str = ""

    def add(self, other: Tally) -> None:
        """Take in what another part of the same tensors gave."""
        self.bits = None if self.bits is None or other.bits is None else self.bits + other.bits
        self.values += other.values
        self.beyond += other.beyond
        self.nans += other.nans
        for name in ("max_abs_error", "max_rel_error", "max_ulps"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if theirs is not None and (mine is None or theirs > mine):
                setattr(self, name, theirs)
        if other.first is not None and (self.first is None or other.first < self.first):
            self.first, self.first_a, self.first_b = other.first, other.first_a, other.first_b


@dataclass
class Difference:
    """One tensor that is not the same on both sides.

    Attributes:
        name: In A; in B where only B has it.
        other_name: In B, where it goes by another name there.
        what: Some of 'only in A', 'only in B', 'renamed', 'dtype', 'shape', 'values' and 'bits' (other bits, equal
            values).
        a: Type and shape in A, or None.
        b: Type and shape in B, or None.
        count: Number of elements, where they were compared.
        tally: How they differ, where they were compared.
    """

    name: str
    what: tuple[str, ...]
    a: Facts | None
    b: Facts | None
    other_name: str | None = None
    count: int | None = None
    tally: Tally | None = None

    def first(self) -> tuple[int, ...] | None:
        """The index of the first element that makes a difference, an entry for each axis."""
        shape = self.a.shape if self.a is not None else ()
        if self.tally is None or self.tally.first is None:
            return None
        rest, index = self.tally.first, []
        for size in reversed(shape):
            rest, at = divmod(rest, size)
            index.append(at)
        return tuple(reversed(index))

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers, ready for JSON; numbers it lacks are texts: 'inf'."""
        found: dict[str, Any] = {"name": self.name}
        if self.other_name is not None:
            found["other_name"] = self.other_name
        found["what"] = list(self.what)
        for side, facts in (("a", self.a), ("b", self.b)):
            found[side] = None if facts is None else {"dtype": facts.dtype, "shape": list(facts.shape)}
        tally = self.tally
        if tally is not None:
            found["count"] = self.count
            for name in ("bits", "values", "beyond", "nans", "max_abs_error", "max_rel_error", "max_ulps"):
                value = getattr(tally, name)
                found[name] = str(value) if isinstance(value, float) and not math.isfinite(value) else value
            index = self.first()
            first = {"index": index and list(index), "a": tally.first_a, "b": tally.first_b}
            found["first"] = None if index is None else first
        return found


class MetadataDifference(NamedTuple):
    """A key of the metadata whose text is not the same on both sides; None where a side lacks it.

    `counts` tells whether that alone makes the two different.
    """

    key: str
    a: str | None
    b: str | None
    counts: bool


@dataclass
class Comparison:
    """The outcome of `convert.diff`.

    Attributes:
        a: Path of one side, as given.
        b: Path of the other.
        differences: Tensors that are not the same, in A's order, then those that only B has.
        tolerated: Tensors that differ, but by no more than was allowed (tolerance, `ignore_dtype`).
        metadata: What differs in the metadata.
        identical: How many tensors have the same name, type, shape and bits.
        nbytes: Bytes of the tensors that both sides have.
        notes: What else is worth knowing.
        tolerance: What was allowed, or None: every bit counts.
        seconds: Wall time.
    """

    a: str
    b: str
    differences: list[Difference] = field(default_factory=list)
    tolerated: list[Difference] = field(default_factory=list)
    metadata: list[MetadataDifference] = field(default_factory=list)
    identical: int = 0
    nbytes: int = 0
    notes: list[str] = field(default_factory=list)
    tolerance: Tolerance | None = None
    seconds: float = 0.0

    @property
    def same(self) -> bool:
        """Whether nothing differs that counts."""
        return not self.differences and not any(row.counts for row in self.metadata)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers, ready for JSON; `same` included."""
        found: dict[str, Any] = {"same": self.same}
        found |= {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        for name in ("differences", "tolerated"):
            found[name] = [difference.to_dict() for difference in found[name]]
        found["metadata"] = [row._asdict() for row in self.metadata]
        found["tolerance"] = None if self.tolerance is None else self.tolerance._asdict()
        return found

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False)
