"""The arrays inside the pickle of a numpy object array, read without an unpickler.

Threat: a pickle is a program, and unpickling runs it. A subclass of `pickle.Unpickler` with a strict `find_class` still
calls whatever is allowed, with any arguments (`numpy.ndarray.__setstate__` has crashed on such), sets attributes, and
allocates what the stream asks for. So nothing here is ever imported or called on behalf of a stream.

Design: a stack machine of our own (`readers.picklevm`) knows only the opcodes that numbers, text, bytes, lists, tuples,
dicts and numpy arrays need. A global is a row of a table (`readers.pickleglobals`), never an object; REDUCE and BUILD
look up what such a row means and make plain records. Everything else is refused with its byte position. This module
turns the records into a flat list of arrays and texts.

Bounds: byte lengths are checked against the stream; dicts are lists of pairs, so crafted hashes cost nothing; at most
`OPERATIONS_PER_LEAF` opcodes a leaf are run, which take about 100 bytes of memory each at worst; what the memo shares
is bounded where it is copied or unfolded: leaves, containers, depth, bytes, names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from convert.errors import CorruptError, InputError, UnsupportedError, quoted
from convert.limits import DEFAULT, Budget, Limits, exceeded
from readers.pickleglobals import (
    HINT,
    SURROGATE,
    ArrayRecord,
    DictRecord,
    PickledArray,
    kind_of,
    text_of,
)
from readers.picklevm import OPERATIONS_PER_LEAF, Machine, run

__all__ = ["PickledArray", "load_object_array"]

_VISITS_PER_LEAF = 4  # containers on the way to a leaf
_NAME_CHARACTERS_PER_LEAF = 64
_SLACK = 1 << 20
_TOO_MANY_BYTES = "the pickle unfolds to too many bytes: it refers to the same ones again and again"


def load_object_array(
    data: bytes | memoryview, shape: tuple[int, ...], limits: Limits = DEFAULT
) -> list[tuple[str, PickledArray | str]]:
    """All arrays and scalars in the pickle of an object array, each under its dotted path.

    Args:
        data: The pickle, to its last byte. Held in memory; a memoryview is copied once more.
        shape: Shape of the object array, from the npy header.
        limits: `pickle_leaves` is the most results, and bounds opcodes and containers; `pickle_depth` counts
            the containers inside each other, the outermost array included.

    Returns:
        (path, leaf) in the order of the pickle: index or key of each container joined by '.'; '' for the only element
        of a 0-d array. A leaf is an array, or the text of a Python number or string. Empty containers give nothing.
        Bytes may be shared between results.

    Raises:
        CorruptError: The stream is malformed, contradicts itself or `shape`, or goes on after its end.
        UnsupportedError: It holds or names something else than arrays, numbers, text, bytes and plain containers.
        LimitError: Too many, too deep, or far larger than the pickle through sharing.
    """
    budget = 4 * len(data) + _SLACK
    machine = Machine(Budget(budget, _TOO_MANY_BYTES), limits.pickle_memo)
    root = run(data, machine, OPERATIONS_PER_LEAF * limits.pickle_leaves + 4096)
    if not isinstance(root, ArrayRecord) or root.leaf is not None:
        raise CorruptError(f"the pickle holds {kind_of(root)} (expected an object array)")
    if not root.built:
        raise CorruptError("the pickle holds an array without its state")
    if root.shape != shape:
        raise CorruptError(f"the pickled array has shape {root.shape} (expected {shape} as in the header)")
    size = Budget(budget, _TOO_MANY_BYTES)
    leaves: dict[str, PickledArray | str] = {}
    for path, value in _flatten(root, limits.pickle_leaves, limits.pickle_depth):
        if len(leaves) >= limits.pickle_leaves:
            raise exceeded("pickle_leaves", "the pickle holds too many arrays and values", limits.pickle_leaves)
        if path in leaves:
            raise UnsupportedError(f"two elements of the pickle would both be called {quoted(path)}")
        try:
            leaves[path] = _leaf(value, size)
        except InputError as err:
            raise type(err)(f"element {quoted(path)}: {err.message}", hint=err.hint) from err
    return list(leaves.items())


# From nested containers to a flat list.


def _flatten(root: ArrayRecord, max_leaves: int, max_depth: int) -> Iterator[tuple[str, object]]:
    """Path and value of everything that is no container, depth first, without recursion."""
    which = ("pickle_leaves", max_leaves)
    visits = Budget(_VISITS_PER_LEAF * max_leaves + 4096, "the pickle unfolds to too many containers", *which)
    names = Budget(_NAME_CHARACTERS_PER_LEAF * max_leaves + _SLACK, "the pickle unfolds to too long names", *which)
    open_containers: list[tuple[str | None, Iterator[tuple[str | None, object]]]] = [(None, _children(root))]
    while open_containers:
        parent, children = open_containers[-1]
        for key, value in children:
            visits.spend(1)
            path = key if parent is None else parent if key is None else f"{parent}.{key}"
            names.spend(len(path or ""))
            if not _is_container(value):
                yield path or "", value
                continue
            if len(open_containers) >= max_depth:
                what = f"containers inside each other are too deep, at {quoted(path or '')}"
                raise exceeded("pickle_depth", what, max_depth)
            open_containers.append((path, _children(value)))
            break
        else:
            open_containers.pop()


def _is_container(value: object) -> bool:
    return isinstance(value, list | tuple | DictRecord) or (
        isinstance(value, ArrayRecord) and value.leaf is None and value.built
    )


def _children(value: object) -> Iterator[tuple[str | None, object]]:
    """Key and value of each element; the one element of a 0-d array has no key."""
    if isinstance(value, DictRecord):
        for key, item in value.pairs:
            yield str(key) if type(key) is int else text_of(key), item
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield str(index), item
    elif isinstance(value, ArrayRecord) and value.objects:
        # Every side is at most the number of objects, so product() holds no more than those.
        for position, item in zip(itertools.product(*map(range, value.shape)), value.objects, strict=True):
            yield ".".join(map(str, position)) if position else None, item


def _leaf(value: object, size: Budget) -> PickledArray | str:
    if isinstance(value, ArrayRecord):
        if value.leaf is None:
            raise CorruptError("an array without its state")
        size.spend(len(value.leaf.data))
        return value.leaf
    if isinstance(value, str):
        size.spend(4 * len(value))
        if SURROGATE.search(value):
            raise UnsupportedError("text with half of a surrogate pair")
        return value
    if isinstance(value, bytes):
        size.spend(len(value))
        if value.endswith(b"\0"):  # numpy pads with NUL, so it could not be told from shorter text
            raise UnsupportedError("bytes that end in NUL, which numpy would drop")
        return PickledArray(f"|S{len(value) or 1}", (), False, value or b"\0")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float | complex):
        return repr(value)
    raise UnsupportedError(f"{kind_of(value)} is neither array nor number nor text", hint=HINT)
