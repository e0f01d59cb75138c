"""A symbolic stack machine for pickles: it knows a few opcodes, and imports and calls nothing that a stream names.

Opcodes are decoded by the readers of `pickletools`; not by `pickletools.genops` itself, which decodes an argument
before its opcode can be refused, and whose text arguments cost more than linear time or warn. See `readers.pickles`.

Source: Python `pickletools` (protocols 0 to 5). Read 2026-11-29.
"""

from __future__ import annotations

import io
import pickletools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from convert.errors import CorruptError, InputError, UnsupportedError, quoted
from convert.limits import DEFAULT, Budget, exceeded
from readers.pickleglobals import (
    GLOBALS,
    HINT,
    ArrayRecord,
    DictRecord,
    DTypeRecord,
    Global,
    build_array,
    build_dtype,
    kind_of,
)

_INTEGER_BITS = 128
OPERATIONS_PER_LEAF = 32  # a number takes 1, an array 22 to 60: of arrays alone, fewer than max_leaves pass
_DECIMAL = re.compile(rb"-?[0-9]+L?")


@dataclass(slots=True, eq=False)
class Machine:
    """Stack, marks and memo of one run.

    Attributes:
        copied: Bounds what opcodes copy beyond the stream.
        max_memo: Most entries of the memo.
    """

    copied: Budget
    max_memo: int = DEFAULT.pickle_memo
    stack: list[object] = field(default_factory=list)
    marked: list[list[object]] = field(default_factory=list)
    memo: dict[int, object] = field(default_factory=dict)

    def push(self, value: object) -> None:
        if type(value) is int and value.bit_length() >= _INTEGER_BITS:
            raise UnsupportedError(f"an integer of {value.bit_length()} bits", hint=HINT)
        self.stack.append(value)

    def pop(self, count: int = 1) -> list[object]:
        if len(self.stack) < count:
            raise CorruptError("the stack is empty")
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def pop_mark(self) -> list[object]:
        if not self.marked:
            raise CorruptError("no mark on the stack")
        taken, self.stack = self.stack, self.marked.pop()
        return taken

    def wrap(self, make: Callable[[list[object]], object]) -> None:
        values = self.pop_mark()
        self.stack.append(make(values))

    def mark(self) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def top(self) -> object:
        if not self.stack:
            raise CorruptError("the stack is empty")
        return self.stack[-1]

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise CorruptError(f"memo entry {index} does not exist")
        self.stack.append(self.memo[index])

    def put(self, index: int) -> None:
        if not 0 <= index < 1 << 32:
            raise CorruptError(f"memo index {index} is out of range")
        self.memo[index] = self.top()
        if len(self.memo) > self.max_memo:
            raise exceeded("pickle_memo", "the pickle keeps too many objects", self.max_memo)

    def append(self, values: list[object]) -> None:
        target = self.top()
        if not isinstance(target, list):
            raise UnsupportedError(f"appends to {kind_of(target)}", hint=HINT)
        target.extend(values)

    def set_items(self, values: list[object]) -> None:
        target = self.top()
        if not isinstance(target, DictRecord):
            raise UnsupportedError(f"sets items of {kind_of(target)}", hint=HINT)
        target.pairs.extend(_pairs(values))

    def push_global(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise UnsupportedError("a global whose name is no text", hint=HINT)
        known = GLOBALS.get((module, name))
        if known is None:
            raise UnsupportedError(f"the pickle names {quoted(f'{module}.{name}')}", hint=HINT)
        self.stack.append(known)

    def reduce(self) -> None:
        function, arguments = self.pop(2)
        if not isinstance(function, Global) or function.call is None:
            raise UnsupportedError(f"calls {kind_of(function)}", hint=HINT)
        if not isinstance(arguments, tuple) or len(arguments) not in function.arities:
            raise CorruptError(f"{function.name} with other arguments than numpy or Python gives it")
        self.stack.append(function.call(self.copied, *arguments))

    def build(self) -> None:
        (state,) = self.pop()
        target = self.top()
        if not isinstance(target, DTypeRecord | ArrayRecord):
            raise UnsupportedError(f"sets the state of {kind_of(target)}", hint=HINT)
        if target.built:
            raise CorruptError(f"sets the state of {kind_of(target)} twice")
        if not isinstance(state, tuple):
            raise CorruptError(f"the state of {kind_of(target)} is no tuple")
        if isinstance(target, DTypeRecord):
            build_dtype(self.copied, target, state)
        else:
            build_array(target, state)
        target.built = True


def run(data: bytes | memoryview, machine: Machine, limit: int) -> object:
    """The one object that a pickle leaves on its stack, as records and plain values.

    Raises:
        InputError: The stream is malformed, or uses what is not in the tables.
        LimitError: It takes more than `limit` operations.
    """
    stream = io.BytesIO(data)
    for _ in range(limit):
        position = stream.tell()
        code = stream.read(1)
        if code == b".":
            break
        if code not in _OPCODES:
            raise _unknown(code, position)
        name, reader, handler = _OPCODES[code]
        try:
            handler(machine, None if reader is None else _argument(reader, stream))
        except InputError as err:
            raise type(err)(f"{err.message} (pickle opcode {name} at byte {position})", hint=err.hint) from err
    else:
        needed = 2 * limit // OPERATIONS_PER_LEAF
        raise exceeded("pickle_leaves", "the pickle takes too many operations", limit, needed=needed)
    if stream.read(1):
        raise CorruptError(f"{len(data) - position - 1} bytes follow the end of the pickle at byte {position}")
    if machine.marked or len(machine.stack) != 1:
        raise CorruptError(f"the pickle ends with {len(machine.stack)} objects on its stack (expected 1)")
    return machine.stack[0]


def _argument(reader: Callable[[IO[bytes]], object], stream: IO[bytes]) -> object:
    try:
        return reader(stream)
    except (ValueError, OverflowError) as err:  # all that pickletools' readers raise; UnicodeError is a ValueError
        raise CorruptError(str(err)) from err


def _check_protocol(version: int) -> None:
    if version > 5:
        raise UnsupportedError(f"pickle protocol {version} (expected at most 5)")


def _unknown(code: bytes, position: int) -> InputError:
    if not code:
        return CorruptError(f"the pickle ends before its STOP opcode, at byte {position}")
    for row in pickletools.opcodes:
        if row.code == code.decode("latin-1"):
            return UnsupportedError(f"the pickle opcode {row.name} at byte {position}", hint=HINT)
    return CorruptError(f"no pickle opcode is {code!r}, at byte {position}")


def _line(stream: IO[bytes]) -> bytes:
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise ValueError("a line without end")
    return line[:-1]


def _read_global(stream: IO[bytes]) -> tuple[str, str]:
    return _line(stream).decode("utf-8"), _line(stream).decode("utf-8")


def _decimal(line: bytes) -> int:
    if not _DECIMAL.fullmatch(line):
        raise CorruptError("a number with other characters than digits")
    if len(line) > 41:  # int() takes more than linear time; 41 are the digits of 2**128, sign and L
        raise UnsupportedError(f"an integer of {len(line)} characters", hint=HINT)
    return int(line.removesuffix(b"L"))


def _pairs(values: list[object]) -> Iterator[tuple[object, object]]:
    if len(values) % 2:
        raise CorruptError("a dict key without a value")
    return zip(values[::2], values[1::2], strict=True)


# The tables. An opcode that is not in them is refused.

_HANDLERS: dict[str, Callable[[Machine, Any], None]] = {
    "PROTO": lambda m, version: _check_protocol(version),
    "FRAME": lambda m, length: None,
    "NONE": lambda m, _: m.stack.append(None),
    "NEWTRUE": lambda m, _: m.stack.append(True),
    "NEWFALSE": lambda m, _: m.stack.append(False),
    "INT": lambda m, line: m.push(line == b"01" if line in (b"00", b"01") else _decimal(line)),
    "LONG": lambda m, line: m.push(_decimal(line)),
    "EMPTY_TUPLE": lambda m, _: m.stack.append(()),
    "EMPTY_LIST": lambda m, _: m.stack.append([]),
    "EMPTY_DICT": lambda m, _: m.stack.append(DictRecord()),
    "MARK": lambda m, _: m.mark(),
    "TUPLE": lambda m, _: m.wrap(tuple),
    "LIST": lambda m, _: m.wrap(list),
    "DICT": lambda m, _: m.wrap(lambda values: DictRecord(list(_pairs(values)))),
    "TUPLE1": lambda m, _: m.stack.append(tuple(m.pop(1))),
    "TUPLE2": lambda m, _: m.stack.append(tuple(m.pop(2))),
    "TUPLE3": lambda m, _: m.stack.append(tuple(m.pop(3))),
    "APPEND": lambda m, _: m.append(m.pop()),
    "APPENDS": lambda m, _: m.append(m.pop_mark()),
    "SETITEM": lambda m, _: m.set_items(m.pop(2)),
    "SETITEMS": lambda m, _: m.set_items(m.pop_mark()),
    "PUT": lambda m, line: m.put(_decimal(line)),
    "GET": lambda m, line: m.get(_decimal(line)),
    "BINPUT": Machine.put,
    "BINGET": Machine.get,
    "LONG_BINPUT": Machine.put,
    "LONG_BINGET": Machine.get,
    "MEMOIZE": lambda m, _: m.put(len(m.memo)),
    "GLOBAL": lambda m, names: m.push_global(*names),
    "STACK_GLOBAL": lambda m, _: m.push_global(*m.pop(2)),
    "REDUCE": lambda m, _: m.reduce(),
    "BUILD": lambda m, _: m.build(),
}
_PUSHED = """BININT BININT1 BININT2 LONG1 LONG4 FLOAT BINFLOAT BINSTRING SHORT_BINSTRING
    BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8"""
_HANDLERS |= dict.fromkeys(_PUSHED.split(), Machine.push)

# Where the reader of pickletools would not do: the text of Python 2 is bytes, and a bytearray would be a copy.
_READERS: dict[str, Callable[[IO[bytes]], object]] = {
    "BINSTRING": pickletools.read_bytes4,
    "SHORT_BINSTRING": pickletools.read_bytes1,
    "BYTEARRAY8": pickletools.read_bytes8,
    "GLOBAL": _read_global,
    "INT": _line,
    "LONG": _line,
    "PUT": _line,
    "GET": _line,
}
_OPCODES: dict[bytes, tuple[str, Callable[[IO[bytes]], object] | None, Callable[[Machine, Any], None]]] = {
    row.code.encode("latin-1"): (row.name, _READERS.get(row.name, row.arg.reader if row.arg else None), handler)
    for row in pickletools.opcodes
    if (handler := _HANDLERS.get(row.name)) is not None
}
