"""The library as programs use it: arrays of any kind in, the same values out; callbacks and errors."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
import types
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import convert
from convert.errors import gather

from . import oracle
from .faultfs import listing

Array = npt.NDArray[Any]
TARGETS = ["out.npz", "out.safetensors", "out/"]


# --- as the documentation shows it -------------------------------------------------------------------------------


def test_the_example_of_the_package(tmp_path: Path) -> None:
    """Convert, look inside, take one tensor in chunks, save, load."""
    source, target = tmp_path / "in.npz", tmp_path / "out.safetensors"
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.savez(source, w=weight, half=np.array([1.5, 2.5], ml_dtypes.bfloat16).view("V2"))
    seen: list[tuple[int, int, str]] = []
    report = convert.convert_file(
        source, target, policy=convert.Policy(V2="bfloat16"), progress=lambda *now: seen.append(now)
    )
    assert report.target_bytes == target.stat().st_size
    assert seen[-1][:2] == (52, 52)
    with convert.open(source) as checkpoint:
        assert dict(checkpoint).keys() == {"w", "half"}
        tensor = checkpoint["w"]
        assert (tensor.name, str(tensor.dtype), tensor.shape, tensor.nbytes) == ("w", "float32", (3, 4), 48)
        assert tensor.numpy().tobytes() == weight.tobytes()
        assert b"".join(map(bytes, tensor.chunks(16))) == weight.tobytes()
    convert.save({"w": weight}, tmp_path / "saved.safetensors", metadata={"format": "pt"})
    assert oracle.read_safetensors(tmp_path / "saved.safetensors")[0] == {"format": "pt"}
    arrays = convert.load(target)
    assert arrays["half"].dtype == ml_dtypes.bfloat16
    assert arrays["w"].tobytes() == weight.tobytes()


def test_a_checkpoint_is_a_mapping(tmp_path: Path) -> None:
    """In file order; nothing is read, and a missing name is a KeyError."""
    np.savez(tmp_path / "in.npz", b=np.zeros(1), a=np.zeros(2))
    with convert.open(tmp_path / "in.npz") as checkpoint:
        assert list(checkpoint) == ["b", "a"]
        assert len(checkpoint) == 2
        assert "a" in checkpoint
        assert checkpoint.get("c") is None
        with pytest.raises(KeyError):
            checkpoint["c"]
        assert repr(checkpoint["a"]) == "<Tensor 'a' float64 [2]>"


def test_paths_are_texts_or_path_objects(tmp_path: Path) -> None:
    """Everywhere, alone and in a list."""
    convert.save({"w": np.zeros(1)}, str(tmp_path / "a.npz"))
    convert.convert_file(str(tmp_path / "a.npz"), tmp_path / "b.npz")
    convert.convert_file([tmp_path / "b.npz"], str(tmp_path / "c.npz"))
    assert convert.load([str(tmp_path / "c.npz")]).keys() == {"w"}


# --- arrays of every kind ----------------------------------------------------------------------------------------

BASE = np.arange(60, dtype=np.int32).reshape(3, 4, 5)


def unaligned() -> Array:
    """An array whose elements begin at odd addresses."""
    raw = np.zeros(BASE.nbytes + 1, np.uint8)
    array = raw[1:].view(np.int32).reshape(BASE.shape)
    array[...] = BASE
    return array


def read_only() -> Array:
    """An array that nobody may write to."""
    array = BASE.copy()
    array.flags.writeable = False
    return array


LAYOUTS: dict[str, Array] = {
    "C": BASE,
    "Fortran": np.asfortranarray(BASE),
    "transposed": BASE.T,
    "axes swapped": BASE.transpose(1, 0, 2),
    "strided": BASE[::2, 1:, ::-2],
    "reversed": BASE[::-1],
    "broadcast": np.broadcast_to(BASE[0, 0], (2, 3, 5)),
    "a column": BASE[:, :, :1],
    "unaligned": unaligned(),
    "read-only": read_only(),
    "0-d": np.array(7, np.int32),
    "0-d view": BASE[1, 2, 3, ...],
    "one element": BASE[:1, :1, :1],
    "empty": BASE[:, :0],
    "empty and strided": BASE[:, :0, ::2],
    "matrix": BASE[0].view(np.matrix),
    "record array": np.zeros(3, [("x", "i4"), ("y", ">f8")]).view(np.recarray),
    "64 dimensions": BASE.reshape((1,) * 61 + BASE.shape),
    "big-endian": BASE.astype(">i4"),
    "big-endian Fortran": np.asfortranarray(BASE.astype(">i4")),
    "big-endian strided": BASE.astype(">i4")[::-1, ::2],
    "masked, nothing hidden": np.ma.masked_array(BASE),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_is_saved_by_its_values(tmp_path: Path, name: str, target: str) -> None:
    """However an array lies in memory, what is saved is what it shows; the array itself is not touched."""
    array = LAYOUTS[name]
    if array.dtype.names and target == "out.safetensors":
        pytest.skip("no records there")
    before = array.tobytes()
    convert.save({"w": array, "again": array}, f"{tmp_path}/{target}", verify=True)
    for back in convert.load(tmp_path / target).values():
        assert back.shape == array.shape
        assert back.dtype == array.dtype.newbyteorder("<")
        assert oracle.canonical(back) == oracle.canonical(np.asarray(array))
    assert array.tobytes() == before


def test_hidden_values_of_a_masked_array_are_not_passed_off_as_data(tmp_path: Path) -> None:
    """No format here has masks: an array that hides values is refused."""
    with pytest.raises(convert.ConvertError):
        convert.save({"w": np.ma.masked_array([1.0, 2.0], [False, True])}, tmp_path / "out.npz")


@pytest.mark.parametrize("order", ["C", "F"])
def test_mapped_files_are_saved_without_being_read_whole(tmp_path: Path, order: str) -> None:
    """A memmap is an array like others; the file below it may even be the target."""
    path = tmp_path / "a.npy"
    np.save(path, np.asarray(BASE, order=order))  # type: ignore[call-overload]
    mapped = np.load(path, mmap_mode="r")
    convert.save({"w": mapped}, tmp_path / "out.safetensors")
    convert.save({"a": mapped}, path, overwrite=True)
    assert np.load(path).tobytes() == BASE.tobytes()
    assert convert.load(tmp_path / "out.safetensors")["w"].tobytes() == BASE.tobytes()


SMALL_FLOATS = [
    name for name in oracle.SAFETENSORS_CODES if name.startswith(("float4_", "float6_", "float8_", "bfloat16"))
]


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_small_floats_of_ml_dtypes(tmp_path: Path, name: str) -> None:
    """Every code of the type, in several layouts, packed as the format wants it, and back as it was."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    bits = 16 if name == "bfloat16" else int(name[5])
    codes = np.arange(1 << bits, dtype=np.uint16 if bits == 16 else np.uint8).view(dtype).reshape(4, -1)
    made = {"c": codes, "f": np.asfortranarray(codes), "s": codes[::-1, ::-1]}
    convert.save(made, tmp_path / "out.safetensors", verify=True)
    found = oracle.read_safetensors(tmp_path / "out.safetensors")[1]
    assert {code for code, _, _ in found.values()} == {oracle.SAFETENSORS_CODES[name]}
    assert len(found["c"][2]) == codes.size * bits // 8
    for key, back in convert.load(tmp_path / "out.safetensors").items():
        assert back.dtype == dtype
        assert back.tobytes() == made[key].tobytes()


