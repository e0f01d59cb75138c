"""The samples are what their script makes, and hold what `expected.json` says."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors

from . import oracle

SAMPLES = Path(__file__).resolve().parent.parent / "samples"
NO_SAMPLES = {"make.py", "expected.json", "PROVENANCE.md"}
EXPECTED: dict[str, dict[str, Any]] = json.loads((SAMPLES / "expected.json").read_text("utf-8"))
PROVENANCE = (SAMPLES / "PROVENANCE.md").read_text("utf-8")

HAS_X87 = np.finfo(np.longdouble).nmant == 63 and np.dtype(np.longdouble).itemsize == 16
SAME_ZIP_WRITER = f"zlib {zlib.ZLIB_RUNTIME_VERSION}," in PROVENANCE and sys.platform != "win32"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def makeable() -> set[str]:
    """The samples that can be made on this machine."""
    return {name for name, facts in EXPECTED.items() if HAS_X87 or facts.get("platform") != "x87"}


def members(data: bytes) -> list[tuple[str, int, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(entry.filename, entry.compress_type, archive.read(entry)) for entry in archive.infolist()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the samples made afresh."""
    if not hasattr(safetensors, "TensorSpec"):
        pytest.skip("safetensors before 0.8 cannot write complex64 and the FNUZ types")
    folder = tmp_path_factory.mktemp("samples")
    subprocess.run([sys.executable, "-W", "error", str(SAMPLES / "make.py"), str(folder)], check=True)
    return folder


def test_the_script_makes_exactly_the_committed_samples(made: Path) -> None:
    """No sample is left over from an older script, and none is missing."""
    assert {path.name for path in made.iterdir()} == makeable() | NO_SAMPLES - {"make.py"}


@pytest.mark.parametrize("name", sorted(makeable()))
def test_the_script_makes_the_same_bytes(made: Path, name: str) -> None:
    """Samples can be made again; where only another zip writer differs, the members are the same."""
    new, committed = (made / name).read_bytes(), (SAMPLES / name).read_bytes()
    if name.endswith(".npz") and not SAME_ZIP_WRITER:
        assert members(new) == members(committed)
    elif name == "object.npy" and np.lib.NumpyVersion(np.__version__) < "2.0.0":
        assert new[:128] == committed[:128]  # numpy 1 pickles under other module names
    else:
        assert new == committed


def test_the_script_expects_the_same(made: Path) -> None:
    """What is expected comes from the script too; file digests are judged with the files."""

    def tensors(folder: Path) -> dict[str, object]:
        facts = json.loads((folder / "expected.json").read_text("utf-8"))
        return {name: facts[name]["tensors"] for name in makeable()}

    assert tensors(made) == tensors(SAMPLES)


def test_every_sample_is_expected_and_small() -> None:
    """The folder and `expected.json` list the same files, and none is large."""
    files = {path.name: path.stat().st_size for path in SAMPLES.iterdir() if path.is_file()}
    assert {name for name in files if not name.startswith(".")} == EXPECTED.keys() | NO_SAMPLES
    assert max(files[name] for name in EXPECTED) < 8192
    assert sum(files.values()) < 200_000


@pytest.mark.parametrize("name", EXPECTED)
def test_sample_is_as_recorded(name: str) -> None:
    """Size and digest agree in the file, in `expected.json` and in PROVENANCE."""
    data = (SAMPLES / name).read_bytes()
    assert (len(data), sha256(data)) == (EXPECTED[name]["size"], EXPECTED[name]["sha256"])
    assert f"| {name} | {len(data)} | `{sha256(data)}` |" in PROVENANCE


def test_provenance_lists_nothing_else() -> None:
    """Each row of PROVENANCE is a sample; those no tool could make are marked."""
    rows = dict(re.findall(r"^\| (\S+\.\w+) \| .* \| ([^|]*) \|$", PROVENANCE, re.MULTILINE))
    assert rows.keys() == EXPECTED.keys()
    by_hand = {name for name, how in rows.items() if how.startswith("**hand-made**")}
    assert by_hand == {"float6.safetensors", "unaligned.safetensors"}


