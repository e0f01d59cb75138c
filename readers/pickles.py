"""The arrays inside the pickle of a numpy object array, read without an unpickler.

Threat: a pickle is a program, and unpickling runs it. A subclass of `pickle.Unpickler` with a strict `find_class` still
calls whatever is allowed, with any arguments (`numpy.ndarray.__setstate__` has crashed on such), sets attributes, and
allocates what the stream asks for. So nothing here is ever imported or called on behalf of a stream.

Design: a stack machine of our own knows only the opcodes that numbers, text, bytes, lists, tuples, dicts and numpy
arrays need. A global is a row of `_GLOBALS`, never an object; REDUCE and BUILD look up what such a row means and make
plain records (`_DType`, `_Array`). Opcodes are decoded by the readers of `pickletools`; not by `pickletools.genops`
itself, which decodes an argument before its opcode can be refused, and whose text arguments cost more than linear time
or warn. Everything else is refused with its byte position.

Bounds: byte lengths are checked against the stream; dicts are lists of pairs, so crafted hashes cost nothing; at most
`_OPERATIONS_PER_LEAF` opcodes a leaf are run, which take about 100 bytes of memory each at worst; what the memo shares
is bounded where it is copied or unfolded: leaves, containers, depth, bytes, names.

Source: Python `pickletools` (protocols 0 to 5); numpy 2.4 `array_reduce`, `array_setstate`, `arraydescr_reduce` and
`_array_descr`; files of numpy 1 and Python 2 differ in module paths and in text being bytes. Read 2026-11-29.
"""

from __future__ import annotations

import io
import itertools
import math
import pickletools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

from convert.errors import CorruptError, InputError, LimitError, UnsupportedError, quoted

_HINT = "only numpy arrays, numbers, strings, dicts, lists and tuples are read from pickles"
_OPERATIONS_PER_LEAF = 32  # a number takes 1, an array 22 to 60: of arrays alone, fewer than max_leaves pass
_VISITS_PER_LEAF = 4  # containers on the way to a leaf
_NAME_CHARACTERS_PER_LEAF = 64
_SLACK = 1 << 20
_MAX_FIELDS = 65_536
_MAX_DIMENSIONS = 64
_INTEGER_BITS = 128

_SIZES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8, 12, 16), "c": (8, 16, 24, 32), "m": (8,)}
_SIZES |= {"M": (8,), "O": (0, 4, 8)}
_TYPE = re.compile(r"([biufcmMSUVO])([0-9]{0,10})")
_UNITS = frozenset(("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic"))
_SURROGATE = re.compile("[\ud800-\udfff]")
_DECIMAL = re.compile(rb"-?[0-9]+L?")


class PickledArray(NamedTuple):
    """One array as it lies in a pickle.

    Attributes:
        descr: The npy descr, as `numpy.lib.format.dtype_to_descr` gives it: a type string, or a list of fields.
        shape: Sides, each 0 or more; () for a scalar.
        fortran: The first index varies fastest.
        data: Exactly prod(shape) * itemsize bytes.
    """

    descr: object
    shape: tuple[int, ...]
    fortran: bool
    data: bytes | memoryview


@dataclass(slots=True, eq=False)
class _DType:
    kind: str
    count: int
    built: bool = False
    descr: object = None
    itemsize: int = 0
    shape: tuple[int, ...] = ()  # of a subarray; its descr is then that of one element
    fields: int = 1
    depth: int = 0


