"""`convert.writer`: tensors that come piece by piece, in any order and from several threads; whole files or none."""

from __future__ import annotations

import contextlib
import errno
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import convert
from convert import streaming
from convert.output import OutputFile
from convert.steps import Pipe
from convert.tensor import Step

Array = npt.NDArray[Any]
Write = Callable[[convert.Writer], None]

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "safetensors": ("out.safetensors", {}),
    "npz": ("out.npz", {}),
    "deflated": ("out.npz", {"compress": True}),
    "aligned": ("out.npz", {"align": 4096}),
    "verified": ("out.safetensors", {"verify": True}),
    "shards": ("out.safetensors", {"max_shard_size": 100_000}),
    "folder": ("out/", {}),
}
RNG = np.random.default_rng(20261129)
ARRAYS: dict[str, Array] = {
    "w": RNG.standard_normal((700, 300)).astype(np.float32),
    "empty": np.zeros((0, 5), np.int16),
    "scalar": np.array(7, np.int64),
    "half": RNG.standard_normal((33, 5)).astype(ml_dtypes.bfloat16),
    "flags": RNG.integers(0, 2, 1001).astype(bool),
}
SPECS = {name: convert.TensorSpec(array.dtype.name, array.shape) for name, array in ARRAYS.items()}


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("way", WAYS)
def test_the_file_is_what_save_writes(tmp_path: Path, way: str) -> None:
    """Byte for byte, whatever the order of names and wherever the chunks are cut."""
    target, settings = WAYS[way]
    saved, streamed = tmp_path / "saved", tmp_path / "streamed"
    saved.mkdir()
    streamed.mkdir()
    convert.save(ARRAYS, f"{saved}/{target}", metadata=None if way == "folder" else {"a": "b"}, **settings)
    metadata = None if way == "folder" else {"a": "b"}
    with convert.writer(f"{streamed}/{target}", SPECS, metadata=metadata, **settings) as out:
        raw = {name: array.tobytes() for name, array in ARRAYS.items()}
        for begin in range(0, max(map(len, raw.values())), 777):  # cuts elements in two
            for name in reversed(raw):
                out.write(name, raw[name][begin : begin + 777])
    files = [path.relative_to(saved) for path in sorted(saved.rglob("*")) if path.is_file()]
    assert files == [path.relative_to(streamed) for path in sorted(streamed.rglob("*")) if path.is_file()]
    assert files
    for path in files:
        assert (saved / path).read_bytes() == (streamed / path).read_bytes(), path
    assert {row.name for row in out.report.tensors} == set(ARRAYS)
    assert out.report.target_bytes > 0


def test_a_single_npy_file(tmp_path: Path) -> None:
    with convert.writer(tmp_path / "w.npy", {"w": ARRAYS["w"]}) as out:
        for row in ARRAYS["w"]:
            out.write("w", row)
    assert np.load(tmp_path / "w.npy").tobytes() == ARRAYS["w"].tobytes()


@pytest.mark.parametrize(
    "chunk",
    [
        np.asfortranarray(np.arange(12, dtype=np.int32).reshape(3, 4)),
        np.arange(12, dtype=">i4").reshape(3, 4),
        np.arange(24, dtype=np.int32)[::2].reshape(3, 4) // 2,
        np.arange(12, dtype=np.int32),
        np.arange(12, dtype="<i4").tobytes(),
        bytearray(np.arange(12, dtype="<i4").tobytes()),
        memoryview(np.arange(12, dtype="<i4").tobytes()),
    ],
    ids=["fortran", "big-endian", "strided", "flat", "bytes", "bytearray", "memoryview"],
)
def test_chunks_of_any_layout(tmp_path: Path, chunk: Any) -> None:
    """Arrays are taken by their values, bytes as they are."""
    with convert.writer(tmp_path / "a.safetensors", {"i": convert.TensorSpec(np.int32, (3, 4))}) as out:
        out.write("i", chunk)
    assert convert.load(tmp_path / "a.safetensors")["i"].tolist() == np.arange(12).reshape(3, 4).tolist()


def test_what_a_policy_changes_on_the_way(tmp_path: Path) -> None:
    """Encodings that need not see the values first work; each chunk is looked at where exactness is owed."""
    values = RNG.standard_normal((50, 3)) + 1j
    target = tmp_path / "a.safetensors"
    with convert.writer(
        target, {"z": convert.TensorSpec("complex128", (50, 3))}, policy=convert.Policy(complex128="pair")
    ) as out:
        for begin in range(0, values.nbytes, 100):
            out.write("z", values.tobytes()[begin : begin + 100])
    assert convert.load(target)["z"].tobytes() == values.tobytes()

    policy = convert.Policy(complex128="complex64")
    spec = {"z": convert.TensorSpec("complex128", (1,))}

    def inexact() -> None:
        with convert.writer(tmp_path / "b.safetensors", spec, policy=policy) as out:
            out.write("z", np.array([1.0 + 2**-40 + 0j]))

    with pytest.raises(convert.PolicyError, match="'z'"):
        inexact()
    assert left_in(tmp_path) == ["a.safetensors"]