@pytest.mark.parametrize("name", ["float8_e4m3", "float8_e3m4", "int4", "uint2"])
def test_types_that_no_format_has_are_refused(tmp_path: Path, name: str) -> None:
    """Even where ml_dtypes' own way to save them would lose which they are."""
    if not hasattr(ml_dtypes, name):
        pytest.skip("not in this ml_dtypes")
    with pytest.raises(convert.UnsupportedError, match=name) as caught:
        convert.save({"w": np.zeros(2, getattr(ml_dtypes, name))}, tmp_path / "out.npz")
    assert caught.value.tensor == "w"
    assert listing(tmp_path) == []


def test_packed_types_must_fill_whole_bytes(tmp_path: Path) -> None:
    """Three float4 are a byte and a half."""
    with pytest.raises(convert.UnsupportedError, match="whole bytes"):
        convert.save({"w": np.zeros(3, ml_dtypes.float4_e2m1fn)}, tmp_path / "out.safetensors")


def test_more_dimensions_than_numpy_has(tmp_path: Path) -> None:
    """safetensors has no limit: such a tensor is listed and handed out in chunks, only not as an array."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [1] * 99 + [3], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "in.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    with convert.open(tmp_path / "in.safetensors") as checkpoint:
        assert len(checkpoint["w"].shape) == 100
        assert b"".join(map(bytes, checkpoint["w"].chunks())) == b"abc"
        with pytest.raises(convert.UsageError, match="64 dimensions"):
            checkpoint["w"].numpy()
    convert.convert_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    assert oracle.read_safetensors(tmp_path / "out.safetensors")[1]["w"][1] == (1,) * 99 + (3,)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (3, np.array(3)),
        (True, np.array(True)),
        (2.5, np.array(2.5)),
        ([1, 2], np.array([1, 2])),
        (np.float32(1.5), np.array(1.5, np.float32)),
        (ml_dtypes.bfloat16(1.5), np.array(1.5, ml_dtypes.bfloat16)),
    ],
)
def test_numbers_and_lists_are_taken_as_arrays(tmp_path: Path, value: object, found: Array) -> None:
    """As numpy takes them."""
    convert.save({"v": value}, tmp_path / "out.safetensors")
    back = convert.load(tmp_path / "out.safetensors")["v"]
    assert (back.dtype, back.shape, back.tobytes()) == (found.dtype, found.shape, found.tobytes())


@pytest.mark.parametrize("value", ["text", b"bytes", None, object(), [[1], [2, 3]], [None], {1, 2}])
def test_what_is_no_array_is_refused(tmp_path: Path, value: object) -> None:
    """By name; no object is pickled, guessed or made empty."""
    with pytest.raises(convert.UnsupportedError) as caught:
        convert.save({"good": np.zeros(1), "v": value}, tmp_path / "out.npz")
    assert caught.value.tensor == "v"
    assert listing(tmp_path) == []


def test_names_are_texts(tmp_path: Path) -> None:
    """A number as a key is a slip."""
    tensors: Any = {1: np.zeros(1)}
    with pytest.raises(convert.UsageError, match="names must be texts"):
        convert.save(tensors, tmp_path / "out.npz")


# --- arrays of other libraries -----------------------------------------------------------------------------------


class Duck:
    """An array of a library nobody has heard of."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        return self._array


