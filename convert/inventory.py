"""What is in a file, as plain facts: what `convert ls` shows, as a table, as JSON or as a page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from convert.errors import ConvertError, UsageError, without_secrets
from convert.tensor import Checkpoint, Tensor
from convert.tree import Leaf, natural

if TYPE_CHECKING:
    from convert.progress import Callback
    from convert.statistics import Stats

SORTS = ("file", "name", "size", "dtype")
"""Orders of a listing; sizes with the largest first."""


class Row(NamedTuple):
    """One tensor.

    Attributes:
        name: As in the file.
        dtype: numpy's or ml_dtypes' name.
        shape: Outermost first.
        nbytes: Of its elements.
        packed_nbytes: What they take in the file; less than `nbytes` where they are compressed.
        order: 'C' or 'F', as stored.
        byteorder: 'little' or 'big', as stored.
        compression: 'deflate', 'bzip2', 'lzma', or None.
        fields: Names of the fields of a structured type.
        was: dtype and shape before it was encoded, or None.
        problem: Why it cannot be read, or None.
        stats: What its values are like, where that was asked for.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    packed_nbytes: int
    order: str
    byteorder: str
    compression: str | None
    fields: tuple[str, ...] = ()
    was: tuple[str, tuple[int, ...]] | None = None
    problem: str | None = None
    stats: Stats | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; what most tensors have not is left out."""
        found: dict[str, Any] = {**self._asdict(), "shape": list(self.shape), "fields": list(self.fields)}
        found["was"] = self.was and {"dtype": self.was[0], "shape": list(self.was[1])}
        found["stats"] = self.stats and self.stats.to_dict()
        return {key: value for key, value in found.items() if value or key not in ("fields", "was", "problem", "stats")}

    def leaf(self) -> Leaf:
        """As a leaf of a tree, where layers with the same dtypes and shapes are alike."""
        return Leaf(self.name, self.nbytes, self.dtype, self.shape)

    def stored(self) -> list[str]:
        """What is special about how it is stored, in words."""
        words = ["Fortran"] if self.order == "F" else []
        words += ["big-endian"] if self.byteorder == "big" else []
        words += [self.compression] if self.compression else []
        return words + ([f"was {self.was[0]}"] if self.was else [])


@dataclass
class Inventory:
    """What is in one file, or in several that are one checkpoint.

    Attributes:
        path: As given, without what gives access to a URL.
        format: Name of its format.
        version: What the file says of the version of its format, or ''.
        rows: Tensors that were asked for.
        left_out: How many were not.
        metadata: Free text beside the tensors.
        notes: What else is worth knowing.
        file_bytes: Size of the files.
    """

    path: str
    format: str
    version: str = ""
    rows: list[Row] = field(default_factory=list)
    left_out: int = 0
    metadata: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    file_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        return sum(row.nbytes for row in self.rows)

    def dtypes(self) -> dict[str, tuple[int, int]]:
        """Tensors and bytes of each dtype, most bytes first."""
        return dtype_totals(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the tensors are an iterator, for with their statistics they take far more memory than rows."""
        totals = {name: {"tensors": count, "nbytes": nbytes} for name, (count, nbytes) in self.dtypes().items()}
        return {
            "path": self.path,
            "format": self.format,
            "version": self.version,
            "file_bytes": self.file_bytes,
            "nbytes": self.nbytes,
            "dtypes": totals,
            "left_out": self.left_out,
            "metadata": self.metadata,
            "notes": self.notes,
            "tensors": (row.to_dict() for row in self.rows),
        }


def dtype_totals(rows: Iterable[Row]) -> dict[str, tuple[int, int]]:
    """Tensors and bytes of each dtype, most bytes first."""
    found: dict[str, tuple[int, int]] = {}
    for row in rows:
        count, nbytes = found.get(row.dtype, (0, 0))
        found[row.dtype] = (count + 1, nbytes + row.nbytes)
    return dict(sorted(found.items(), key=lambda item: (-item[1][1], item[0])))


def take_inventory(
    checkpoint: Checkpoint,
    *,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    sort: str = "file",
    stats: bool = False,
    jobs: int | None = None,
    progress: Callback | None = None,
) -> tuple[Inventory, list[ConvertError]]:
    """The facts about a checkpoint; data is read only for `stats`, all of it once.

    Returns:
        The facts, and the problems of tensors whose data is damaged, which `stats` finds.

    Raises:
        UsageError: An unknown order.
    """
    if sort not in SORTS:
        raise UsageError(f"the order must be one of {', '.join(SORTS)} (found {sort!r})")
    wanted, unwanted = tuple(include), tuple(exclude)
    chosen = [tensor for tensor in checkpoint.tensors if _takes(tensor.name, wanted, unwanted)]
    rows = [_row(tensor) for tensor in chosen]
    problems: list[ConvertError] = []
    if stats:
        from convert.statistics import measure

        for index, found in enumerate(measure(chosen, jobs, progress)):
            if isinstance(found, ConvertError):
                rows[index] = rows[index]._replace(problem=found.message)
                problems.append(found)
            else:
                rows[index] = rows[index]._replace(stats=found)
        for file in checkpoint.files:
            file.check_unchanged()
    if sort == "name":
        rows.sort(key=lambda row: natural(row.name))
    elif sort == "size":
        rows.sort(key=lambda row: -row.nbytes)
    elif sort == "dtype":
        rows.sort(key=lambda row: row.dtype)
    made = Inventory(
        without_secrets(checkpoint.path),
        checkpoint.format,
        checkpoint.version,
        rows,
        len(checkpoint.tensors) - len(rows),
        checkpoint.metadata,
        checkpoint.notes,
        sum(file.size for file in checkpoint.files),
    )
    return made, problems


def _takes(name: str, include: tuple[str, ...], exclude: tuple[str, ...]) -> bool:
    if include and not any(fnmatchcase(name, glob) for glob in include):
        return False
    return not any(fnmatchcase(name, glob) for glob in exclude)


def _row(tensor: Tensor) -> Row:
    origin = tensor.origin
    return Row(
        tensor.name,
        tensor.dtype.name,
        tensor.shape,
        tensor.nbytes or tensor.data.nbytes,
        tensor.packed_nbytes,
        "F" if tensor.stored_fortran else "C",
        "big" if tensor.stored_big else "little",
        tensor.compression,
        tuple(field.name for field in tensor.dtype.fields),
        None if origin is None else (origin.dtype, tuple(origin.shape)),
        None if tensor.problem is None else tensor.problem.message,
    )