def test_the_callers_bytes_are_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps may work in place, but never in what they were lent."""

    def wipe(view: memoryview, first: int) -> memoryview:
        view[:] = bytes(len(view))
        return view

    monkeypatch.setattr(streaming, "pipe_of", lambda tensor: Pipe(1, 1, (Step(1, 1, wipe),)))
    data = bytearray(b"lent")
    with convert.writer(tmp_path / "a.npz", {"b": convert.TensorSpec("uint8", (4,))}) as out:
        out.write("b", data)
    assert data == b"lent"
    assert np.load(tmp_path / "a.npz")["b"].tolist() == [0] * 4


@pytest.mark.parametrize("way", ["safetensors", "npz", "deflated"])
def test_several_threads_write_their_own_tensors(tmp_path: Path, way: str) -> None:
    target, settings = WAYS[way]
    arrays = {f"t{number}": np.full((64, 1000), number, np.float32) for number in range(8)}
    gate = threading.Barrier(4)
    with convert.writer(tmp_path / target, arrays, **settings) as out:

        def send(first: int) -> None:
            gate.wait(60)
            for name in (f"t{first}", f"t{first + 4}"):
                for row in arrays[name]:
                    out.write(name, row)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(send, range(4)))
    loaded = convert.load(tmp_path / target)
    assert all(loaded[name].tobytes() == array.tobytes() for name, array in arrays.items())


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["safetensors", "deflated"])
@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (lambda out: out.write("x", b""), "was announced"),
        (lambda out: out.write("w", bytes(841_000)), "more than was announced .*840000.*841000"),
        (lambda out: out.write("w", np.zeros(4)), "another type .*float32.*float64"),
        (lambda out: out.write("w", np.zeros((300, 700), np.float32)), "another shape"),
        (lambda out: out.write("w", np.zeros((1, 7, 300), np.float32)), "another shape"),
        (lambda out: out.write("w", memoryview(np.zeros(4, np.float32).data)), "memoryview of bytes"),
        (lambda out: out.write("w", object()), "no array"),
    ],
    ids=["name", "much", "type", "shape", "axes", "memoryview", "object"],
)
def test_what_is_refused_is_not_taken(tmp_path: Path, way: str, wrong: Write, found: str) -> None:
    """The message tells, and writing may go on."""
    target, settings = WAYS[way]
    with convert.writer(tmp_path / target, {"w": ARRAYS["w"]}, **settings) as out:
        with pytest.raises(convert.ConvertError, match=found) as caught:
            wrong(out)
        assert caught.value.tensor in ("w", "x")
        out.write("w", ARRAYS["w"])
    assert convert.load(tmp_path / target)["w"].tobytes() == ARRAYS["w"].tobytes()


@pytest.mark.parametrize("way", WAYS)
def test_missing_bytes_leave_nothing(tmp_path: Path, way: str) -> None:
    """All tensors that are not complete are named together."""
    target, settings = WAYS[way]

    def too_little() -> None:
        with convert.writer(f"{tmp_path}/{target}", SPECS, **settings) as out:
            out.write("w", ARRAYS["w"][:-1])
            out.write("flags", ARRAYS["flags"])

    with pytest.raises(convert.UsageError) as caught:
        too_little()
    assert {problem.tensor for problem in caught.value.problems} == {"w", "scalar", "half"}
    assert "(expected 840000, found 838800)" in str(caught.value)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_leaves_nothing(tmp_path: Path, way: str) -> None:
    """And comes out as it was; an old target stays."""
    target, settings = WAYS[way]
    out = convert.writer(f"{tmp_path}/{target}", SPECS, **settings)

    def fail() -> None:
        with out:
            out.write("w", ARRAYS["w"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert left_in(tmp_path) == []
    with pytest.raises(convert.UsageError, match="closed"):
        out.write("w", b"")
    with pytest.raises(convert.UsageError, match="nothing is written"):
        _ = out.report


@pytest.mark.parametrize("way", ["safetensors", "deflated", "verified"])
def test_an_existing_target_is_refused_at_once(tmp_path: Path, way: str) -> None:
    """Before hours of work; with `overwrite` it stays until the block has ended well."""
    target, settings = WAYS[way]
    (tmp_path / target).write_bytes(b"old")
    with pytest.raises(convert.TargetExistsError):
        convert.writer(tmp_path / target, SPECS, **settings)
    with convert.writer(tmp_path / target, {"w": ARRAYS["w"]}, overwrite=True, **settings) as out:
        out.write("w", ARRAYS["w"])
        assert (tmp_path / target).read_bytes() == b"old"
    assert convert.load(tmp_path / target)["w"].tobytes() == ARRAYS["w"].tobytes()


def test_a_full_disk_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever swallows the error of a write does not get a file with a hole."""
    write_at = OutputFile.write_at

    def full(self: OutputFile, offset: int, data: Any) -> None:
        if len(data) == 12:
            raise convert.OutputError("no space", path=self.target) from OSError(errno.ENOSPC, "no space")
        write_at(self, offset, data)

    monkeypatch.setattr(OutputFile, "write_at", full)

    def swallow() -> None:
        with convert.writer(tmp_path / "a.npz", {"w": convert.TensorSpec("uint8", (12,))}) as out:
            with contextlib.suppress(convert.OutputError):
                out.write("w", bytes(12))
            monkeypatch.undo()

    with pytest.raises(convert.OutputError, match="no space"):
        swallow()
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("way", ["npz", "deflated"])
def test_raising_in_progress_cancels(tmp_path: Path, way: str) -> None:
    target, settings = WAYS[way]

    def stop(done: int, total: int, name: str) -> None:
        assert (total, name) == (840_000, "w")
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        convert.writer(tmp_path / target, {"w": ARRAYS["w"]}, progress=stop, **settings) as out,
    ):
        out.write("w", ARRAYS["w"])
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("specs", "kind", "found"),
    [
        ({"w": ("float32", (3,))}, convert.UsageError, "not the type and shape"),
        ({"w": convert.TensorSpec("float33", (3,))}, convert.UsageError, "float33"),
        ({"w": convert.TensorSpec(">f4", (3,))}, convert.UsageError, "big-endian"),
        ({"w": convert.TensorSpec("float32", (-3,))}, convert.UsageError, "shape"),
        ({"w": convert.TensorSpec("float4_e2m1fn", (3,))}, convert.UsageError, "shape"),
        ({"w": convert.TensorSpec([("a", "f4")], (3,))}, convert.UsageError, "record"),
        ({"w": convert.TensorSpec(object, (3,))}, convert.UnsupportedError, "Python objects"),
        ({1: convert.TensorSpec("float32", (3,))}, convert.UsageError, "names must be texts"),
        ({"w": convert.TensorSpec("complex128", (3,))}, convert.PolicyError, "complex128=pair"),
        ({"w": convert.TensorSpec("S3", ())}, convert.PolicyError, "bytes="),
        ({"__metadata__": convert.TensorSpec("float32", (3,))}, convert.PolicyError, "reserved"),
    ],
)
def test_specs_are_checked_first(tmp_path: Path, specs: Any, kind: type[convert.ConvertError], found: str) -> None:
    """Everything that can be refused is refused before any bytes."""
    with pytest.raises(kind, match=found):
        convert.writer(tmp_path / "a.safetensors", specs)
    assert left_in(tmp_path) == []