def test_anything_with_an_array_method_is_taken(tmp_path: Path) -> None:
    """numpy's protocol is enough, in any layout."""
    convert.save({"w": Duck(BASE.T)}, tmp_path / "out.npz")
    assert convert.load(tmp_path / "out.npz")["w"].tobytes() == BASE.T.tobytes()


def test_a_duck_that_fails_is_refused(tmp_path: Path) -> None:
    """What its own method raises becomes a refusal that names the tensor."""

    class Broken(Duck):
        def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
            raise RuntimeError("on another device")

    with pytest.raises(convert.UnsupportedError, match="on another device") as caught:
        convert.save({"w": Broken(BASE)}, tmp_path / "out.npz")
    assert caught.value.tensor == "w"


class FakeTensor:
    """What the library asks of a torch.Tensor."""

    bits = types.MappingProxyType({"torch.uint8": np.uint8, "torch.int16": np.int16})

    def __init__(self, array: Array, dtype: str) -> None:
        self._array, self.dtype, self.shape = array, dtype, array.shape

    def detach(self) -> FakeTensor:
        return self

    cpu = resolve_conj = resolve_neg = detach

    def view(self, dtype: str) -> FakeTensor:
        return FakeTensor(self._array.view(self.bits[dtype]), dtype)

    def numpy(self) -> Array:
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self._array


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn", "complex128", "bool"])
def test_tensors_of_torch_are_taken_with_their_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, order: str
) -> None:
    """Those that torch itself cannot hand to numpy as well; torch is the caller's, and a stand-in does here."""
    torch = types.ModuleType("torch")
    vars(torch).update(uint8="torch.uint8", int16="torch.int16")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(FakeTensor, "__module__", "torch")
    array = np.asarray(BASE[0] % 2, order=order).astype(getattr(ml_dtypes, name, name), order="K")  # type: ignore[call-overload]
    convert.save({"w": FakeTensor(array, f"torch.{name}")}, tmp_path / "out.npz")
    convert.convert_file(tmp_path / "out.npz", tmp_path / "back.npz")
    with convert.open(tmp_path / "back.npz") as checkpoint:
        assert b"".join(map(bytes, checkpoint["w"].chunks())) == array.tobytes()
        assert checkpoint["w"].shape == array.shape


