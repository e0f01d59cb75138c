"""Every rule of the pickle in an object array: what unpickling here would refuse, and every global that it names.

Nothing is imported or called; see `readers.pickles`.
"""

from __future__ import annotations

import re

from convert.errors import ConvertError, CorruptError, InputError, LimitError, UnsupportedError
from convert.findings import LIMITS, Findings, Part, Rule
from convert.limits import Limits
from convert.tensor import Extent, Stream
from convert.transfer import stored_chunks
from readers import npy
from readers.pickleglobals import Budget
from readers.picklevm import Machine, run

MALFORMED = Rule(
    "PKL-001",
    "The pickle is whole, and holds the array of the header.",
    "It is damaged: download or save the file again.",
)
GLOBAL = Rule(
    "PKL-002",
    "The pickle names nothing but numpy's arrays and plain containers.",
    "Whatever else it names would be imported, and mostly called, by pickle.load: such a file may run code. Nothing is "
    "called here.",
)
OPCODE = Rule(
    "PKL-003",
    "The pickle holds arrays, numbers, strings, dicts, lists and tuples only.",
    "Other objects cannot be told from data without running them. Save the arrays in them on their own.",
)
RULES = (MALFORMED, GLOBAL, OPCODE)


def check(
    header: npy.Header, head_bytes: int, data: Extent | Stream, findings: Findings, limits: Limits, part: Part
) -> None:
    """Add what unpickling would refuse: each global the pickle names, or else the first other problem."""
    if data.nbytes <= limits.pickle_bytes:
        before = findings.errors
        _check_globals(b"".join(map(bytes, stored_chunks(data, 1 << 20))), limits, head_bytes, findings, part)
        if findings.errors > before:
            return
    try:
        npy.unpickled("", header, data, limits)
    except UnsupportedError as err:
        _refused(OPCODE, err, head_bytes, findings, part)
    except LimitError as err:
        _refused(LIMITS, err, head_bytes, findings, part)
    except CorruptError as err:
        _refused(MALFORMED, err, head_bytes, findings, part)


class _Lenient(Machine):
    """Takes the globals in `known`, which are refused, for something that can be called and built."""

    known: frozenset[tuple[str, str]] = frozenset()
    refused: tuple[str, str] | None = None

    def push_global(self, module: object, name: object) -> None:
        try:
            super().push_global(module, name)
        except UnsupportedError:
            if not (isinstance(module, str) and isinstance(name, str)):
                raise
            if (module, name) not in self.known:
                self.refused = module, name
                raise
            self.stack.append(_FOREIGN)

    def reduce(self) -> None:
        if len(self.stack) > 1 and self.stack[-2] is _FOREIGN:
            self.pop()
        else:
            super().reduce()

    def build(self) -> None:
        if len(self.stack) > 1 and self.stack[-2] is _FOREIGN:
            self.pop()
        else:
            super().build()


_FOREIGN = object()


def _check_globals(pickle: bytes, limits: Limits, head_bytes: int, findings: Findings, part: Part) -> None:
    """Add each global the pickle names and no array needs, as far as it can be followed."""
    known: frozenset[tuple[str, str]] = frozenset()
    while len(known) < _MAX_GLOBALS:
        machine = _Lenient(Budget(4 * len(pickle) + (1 << 20), "many bytes"))
        machine.known = known
        try:
            run(pickle, machine, 32 * limits.pickle_leaves + 4096)
        except InputError as err:
            if machine.refused is None:
                return
            _refused(GLOBAL, err, head_bytes, findings, part)
            known |= {machine.refused}
        else:
            return


_MAX_GLOBALS = 20


_OPCODE_PLACE = re.compile(r"(?<= at byte )([0-9]+)(?=\)?$)")


def _refused(rule: Rule, err: ConvertError, head_bytes: int, findings: Findings, part: Part) -> None:
    """Add what the stack machine refused, at its place in the file."""
    place = _OPCODE_PLACE.search(err.message)
    position = int(place[1]) if place else 0
    message = re.sub(r",? at byte [0-9]+(?=\)?$)", "", err.message)
    findings.add(rule, message, hint=err.hint, **part.at(head_bytes + position))
