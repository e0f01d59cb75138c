"""Writes docs/matrix.md from the code: what each format holds, and what the policy says by default where it does not.

`python docs/make_matrix.py` prints it; a test compares it with the committed file.
"""

from __future__ import annotations

import sys

from convert import dtypes, formats
from convert.dtypes import DType
from convert.files import MemoryFile
from convert.policy import BY_KIND
from convert.tensor import Extent, Tensor

_ROWS: tuple[DType, ...] = (
    *dtypes.CANONICAL,
    dtypes.sized("V", 2, "<"),
    dtypes.sized("V", 1, "<"),
    dtypes.sized("V", 24),
    dtypes.LONG_DOUBLES["float128"],
    dtypes.LONG_DOUBLES["complex256"],
    dtypes.time("datetime64", "ns"),
    dtypes.time("timedelta64", "s"),
    dtypes.sized("S", 5),
    dtypes.sized("U", 5),
    dtypes.structured((), 8, []),
    dtypes.OBJECT,
    dtypes.BLOB,
)
_HEAD = """# What each format holds

Made from the code by `python docs/make_matrix.py`. *exact*: the format has the type. Otherwise the kind that a policy
speaks for, and its default; the README lists all actions, and `convert policies` explains them.

"""


def cell(dtype: DType, writer: object) -> str:
    """'exact', or the policy kind and its default action."""
    tensor = Tensor("x", dtype, (), Extent(MemoryFile(b""), 0, 0))
    if writer.holds(tensor):  # type: ignore[attr-defined]
        return "exact"
    default = next(iter(BY_KIND[dtype.kind].actions))
    return f"`{dtype.kind}`: {'refused' if default == 'error' else default}"


def matrix() -> str:
    """The whole page."""
    rows = [row for row in formats.BUILT_IN if row.writer]
    lines = ["| dtype | " + " | ".join(row.name for row in rows) + " |", "|---" * (len(rows) + 1) + "|"]
    for dtype in _ROWS:
        cells = " | ".join(cell(dtype, row.load_writer()) for row in rows)
        lines.append(f"| {dtype.name} | {cells} |")
    return _HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(matrix())