def test_no_library_is_imported_for_its_arrays(tmp_path: Path) -> None:
    """torch, JAX and MLX are large; whoever has arrays of theirs has imported them."""
    code = (
        "import sys, numpy, convert\n"
        "class Tensor: pass\n"
        "Tensor.__module__ = 'torch.nn'\n"
        "try: convert.save({'w': Tensor()}, 'out.npz')\n"
        "except (convert.ConvertError, AttributeError): pass\n"
        "convert.save({'w': numpy.zeros(1)}, 'out.npz')\n"
        "print([name for name in ('torch', 'jax', 'mlx', 'tensorflow', 'safetensors') if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout == "[]\n"


def test_arrays_of_mlx(tmp_path: Path) -> None:
    """Its bfloat16 too, which numpy's protocol does not have."""
    mx = pytest.importorskip("mlx.core")
    made = {"a": mx.array([[1.5, 2.5], [3.5, 4.5]]).T, "b": mx.array([1.5, -2.0]).astype(mx.bfloat16)}
    convert.save(made, tmp_path / "out.safetensors")
    back = convert.load(tmp_path / "out.safetensors")
    assert back["a"].tolist() == [[1.5, 3.5], [2.5, 4.5]]
    assert back["b"].dtype == ml_dtypes.bfloat16
    assert back["b"].tolist() == [1.5, -2.0]


# --- progress and cancellation -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many small tensors and a few large ones, one in Fortran order."""
    path = tmp_path_factory.mktemp("source") / "in.npz"
    arrays: dict[str, Any] = {f"small{index}": np.full(9, index, np.int16) for index in range(50)}
    arrays["large"] = np.random.default_rng(1).integers(0, 255, 20_000_000, np.uint8)
    arrays["fortran"] = np.asfortranarray(np.ones((700, 900)))
    np.savez(path, **arrays)
    return path


WAYS: list[tuple[str, dict[str, Any]]] = [
    ("out.npz", {}),
    ("out.npz", {"compress": 1}),
    ("out.safetensors", {}),
    ("out/", {}),
    ("out.safetensors", {"cast": [("float64", "float32")]}),
]


@pytest.mark.parametrize("jobs", [1, 4])
@pytest.mark.parametrize(("target", "options"), WAYS)
def test_progress_counts_every_byte_once(
    source: Path, tmp_path: Path, target: str, options: dict[str, Any], jobs: int
) -> None:
    """Rising, one call at a time whatever the threads, from something to everything; with names of tensors."""
    seen: list[tuple[int, int, str]] = []
    inside = threading.Lock()

    def watch(done: int, total: int, name: str) -> None:
        assert inside.acquire(blocking=False), "two calls at once"
        seen.append((done, total, name))
        threading.Event().wait(0.0001)  # lets the other threads come in, if they can
        inside.release()

    report = convert.convert_file(source, f"{tmp_path}/{target}", progress=watch, jobs=jobs, **options)
    names = {tensor.name for tensor in report.tensors}
    total = sum(tensor.nbytes for tensor in report.tensors)
    counts = [done for done, _, _ in seen]
    assert counts == sorted(counts)
    assert {whole for _, whole, _ in seen} == {total}
    assert {name for _, _, name in seen} <= names
    assert total <= counts[-1] <= total * 1.01  # headers of small members may be counted with them


class CancelledError(Exception):
    """What a caller raises to cancel."""


@pytest.mark.parametrize("jobs", [1, 4])
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("after", [0.0, 0.5, 0.99])
@pytest.mark.parametrize(("target", "options"), WAYS[:4])
def test_raising_in_the_callback_cancels(
    source: Path, tmp_path: Path, target: str, options: dict[str, Any], after: float, old: bool, jobs: int
) -> None:
    """The caller's exception comes back, and the target is absent, or the old one."""
    path = tmp_path / target
    kept = path / "old.npy" if target.endswith("/") else path
    if old:
        kept.parent.mkdir(exist_ok=True)
        kept.write_bytes(b"old")

    def watch(done: int, total: int, _: str) -> None:
        if done >= after * total:
            raise CancelledError

    with pytest.raises(CancelledError):
        convert.convert_file(source, f"{tmp_path}/{target}", progress=watch, overwrite=old, jobs=jobs, **options)
    assert listing(tmp_path) == ([path.name] if old else [])
    assert not old or kept.read_bytes() == b"old"
    assert threading.active_count() < 20


def test_conversions_may_run_side_by_side(source: Path, tmp_path: Path) -> None:
    """From several threads of one program; of two that want the same target one wins."""
    targets = [tmp_path / f"{index}.safetensors" for index in range(4)] + [tmp_path / "same.npz"] * 4

    def work(target: Path) -> bool:
        try:
            convert.convert_file(source, target, jobs=2)
        except convert.TargetExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(work, targets))
    assert won[:4] == [True] * 4
    assert won[4:].count(True) == 1
    assert len({path.read_bytes() for path in targets[:4]}) == 1
    assert listing(tmp_path) == [*(path.name for path in targets[:4]), "same.npz"]


