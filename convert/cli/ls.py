"""What `convert ls` does: inventories of files as tables, trees, JSON or a page."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from convert.cli.job import error_object, progress_bar, write_json
from convert.cli.shared import columns
from convert.errors import ConvertError, InputError, UsageError, gather, printable, without_secrets
from convert.inventory import SORTS, Inventory, Row, take_inventory
from convert.shown import counted, human, number, shape_text

if TYPE_CHECKING:
    from convert.cli.table import Entry
    from convert.limits import Limits
    from convert.statistics import Stats
    from convert.tree import Line

_TABLE: tuple[tuple[Any, ...], ...] = (("name",), ("dtype",), ("shape",), ("size", True), ("stored",))
_TREE: tuple[tuple[Any, ...], ...] = (
    ("name",), ("tensors", True), ("size", True), ("dtype", False, True), ("shape", False, True),
)  # fmt: skip
"""Columns: title, whether they stand right, whether they may go where room is scarce."""
_SHOWN_CHARACTERS = 200
_SHOWN_DTYPES = 8


@dataclass
class Wanted:
    """The options of `convert ls`."""

    sort: str = "file"
    tree: bool = False
    depth: int | None = None
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    stats: bool = False
    html: str | None = None
    overwrite: bool = False
    json: bool = False
    jobs: int | None = None
    no_progress: bool = False
    limits: Limits | None = None

    def check(self) -> None:
        """Refuse what makes no sense, before any file is looked at."""
        from convert.options import check_jobs, one_of

        one_of("--sort", self.sort, SORTS)
        if self.depth is not None and self.depth < 1:
            raise UsageError(f"--depth must be 1 or more (found {self.depth})")
        if self.tree and (self.json or self.stats):
            other = "--json" if self.json else "--stats"
            raise UsageError(f"--tree folds tensors, {other} is about each of them", hint="leave out one of the two")
        if self.tree and self.html is not None:
            raise UsageError("--tree is for the terminal; a page has a picture instead", hint="leave out --tree")
        if self.overwrite and self.html is None:
            raise UsageError("--overwrite is for --html FILE; nothing else is written")
        check_jobs(self.jobs)


def list_files(files: Sequence[str], wanted: Wanted) -> int:
    """List them all; what cannot be read is told at the end and keeps nothing else from being listed."""
    wanted.tree = wanted.tree or wanted.depth is not None
    wanted.check()
    if wanted.html is None:
        problems, sums, count = _list_all(files, wanted, [])
        if count > 1 and not wanted.json:
            sys.stdout.write(f"{sums}\n")
    else:
        problems = _write_page(wanted.html, files, wanted)
    if problems:
        raise gather(problems)
    return 0


def _write_page(target: str, files: Sequence[str], wanted: Wanted) -> list[ConvertError]:
    """The page is begun first, so that hours of reading are not lost to a target that cannot be written."""
    from convert.html import write_inventories
    from convert.output import OutputFile, committed

    output = OutputFile(target, overwrite=wanted.overwrite)
    with committed(output):
        kept: list[Inventory] = []
        problems, sums, _ = _list_all(files, wanted, kept)
        if not kept:
            raise gather(problems)
        write_inventories(output, kept, problems)
        output.commit()
    sys.stderr.write(f"{printable(target)}: {sums}\n")
    return problems


def _list_all(files: Sequence[str], wanted: Wanted, kept: list[Inventory]) -> tuple[list[ConvertError], str, int]:
    """What could not be read, the sums in words, and how many files there were; inventories are kept for a page."""
    problems: list[ConvertError] = []
    count = tensors = nbytes = 0
    for file in files:
        try:
            for path in _sources(file):
                count += 1
                found = _list(path, wanted, problems)
                if found is not None:
                    tensors, nbytes = tensors + len(found.rows), nbytes + found.nbytes
                    kept += [found] if wanted.html is not None else []
        except ConvertError as err:
            problems.append(err)
            if wanted.json:
                write_json({"path": without_secrets(file), **error_object(err)})
    return problems, f"{counted(count, 'file')}, {counted(tensors, 'tensor')}, {human(nbytes)}", count


def _sources(file: str) -> Iterator[str]:
    """The file itself; of a folder that is no checkpoint by itself, each checkpoint in it."""
    if not os.path.isdir(file):
        yield file
        return
    from convert import formats
    from convert.batchtree import Rules, read_tree

    tree = read_tree(file, formats.by_name(formats.BUILT_IN[0].name), Rules(), copy_others=False)
    paths = [item.source for item in tree.items]
    alone = len(paths) == 1 and formats.is_index(paths[0]) and "/" not in paths[0]
    if alone or all(path.lower().endswith(formats.BUILT_IN[0].suffixes) for path in paths):
        if not paths and not tree.failures:
            raise InputError("the folder holds no tensor files", path=file, hint="convert formats shows the suffixes")
        if paths:
            yield file
    else:
        from convert.tree import natural

        yield from (os.path.join(file, *path.split("/")) for path in sorted(paths, key=natural))
    if tree.failures:
        raise gather([err for _, err in tree.failures])


def _list(path: str, wanted: Wanted, problems: list[ConvertError]) -> Inventory | None:
    """One file, or a folder that is one checkpoint; what is damaged in it is added to the problems."""
    from convert.api import open as open_checkpoint
    from convert.limits import DEFAULT

    try:
        with (
            open_checkpoint(path, limits=wanted.limits or DEFAULT) as checkpoint,
            progress_bar(wanted.no_progress or not wanted.stats) as progress,
        ):
            found, damaged = take_inventory(
                checkpoint,
                include=wanted.include,
                exclude=wanted.exclude,
                sort=wanted.sort,
                stats=wanted.stats,
                jobs=wanted.jobs,
                progress=progress,
            )
    except ConvertError as err:
        if wanted.json:
            write_json({"path": without_secrets(path), **error_object(err)})
        problems.append(err)
        return None
    problems += damaged
    if wanted.json:
        write_json({**found.to_dict(), **(error_object(gather(damaged)) if damaged else {})})
    elif wanted.html is None:
        _print(found, wanted)
    return found


# --- text --------------------------------------------------------------------------------------------------------


def _print(found: Inventory, wanted: Wanted) -> None:
    """Title, table or tree, totals, metadata and notes."""
    from convert.cli.table import Column, laid_out, wrapped
    from convert.tree import grow, lines

    width = columns()
    _heading(wrapped([printable(found.path)], width))
    out = sys.stdout
    if wanted.tree:
        lines_of = list(lines(grow(row.leaf() for row in found.rows), wanted.depth, by_size=wanted.sort == "size"))
        text = laid_out([Column(*column) for column in _TREE], lambda: _tree(lines_of), width)
    else:
        text = laid_out([Column(*column) for column in _TABLE], lambda: _table(found.rows), width)
    out.writelines(line + "\n" for line in text)
    for remark in _remarks(found):
        out.write("\n".join(wrapped(remark.split(" "), width, " ")) + "\n")
    out.write("\n")


def _heading(lines: Sequence[str]) -> None:
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.text import Text

        console = Console()
        for line in lines:
            console.print(Text(line, style="bold"))
    else:
        sys.stdout.write("\n".join(lines) + "\n")


def _table(rows: Sequence[Row]) -> Iterator[Entry]:
    """A line for each tensor."""
    from convert.cli.table import Entry

    for row in rows:
        details = [_values(row.stats)] if row.stats is not None else []
        if row.problem is not None:
            details.append(["!", *printable(row.problem).split(" ")])
        cells = (_name(row.name), printable(row.dtype), shape_text(row.shape), human(row.nbytes), _stored(row))
        yield Entry(cells, details)


def _name(name: str) -> str:
    """Safe for the terminal, and shortened in the middle when very long."""
    if len(name) <= _SHOWN_CHARACTERS:
        return printable(name) or "''"
    half = _SHOWN_CHARACTERS // 2
    return f"{printable(name[:half])}...{printable(name[-half:])} ({len(name)} characters)"


def _stored(row: Row) -> str:
    words = row.stored()
    if row.compression and row.nbytes:
        words[words.index(row.compression)] += f" {100 * row.packed_nbytes / row.nbytes:.0f} %"
    return ", ".join(map(printable, words))


def _values(stats: Stats) -> list[str]:
    from convert.cli.table import sparkline

    words = []
    if stats.min is not None:
        words = [f"{word} {number(value)}" for word, value in
                 (("min", stats.min), ("max", stats.max), ("mean", stats.mean), ("std", stats.std))]  # fmt: skip
    words += [f"zeros {stats.zeros}"] if stats.zeros else []
    words += [f"NaN {stats.nans}"] if stats.nans else []
    words += [f"inf {stats.infs}"] if stats.infs else []
    words += [f"[{sparkline(stats.counts)}]"] if stats.counts else []
    words += [f"({stats.note})"] if stats.note else []
    return words or ["(no elements)"]


def _tree(lines: Sequence[Line]) -> Iterator[Entry]:
    """A line for each node, with its subtotals."""
    from convert.cli.table import Entry

    for line in lines:
        node = line.node
        kinds = sorted(node.shares(), key=lambda kind: -node.shares()[kind])
        dtypes = ", ".join(kinds[:3]) + (", ..." if len(kinds) > 3 else "")
        shape = "" if node.leaf is None else shape_text(node.leaf.about)  # type: ignore[arg-type]
        label = "  " * line.depth + _name(line.label)
        yield Entry((label, str(node.count * line.times), human(node.nbytes * line.times), printable(dtypes), shape))


def _remarks(found: Inventory) -> Iterator[str]:
    """Totals, metadata and notes."""
    total = len(found.rows) + found.left_out
    some = f"{len(found.rows)} of " if found.left_out else ""
    version = f"; {found.version}" if found.version else ""
    size = f"{human(found.nbytes)}, file {human(found.file_bytes)}"
    yield f"{found.format}, {some}{counted(total, 'tensor')}, {size}{version}"
    dtypes = found.dtypes()
    if len(dtypes) > 1:
        said = [f"{printable(name)}: {count} ({human(size)})" for name, (count, size) in dtypes.items()]
        more = len(said) - _SHOWN_DTYPES
        yield ", ".join(said[:_SHOWN_DTYPES]) + (f", and {more} more" if more > 0 else "")
    for key, text in found.metadata.items():
        shown = printable(text[:_SHOWN_CHARACTERS])
        cut = f"... ({len(text)} characters)" if len(text) > _SHOWN_CHARACTERS else ""
        yield f"metadata {printable(key)}: {shown}{cut}"
    for note in found.notes:
        yield f"note: {printable(note)}"
