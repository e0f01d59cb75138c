"""Names with dots and slashes as a tree with subtotals: what `ls --tree` prints and a report draws."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

MAX_DEPTH = 32
"""Levels; what is left of a deeper name stays whole. Without any limit a name of dots could exhaust the stack."""
_CUT = re.compile(r"(?<=[./])")
_NUMBER = re.compile(r"([0-9]{1,18})(?![0-9])(.*)", re.DOTALL)


class Leaf(NamedTuple):
    """One thing to put into a tree: `kind` is what subtotals are kept by, `about` whatever tells equal ones apart."""

    name: str
    nbytes: int
    kind: str
    about: object = None


class Node:
    """A leaf, or all that begins the same.

    Attributes:
        label: Its part of the name, the separator behind it included.
        path: The whole name up to here.
        leaf: What stands here, or None for a node with children.
        children: In the order in which they were found.
        count: Leaves below, or 1.
        nbytes: Theirs together.
        kinds: Bytes below by kind; empty for a leaf.
    """

    __slots__ = ("children", "count", "kinds", "label", "leaf", "nbytes", "path")

    def __init__(self, label: str, path: str, leaf: Leaf | None = None) -> None:
        self.label = label
        self.path = path
        self.leaf = leaf
        self.children: list[Node] = []
        self.count = 0 if leaf is None else 1
        self.nbytes = 0 if leaf is None else leaf.nbytes
        self.kinds: dict[str, int] = _NONE if leaf is not None else {}

    def take(self, child: Node) -> None:
        """Add a child's sums to its own."""
        self.count += child.count
        self.nbytes += child.nbytes
        for kind, nbytes in child.shares().items():
            self.kinds[kind] = self.kinds.get(kind, 0) + nbytes

    def shares(self) -> dict[str, int]:
        """Bytes by kind, here or below."""
        return self.kinds if self.leaf is None else {self.leaf.kind: self.leaf.nbytes}


_NONE: dict[str, int] = {}
"""What all leaves have in common, of which there may be very many."""


def grow(leaves: Iterable[Leaf]) -> Node:
    """The tree of some leaves; a node with a single child is joined with it."""
    root = Node("", "")
    places: dict[str, Node] = {}
    for leaf in leaves:
        node, path = root, ""
        parts = _CUT.split(leaf.name, MAX_DEPTH)
        for part in parts[:-1]:
            path += part
            child = places.get(path)
            if child is None:
                child = places[path] = Node(part, path)
                node.children.append(child)
            node = child
        node.children.append(Node(parts[-1], leaf.name, leaf))
    places.clear()
    _sum(root)
    return root


def _sum(node: Node) -> None:
    """Subtotals, from the leaves up; and chains become one node."""
    for index, child in enumerate(node.children):
        if child.leaf is None:
            _sum(child)
        if len(child.children) == 1:
            only = child.children[0]
            only.label = child.label + only.label
            node.children[index] = child = only
        node.take(child)


def unfolded(root: Node, most: int) -> set[int]:
    """The nodes to open, by `id`, so that about `most` are seen: always the largest next.

    Of a node with more children than that, `largest` shows as many.
    """
    opened: set[int] = set()
    waiting = [(-root.nbytes, 0, root)]
    seen = number = 0
    while waiting:
        node = heapq.heappop(waiting)[2]
        if not node.children or (opened and seen + len(node.children) > most):
            continue
        opened.add(id(node))
        seen += min(len(node.children), most)
        for child in node.children:
            number += 1
            if child.children:
                heapq.heappush(waiting, (-child.nbytes, number, child))
    return opened


def largest(node: Node, most: int) -> tuple[list[Node], Node | None]:
    """The children, the largest `most` of them in their order, and one node for all others, if there are any."""
    if len(node.children) <= most:
        return node.children, None
    ranked = sorted(range(len(node.children)), key=lambda index: -node.children[index].nbytes)
    shown, rest = sorted(ranked[:most]), Node("", f"{node.path}*")
    for index in ranked[most:]:
        rest.take(node.children[index])
    rest.label = f"{rest.count} smaller ones"
    return [node.children[index] for index in shown], rest


def natural(text: str) -> list[tuple[int, int, str]]:
    """A key that sorts `layer.2` before `layer.10`."""
    parts = re.split(r"([0-9]{1,18})", text)
    return [(0, int(part), "") if index % 2 else (1, 0, part) for index, part in enumerate(parts)]


class Line(NamedTuple):
    """A line of a printed tree. `times` says how many equal nodes with consecutive numbers it stands for."""

    depth: int
    label: str
    node: Node
    times: int


def lines(root: Node, depth: int | None = None, *, by_size: bool = False) -> Iterator[Line]:
    """The tree from the top, in natural order or the largest first.

    Numbered siblings that are equal but for their values (the layers of a model) are one line, `0..31.`, and so
    are all lines below it, which stand for `times` nodes each.
    """
    yield from _below(root, 0, depth, by_size, 1, _Signs())


def _below(node: Node, level: int, depth: int | None, by_size: bool, times: int, signs: _Signs) -> Iterator[Line]:
    children = sorted(node.children, key=lambda child: natural(child.label))
    groups: list[tuple[str, Node, int]] = []
    begin, last = "", None
    for child in children:
        match = _NUMBER.fullmatch(child.label)
        here = None if match is None else (int(match[1]), match[2], signs.of(child))
        if here is not None and last is not None and here == (last[0] + 1, *last[1:]):
            _, first, count = groups[-1]
            groups[-1] = (f"{begin}..{child.label}", first, count + 1)
        else:
            groups.append((child.label, child, 1))
            begin = "" if match is None else match[1]
        last = here
    if by_size:
        groups.sort(key=lambda group: -group[1].nbytes * group[2])
    for label, child, count in groups:
        yield Line(level, label, child, times * count)
        if child.children and (depth is None or level + 1 < depth):
            yield from _below(child, level + 1, depth, by_size, times * count, signs)


class _Signs:
    """Numbers that are equal for nodes with equal leaves: same labels, sizes, kinds and whatever `about` says."""

    def __init__(self) -> None:
        self._known: dict[object, int] = {}
        self._of: dict[int, int] = {}

    def of(self, node: Node) -> int:
        found = self._of.get(id(node))
        if found is None:
            key: object = (
                node.leaf[1:]
                if node.leaf is not None
                else tuple(sorted((child.label, self.of(child)) for child in node.children))
            )
            found = self._of[id(node)] = self._known.setdefault(key, len(self._known))
        return found