# --- errors ------------------------------------------------------------------------------------------------------


def test_a_refusal_tells_path_tensor_and_way_out(tmp_path: Path) -> None:
    """Each by its own attribute, for programs; all together in the message, for people."""
    np.savez(tmp_path / "in.npz", w=np.zeros(1, complex))
    with pytest.raises(convert.PolicyError) as caught:
        convert.convert_file(tmp_path / "in.npz", tmp_path / "out.safetensors")
    err = caught.value
    assert (err.path, err.tensor, err.exit_code) == (str(tmp_path / "in.npz"), "w", 4)
    assert err.problems == (err,)
    assert str(err) == f"{err.path}: tensor 'w': {err.message}\nhint: {err.hint}"


def test_refusals_form_a_tree() -> None:
    """One `except` for all, or for a kind; the exit status comes with the class."""
    assert issubclass(convert.CorruptError, convert.InputError)
    assert issubclass(convert.TargetExistsError, convert.OutputError)
    kinds = (convert.UsageError, convert.InputError, convert.PolicyError, convert.OutputError)
    assert [kind.exit_code for kind in kinds] == [2, 3, 4, 5]
    assert all(issubclass(kind, convert.ConvertError) for kind in kinds)
    assert not issubclass(convert.ConvertError, (ValueError, OSError))


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ("P", convert.PolicyError),
        ("PP", convert.PolicyError),
        ("UP", convert.UsageError),
        ("PIU", convert.InputError),
        ("CC", convert.CorruptError),
        ("CI", convert.InputError),
        ("CPC", convert.CorruptError),
        ("CPO", convert.OutputError),
    ],
)
def test_several_problems_raise_what_the_worst_would(kinds: str, found: type[convert.ConvertError]) -> None:
    """Output before input, input before usage, usage before policy."""
    made = {"P": convert.PolicyError, "U": convert.UsageError, "I": convert.InputError, "C": convert.CorruptError,
            "O": convert.OutputError}  # fmt: skip
    problems: list[convert.ConvertError] = [made[kind](kind, path=index) for index, kind in enumerate(kinds)]
    err = gather(problems)
    assert type(err) is found
    assert list(err.problems) == problems
    assert str(err).splitlines() == [f"{index}: {kind}" for index, kind in enumerate(kinds)]
    assert gather([err, problems[0]]).problems == (*problems, problems[0])


def test_a_place_is_filled_in_once() -> None:
    """Where an error is first known it is named; those further out do not overwrite it."""
    err = convert.InputError("bad").at("a", "t").at("b", "u")
    assert (err.path, err.tensor) == ("a", "t")


def test_long_and_hostile_names_are_shown_safely() -> None:
    """Escaped, and cut in the middle."""
    text = str(convert.InputError("x\x1b[1m", path="p\n", tensor="a" * 500 + "\u202e", hint="\x07"))
    assert len(text) < 400
    assert "(501 characters)" in text
    assert text.splitlines()[1] == "hint: \\x07"
    assert text.replace("\n", "").isprintable()


def problems() -> list[convert.ConvertError]:
    """Errors of every class, and several together."""
    one = [
        kind(f"{kind.__name__} é", path="p", tensor="t\0", hint="h")
        for kind in vars(convert).values()
        if isinstance(kind, type) and issubclass(kind, convert.ConvertError)
    ]
    return [*one, gather(one), convert.InputError("bare")]