def test_the_two_examples_of_the_descriptions() -> None:
    """The examples in the format descriptions have exactly these sizes and members."""
    assert (SAMPLES / "w_f32.npy").stat().st_size == 1152
    array = np.load(SAMPLES / "w_f32.npy")
    assert (array.dtype.str, array.shape, array.flags.c_contiguous) == ("<f4", (4, 64), True)

    assert (SAMPLES / "small.npz").stat().st_size == 2314
    with np.load(SAMPLES / "small.npz") as archive:
        found = [(name, archive[name].dtype.str, archive[name].shape) for name in archive.files]
    # numpy shows the opaque <V2 of the header as |V2.
    assert found == [
        ("w_f32", "<f4", (4, 64)),
        ("b_f16", "<f2", (8,)),
        ("e_bf16", "|V2", (2, 3)),
        ("i_i32", "<i4", (3, 2)),
        ("s_f32", "<f4", ()),
    ]
    assert [tensor["stored"] for tensor in EXPECTED["small.npz"]["tensors"]] == ["<f4", "<f2", "<V2", "<i4", "<f4"]


@pytest.mark.parametrize("name", [name for name, facts in EXPECTED.items() if facts["format"] == "safetensors"])
def test_safetensors_sample_holds_what_is_expected(name: str) -> None:
    """The strict parser of the tests finds the expected tensors and metadata."""
    if name == "unaligned.safetensors":  # its metadata is null, which readers accept and the rules do not
        with pytest.raises(AssertionError, match="metadata"):
            oracle.read_safetensors(SAMPLES / name)
        return
    metadata, tensors = oracle.read_safetensors(SAMPLES / name)
    assert metadata == EXPECTED[name].get("metadata", {})
    found = {key: (code, list(shape), sha256(data)) for key, (code, shape, data) in tensors.items()}
    wanted = {t["name"]: (t["stored"], t["shape"], t["sha256"]) for t in EXPECTED[name]["tensors"]}
    assert found == wanted
    for tensor in EXPECTED[name]["tensors"]:
        assert oracle.SAFETENSORS_CODES[tensor["dtype"]] == tensor["stored"]


@pytest.mark.parametrize("name", [name for name, facts in EXPECTED.items() if facts["format"] != "safetensors"])
def test_numpy_sample_holds_what_is_expected(name: str) -> None:
    """numpy reads the expected shapes and bytes, where it reads the file at all."""
    if EXPECTED[name].get("platform") == "x87" and not HAS_X87:
        pytest.skip("numpy reads these bytes as another type here")
    data = (SAMPLES / name).read_bytes()
    files = [(f"{Path(name).stem}.npy", 0, data)] if name.endswith(".npy") else members(data)
    arrays = {member.removesuffix(".npy"): content for member, _, content in files if member.endswith(".npy")}
    blobs = {member: sha256(content) for member, _, content in files if not member.endswith(".npy")}
    assert blobs == EXPECTED[name].get("blobs", {})
    assert list(arrays) == [tensor["name"] for tensor in EXPECTED[name]["tensors"]]
    for tensor in EXPECTED[name]["tensors"]:
        content = arrays[tensor["name"]]
        if tensor["stored"] == "<f1":  # what ml_dtypes writes and numpy refuses
            content = content.replace(b"'<f1'", b"'|u1'", 1)
        if tensor["dtype"] == "object":
            continue
        array = np.load(io.BytesIO(content))
        assert list(array.shape) == tensor["shape"]
        assert sha256(oracle.canonical(array)) == tensor["sha256"]


def test_oracle_writes_as_the_samples_were_written(tmp_path: Path) -> None:
    """Whatever the layout of the arrays, the reference route of the tests gives the bytes of the sample."""
    if not hasattr(safetensors, "TensorSpec"):
        pytest.skip("safetensors before 0.8 cannot write complex64 and the FNUZ types")
    committed = (SAMPLES / "dtypes.safetensors").read_bytes()
    _, tensors = oracle.read_safetensors(SAMPLES / "dtypes.safetensors")
    arrays = {}
    for name, (_, shape, data) in tensors.items():
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        arrays[name] = np.asfortranarray(np.frombuffer(data, dtype).reshape(shape))
    oracle.save_with_reference(tmp_path / "f.safetensors", arrays)
    assert (tmp_path / "f.safetensors").read_bytes() == committed
    assert oracle.canonical(arrays["complex64"].astype(">c8")) == oracle.canonical(arrays["complex64"])

    _, four = oracle.read_safetensors(SAMPLES / "float4.safetensors")
    codes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).reshape(four["f4"][1])
    oracle.save_with_reference(tmp_path / "4.safetensors", {"f4": codes})
    assert (tmp_path / "4.safetensors").read_bytes() == (SAMPLES / "float4.safetensors").read_bytes()

    scalars = {"s": np.array(-1.5, ">f4"), "t": np.array(True)}
    oracle.save_with_reference(tmp_path / "0.safetensors", scalars)
    assert (tmp_path / "0.safetensors").read_bytes() == (SAMPLES / "scalar.safetensors").read_bytes()