@dataclass(slots=True, eq=False)
class _Array:
    built: bool = False
    leaf: PickledArray | None = None
    objects: list[object] = field(default_factory=list)
    shape: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class _Dict:
    pairs: list[tuple[object, object]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Global:
    name: str
    call: Callable[..., object] | None
    arities: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Budget:
    left: int
    what: str

    def spend(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise LimitError(f"the pickle unfolds to too {self.what}")


@dataclass(slots=True, eq=False)
class _Machine:
    copied: _Budget
    stack: list[object] = field(default_factory=list)
    marked: list[list[object]] = field(default_factory=list)
    memo: dict[int, object] = field(default_factory=dict)

    def push(self, value: object) -> None:
        if type(value) is int and value.bit_length() >= _INTEGER_BITS:
            raise UnsupportedError(f"an integer of {value.bit_length()} bits", hint=_HINT)
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

    def append(self, values: list[object]) -> None:
        target = self.top()
        if not isinstance(target, list):
            raise UnsupportedError(f"appends to {_kind(target)}", hint=_HINT)
        target.extend(values)

    def set_items(self, values: list[object]) -> None:
        target = self.top()
        if not isinstance(target, _Dict):
            raise UnsupportedError(f"sets items of {_kind(target)}", hint=_HINT)
        target.pairs.extend(_pairs(values))

    def push_global(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise UnsupportedError("a global whose name is no text", hint=_HINT)
        known = _GLOBALS.get((module, name))
        if known is None:
            raise UnsupportedError(f"the pickle names {quoted(f'{module}.{name}')}", hint=_HINT)
        self.stack.append(known)

    def reduce(self) -> None:
        function, arguments = self.pop(2)
        if not isinstance(function, _Global) or function.call is None:
            raise UnsupportedError(f"calls {_kind(function)}", hint=_HINT)
        if not isinstance(arguments, tuple) or len(arguments) not in function.arities:
            raise CorruptError(f"{function.name} with other arguments than numpy or Python gives it")
        self.stack.append(function.call(self, *arguments))

    def build(self) -> None:
        (state,) = self.pop()
        target = self.top()
        if not isinstance(target, _DType | _Array):
            raise UnsupportedError(f"sets the state of {_kind(target)}", hint=_HINT)
        if target.built:
            raise CorruptError(f"sets the state of {_kind(target)} twice")
        if not isinstance(state, tuple):
            raise CorruptError(f"the state of {_kind(target)} is no tuple")
        if isinstance(target, _DType):
            _build_dtype(self, target, state)
        else:
            _build_array(target, state)
        target.built = True


def load_object_array(
    data: bytes | memoryview, shape: tuple[int, ...], *, max_leaves: int = 1_000_000, max_depth: int = 64
) -> list[tuple[str, PickledArray | str]]:
    """All arrays and scalars in the pickle of an object array, each under its dotted path.

    Args:
        data: The pickle, to its last byte. Held in memory; a memoryview is copied once more.
        shape: Shape of the object array, from the npy header.
        max_leaves: Most results; also bounds opcodes and the containers visited.
        max_depth: Most containers inside each other, the outermost array included.

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
    root = _run(data, _Machine(_Budget(budget, "many bytes")), _OPERATIONS_PER_LEAF * max_leaves + 4096)
    if not isinstance(root, _Array) or root.leaf is not None:
        raise CorruptError(f"the pickle holds {_kind(root)} (expected an object array)")
    if not root.built:
        raise CorruptError("the pickle holds an array without its state")
    if root.shape != shape:
        raise CorruptError(f"the pickled array has shape {root.shape} (expected {shape} as in the header)")
    size = _Budget(budget, "many bytes")
    leaves: dict[str, PickledArray | str] = {}
    for path, value in _flatten(root, max_leaves, max_depth):
        if len(leaves) >= max_leaves:
            raise LimitError(f"the pickle holds more than {max_leaves} arrays")
        if path in leaves:
            raise UnsupportedError(f"two elements of the pickle would both be called {quoted(path)}")
        try:
            leaves[path] = _leaf(value, size)
        except InputError as err:
            raise type(err)(f"element {quoted(path)}: {err.message}", hint=err.hint) from err
    return list(leaves.items())


def _run(data: bytes | memoryview, machine: _Machine, limit: int) -> object:
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
        raise LimitError(f"the pickle takes more than {limit} operations")
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
            return UnsupportedError(f"the pickle opcode {row.name} at byte {position}", hint=_HINT)
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
        raise UnsupportedError(f"an integer of {len(line)} characters", hint=_HINT)
    return int(line.removesuffix(b"L"))


# What the accepted globals mean when called. `_reconstruct` and `dtype` give records that BUILD completes.


def _call_reconstruct(machine: _Machine, kind: object, *_: object) -> object:
    if kind is not _GLOBALS["numpy", "ndarray"]:
        raise UnsupportedError(f"an array of the class {_kind(kind)}", hint=_HINT)
    return _Array()


def _call_scalar(machine: _Machine, dtype: object, data: object) -> object:
    return _new_array(dtype, (), False, data)


def _call_frombuffer(
    machine: _Machine, data: object, dtype: object, shape: object, order: object, *_: object
) -> object:
    if _text(order) not in ("C", "F"):
        raise UnsupportedError(f"an array in memory order {quoted(_text(order))}", hint="save it in C order")
    return _new_array(dtype, _shape(shape), _text(order) == "F", data)


def _call_dtype(machine: _Machine, code: object, *_: object) -> object:
    found = _TYPE.fullmatch(_text(code))
    if found is None or int(found[2] or 0) not in _SIZES.get(found[1], range(1 << 31)):
        raise UnsupportedError(f"the dtype {quoted(_text(code))}", hint=_HINT)
    return _DType(found[1], int(found[2] or 0))


def _call_bytes(machine: _Machine, value: object = b"", encoding: object = None) -> object:
    """`_codecs.encode(text, 'latin1')` is how protocols 0 to 2 write bytes; also bytes() and bytearray()."""
    if isinstance(value, bytes) and encoding is None:
        return value
    if not isinstance(value, str) or encoding is None or _text(encoding) not in ("latin1", "latin-1"):
        raise UnsupportedError("bytes of something else than text in latin1", hint=_HINT)
    machine.copied.spend(len(value))
    try:
        return value.encode("latin-1")
    except UnicodeEncodeError as err:
        raise CorruptError(f"bytes with a value over 255, at {err.start}") from err


def _call_complex(machine: _Machine, real: object, imaginary: object) -> object:
    if not isinstance(real, float) or not isinstance(imaginary, float):
        raise CorruptError("a complex number of other parts than two floats")
    return complex(real, imaginary)


def _call_ordered_dict(machine: _Machine, items: object = ()) -> object:
    """Items follow the call, but Python 2 gives them as a list of [key, value] lists."""
    if not isinstance(items, list | tuple):
        raise CorruptError("an OrderedDict of something else than pairs")
    machine.copied.spend(16 * len(items))
    result = _Dict()
    for pair in items:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise CorruptError("an OrderedDict of something else than pairs")
        result.pairs.append((pair[0], pair[1]))
    return result


# What the states mean that BUILD sets.


def _build_dtype(machine: _Machine, dtype: _DType, state: tuple[object, ...]) -> None:
    """Complete a dtype from its state, as `dtype.__setstate__` of versions 3 and 4 would."""
    if len(state) not in (8, 9) or not isinstance(state[0], int) or state[0] not in (3, 4):
        raise UnsupportedError(f"dtype state of {len(state)} items, with another version than numpy writes")
    order, subdtype, names, fields, size = _text(state[1]), *state[2:6]
    flexible = dtype.kind in "SUV"
    dtype.itemsize = dtype.count * (4 if dtype.kind == "U" else 1)
    if not isinstance(size, int) or size not in ((dtype.itemsize,) if flexible else (-1, dtype.itemsize)):
        raise CorruptError(f"dtype {dtype.kind}{dtype.count} has another itemsize than {dtype.itemsize}")
    if subdtype is not None or names is not None:
        if dtype.kind != "V" or (subdtype is not None and names is not None):
            raise CorruptError(f"fields or a subarray in dtype {dtype.kind}{dtype.count}")
        _build_fields(machine, dtype, names, fields) if names is not None else _build_subarray(dtype, subdtype)
        return
    if dtype.kind in "SVO" or dtype.itemsize == 1:
        order = "|"
    elif order not in ("<", ">"):
        raise CorruptError(f"dtype {dtype.kind}{dtype.count} has byte order {quoted(order)} (expected '<' or '>')")
    unit = _unit(state) if dtype.kind in "mM" else ""
    dtype.descr = f"{order}{dtype.kind}{'' if dtype.kind == 'O' else dtype.count}{unit}"


def _unit(state: tuple[object, ...]) -> str:
    """The unit of a datetime64 or timedelta64: '[ns]', '[25s]', or '' when generic."""
    extra = state[8] if len(state) == 9 else None
    found = extra[1] if isinstance(extra, tuple) and len(extra) == 2 else None
    if not isinstance(found, tuple) or len(found) != 4 or not all(isinstance(n, int) for n in found[1:]):
        raise CorruptError("a datetime64 without its unit")
    unit, (count, divisor, event) = _text(found[0]), found[1:]
    if unit not in _UNITS or not 1 <= count < 1 << 31 or (divisor, event) != (1, 1):
        raise UnsupportedError(f"datetime64 unit {quoted(unit)} times {count}, divisor {divisor}, event {event}")
    if unit == "generic":
        return ""
    return f"[{'' if count == 1 else count}{unit}]"


def _build_subarray(dtype: _DType, subdtype: object) -> None:
    if not isinstance(subdtype, tuple) or len(subdtype) != 2:
        raise CorruptError("a subarray that is no pair of dtype and shape")
    base, shape = _member(subdtype[0]), _shape(subdtype[1])
    if base.shape:
        raise UnsupportedError("a subarray of subarrays")
    if math.prod(shape) * base.itemsize != dtype.itemsize or not shape:
        raise CorruptError(f"a subarray of shape {shape} does not fill its {dtype.itemsize} bytes")
    dtype.descr, dtype.shape, dtype.fields, dtype.depth = base.descr, shape, base.fields, base.depth


def _build_fields(machine: _Machine, dtype: _DType, names: object, fields: object) -> None:
    """The list of fields that `numpy.lib.format.dtype_to_descr` gives, padding included."""
    if not isinstance(names, tuple) or not names or not isinstance(fields, _Dict):
        raise UnsupportedError("a structured dtype without fields")
    machine.copied.spend(8 * (len(names) + len(fields.pairs)))
    by_name = {_text(key): value for key, value in fields.pairs}
    descr: list[object] = []
    end = 0
    for name in map(_text, names):
        machine.copied.spend(len(name))
        found = by_name.pop(name, None)
        if not isinstance(found, tuple) or len(found) not in (2, 3) or not isinstance(found[1], int):
            raise CorruptError(f"field {quoted(name)} is missing, twice, or no pair of dtype and offset")
        member, offset = _member(found[0]), found[1]
        if not end <= offset <= dtype.itemsize - member.itemsize:
            raise UnsupportedError(f"field {quoted(name)} overlaps, is out of order, or leaves the structure")
        if offset > end:
            descr.append(("", f"|V{offset - end}"))
        label = (_text(found[2]), name) if len(found) == 3 else name
        descr.append((label, member.descr, member.shape) if member.shape else (label, member.descr))
        end = offset + member.itemsize
        dtype.depth = max(dtype.depth, member.depth + 1)
        dtype.fields += member.fields
    if end < dtype.itemsize:
        descr.append(("", f"|V{dtype.itemsize - end}"))
    if dtype.fields > _MAX_FIELDS or dtype.depth > 16:
        raise LimitError(f"a structured dtype of {dtype.fields} fields, {dtype.depth} deep")
    dtype.descr = descr


def _member(dtype: object) -> _DType:
    if not isinstance(dtype, _DType) or not dtype.built:
        raise CorruptError(f"{_kind(dtype)} where a dtype belongs")
    if dtype.kind == "O":
        raise UnsupportedError("a structured dtype with an object field", hint=_HINT)
    return dtype


def _build_array(array: _Array, state: tuple[object, ...]) -> None:
    if len(state) != 5 or not isinstance(state[0], int) or state[0] != 1:
        raise UnsupportedError(f"array state of {len(state)} items, with another version than numpy writes")
    _, shape, dtype, fortran, data = state
    array.shape = _shape(shape)
    if not isinstance(fortran, int) or fortran not in (0, 1):
        raise CorruptError(f"the order of an array is {_kind(fortran)}, not True or False")
    if not isinstance(dtype, _DType) or dtype.kind != "O":
        array.leaf = _new_array(dtype, array.shape, bool(fortran), data).leaf
    elif not isinstance(data, list) or not dtype.built:
        raise CorruptError(f"the data of an object array is {_kind(data)}, not a list")
    elif len(data) != math.prod(array.shape):
        raise CorruptError(f"an object array of shape {array.shape} holds {len(data)} objects")
    else:
        array.objects = data  # in C order, whatever `fortran` says (numpy `_getlist_pkl`)


def _new_array(dtype: object, shape: tuple[int, ...], fortran: bool, data: object) -> _Array:
    if not isinstance(dtype, _DType) or not dtype.built or dtype.shape:
        raise CorruptError(f"an array whose dtype is {_kind(dtype)}")
    if dtype.kind == "O":
        raise UnsupportedError("a numpy scalar or buffer of objects", hint=_HINT)
    if not isinstance(data, bytes):
        raise CorruptError(f"the data of an array is {_kind(data)}, not bytes")
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise CorruptError(f"an array of shape {shape} and {dtype.itemsize} byte elements has {len(data)} bytes")
    return _Array(True, PickledArray(dtype.descr, shape, fortran, data), [], shape)


def _shape(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > _MAX_DIMENSIONS:
        raise CorruptError(f"a shape that is {_kind(value)} or has over {_MAX_DIMENSIONS} sides")
    if not all(type(side) is int and side >= 0 for side in value):
        raise CorruptError("a shape with a side that is negative or no integer")
    if math.prod(side or 1 for side in value) >= 1 << 63:
        raise LimitError("a shape of more than 2**63 elements")
    return value


def _text(value: object) -> str:
    """Text of the machinery (names, codes, keys), which Python 2 wrote as bytes."""
    if isinstance(value, bytes) and value.isascii():
        return value.decode("ascii")
    if not isinstance(value, str):
        raise UnsupportedError(f"{_kind(value)} where text belongs", hint=_HINT)
    if not value.isascii() and _SURROGATE.search(value):
        raise UnsupportedError("a name with half of a surrogate pair")
    return value


def _pairs(values: list[object]) -> Iterator[tuple[object, object]]:
    if len(values) % 2:
        raise CorruptError("a dict key without a value")
    return zip(values[::2], values[1::2], strict=True)


def _kind(value: object) -> str:
    if isinstance(value, _Global):
        return value.name
    if isinstance(value, _Array | _DType | _Dict):
        return {_Array: "a numpy array", _DType: "a numpy dtype", _Dict: "a dict"}[type(value)]
    return "None" if value is None else f"a {type(value).__name__}"


# From nested containers to a flat list.


def _flatten(root: _Array, max_leaves: int, max_depth: int) -> Iterator[tuple[str, object]]:
    """Path and value of everything that is no container, depth first, without recursion."""
    visits = _Budget(_VISITS_PER_LEAF * max_leaves + 4096, "many containers")
    names = _Budget(_NAME_CHARACTERS_PER_LEAF * max_leaves + _SLACK, "long names")
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
                raise LimitError(f"containers inside each other more than {max_depth} deep, at {quoted(path or '')}")
            open_containers.append((path, _children(value)))
            break
        else:
            open_containers.pop()


def _is_container(value: object) -> bool:
    return isinstance(value, list | tuple | _Dict) or (isinstance(value, _Array) and value.leaf is None and value.built)


def _children(value: object) -> Iterator[tuple[str | None, object]]:
    """Key and value of each element; the one element of a 0-d array has no key."""
    if isinstance(value, _Dict):
        for key, item in value.pairs:
            yield str(key) if type(key) is int else _text(key), item
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield str(index), item
    elif isinstance(value, _Array) and value.objects:
        # Every side is at most the number of objects, so product() holds no more than those.
        for position, item in zip(itertools.product(*map(range, value.shape)), value.objects, strict=True):
            yield ".".join(map(str, position)) if position else None, item


def _leaf(value: object, size: _Budget) -> PickledArray | str:
    if isinstance(value, _Array):
        if value.leaf is None:
            raise CorruptError("an array without its state")
        size.spend(len(value.leaf.data))
        return value.leaf
    if isinstance(value, str):
        size.spend(4 * len(value))
        if _SURROGATE.search(value):
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
    raise UnsupportedError(f"{_kind(value)} is neither array nor number nor text", hint=_HINT)


# The tables. An opcode or global that is not in them is refused.

_GLOBALS: dict[tuple[str, str], _Global] = {
    (module, name): _Global(f"{module}.{name}", call, arities)
    for modules, name, call, arities in (
        ("numpy", "ndarray", None, ()),
        ("numpy", "dtype", _call_dtype, (1, 2, 3)),
        ("numpy.core.multiarray numpy._core.multiarray", "_reconstruct", _call_reconstruct, (3,)),
        ("numpy.core.multiarray numpy._core.multiarray", "scalar", _call_scalar, (2,)),
        ("numpy.core.numeric numpy._core.numeric", "_frombuffer", _call_frombuffer, (4, 5)),
        ("_codecs", "encode", _call_bytes, (2,)),
        ("builtins __builtin__", "bytes", _call_bytes, (0, 1)),
        ("builtins __builtin__", "bytearray", _call_bytes, (0, 1, 2)),
        ("builtins __builtin__", "complex", _call_complex, (2,)),
        ("collections", "OrderedDict", _call_ordered_dict, (0, 1)),
    )
    for module in modules.split()
}

_HANDLERS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda m, version: _check_protocol(version),
    "FRAME": lambda m, length: None,
    "NONE": lambda m, _: m.stack.append(None),
    "NEWTRUE": lambda m, _: m.stack.append(True),
    "NEWFALSE": lambda m, _: m.stack.append(False),
    "INT": lambda m, line: m.push(line == b"01" if line in (b"00", b"01") else _decimal(line)),
    "LONG": lambda m, line: m.push(_decimal(line)),
    "EMPTY_TUPLE": lambda m, _: m.stack.append(()),
    "EMPTY_LIST": lambda m, _: m.stack.append([]),
    "EMPTY_DICT": lambda m, _: m.stack.append(_Dict()),
    "MARK": lambda m, _: m.mark(),
    "TUPLE": lambda m, _: m.wrap(tuple),
    "LIST": lambda m, _: m.wrap(list),
    "DICT": lambda m, _: m.wrap(lambda values: _Dict(list(_pairs(values)))),
    "TUPLE1": lambda m, _: m.stack.append(tuple(m.pop(1))),
    "TUPLE2": lambda m, _: m.stack.append(tuple(m.pop(2))),
    "TUPLE3": lambda m, _: m.stack.append(tuple(m.pop(3))),
    "APPEND": lambda m, _: m.append(m.pop()),
    "APPENDS": lambda m, _: m.append(m.pop_mark()),
    "SETITEM": lambda m, _: m.set_items(m.pop(2)),
    "SETITEMS": lambda m, _: m.set_items(m.pop_mark()),
    "PUT": lambda m, line: m.put(_decimal(line)),
    "GET": lambda m, line: m.get(_decimal(line)),
    "BINPUT": _Machine.put,
    "BINGET": _Machine.get,
    "LONG_BINPUT": _Machine.put,
    "LONG_BINGET": _Machine.get,
    "MEMOIZE": lambda m, _: m.put(len(m.memo)),
    "GLOBAL": lambda m, names: m.push_global(*names),
    "STACK_GLOBAL": lambda m, _: m.push_global(*m.pop(2)),
    "REDUCE": lambda m, _: m.reduce(),
    "BUILD": lambda m, _: m.build(),
}
_PUSHED = """BININT BININT1 BININT2 LONG1 LONG4 FLOAT BINFLOAT BINSTRING SHORT_BINSTRING
    BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8"""
_HANDLERS |= dict.fromkeys(_PUSHED.split(), _Machine.push)

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
_OPCODES: dict[bytes, tuple[str, Callable[[IO[bytes]], object] | None, Callable[[_Machine, Any], None]]] = {
    row.code.encode("latin-1"): (row.name, _READERS.get(row.name, row.arg.reader if row.arg else None), handler)
    for row in pickletools.opcodes
    if (handler := _HANDLERS.get(row.name)) is not None
}
