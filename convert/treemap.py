"""A tree of sizes as a picture: rectangles in rectangles, each as large as its share, as close to squares as can be.

Source: M. Bruls, K. Huizing, J. J. van Wijk, "Squarified Treemaps", 2000.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from convert.errors import printable
from convert.shown import counted, human
from convert.tree import Node, largest, unfolded

MOST_RECTANGLES = 400
"""What does not fit is folded into its parent, the smallest first."""
_TITLE_HEIGHT = 16.0
_LETTERS = {
    "iljI.,:;|!'()[]": 4.6, "tfr-/ ": 5.2, "abcdefghknopqsuvxyz_*0123456789": 7.2, "ABCDEFGHJKLNOPRSTUVXYZ": 8.8,
}  # fmt: skip
_WIDTHS = {letter: width for letters, width in _LETTERS.items() for letter in letters}
"""Pixels of letters in the 11 px font of labels, were it a wide one."""
_OTHER_WIDTH = 11.5
_LEAST_PIXELS = 1.5
"""A rectangle with a shorter side is not drawn: nobody would see it."""
_LEAST_INSIDE = 12.0
"""A node with less room than this for its children is drawn whole."""
_LEAST_LABEL = 24.0


class Box(NamedTuple):
    """A rectangle in pixels."""

    x: float
    y: float
    width: float
    height: float


def squarified(sizes: Sequence[float], box: Box) -> list[Box]:
    """A rectangle in the box for each size (positive, the largest first), with areas in proportion."""
    total = sum(sizes)
    found: list[Box] = []
    at = 0
    while at < len(sizes):
        scale = box.width * box.height / total if total else 0.0
        side = min(box.width, box.height)
        end, area = at + 1, sizes[at] * scale
        worst = _ratio(sizes[at] * scale, sizes[at] * scale, area, side)
        while end < len(sizes):
            more = area + sizes[end] * scale
            ratio = _ratio(sizes[at] * scale, sizes[end] * scale, more, side)
            if ratio > worst:
                break
            worst, area, end = ratio, more, end + 1
        row = [size * scale for size in sizes[at:end]]
        thick = area / side if side else 0.0
        place = 0.0
        for each in row:
            length = each / thick if thick else 0.0
            if box.width >= box.height:
                found.append(Box(box.x, box.y + place, thick, length))
            else:
                found.append(Box(box.x + place, box.y, length, thick))
            place += length
        if box.width >= box.height:
            box = Box(box.x + thick, box.y, max(box.width - thick, 0.0), box.height)
        else:
            box = Box(box.x, box.y + thick, box.width, max(box.height - thick, 0.0))
        total -= sum(sizes[at:end])
        at = end
    return found


def _ratio(largest: float, smallest: float, area: float, side: float) -> float:
    """The worst ratio of sides among the rectangles of a row."""
    if not smallest or not side or not area:
        return float("inf")
    return max(side * side * largest / (area * area), area * area / (side * side * smallest))


def svg(root: Node, width: int, height: int, colour: Callable[[Node], str], name: str, word: str = "tensor") -> str:
    """The picture as an SVG element.

    Args:
        root: Its children fill the picture.
        width, height: Pixels; style sheets may scale it.
        colour: Gives the class of a rectangle.
        name: What it is a picture of, for those who do not see it.
        word: What a leaf is.
    """
    opened = unfolded(root, MOST_RECTANGLES)
    parts = [
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="{escape(name)}">'
    ]
    parts += _Drawing(colour, opened, word).inside(root, Box(0, 0, width, height))
    parts.append("</svg>")
    return "".join(parts)


class _Drawing:
    """What is the same for all rectangles of a picture."""

    def __init__(self, colour: Callable[[Node], str], opened: set[int], word: str) -> None:
        self._colour = colour
        self._opened = opened
        self._word = word

    def inside(self, node: Node, box: Box) -> Iterator[str]:
        """The children of a node; those that are open have a title, if there is room for it, and children inside."""
        shown, rest = largest(node, MOST_RECTANGLES)
        children = sorted(shown, key=lambda child: -child.nbytes) + ([] if rest is None else [rest])
        children = [child for child in children if child.nbytes]
        for child, place in zip(children, squarified([child.nbytes for child in children], box), strict=True):
            if min(place.width, place.height) < _LEAST_PIXELS:
                continue
            below = Box(place.x + 1, place.y + _TITLE_HEIGHT, place.width - 3, place.height - _TITLE_HEIGHT - 2)
            if id(child) in self._opened and min(below.width, below.height) > _LEAST_INSIDE:
                yield f"<g>{self._rectangle(child, place, 'frame')}</g>"
                yield from self.inside(child, below)
            else:
                yield f"<g>{self._rectangle(child, place, self._colour(child))}</g>"

    def _rectangle(self, node: Node, box: Box, kind: str) -> str:
        many = "" if node.leaf is not None else f", {counted(node.count, self._word)}"
        kinds = ", ".join(list(node.shares())[:4])
        title = _cut(f"{printable(node.path)}: {human(node.nbytes)}{many} ({printable(kinds)})", 300)
        return (
            f"<title>{escape(title)}</title>"
            f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{max(box.width - 1, 0.5):.1f}" '
            f'height="{max(box.height - 1, 0.5):.1f}" class="{kind}"/>{_label(node, box)}'
        )


def _label(node: Node, box: Box) -> str:
    room = box.width - 9
    if room < _LEAST_LABEL or box.height < _TITLE_HEIGHT:
        return ""
    text = printable(node.label) if node.leaf is not None else printable(node.label).rstrip("./") or "."
    line = f'<text x="{box.x + 4:.1f}" y="{box.y + 12:.1f}">{escape(_fitting(text, room))}</text>'
    size = human(node.nbytes)
    if node.leaf is not None and box.height >= 2 * _TITLE_HEIGHT and _fitting(size, room) == size:
        line += f'<text x="{box.x + 4:.1f}" y="{box.y + 25:.1f}" class="size">{size}</text>'
    return line


def _fitting(text: str, room: float) -> str:
    """The text, or the beginning of it that surely fits into so many pixels."""
    reached, last = 0.0, 0
    for index, letter in enumerate(text):
        last = index if reached + _OTHER_WIDTH <= room else last
        reached += _WIDTHS.get(letter, _OTHER_WIDTH)
        if reached > room:
            return text[:last] + "…"
    return text


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: letters - 1] + "…"
