"""The techniques of published attacks on pickles: none runs anything, none resolves a global that is not in the table.

Streams are assembled from the names of `pickletools`, so that each attack can be read. While ours reads one, Python's
own audit events are watched: an import, a call of exec, a file opened or a global looked up would be seen, whatever
became of it afterwards. Attacks that can be shown to work are also given to pickle itself, which proves that they do.

Techniques: Slaviero, "Sour Pickles" (Black Hat 2011); trailofbits/fickling and its example scripts; advisories of
picklescan and modelscan on gadgets they missed; ReversingLabs, "nullifAI" (2025), on streams that break off after the
payload; pain-pickle and pickora, on memo and BUILD. Read 2026-11-29.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import pickle
import pickletools
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert.cli.main import run
from readers.pickleglobals import GLOBALS
from readers.pickles import load_object_array

# --- an assembler ------------------------------------------------------------------------------------------------

CODES = {row.name: row for row in pickletools.opcodes}


def op(name: str, *arguments: Any) -> bytes:
    """One opcode, its argument encoded as `pickletools` describes it."""
    row = CODES[name]
    code = row.code.encode("latin-1")
    kind = "" if row.arg is None else row.arg.name
    if not kind:
        return code
    value = arguments[0]
    if kind == "stringnl_noescape_pair":
        module, attribute = map(str, arguments)
        return code + f"{module}\n{attribute}\n".encode()
    if kind in ("decimalnl_short", "decimalnl_long", "floatnl", "stringnl", "stringnl_noescape", "unicodestringnl"):
        return code + str(value).encode() + b"\n"
    packed = {
        "uint1": "<B", "uint2": "<H", "int4": "<i", "uint4": "<I", "uint8": "<Q",
    }  # fmt: skip
    if kind in packed:
        return code + struct.pack(packed[kind], value)
    widths = {"1": "<B", "4": "<I", "8": "<Q"}
    data: bytes = value.encode() if isinstance(value, str) else value
    return code + struct.pack(widths[kind[-1]], len(data)) + data


def text(value: str) -> bytes:
    return op("BINUNICODE", value)


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + op("MARK") + b"".join(arguments) + op("TUPLE") + op("REDUCE")


def name(module: str, attribute: str) -> bytes:
    return op("GLOBAL", module, attribute)


def stack_global(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + op("STACK_GLOBAL")


def tuple_of(*items: bytes) -> bytes:
    return op("MARK") + b"".join(items) + op("TUPLE")


def int_(value: int) -> bytes:
    return op("BININT", value)


NDARRAY = name("numpy", "ndarray")
EMPTY_ARRAY = call(name("numpy._core.multiarray", "_reconstruct"), NDARRAY, tuple_of(int_(0)), op("BINBYTES", b"b"))
NONE = op("NONE")


def dtype(code: str, order: str = "|", *, subdtype: bytes = NONE, names: bytes = NONE, fields: bytes = NONE) -> bytes:
    size = int_(-1)
    made = call(name("numpy", "dtype"), text(code), op("NEWFALSE"), op("NEWTRUE"))
    state = tuple_of(int_(3), text(order), subdtype, names, fields, size, size, int_(63 if code == "O8" else 0))
    return made + state + op("BUILD")


OBJECT = dtype("O8")


def array_of(*items: bytes, kind: bytes = OBJECT) -> bytes:
    """An object array of these."""
    data = op("EMPTY_LIST") + op("MARK") + b"".join(items) + op("APPENDS")
    state = tuple_of(int_(1), tuple_of(int_(len(items))), kind, op("NEWFALSE"), data)
    return EMPTY_ARRAY + state + op("BUILD")


def boxed(item: bytes) -> bytes:
    """A whole stream: an object array of one element."""
    return op("PROTO", 4) + array_of(item) + op("STOP")


# --- watching ----------------------------------------------------------------------------------------------------

_seen: list[str] | None = None


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if _seen is not None and not event.startswith(("object.__getattr__", "sys._getframe", "cpython.", "gc.")):
        _seen.append(f"{event} {arguments!r:.100}")


sys.addaudithook(_watch)


@contextlib.contextmanager
def nothing_happens() -> Iterator[None]:
    """Inside, no module comes in, and nothing is imported, looked up, opened, compiled or run."""
    global _seen
    modules = set(sys.modules)
    _seen = []
    try:
        yield
    finally:
        seen, _seen = _seen, None
    assert seen == []
    assert set(sys.modules) == modules


def refused(stream: bytes) -> convert.ConvertError:
    """What ours says, and that nothing else happened."""
    shape = (1,)
    found: convert.ConvertError | None = None
    with nothing_happens():
        try:
            load_object_array(stream, shape)
        except convert.ConvertError as err:
            found = err
    assert found is not None, "the stream was read"
    assert str(found).isprintable() or "\n" in str(found)
    return found


def test_the_watch_sees() -> None:
    """The test of the tests: what pickle does is noticed."""
    with pytest.raises(AssertionError, match=r"pickle\.find_class"), nothing_happens():
        pickle.loads(op("PROTO", 4) + name("collections", "OrderedDict") + op("STOP"))


def test_the_assembler_is_right() -> None:
    """Harmless arrays made with it are read by pickle, and by us, as numpy's own."""
    stream = boxed(array_of(text("a"), int_(5)))
    found = pickle.loads(stream)
    assert found.dtype == object
    assert list(found[0]) == ["a", 5]
    with nothing_happens():
        assert load_object_array(stream, (1,)) == [("0.0", "a"), ("0.1", "5")]


