"""Other programs open what we write, and what they write converts exactly: MLX, numpy, safetensors and zip tools."""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import shutil
import struct
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

import convert

from . import oracle
from .strategies import CANONICAL_NAMES, FLOAT8_NAMES, NUMPY_NAMES, SUBBYTE_NAMES, dtype_of, savez, with_bytes

Array = npt.NDArray[Any]
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (3, 0, 2), (1,), (7,), (2, 3), (2, 3, 4))
HAS_MLX = importlib.util.find_spec("mlx") is not None
mx: Any = importlib.import_module("mlx.core") if HAS_MLX else None
needs_mlx = pytest.mark.skipif(not HAS_MLX, reason="mlx is not installed: its readers and writers are not tested")
MLX_NAMES = (*NUMPY_NAMES, "bfloat16")
MLX_SAFETENSORS_NAMES = tuple(name for name in MLX_NAMES if name != "float64")  # MLX has no F64 there


def arrays_of(names: tuple[str, ...]) -> dict[str, Array]:
    return {
        f"{name}.{'x'.join(map(str, shape)) or '0d'}": with_bytes(dtype_of(name), shape, seed)
        for seed, shape in enumerate(SHAPES)
        for name in names
    }


def large() -> dict[str, Array]:
    """Members that are deflated in several blocks, at and around the borders of blocks."""
    rng = np.random.default_rng(1)
    found: dict[str, Array] = {
        f"n{size}": rng.integers(0, 9, size, np.uint8)
        for size in ((1 << 20) - 129, (1 << 20) - 128, 1 << 20, (1 << 20) + 1, 3 << 20)
    }
    found["weights"] = rng.standard_normal((600, 1000)).astype(np.float32)
    found["constant"] = np.zeros((512, 1024), np.float64)
    return found


