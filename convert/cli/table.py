"""Tables, trees and histograms as text that fits the terminal.

Rich's tables take a minute for a hundred thousand rows; these take a second. A table that is too wide for its columns
to stand side by side has each row in several short lines instead, so that it can be read on a telephone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

_GAP = "  "
_LEAST_NAME = 20
"""Columns that names are worth before a row is laid out in several lines."""
_BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII = " .:-=+*%@"


class Column(NamedTuple):
    """A column; all but the first are as wide as their widest cell. One of little weight goes where room is scarce."""

    title: str
    right: bool = False
    light: bool = False


class Entry(NamedTuple):
    """A row, and words about it that stand below, each group on lines of its own."""

    cells: Sequence[str]
    details: Sequence[Sequence[str]] = ()


def wide(text: str) -> int:
    """Columns that a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def folded(text: str, width: int) -> list[str]:
    """The text cut into lines of at most `width` columns, anywhere."""
    if wide(text) <= width:
        return [text]
    if text.isascii():
        return [text[at : at + width] for at in range(0, len(text), width)]
    from rich.cells import chop_cells

    return chop_cells(text, width)


def wrapped(words: Iterable[str], width: int, gap: str = _GAP) -> list[str]:
    """Words set into lines of at most `width` columns; one that is wider is cut."""
    lines: list[str] = []
    line = ""
    for word in words:
        if line and wide(line) + len(gap) + wide(word) <= width:
            line += gap + word
            continue
        if line:
            lines.append(line)
        *before, line = folded(word, width)
        lines += before
    return [*lines, line] if line else lines


def laid_out(columns: Sequence[Column], entries: Callable[[], Iterable[Entry]], width: int) -> Iterator[str]:
    """The lines of a table, its title line and a rule first; none is wider than `width` columns.

    Args:
        columns: The first one is folded where it is too wide; empty ones are left out.
        entries: Gives the rows, and is called twice: so not all of very many are held at once.
        width: Of the terminal.
    """
    widths = [0] * len(columns)
    for entry in entries():
        widths = [max(most, wide(cell)) for most, cell in zip(widths, entry.cells, strict=True)]
    shown = [at for at, most in enumerate(widths) if most or at == 0]
    widths = [max(most, wide(column.title)) for most, column in zip(widths, columns, strict=True)]
    while True:
        room = width - sum(widths[at] + len(_GAP) for at in shown[1:])
        if room >= min(widths[0], _LEAST_NAME):
            break
        if not columns[shown[-1]].light:
            yield from _stacked(entries(), width)
            return
        shown.pop()
    widths[0] = min(widths[0], room)
    form = _GAP.join(f"{{:{'>' if columns[at].right else '<'}{widths[at]}}}" for at in shown)
    yield form.format(*(columns[at].title for at in shown)).rstrip()
    yield ("─" if _can("─") else "-") * (sum(widths[at] for at in shown) + len(_GAP) * (len(shown) - 1))
    for entry in entries():
        first, *rest = folded(entry.cells[0], widths[0])
        cells = [first, *(entry.cells[at] for at in shown[1:])]
        if "".join(cells).isascii():
            yield form.format(*cells).rstrip()
        else:  # str.format counts characters, not columns
            padded = [_padded(cell, columns[at], widths[at]) for cell, at in zip(cells, shown, strict=True)]
            yield _GAP.join(padded).rstrip()
        yield from rest
        yield from _details(entry, width)


def _padded(cell: str, column: Column, width: int) -> str:
    room = " " * (width - wide(cell))
    return room + cell if column.right else cell + room


def _stacked(entries: Iterable[Entry], width: int) -> Iterator[str]:
    """Names on lines of their own, everything else indented below."""
    for entry in entries:
        yield from folded(entry.cells[0].rstrip() or " ", width)
        yield from _indented([cell for cell in entry.cells[1:] if cell], width)
        yield from _details(entry, width)


def _details(entry: Entry, width: int) -> Iterator[str]:
    for detail in entry.details:
        yield from _indented(detail, width)


def _indented(words: Iterable[str], width: int) -> Iterator[str]:
    indent = _GAP if width > 8 else ""
    for line in wrapped(words, width - len(indent)):
        yield indent + line


def sparkline(counts: Sequence[int]) -> str:
    """A histogram a line high; a bin that is not empty always shows."""
    marks = _BLOCKS if _can(_BLOCKS) else _ASCII
    most = max(counts, default=0)
    return "".join(marks[-(-count * 8 // most)] if count else marks[0] for count in counts)


def _can(text: str) -> bool:
    """Whether stdout's encoding has these characters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