# --- attacks that work on pickle ---------------------------------------------------------------------------------

Marker = str


def code_for(marker: Marker) -> str:
    return f"open({marker!r}, 'w').close()"


def _getattr_chain(marker: Marker) -> bytes:
    """getattr(getattr(getattr(type(()), '__base__'), '__subclasses__')(), '__len__') and on to the real thing."""
    getattr_ = name("builtins", "getattr")
    imported = call(name("builtins", "__import__"), text("builtins"))
    return call(call(getattr_, imported, text("exec")), text(code_for(marker)))


def _globals_chain(marker: Marker) -> bytes:
    """builtins.getattr over dict.get over globals(): how a check of module names is passed by."""
    getter = call(name("builtins", "getattr"), name("builtins", "dict"), text("get"))
    found = call(getter, call(name("builtins", "globals")), text("__builtins__"))
    item = call(name("builtins", "getattr"), name("builtins", "dict"), text("get"))
    return call(call(item, found, text("exec")), text(code_for(marker)))


def _memo(marker: Marker) -> bytes:
    """The global is made early, kept under a number, and called from there; the visible part looks harmless."""
    kept = name("builtins", "exec") + op("BINPUT", 200) + op("POP")
    return kept + call(op("BINGET", 200), text(code_for(marker)))


def _memo_parts(marker: Marker) -> bytes:
    """Module and attribute come from the memo, where they lay as plain text."""
    kept = text("builtins") + op("PUT", 7) + op("POP") + text("exec") + op("LONG_BINPUT", 70_000) + op("POP")
    return kept + call(op("GET", 7) + op("LONG_BINGET", 70_000) + op("STACK_GLOBAL"), text(code_for(marker)))


def _dup_pop(marker: Marker) -> bytes:
    """Called, and its result thrown away: the stream leaves just a number."""
    return call(name("builtins", "exec"), text(code_for(marker))) + op("POP") + int_(1)


def _pop_mark(marker: Marker) -> bytes:
    return op("MARK") + call(name("builtins", "exec"), text(code_for(marker))) + op("POP_MARK") + int_(1)


def _build(marker: Marker) -> bytes:
    """BUILD calls __setstate__: of an object whose dictionary an earlier BUILD has filled."""
    made = call(name("types", "SimpleNamespace"))
    state = op("EMPTY_DICT") + text("__setstate__") + name("builtins", "exec") + op("SETITEM")
    return made + state + op("BUILD") + text(code_for(marker)) + op("BUILD")


def _scalar(marker: Marker) -> bytes:
    """numpy's scalar of type object: its bytes are a pickle, in the pickle."""
    inner = call(name("builtins", "exec"), text(code_for(marker)))
    inner = op("PROTO", 4) + inner + op("STOP")
    return call(name("pickle", "loads"), op("BINBYTES", inner))


def _extension(marker: Marker) -> bytes:
    """A code of the extension registry stands for a global."""
    return call(op("EXT1", 240), text(code_for(marker)))