def from_mlx(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Type, shape and bytes of an MLX array, by way of numpy."""
    name = str(value.dtype).removeprefix("mlx.core.").rstrip("_")
    with mx.stream(mx.cpu):
        array = np.array(value.view(mx.uint16) if name == "bfloat16" else value)
    return name, tuple(value.shape), oracle.canonical(array)


def facts(arrays: dict[str, Array]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (array.dtype.name, array.shape, oracle.canonical(array)) for name, array in arrays.items()}


def mlx_load(path: Path) -> Any:
    with mx.stream(mx.cpu):
        return mx.load(str(path))


# --- what we write, others read ----------------------------------------------------------------------------------


@needs_mlx
@pytest.mark.parametrize("options", [{}, {"compress": True}, {"align": 64}, {"align": 4096}], ids=str)
def test_mlx_reads_our_npz(options: dict[str, Any], tmp_path: Path) -> None:
    """Stored, deflated or aligned, every type MLX has, bfloat16 as bfloat16."""
    arrays = {**arrays_of(MLX_NAMES), **large()}
    convert.save(arrays, tmp_path / "a.npz", metadata={"format": "mlx"}, **options)
    found = {name: from_mlx(value) for name, value in mlx_load(tmp_path / "a.npz").items()}
    assert found == facts(arrays)


@needs_mlx
@pytest.mark.parametrize("name", MLX_NAMES)
def test_mlx_reads_our_npy(name: str, tmp_path: Path) -> None:
    """MLX looks at fixed offsets of the header, so ours must be laid out as it expects."""
    for key, array in arrays_of((name,)).items():
        convert.save({key: array}, tmp_path / f"{key}.npy")
        assert from_mlx(mlx_load(tmp_path / f"{key}.npy")) == (name, array.shape, oracle.canonical(array))


@needs_mlx
@pytest.mark.parametrize("align", [1, 64, 4096])
def test_mlx_reads_our_safetensors(align: int, tmp_path: Path) -> None:
    """Every type that MLX knows in safetensors, with metadata beside it."""
    arrays = {**arrays_of(MLX_SAFETENSORS_NAMES), "weights": large()["weights"]}
    convert.save(arrays, tmp_path / "a.safetensors", metadata={"format": "mlx"}, align=align)
    found = {name: from_mlx(value) for name, value in mlx_load(tmp_path / "a.safetensors").items()}
    assert found == facts(arrays)
    with mx.stream(mx.cpu):
        assert mx.load(str(tmp_path / "a.safetensors"), return_metadata=True)[1] == {"format": "mlx"}


@pytest.mark.parametrize("options", [{}, {"compress": 1}, {"compress": True}, {"compress": 9}, {"align": 64}], ids=str)
def test_numpy_reads_our_npz(options: dict[str, Any], tmp_path: Path) -> None:
    """numpy finds every array, of more than one deflate block too, and the checksums are right."""
    names = (*NUMPY_NAMES, "complex128", "datetime64[ns]", "timedelta64[25s]", "S5", "V5")
    arrays = arrays_of(names) | ({} if options.get("compress") == 9 else large())
    convert.save(arrays, tmp_path / "a.npz", metadata={"k": "v" * 70_000}, **options)
    with np.load(tmp_path / "a.npz") as archive:
        assert archive.files == list(arrays)
        for name, array in arrays.items():
            got = archive[name]
            assert (got.dtype, got.shape) == (array.dtype, array.shape), name
            assert got.tobytes() == array.tobytes(), name


@pytest.mark.parametrize("options", [{}, {"compress": 1}, {"compress": True}, {"align": 64}, {"align": 4096}], ids=str)
def test_zip_tools_find_no_fault(options: dict[str, Any], tmp_path: Path) -> None:
    """`zipfile` and `unzip -t` read every member and its checksum; odd names and comments included."""
    names = {"caf\u00e9": 1, "cafe\u0301": 2, "a/b": 3, " ": 4, "\U0001f9ca": 5, "x" * 200: 6}
    arrays = {**large(), **{name: np.arange(count) for name, count in names.items()}, "bf": np.zeros(3, "V2")}
    arrays["bf16"] = np.arange(5).astype(ml_dtypes.bfloat16)
    convert.save(arrays, tmp_path / "a.npz", metadata={"k": "v"}, **options)
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [f"{name}.npy" for name in arrays]
    if (unzip := shutil.which("unzip")) is None:
        pytest.skip("unzip is not installed: only zipfile has looked")
    done = subprocess.run([unzip, "-tqq", tmp_path / "a.npz"], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("align", [1, 2, 16, 64, 4096, 1 << 15])
def test_aligned_data_can_be_mapped(align: int, tmp_path: Path) -> None:
    """Each stored member's data, and a safetensors file's data, begins at a multiple of `align`."""
    arrays = {**arrays_of(("float32", "uint8")), "w": large()["weights"]}
    convert.save(arrays, tmp_path / "a.npz", align=align)
    with (tmp_path / "a.npz").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        with zipfile.ZipFile(tmp_path / "a.npz") as archive:
            members = archive.infolist()
        for member in members:
            at = member.header_offset
            head = at + 30 + sum(struct.unpack("<2H", data[at + 26 : at + 30]))
            begin = head + 10 + int.from_bytes(data[head + 8 : head + 10], "little")
            array = arrays[member.filename.removesuffix(".npy")]
            assert begin % align == 0, member.filename
            assert data[begin : begin + array.nbytes] == array.tobytes(), member.filename

    convert.save(arrays, tmp_path / "a.safetensors", align=align)
    content = (tmp_path / "a.safetensors").read_bytes()
    assert (8 + int.from_bytes(content[:8], "little")) % align == 0
    found = safetensors.numpy.load(content)
    assert {name: array.tobytes() for name, array in found.items()} == {n: a.tobytes() for n, a in arrays.items()}


def test_the_safetensors_library_reads_every_type(tmp_path: Path) -> None:
    """All 22 types of the format open in the reference, with the bytes that were put in."""
    names = tuple(name for name in CANONICAL_NAMES if name not in (*SUBBYTE_NAMES, "complex128"))
    arrays = arrays_of(names)
    packed = {f"{name}.{count}": with_bytes(dtype_of(name), (count,), 3) for name in SUBBYTE_NAMES for count in (0, 8)}
    convert.save({**arrays, **packed}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    reference: Any = safetensors
    found = dict(reference.deserialize((tmp_path / "a.safetensors").read_bytes()))
    wanted = {name: (oracle.SAFETENSORS_CODES[a.dtype.name], list(a.shape), a.tobytes()) for name, a in arrays.items()}
    for name, array in packed.items():
        bits = oracle.CODE_BITS[oracle.SAFETENSORS_CODES[array.dtype.name]]
        joined = sum(code << bits * index for index, code in enumerate(array.tobytes()))
        data = joined.to_bytes(array.size * bits // 8, "little")
        wanted[name] = (oracle.SAFETENSORS_CODES[array.dtype.name], list(array.shape), data)
    assert {n: (v["dtype"], v["shape"], bytes(v["data"])) for n, v in found.items()} == wanted
    with reference.safe_open(tmp_path / "a.safetensors", "np") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert set(opened.keys()) == wanted.keys()


def test_ml_dtypes_come_back_from_npz(tmp_path: Path) -> None:
    """bfloat16 and the 8-bit floats are the bits that ml_dtypes itself would have saved."""
    arrays = {name: with_bytes(dtype_of(name), (5, 3), 2) for name in ("bfloat16", *FLOAT8_NAMES)}
    convert.save(arrays, tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as archive:
        for name, array in arrays.items():
            assert archive[name].view(array.dtype).tobytes() == array.tobytes()
            assert archive[name].dtype.itemsize == array.dtype.itemsize


# --- what others write, we read ----------------------------------------------------------------------------------


def mlx_arrays(names: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Array]]:
    """The same arrays for MLX and for numpy, axes turned around in some."""
    ours = arrays_of(names)
    theirs = {}
    with mx.stream(mx.cpu):
        for name, array in ours.items():
            if array.dtype.name == "bfloat16":
                theirs[name] = mx.array(array.view(np.uint16)).view(mx.bfloat16)
            else:
                # asked for, as MLX would make float32 of float64
                theirs[name] = mx.array(array, getattr(mx, array.dtype.name.replace("bool", "bool_")))
            if array.ndim == 3:
                theirs[name] = theirs[name].transpose(2, 0, 1)
                ours[name] = array.transpose(2, 0, 1)
        mx.eval(list(theirs.values()))
    return theirs, ours


def converted(source: Path, folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What a source becomes in safetensors, as the strict parser of the tests finds it."""
    convert.convert_file(source, folder / "out.safetensors", overwrite=True)
    names = {code: name for name, code in oracle.SAFETENSORS_CODES.items()}
    tensors = oracle.read_safetensors(folder / "out.safetensors")[1]
    return {name: (names[code], shape, data) for name, (code, shape, data) in tensors.items()}


@needs_mlx
@pytest.mark.parametrize("save", ["savez", "savez_compressed"])
def test_npz_of_mlx(save: str, tmp_path: Path) -> None:
    """Archives of MLX, stored and deflated: unpadded headers, `<V2` for bfloat16, Fortran-flagged arrays."""
    theirs, ours = mlx_arrays(MLX_NAMES)
    with mx.stream(mx.cpu):
        getattr(mx, save)(str(tmp_path / "a.npz"), **theirs)
    assert converted(tmp_path / "a.npz", tmp_path) == facts(ours)
    convert.convert_file(tmp_path / "a.npz", tmp_path / "b.npz", order="keep")
    assert {name: from_mlx(value) for name, value in mlx_load(tmp_path / "b.npz").items()} == facts(ours)


@needs_mlx
@pytest.mark.parametrize("name", MLX_NAMES)
def test_npy_of_mlx(name: str, tmp_path: Path) -> None:
    """MLX marks 0-d, 1-d and turned arrays as Fortran; the values are where they belong."""
    theirs, ours = mlx_arrays((name,))
    for key, array in ours.items():
        with mx.stream(mx.cpu):
            mx.save(str(tmp_path / f"{key}.npy"), theirs[key])
        assert converted(tmp_path / f"{key}.npy", tmp_path) == facts({key: array})
    assert b"'fortran_order': True" in (tmp_path / f"{name}.7.npy").read_bytes()


@needs_mlx
@pytest.mark.parametrize("metadata", [None, {}, {"format": "mlx", "\u00e9": "\n"}], ids=str)
def test_safetensors_of_mlx(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    """MLX writes `__metadata__: null`, other key orders, and headers that end anywhere."""
    theirs, ours = mlx_arrays(MLX_SAFETENSORS_NAMES)
    with mx.stream(mx.cpu):
        more = () if metadata is None else (metadata,)
        mx.save_safetensors(str(tmp_path / "a.safetensors"), theirs, *more)
    assert converted(tmp_path / "a.safetensors", tmp_path) == facts(ours)
    assert oracle.read_safetensors(tmp_path / "out.safetensors")[0] == (metadata or {})
    convert.convert_file(tmp_path / "a.safetensors", tmp_path / "b.npz")
    assert {name: from_mlx(value) for name, value in mlx_load(tmp_path / "b.npz").items()} == facts(ours)


@needs_mlx
def test_mlx_arrays_can_be_saved(tmp_path: Path) -> None:
    """`convert.save` takes MLX arrays as they are."""
    theirs, ours = mlx_arrays(MLX_NAMES)
    convert.save(theirs, tmp_path / "a.safetensors")
    names = {code: name for name, code in oracle.SAFETENSORS_CODES.items()}
    tensors = oracle.read_safetensors(tmp_path / "a.safetensors")[1]
    assert {name: (names[code], shape, data) for name, (code, shape, data) in tensors.items()} == facts(ours)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_archives_of_zip_programs(method: int, tmp_path: Path) -> None:
    """npy files packed by hand, by any method of zipfile, large ones too."""
    arrays = {**arrays_of(("float32", "bool")), "weights": large()["weights"][:150], "zeros": np.zeros(600_000)}
    savez(tmp_path / "source.npz", arrays)
    with zipfile.ZipFile(tmp_path / "source.npz") as before, zipfile.ZipFile(tmp_path / "a.npz", "w", method) as after:
        for name in before.namelist():
            after.writestr(name, before.read(name), compresslevel=1 if method == zipfile.ZIP_BZIP2 else None)
    assert converted(tmp_path / "a.npz", tmp_path) == facts(arrays)


def test_archives_of_the_zip_command(tmp_path: Path) -> None:
    """Info-ZIP's `zip`, streaming to a pipe: data descriptors, time stamps in extra fields, zip64."""
    if (program := shutil.which("zip")) is None:
        pytest.skip("zip is not installed: zipfile has written all archives")
    arrays = {"w": large()["weights"], "b": np.arange(3), "c": np.arange(0.0)}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    with (tmp_path / "a.npz").open("wb") as out:
        command = [program, "-q", "-", *(f"{name}.npy" for name in arrays)]
        subprocess.run(command, cwd=tmp_path, stdout=out, check=True)
    assert converted(tmp_path / "a.npz", tmp_path) == facts(arrays)
