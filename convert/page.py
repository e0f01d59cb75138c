"""The parts that all pages are made of; every text in them is escaped here."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from convert import treemap
from convert.errors import printable
from convert.htmlstyle import SCRIPT, STYLE
from convert.shown import counted, human
from convert.version import __version__

if TYPE_CHECKING:
    from convert.output import OutputFile
    from convert.tree import Node

COLOURS = 8
"""Kinds beyond that share a ninth colour."""
_WRITE_BYTES = 1 << 20
_GENERATOR = "tensor-convert"
_HEAD_BYTES = 2000


def shown(text: object) -> str:
    """Text for a page: marks are escaped, and what cannot be seen or turns the direction of writing is spelled out."""
    return escape(printable(text))


def page(title: str, body: Iterable[str], kind: str) -> Iterator[str]:
    """A whole page, of a kind by which `is_page` knows it.

    The policy in its head lets it load nothing, and run only the script that is in it.
    """
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    yield (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        f'<meta name="generator" content="{_GENERATOR} {shown(kind)}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{shown(title)}</title><style>{STYLE}</style></head><body>"
    )
    yield from body
    yield f"<footer>tensor-convert {__version__}</footer><script>{SCRIPT}</script></body></html>\n"


def write(output: OutputFile, parts: Iterable[str]) -> None:
    """Write the parts of a page to a file, which is then complete but has not got its name yet."""
    at, waiting = 0, bytearray()
    for part in parts:
        waiting += part.encode("utf-8", "backslashreplace")
        if len(waiting) >= _WRITE_BYTES:
            output.write_at(at, waiting)
            at, waiting = at + len(waiting), bytearray()
    output.write_at(at, waiting)


def is_page(path: str, kind: str) -> bool:
    """Whether a file is a page of that kind, made by this program."""
    try:
        with open(path, "rb") as file:
            return f'content="{_GENERATOR} {shown(kind)}"'.encode() in file.read(_HEAD_BYTES)
    except OSError:
        return False


def head(title: str, about: str) -> str:
    """What it is about."""
    return f'<h1>{shown(title)}</h1><p class="dim">{shown(about)}</p>'


def tiles(facts: Iterable[tuple[str, str]]) -> str:
    """Figures with what they mean below."""
    made = (f'<div class="tile"><b>{shown(figure)}</b><span>{shown(what)}</span></div>' for figure, what in facts)
    return f'<div class="tiles">{"".join(made)}</div>'


def problem_list(texts: Sequence[str], count: int) -> str:
    """What is wrong, each with its hint, and how many there are in all; nothing if nothing is."""
    if not texts:
        return ""
    # Line by line, as the end of a line is what `printable` would spell out.
    items = ("<li>" + "\n".join(map(shown, text.split("\n"))) + "</li>" for text in texts)
    more = f'<p class="dim">and {count - len(texts):,} more</p>' if count > len(texts) else ""
    return f'<h2 class="bad">{counted(count, "problem")}</h2><ul>{"".join(items)}</ul>{more}'


def bullets(title: str, texts: Sequence[str]) -> str:
    """A list under a heading; nothing if it is empty."""
    return f"<h2>{shown(title)}</h2><ul>{''.join(f'<li>{shown(text)}</li>' for text in texts)}</ul>" if texts else ""


def colours(kinds: Iterable[str]) -> dict[str, str]:
    """A colour's class for each kind, the most important first."""
    return {kind: f"c{min(index, COLOURS)}" for index, kind in enumerate(kinds)}


def share_bar(shares: Mapping[str, tuple[int, int]], classes: Mapping[str, str], word: str) -> str:
    """A bar cut by bytes, and its key: for each kind how many, how many bytes."""
    total = sum(nbytes for _, nbytes in shares.values())
    bar = "".join(
        f'<i class="{classes[kind]}" style="flex:{nbytes / total:.6f}" title="{shown(kind)}"></i>'
        for kind, (_, nbytes) in shares.items()
        if nbytes
    )
    rows = "".join(
        f'<tr><td><span class="key {classes[kind]}"></span>{shown(kind)}</td><td class="n">{counted(count, word)}</td>'
        f'<td class="n">{human(nbytes)}</td><td class="n">{f"{100 * nbytes / total:.1f} %" if total else ""}</td></tr>'
        for kind, (count, nbytes) in shares.items()
    )
    return f'<div class="share">{bar}</div><table class="legend">{rows}</table>'


def picture(root: Node, classes: Mapping[str, str], title: str, word: str = "tensor") -> str:
    """A treemap twice: for wide and for narrow screens, of which a style sheet shows one."""
    if not root.nbytes:
        return ""

    def colour(node: Node) -> str:
        shares = node.shares()
        return classes[max(shares, key=lambda kind: shares[kind])]

    made = (
        f'<div class="{name}">{treemap.svg(root, width, height, colour, title, word)}</div>'
        for name, width, height in (("wide", 1248, 520), ("narrow", 366, 480))
    )
    return f"<h2>{shown(title)}</h2>{''.join(made)}"


def table(columns: Sequence[tuple[str, str]], rows: Iterable[str]) -> Iterator[str]:
    """A table that becomes cards on a narrow screen; columns are titles and classes."""
    heads = "".join(f'<th class="{kind}">{shown(title)}</th>' for title, kind in columns)
    yield f'<table class="cards"><thead><tr>{heads}</tr></thead><tbody>'
    yield from rows
    yield "</tbody></table>"


def cell(content: str, kind: str = "", title: str = "") -> str:
    """A cell of markup; a title stands before it on a narrow screen."""
    said = f' data-t="{shown(title)}"' if title and content else ""
    return f'<td class="{kind}"{said}>{content}</td>' if kind else f"<td{said}>{content}</td>"


def filter_box(what: str) -> str:
    """A field that hides rows without the words typed; hidden itself where scripts do not run."""
    return (
        f'<input id="filter" type="search" placeholder="Filter {shown(what)}" aria-label="Filter {shown(what)}" hidden>'
        '<p id="left" class="dim" role="status"></p>'
    )


def bars(counts: Sequence[int], title: str) -> str:
    """A histogram as a picture; a bin that is not empty always shows."""
    most = max(counts)
    path = "".join(f"M{4 * at} 26v-{max(24 * count / most, 1):.1f}h3.4V26z" for at, count in enumerate(counts) if count)
    return f'<svg class="hist" viewBox="0 0 {4 * len(counts)} 26" preserveAspectRatio="none" role="img" ' + (
        f'aria-label="{shown(title)}"><title>{shown(title)}</title><path d="{path}"/></svg>'
    )