WORKING: dict[str, Callable[[Marker], bytes]] = {
    "reduce": lambda marker: call(name("builtins", "exec"), text(code_for(marker))),
    "reduce-python-2": lambda marker: op("PROTO", 2)
    + call(name("__builtin__", "eval"), text(code_for(marker))),
    "stack-global": lambda marker: call(stack_global("builtins", "exec"), text(code_for(marker))),
    "dotted-name": lambda marker: call(
        stack_global("pathlib", "Path.touch"), call(name("pathlib", "Path"), text(marker))
    ),
    "dotted-from-numpy": lambda marker: call(stack_global("numpy", "lib._datasource.os.mkdir"), text(marker)),
    "inst": lambda marker: op("MARK") + text(code_for(marker)) + op("INST", "builtins", "exec"),
    "obj": lambda marker: op("MARK") + name("builtins", "exec") + text(code_for(marker)) + op("OBJ"),
    "newobj": lambda marker: name("pathlib", "Path")
    + op("POP")
    + call(
        name("builtins", "list"),
        name("builtins", "map") + tuple_of(name("builtins", "exec"), tuple_of(text(code_for(marker)))) + op("NEWOBJ"),
    ),
    "newobj-ex": lambda marker: call(
        name("builtins", "list"),
        name("builtins", "map")
        + tuple_of(name("builtins", "exec"), tuple_of(text(code_for(marker))))
        + op("EMPTY_DICT")
        + op("NEWOBJ_EX"),
    ),
    "getattr-chain": _getattr_chain,
    "globals-chain": _globals_chain,
    "methodcaller": lambda marker: call(
        call(name("operator", "methodcaller"), text("touch")), call(name("pathlib", "Path"), text(marker))
    ),
    "partial": lambda marker: call(
        call(name("functools", "partial"), name("builtins", "exec"), text(code_for(marker)))
    ),
    "memo": _memo,
    "memo-parts": _memo_parts,
    "result-dropped": _dup_pop,
    "result-dropped-by-mark": _pop_mark,
    "build-setstate": _build,
    "pickle-in-pickle": _scalar,
    "extension": _extension,
    "runpy": lambda marker: call(name("runpy", "_run_code"), text(code_for(marker)), op("EMPTY_DICT")),
    "numpy-runstring": lambda marker: call(
        name("numpy.testing._private.utils", "runstring"), text(code_for(marker)), op("EMPTY_DICT")
    ),
    "timeit": lambda marker: call(name("timeit", "timeit"), text("0"), text(code_for(marker))),
    "interpreter": lambda marker: call(
        call(name("builtins", "getattr"), call(name("code", "InteractiveInterpreter")), text("runcode")),
        call(name("builtins", "compile"), text(code_for(marker)), text("x"), text("exec")),
    ),
    "folder": lambda marker: call(name("posix", "mkdir"), text(marker)),
    "shutil": lambda marker: call(name("shutil", "copyfile"), text(__file__), text(marker)),
    "nested-in-arrays": lambda marker: array_of(
        array_of(array_of(call(name("builtins", "exec"), text(code_for(marker)))))
    ),
    "in-a-dict-key": lambda marker: op("EMPTY_DICT")
    + call(name("builtins", "exec"), text(code_for(marker)))
    + int_(1)
    + op("SETITEM"),
    "in-the-state-of-an-array": lambda marker: EMPTY_ARRAY
    + tuple_of(
        int_(1), tuple_of(int_(1)), OBJECT, op("NEWFALSE"),
        op("EMPTY_LIST") + call(name("builtins", "exec"), text(code_for(marker))) + op("APPEND"),
    )
    + op("BUILD"),
    "in-the-metadata-of-a-dtype": lambda marker: call(
        name("numpy", "dtype"), text("f4"), op("NEWFALSE"), call(name("builtins", "exec"), text(code_for(marker)))
    ),
}  # fmt: skip


@pytest.fixture
def extension() -> Iterator[None]:
    """A registry in which code 240 is exec, as a library in the process may have it."""
    copyreg.add_extension("builtins", "exec", 240)
    yield
    copyreg.remove_extension("builtins", "exec", 240)


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("what", WORKING)
def test_what_works_on_pickle_does_nothing_here(what: str, tmp_path: Path) -> None:
    """Refused with its position; and given to pickle, it does what it was made for."""
    marker = tmp_path / "marker"
    stream = boxed(WORKING[what](str(marker)))
    found = refused(stream)
    assert isinstance(found, convert.UnsupportedError)
    assert "pickle" in found.message
    assert " at byte " in found.message
    assert not marker.exists()
    with contextlib.suppress(Exception):
        pickle.loads(stream)
    assert marker.exists(), "this is no attack"