def facts(err: convert.ConvertError) -> tuple[Any, ...]:
    """All that an error says."""
    return (
        type(err),
        err.message,
        err.path,
        err.tensor,
        err.hint,
        [facts(p) for p in err.problems if p is not err],
        str(err),
    )


def test_errors_survive_pickling() -> None:
    """With every attribute."""
    for name in convert.__all__:
        getattr(convert, name)
    for err in problems():
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert facts(pickle.loads(pickle.dumps(err, protocol))) == facts(err)


def test_errors_come_back_from_another_process(tmp_path: Path) -> None:
    """As from a pool of workers, which a pipeline may use; reports do too."""
    np.savez(tmp_path / "in.npz", w=np.zeros(1, complex), ok=np.zeros(1))
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        with pytest.raises(convert.PolicyError) as caught:
            pool.submit(convert.convert_file, tmp_path / "in.npz", tmp_path / "out.safetensors").result()
        report = pool.submit(convert.convert_file, tmp_path / "in.npz", tmp_path / "out.npz").result()
    assert (caught.value.tensor, caught.value.path) == ("w", str(tmp_path / "in.npz"))
    assert [tensor.name for tensor in report.tensors] == ["w", "ok"]


# --- dictionaries within dictionaries ----------------------------------------------------------------------------


@pytest.mark.parametrize(("separator", "name"), [(".", "a.b.c"), ("/", "a/b/c"), ("", "abc")])
def test_nested_dictionaries_are_flattened(tmp_path: Path, separator: str, name: str) -> None:
    """Keys joined in the order in which they are found; any mapping will do."""
    nested = {"a": types.MappingProxyType({"b": {"c": np.arange(3)}}), "d": np.zeros(1)}
    report = convert.save(nested, tmp_path / "out.npz", separator=separator)
    assert list(convert.load(tmp_path / "out.npz")) == [name, "d"]
    assert report.notes == []


def test_names_that_clash_when_flattened_are_refused(tmp_path: Path) -> None:
    """One of the two would be lost."""
    nested = {"a": {"b": np.zeros(1)}, "a.b": np.ones(1)}
    with pytest.raises(convert.UsageError, match="separator='/'") as caught:
        convert.save(nested, tmp_path / "out.npz")
    assert caught.value.tensor == "a.b"
    convert.save(nested, tmp_path / "out.npz", separator="/")
    assert list(convert.load(tmp_path / "out.npz")) == ["a/b", "a.b"]


def test_dictionaries_that_hold_nothing_or_themselves(tmp_path: Path) -> None:
    """The first leave no trace, which is said; the second have no end."""
    report = convert.save({"a": {"b": {}}, "c": np.zeros(1)}, tmp_path / "out.npz")
    assert report.notes == ["'a.b' is an empty dictionary, which leaves no trace"]
    endless: dict[str, Any] = {}
    endless["x"] = {"y": endless}
    with pytest.raises(convert.UsageError, match=r"'x\.y'.*holds itself"):
        convert.save(endless, tmp_path / "out.npz")
    with pytest.raises(convert.UsageError, match="must be texts"):
        convert.save({"a": {0: np.zeros(1)}}, tmp_path / "out.npz")
    for wrong in ([np.zeros(1)], np.zeros(1), None):
        with pytest.raises(convert.UsageError, match="dictionary of arrays"):
            convert.save(wrong, tmp_path / "out.npz")  # type: ignore[arg-type]


def test_arrays_that_share_their_memory_are_noted(tmp_path: Path) -> None:
    """Tied weights are written under each of their names; parts of one array are no ties, nor are equal copies."""
    tied = np.arange(6.0).reshape(2, 3)
    arrays = {"a": tied, "b": tied.T, "c": tied.copy(), "d": tied[0], "e": tied[1], "f": tied[:0], "g": tied[:0]}
    report = convert.save(arrays, tmp_path / "out.safetensors")
    assert report.notes == ["'a', 'b' share their memory (tied weights); each is written in full"]
    back = convert.load(tmp_path / "out.safetensors")
    assert all(back[name].tobytes() == array.tobytes() for name, array in arrays.items())
