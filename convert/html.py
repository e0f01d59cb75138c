"""Inventories as one page that needs nothing else: no network, and no script to be read; on a screen or on paper.

The page stays small whatever the checkpoint: of more than `MOST_ROWS` tensors the small ones are folded by the
beginning of their names, each fold with its count and size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from convert import page
from convert.errors import ConvertError
from convert.inventory import Inventory, Row, dtype_totals
from convert.output import OutputFile
from convert.page import cell, shown
from convert.shown import counted, human, number, shape_text
from convert.tree import Leaf, Node, grow, largest, unfolded

MOST_ROWS = 4000
"""Of all tables of a page together."""
_METADATA_CHARACTERS = 2000


def write_inventories(output: OutputFile, found: Sequence[Inventory], problems: Sequence[ConvertError]) -> None:
    """Write the page; the caller gives the file its name. Memory is that of the page, a few megabytes."""
    page.write(output, inventory_page(found, problems))


def inventory_page(found: Sequence[Inventory], problems: Sequence[ConvertError] = ()) -> Iterator[str]:
    """The page, piece by piece."""
    title = found[0].path if len(found) == 1 else counted(len(found), "file")
    flat = [problem for error in problems for problem in error.problems]
    return page.page(title, _body(title, found, flat), "ls")


def _body(title: str, found: Sequence[Inventory], problems: Sequence[ConvertError]) -> Iterator[str]:
    rows = [row for one in found for row in one.rows]
    totals = dtype_totals(rows)
    nbytes = sum(size for _, size in totals.values())
    about = f"{found[0].format} {found[0].version}".strip() if len(found) == 1 else "; ".join(_formats(found))
    yield page.head(title, about)
    facts = [(f"{len(rows):,}", "tensors"), (human(nbytes), "in tensors"),
             (human(sum(one.file_bytes for one in found)), "in files"), (str(len(totals)), "dtypes")]  # fmt: skip
    left_out = sum(one.left_out for one in found)
    facts += [(f"{left_out:,}", "left out")] if left_out else []
    yield page.tiles(facts)
    yield page.problem_list([str(problem) for problem in problems], len(problems))
    classes = page.colours(totals)
    yield page.picture(_tree(found), classes, "Where the bytes are")
    if totals:
        yield "<h2>Types</h2>" + page.share_bar(totals, classes, "tensor")
    yield "<h2>Tensors</h2>" + page.filter_box("by name, dtype, shape")
    for one in found:
        if len(found) > 1:
            size = f"{counted(len(one.rows), 'tensor')}, {human(one.nbytes)}"
            yield f'<h3>{shown(one.path)} <span class="dim">{shown(one.format)}, {size}</span></h3>'
        yield from _table(one, max(MOST_ROWS * len(one.rows) // max(len(rows), 1), 1))
        yield from _remarks(one)


def _formats(found: Sequence[Inventory]) -> list[str]:
    names = sorted({one.format for one in found})
    return [f"{counted(sum(one.format == name for one in found), 'file')} of {name}" for name in names]


def _tree(found: Sequence[Inventory]) -> Node:
    """All tensors; of several files with their paths before their names."""
    if len(found) == 1:
        return grow(row.leaf() for row in found[0].rows)
    return grow(Leaf(f"{one.path}/{row.name}", row.nbytes, row.dtype, row.shape) for one in found for row in one.rows)


def _table(one: Inventory, most: int) -> Iterator[str]:
    if not one.rows:
        return
    stats = any(row.stats is not None for row in one.rows)
    stored = any(row.stored() for row in one.rows)
    columns = [("name", ""), ("dtype", ""), ("shape", ""), ("size", "n")]
    columns += [("stored", "")] if stored else []
    columns += [("min", "n"), ("max", "n"), ("mean", "n"), ("std", "n"), ("values", "")] if stats else []
    if len(one.rows) <= most:
        lines: Iterator[str] = (_row(row, stored, stats) for row in one.rows)
    else:
        by_name = {row.name: row for row in one.rows}
        root = grow(row.leaf() for row in one.rows)
        lines = _folded(root, unfolded(root, most), most, by_name, stored, stats)
        yield '<p class="dim">The small ones are folded by the beginning of their names.</p>'
    yield from page.table(columns, lines)


def _folded(
    node: Node, opened: set[int], most: int, by_name: dict[str, Row], stored: bool, stats: bool
) -> Iterator[str]:
    """Rows for what is open, in the order of the file."""
    children, rest = largest(node, most)
    for child in [*children, *([] if rest is None else [rest])]:
        if child.leaf is not None:
            yield _row(by_name[child.leaf.name], stored, stats)
        elif id(child) in opened:
            yield from _folded(child, opened, most, by_name, stored, stats)
        else:
            shares = sorted(child.shares(), key=lambda kind: -child.shares()[kind])
            kinds = ", ".join(shares[:3]) + (" ..." if len(shares) > 3 else "")
            name = child.path if child is rest else f"{child.path}*"
            said = f"{shown(name)} ({counted(child.count, 'tensor')})"
            empty = cell("") * (stored + 5 * stats)
            cells = cell(said, "name") + cell(shown(kinds)) + cell("") + cell(human(child.nbytes), "n") + empty
            yield f'<tr class="fold">{cells}</tr>'


def _row(row: Row, stored: bool, stats: bool) -> str:
    cells = [
        cell(shown(row.name) if row.name else "''", "name"),
        cell(shown(row.dtype)),
        cell(shape_text(row.shape), "s"),
        cell(human(row.nbytes), "n"),
    ]
    if stored:
        cells.append(cell(shown(", ".join(row.stored()))))
    if stats:
        found = row.stats
        for title in ("min", "max", "mean", "std"):
            cells.append(cell(number(getattr(found, title, None)), "n", title))
        cells.append(cell(_values(row)))
    elif row.problem is not None:
        cells[0] = cell(f'{shown(row.name)}<br><span class="bad">{shown(row.problem)}</span>', "name")
    return f"<tr>{''.join(cells)}</tr>"


def _values(row: Row) -> str:
    """The histogram and what is odd about the values."""
    if row.problem is not None:
        return f'<span class="bad">{shown(row.problem)}</span>'
    if row.stats is None:
        return ""
    counts = (("zero", row.stats.zeros), ("NaN", row.stats.nans), ("infinite", row.stats.infs))
    words = [f"{count:,} {word}" for word, count in counts if count] + ([row.stats.note] if row.stats.note else [])
    drawn = ""
    if row.stats.counts:
        first, last = row.stats.edges[0], row.stats.edges[-1]
        drawn = page.bars(row.stats.counts, f"from {number(first)} to {number(last)}")
    return drawn + (f'<span class="dim">{shown(", ".join(words))}</span>' if words else "")


def _remarks(one: Inventory) -> Iterator[str]:
    """Metadata and notes of a file."""
    said = []
    for key, text in one.metadata.items():
        cut = f"... ({len(text)} characters)" if len(text) > _METADATA_CHARACTERS else ""
        said.append(f"{key}: {text[:_METADATA_CHARACTERS]}{cut}")
    yield page.bullets("Metadata", said)
    yield page.bullets("Notes", one.notes)