@pytest.mark.parametrize("what", ["cut", "broken", "joined"])
def test_a_payload_before_the_damage_does_not_run(what: str, tmp_path: Path) -> None:
    """A stream that breaks off, or goes on, after its payload: scanners give up, and pickle has run it by then."""
    marker = tmp_path / "marker"
    attack = op("PROTO", 4) + call(name("builtins", "exec"), text(code_for(str(marker))))
    stream = {"cut": attack, "broken": attack + b"\xff\xff", "joined": boxed(int_(1)) + attack + op("STOP")}[what]
    refused(stream)
    assert not marker.exists()
    if what == "joined":
        assert "follow the end" in str(refused(stream))
        return
    with pytest.raises((EOFError, pickle.UnpicklingError)):
        pickle.loads(stream)
    assert marker.exists()


# --- globals -----------------------------------------------------------------------------------------------------

GADGETS = """
    os.system posix.system nt.system os.popen os.execv os.spawnlp pty.spawn subprocess.Popen
    subprocess.check_output commands.getoutput builtins.eval builtins.exec builtins.compile
    builtins.__import__ builtins.open builtins.getattr builtins.setattr builtins.apply builtins.map
    builtins.type builtins.globals builtins.breakpoint io.open _io.FileIO importlib.import_module
    importlib._bootstrap._load runpy._run_code runpy.run_path code.InteractiveInterpreter
    codeop.compile_command types.FunctionType types.CodeType types.SimpleNamespace marshal.loads pickle.loads
    _pickle.loads dill.loads cloudpickle.loads joblib.load shelve.open operator.attrgetter
    operator.methodcaller functools.partial functools.reduce itertools.starmap
    multiprocessing.util.spawnv_passfds ctypes.CDLL _posixsubprocess.fork_exec socket.create_connection
    urllib.request.urlopen http.client.HTTPSConnection requests.api.get webbrowser.open shutil.rmtree
    shutil.copyfile tempfile.mktemp zipfile.ZipFile pathlib.Path timeit.timeit cProfile.runctx
    profile.Profile.run pstats.Stats bdb.Bdb.run pdb.run trace.Trace.run doctest.debug_script
    unittest.mock._importer pydoc.pipepager pydoc.locate ensurepip._run_pip pip.main venv.create
    distutils.file_util.write_file lib2to3.pgen2.grammar.Grammar.loadg logging.config._resolve
    idlelib.run.Executive.runcode asyncio.unix_events._UnixSubprocessTransport._start sys.exit sys.settrace
    gc.get_objects inspect.currentframe weakref.proxy copyreg._reconstructor copyreg.add_extension
    copy_reg._reconstructor collections.defaultdict collections.UserDict collections.Counter
    _collections.OrderedDict torch.load torch._utils._rebuild_tensor_v2 torch.hub.load
    torch.serialization.load torch.jit.unsupported_tensor_ops.execWrapper jax._src.array._reconstruct_array
    tensorflow.keras.models.load_model pandas.read_pickle sklearn.tree._tree.Tree numpy.load numpy.fromfile
    numpy.memmap numpy.save numpy.matrix numpy.recarray numpy.ma.core._mareconstruct numpy.frombuffer
    numpy.fromregex numpy.genfromtxt numpy.ctypeslib.load_library numpy.f2py.crackfortran.myeval
    numpy.testing._private.utils.runstring numpy.distutils.exec_command.exec_command numpy.lib.npyio.NpzFile
    numpy.core.records.fromfile numpy._core.multiarray.fromfile numpy.core.multiarray.set_typeDict
    numpy.random.__RandomState_ctor numpy.core._internal._ctypes numpy.vectorize numpy.apply_along_axis
    numpy.core.multiarray._vec_string ml_dtypes.finfo ml_dtypes._finfo.np.load _codecs.decode _codecs.lookup
    codecs.decode codecs.open
""".split()  # noqa: SIM905


