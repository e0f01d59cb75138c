"""The report of a batch as one page: what was done, what failed and why, and what policies and casts changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from convert import page
from convert.batchjob import FileReport
from convert.batchrun import BatchReport
from convert.output import OutputFile
from convert.page import cell, shown
from convert.shown import counted, human
from convert.tree import Leaf, Node, grow, largest, natural, unfolded

MOST_ROWS = 4000
_MOST_PROBLEMS = 500
_KIND = "batch"
_STATES = {"done": "c2", "copied": "c6", "finished before": "c0", "failed": "c4"}
"""What becomes of a file, and its colour."""


def is_report(path: str) -> bool:
    """Whether a file is such a page."""
    return page.is_page(path, _KIND)


class _File(NamedTuple):
    """What is kept of a file's report."""

    source: str
    target: str
    state: str
    source_bytes: int
    target_bytes: int
    remark: str


class _Sums:
    """Tensors and files that share a fate."""

    def __init__(self) -> None:
        self.tensors: Counter[tuple[str, ...]] = Counter()
        self.files: Counter[tuple[str, ...]] = Counter()

    def add(self, fates: list[tuple[str, ...]]) -> None:
        """Those of one file."""
        self.tensors.update(fates)
        self.files.update(set(fates))


class BatchPage:
    """Takes in the reports of files as they come, then writes the page. Memory: less than 1 KB a file."""

    def __init__(self) -> None:
        self._files: list[_File] = []
        self._changes = _Sums()
        self._left_out = _Sums()
        self._notes: Counter[str] = Counter()

    def add(self, report: FileReport) -> None:
        """A file has ended; for `on_file` of `convert.convert_folder`."""
        state = {"skipped": "finished before", "failed": "failed"}.get(report.status, "done")
        state = "copied" if report.copied and state == "done" else state
        remark = report.problems[0]["message"] if report.problems else "source removed" if report.deleted else ""
        self._files.append(_File(report.source, report.target, state, report.source_bytes, report.target_bytes, remark))
        self._changes.add([(row["source_dtype"], row["dtype"], row["how"]) for row in report.changes])
        self._left_out.add([(row["dtype"], row["reason"]) for row in report.left_out])
        self._notes.update(report.notes)

    def write(self, output: OutputFile, report: BatchReport) -> None:
        """Write the page; the caller gives the file its name."""
        page.write(output, self.parts(report))

    def parts(self, report: BatchReport) -> Iterator[str]:
        """The page, piece by piece."""
        return page.page(f"{report.src} to {report.dst}", self._body(report), _KIND)

    def _body(self, report: BatchReport) -> Iterator[str]:
        yield page.head(f"{report.src} → {report.dst}", f"to {report.to}, {report.seconds:.1f} s")
        facts = [(f"{report.done:,}", "done"), (f"{report.skipped:,}", "finished before"),
                 (f"{report.failed:,}", "failed"), (human(report.source_bytes), "read"),
                 (human(report.target_bytes), "written")]  # fmt: skip
        facts += [(f"{report.stopped:,}", "not tried")] if report.stopped else []
        facts += [(f"{report.deleted:,}", "sources removed")] if report.deleted else []
        yield page.tiles(facts)
        yield from _problems(report)
        root = grow(Leaf(one.source, one.source_bytes, one.state) for one in self._files)
        yield page.picture(root, _STATES, "Where the bytes are", "file")
        if self._files:
            yield "<h2>What became of the files</h2>" + page.share_bar(self._states(), _STATES, "file")
        yield from _fates("What policies and casts changed", ("was", "became", "by"), self._changes)
        yield from _fates("What was left out", ("dtype", "why"), self._left_out)
        notes = [
            text if count == 1 else f"{text} ({counted(count, 'file')})" for text, count in self._notes.most_common()
        ]
        yield page.bullets("Notes", [*report.notes, *notes][:_MOST_PROBLEMS])
        yield "<h2>Files</h2>" + page.filter_box("by path, state, problem")
        yield from page.table(_COLUMNS, self._rows(root))

    def _states(self) -> dict[str, tuple[int, int]]:
        counts = Counter(one.state for one in self._files)
        nbytes: Counter[str] = Counter()
        for one in self._files:
            nbytes[one.state] += one.source_bytes
        return {state: (counts[state], nbytes[state]) for state in _STATES if counts[state]}

    def _rows(self, root: Node) -> Iterator[str]:
        """All files, failures first; of very many the small ones folded by folder."""
        if len(self._files) <= MOST_ROWS:
            order = sorted(self._files, key=lambda one: (one.state != "failed", natural(one.source)))
            yield from map(_row, order)
            return
        failed = [one for one in self._files if one.state == "failed"]
        yield from map(_row, failed[:MOST_ROWS])
        by_source = {one.source: one for one in self._files}
        yield from _folded(root, unfolded(root, MOST_ROWS), by_source)


_COLUMNS = (("source", ""), ("state", ""), ("size", "n"), ("target", ""), ("written", "n"))


def _row(one: _File) -> str:
    state = f'<span class="key {_STATES[one.state]}"></span>{shown(one.state)}'
    remark = ""
    if one.remark:
        remark = f'<br><span class="{"bad" if one.state == "failed" else "dim"}">{shown(one.remark)}</span>'
    cells = (
        cell(shown(one.source) + remark, "name"),
        cell(state),
        cell(human(one.source_bytes), "n"),
        cell(shown(one.target), "name"),
        cell(human(one.target_bytes), "n", "written") if one.state != "failed" else cell(""),
    )
    return f"<tr>{''.join(cells)}</tr>"


def _folded(node: Node, opened: set[int], by_source: dict[str, _File]) -> Iterator[str]:
    children, rest = largest(node, MOST_ROWS)
    for child in [*children, *([] if rest is None else [rest])]:
        if child.leaf is not None:
            yield _row(by_source[child.leaf.name])
        elif id(child) in opened:
            yield from _folded(child, opened, by_source)
        else:
            states = ", ".join(child.shares())
            name = child.path if child is rest else f"{child.path}*"
            said = f"{shown(name)} ({counted(child.count, 'file')})"
            cells = cell(said, "name") + cell(shown(states)) + cell(human(child.nbytes), "n") + cell("") * 2
            yield f'<tr class="fold">{cells}</tr>'


def _fates(title: str, columns: tuple[str, ...], sums: _Sums) -> Iterator[str]:
    """A table of what happened to tensors, the most frequent first."""
    if not sums.tensors:
        return
    heads = [(column, "") for column in columns] + [("tensors", "n"), ("files", "n")]
    rows = (
        f"<tr>{''.join(cell(shown(text)) for text in fate)}{cell(f'{count:,}', 'n', 'tensors')}"
        f"{cell(f'{sums.files[fate]:,}', 'n', 'files')}</tr>"
        for fate, count in sums.tensors.most_common()
    )
    yield f"<h2>{shown(title)}</h2>"
    yield from page.table(heads, rows)


def _problems(report: BatchReport) -> Iterator[str]:
    """Why files failed, each problem with its hint."""
    texts = [problem["text"] for failure in report.failures for problem in failure.problems]
    if texts:
        yield page.problem_list(texts[:_MOST_PROBLEMS], len(texts))