def test_a_policy_that_needs_the_values(tmp_path: Path) -> None:
    """They are not there when it has to decide."""
    with pytest.raises(convert.UsageError, match="not there yet"):
        convert.writer(
            tmp_path / "a.safetensors", {"s": convert.TensorSpec("S3", ())}, policy=convert.Policy(bytes="metadata")
        )


def test_types_are_named_in_many_ways() -> None:
    """By name, by numpy's and ml_dtypes' objects, or as another tensor has them."""
    from convert.arrays import dtype_from

    names = {
        "float32": ["float32", "f4", "<f4", np.float32, np.dtype("f4"), np.single],
        "bfloat16": ["bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)],
        "float4_e2m1fn": ["float4_e2m1fn", ml_dtypes.float4_e2m1fn],
        "datetime64[ns]": ["datetime64[ns]", np.dtype("M8[ns]")],
        "bool": ["bool", bool],
        "V2": ["V2"],
    }
    for name, values in names.items():
        assert {dtype_from(value).name for value in values} == {name}


def test_a_tensor_of_one_file_into_another(tmp_path: Path) -> None:
    """Tensors are specs, and their chunks are chunks: a checkpoint may be changed on the way, in bounded memory."""
    convert.save(ARRAYS, tmp_path / "a.npz")
    with (
        convert.open(tmp_path / "a.npz") as checkpoint,
        convert.writer(tmp_path / "b.safetensors", checkpoint) as out,
    ):
        for name, tensor in checkpoint.items():
            for chunk in tensor.chunks():
                out.write(name, chunk)
    assert convert.load(tmp_path / "b.safetensors")["half"].tobytes() == ARRAYS["half"].tobytes()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("target", ["out.safetensors", "out.npz"])
def test_memory_is_that_of_a_chunk(tmp_path: Path, target: str) -> None:
    """320 MB in two tensors, written in turn, then read in parts: far less than one of them."""
    code = (
        "import convert, numpy as np\n"
        "chunk = np.zeros(1 << 18, np.float32)\n"
        "spec = convert.TensorSpec('float32', (1 << 8, 160_000))\n"
        f"with convert.writer({target!r}, {{'a': spec, 'b': spec}}, compress=None) as out:\n"
        "    for begin in range(0, 160_000 << 8, 1 << 18):\n"
        "        for name in 'ab': out.write(name, chunk[: (160_000 << 8) - begin])\n"
        f"with convert.open({target!r}) as checkpoint:\n"
        "    assert checkpoint['b'][:, ::1000].sum() == 0 == checkpoint['a'][3, 5]\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert int(done.stdout) < 96 << 10