@pytest.mark.parametrize("gadget", GADGETS)
@pytest.mark.parametrize("way", ["GLOBAL", "STACK_GLOBAL", "INST", "named only"])
def test_no_gadget_is_resolved(gadget: str, way: str) -> None:
    """The globals of known attacks: refused by name, before any of their modules is looked for."""
    module, _, attribute = gadget.rpartition(".")
    assert (module, attribute) not in GLOBALS
    stream = {
        "GLOBAL": call(name(module, attribute), text("x")),
        "STACK_GLOBAL": call(stack_global(module, attribute), text("x")),
        "INST": op("MARK") + text("x") + op("INST", module, attribute),
        "named only": name(module, attribute),
    }[way]
    found = refused(boxed(stream))
    assert isinstance(found, convert.UnsupportedError)
    if way != "INST":
        assert repr(gadget) in found.message


ODD_NAMES: dict[str, bytes] = {
    "upper case": name("NUMPY", "ndarray"),
    "space behind": name("numpy ", "ndarray"),
    "space before": name("numpy", " ndarray"),
    "carriage return": op("GLOBAL", "numpy", "ndarray\r"),
    "look-alike": name("num\N{CYRILLIC SMALL LETTER ER}y", "ndarray"),
    "ligature": name("numpy", "ndarra\N{LATIN SMALL LETTER Y WITH DOT ABOVE}"),
    "NUL": stack_global("numpy\0os", "ndarray"),
    "newline": stack_global("numpy\n", "ndarray"),
    "empty": name("", ""),
    "empty module": stack_global("", "numpy.ndarray"),
    "all in the name": stack_global("numpy", "ndarray.tofile"),
    "all in the module": stack_global("numpy.ndarray", "tofile"),
    "dunder": stack_global("numpy", "ndarray.__class__.__base__.__subclasses__"),
    "dtype's": stack_global("numpy", "dtype.__init__"),
    "encode's": stack_global("_codecs", "encode.__self__"),
    "relative": stack_global(".os", "system"),
    "bytes": op("SHORT_BINBYTES", b"numpy") + op("SHORT_BINBYTES", b"ndarray") + op("STACK_GLOBAL"),
    "old bytes": op("SHORT_BINSTRING", b"numpy") + op("SHORT_BINSTRING", b"ndarray") + op("STACK_GLOBAL"),
    "numbers": int_(1) + int_(2) + op("STACK_GLOBAL"),
    "a global as module": NDARRAY + text("tofile") + op("STACK_GLOBAL"),
    "a million letters": stack_global("n" * 1_000_000, "ndarray"),
    "control characters": stack_global("\x1b[2J\x9b31m", "\u202egnp.exe"),
}


@pytest.mark.parametrize("what", ODD_NAMES)
def test_a_name_is_in_the_table_or_it_is_not(what: str) -> None:
    """No folding, trimming, walking of dots or decoding; and the message stays short and harmless."""
    found = refused(boxed(ODD_NAMES[what]))
    assert isinstance(found, convert.UnsupportedError)
    assert found.message.isprintable()
    assert len(found.message) < 600


# --- accepted globals in other roles -----------------------------------------------------------------------------

RECONSTRUCT = name("numpy.core.multiarray", "_reconstruct")
SCALAR = name("numpy.core.multiarray", "scalar")
FROMBUFFER = name("numpy.core.numeric", "_frombuffer")
ENCODE = name("_codecs", "encode")
FLOAT = dtype("f4", "<")
EIGHT = op("BINBYTES", bytes(8))


def state(*items: bytes) -> bytes:
    return EMPTY_ARRAY + tuple_of(*items) + op("BUILD")


ROLES: dict[str, bytes] = {
    "a subclass opens a file": call(
        RECONSTRUCT, name("numpy", "memmap"), tuple_of(int_(0)), op("BINBYTES", b"b")
    ),
    "a record class": call(RECONSTRUCT, name("numpy", "record"), tuple_of(int_(0)), op("BINBYTES", b"b")),
    "reconstruct of dtype": call(RECONSTRUCT, name("numpy", "dtype"), tuple_of(int_(0)), op("BINBYTES", b"b")),
    "reconstruct of a function": call(RECONSTRUCT, ENCODE, tuple_of(int_(0)), op("BINBYTES", b"b")),
    "scalar of objects": call(SCALAR, OBJECT, op("BINBYTES", pickle.dumps(1))),
    "scalar of objects as text": call(SCALAR, OBJECT, text("cos\nsystem\n(S'x'\ntR.")),
    "pointers from a buffer": call(FROMBUFFER, EIGHT, OBJECT, tuple_of(int_(1)), text("C")),
    "pointers as data": state(int_(1), tuple_of(int_(1)), OBJECT, op("NEWFALSE"), EIGHT),
    "fewer bytes than the shape": state(int_(1), tuple_of(int_(9)), FLOAT, op("NEWFALSE"), EIGHT),
    "a list as data": state(int_(1), tuple_of(int_(1)), FLOAT, op("NEWFALSE"), op("EMPTY_LIST")),
    "a negative side": state(int_(1), tuple_of(int_(-2)), FLOAT, op("NEWFALSE"), EIGHT),
    "an overflowing shape": state(
        int_(1), tuple_of(*[op("LONG1", (1 << 62).to_bytes(8, "little"))] * 2), FLOAT, op("NEWFALSE"), EIGHT
    ),
    "a dtype that is an array": state(int_(1), tuple_of(int_(2)), EMPTY_ARRAY, op("NEWFALSE"), EIGHT),
    "a dtype without state": state(
        int_(1), tuple_of(int_(2)), call(name("numpy", "dtype"), text("f4"), op("NEWFALSE"), op("NEWTRUE")),
        op("NEWFALSE"), EIGHT,
    ),
    "its own element": EMPTY_ARRAY + op("BINPUT", 9) + tuple_of(
        int_(1), tuple_of(int_(1)), OBJECT, op("NEWFALSE"), op("EMPTY_LIST") + op("BINGET", 9) + op("APPEND")
    ) + op("BUILD"),
    "state set twice": array_of(int_(1)) + tuple_of(int_(1), tuple_of(int_(2)), FLOAT, op("NEWFALSE"), EIGHT)
    + op("BUILD"),
    "state with slots": EMPTY_ARRAY + tuple_of(NONE, op("EMPTY_DICT") + text("shape") + int_(1) + op("SETITEM"))
    + op("BUILD"),
    "state as a dict": EMPTY_ARRAY + op("EMPTY_DICT") + text("__class__") + NDARRAY + op("SETITEM") + op("BUILD"),
    "object fields": dtype("V8", names=tuple_of(text("a")), fields=op("EMPTY_DICT") + text("a")
                           + tuple_of(OBJECT, int_(0)) + op("SETITEM")),
    "objects in a subarray": dtype("V8", subdtype=tuple_of(OBJECT, tuple_of(int_(1)))),
    "a dtype of a dict": call(name("numpy", "dtype"), op("EMPTY_DICT"), op("NEWFALSE"), op("NEWTRUE")),
    "a dtype of a list of fields": call(name("numpy", "dtype"), op("EMPTY_LIST"), op("NEWFALSE"), op("NEWTRUE")),
    "a dtype that is a formula": call(name("numpy", "dtype"), text("f4" + ",f4" * 1000), op("NEWFALSE"), op("NEWTRUE")),
    "another codec": call(ENCODE, text("x"), text("zlib_codec")),
    "a codec module": call(ENCODE, text("x"), text("os.path")),
    "bytes of a size": call(name("builtins", "bytes"), int_(2**31 - 1)),
    "bytearray of a size": call(name("builtins", "bytearray"), int_(2**31 - 1)),
    "complex of text": call(name("builtins", "complex"), text("1" * 100_000)),
    "a class with an argument": call(NDARRAY, tuple_of(int_(2**30))),
    "keyword arguments": NDARRAY + tuple_of(tuple_of(int_(4))) + op("EMPTY_DICT") + op("NEWOBJ_EX"),
    "too many arguments": call(ENCODE, text("x"), text("latin1"), text("strict"), text("y")),
    "arguments as a list": ENCODE + op("EMPTY_LIST") + op("REDUCE"),
    "persistent id": op("PERSID", "../../etc/passwd"),
    "binary persistent id": tuple_of(text("storage"), text("x")) + op("BINPERSID"),
    "extension 1": op("EXT1", 1),
    "extension 2": op("EXT2", 256),
    "extension 4": op("EXT4", 70_000),
    "next buffer": op("NEXT_BUFFER"),
    "read-only buffer": op("BINBYTES", b"x") + op("READONLY_BUFFER"),
    "set": op("EMPTY_SET"),
    "frozen set": op("MARK") + op("FROZENSET"),
    "memo of nothing": op("BINGET", 77),
    "memo before the stack": op("BINPUT", 1),
    "a negative memo": int_(1) + op("PUT", -1),
    "a huge memo index": int_(1) + op("PUT", 10**30),
    "a mark too few": op("TUPLE") + op("TUPLE"),
    "protocol 9 within": op("PROTO", 9),
    "text to evaluate": b"S'\\x41'\n",
    "a number to evaluate": b"I__import__('os')\n",
    "a long number": b"L" + b"9" * 200_000 + b"L\n",
    "half a character": op("BINUNICODE", b"\xed\xa0\x80"),
}  # fmt: skip


@pytest.mark.parametrize("what", ROLES)
def test_what_is_accepted_cannot_be_turned_against_us(what: str) -> None:
    """numpy's own reconstructors with arguments that open files, take bytes for pointers, or want memory."""
    refused(boxed(ROLES[what]))


def test_frames_and_protocols_may_lie() -> None:
    """Frame lengths are no more than a hint; what is read is what pickle reads, or nothing."""
    item = text("x")
    for length in (0, 1, 5, 1 << 20, (1 << 64) - 1):
        stream = op("PROTO", 4) + op("FRAME", length) + boxed(item)[2:]
        with nothing_happens():
            assert load_object_array(stream, (1,)) == [("0", "x")]
    with nothing_happens():
        assert load_object_array(op("PROTO", 4) * 3 + boxed(item), (1,)) == [("0", "x")]


# --- whole files -------------------------------------------------------------------------------------------------


def npy_of(stream: bytes) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    return buffer.getvalue() + stream


@pytest.mark.parametrize("suffix", ["npy", "npz"])
@pytest.mark.parametrize("policy", [[], ["--policy", "object=unpickle"], ["--policy", "lossless"], ["--dry-run"]])
def test_no_command_runs_a_pickle(suffix: str, policy: list[str], tmp_path: Path) -> None:
    """Whatever is asked for; the canary, given to numpy, shows that it would."""
    marker = tmp_path / "marker"
    data = npy_of(boxed(call(name("builtins", "exec"), text(code_for(str(marker))))))
    source = tmp_path / f"w.{suffix}"
    if suffix == "npy":
        source.write_bytes(data)
    else:
        import zipfile

        with zipfile.ZipFile(source, "w") as file:
            file.writestr("w.npy", data)
    assert run([str(source), str(tmp_path / "out.safetensors"), *policy]) in (3, 4)
    assert run(["ls", str(source)]) == 0
    with pytest.raises(convert.ConvertError):
        convert.load(source)
    assert not marker.exists()
    assert not (tmp_path / "out.safetensors").exists()
    with contextlib.suppress(Exception), source.open("rb") as file:
        loaded = np.load(file, allow_pickle=True)
        with loaded:
            loaded["w"]
    assert marker.exists()


@pytest.mark.parametrize("suffix", ["pkl", "pt", "npy", "npz", "safetensors"])
def test_a_bare_pickle_is_no_tensor_file(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused by its first bytes, whatever it is called."""
    marker = tmp_path / "marker"
    source = tmp_path / f"w.{suffix}"
    source.write_bytes(op("PROTO", 2) + call(name("builtins", "exec"), text(code_for(str(marker)))) + op("STOP"))
    assert run([str(source), str(tmp_path / "out.npz"), "--policy", "object=unpickle"]) == 3
    assert "hint:" in capsys.readouterr().err
    assert not marker.exists()


def test_reading_pickles_imports_nothing_of_theirs(tmp_path: Path) -> None:
    """A fresh process: all attacks together bring in no module that an honest pickle does not."""
    streams = [boxed(make(str(tmp_path / "marker"))) for make in WORKING.values()]
    streams += [boxed(each) for each in (*ROLES.values(), *ODD_NAMES.values())]
    streams += [boxed(name(*gadget.rsplit(".", 1))) for gadget in GADGETS]
    honest = [boxed(array_of(text("a"), int_(5)))]
    code = (
        "import pickle, sys\nfrom readers.pickles import load_object_array\nfrom convert.errors import ConvertError\n"
        "honest, hostile = pickle.load(sys.stdin.buffer)\n"
        "[load_object_array(stream, (1,)) for stream in honest]\n"
        "before = set(sys.modules)\nrefused = 0\n"
        "for stream in hostile:\n    try:\n        load_object_array(stream, (1,))\n"
        "    except ConvertError:\n        refused += 1\n"
        "print(refused, sorted(set(sys.modules) - before))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps((honest, streams)),
        capture_output=True,
        check=True,
        timeout=300,
    )
    assert done.stdout.decode().strip() == f"{len(streams)} []"
    assert not (tmp_path / "marker").exists()
