"""The public API as type checkers see it in the program of somebody who installed it: mypy --strict and pyright."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

RIGHT = """
from pathlib import Path
from typing import Any, Unpack, assert_type

import numpy as np
import numpy.typing as npt

import convert


def progress(done: int, total: int, name: str) -> None: ...


def wrapper(source: str, **options: Unpack[convert.Options]) -> convert.Report:
    return convert.convert_file(source, "out.npz", **options)


def main(source: Path, target: str) -> None:
    assert_type(convert.__version__, str)
    report = convert.convert_file(
        source, target, policy=convert.Policy(V2="bfloat16"), progress=progress, compress=6, overwrite=True,
        cast=[("float32", "bfloat16")], rename=[("^a", "b")], include=["*"], limits=convert.Limits(), jobs=None,
    )
    assert_type(report, convert.Report)
    assert_type(report.to_json(), str)
    assert_type(report.notes, list[str])
    for row in report.tensors:
        assert_type(row.shape, tuple[int, ...])
    with convert.open([source, target]) as checkpoint:
        assert_type(checkpoint, convert.Checkpoint)
        for name, tensor in checkpoint.items():
            assert_type(name, str)
            assert_type(tensor, convert.Tensor)
            assert_type(tensor.dtype, convert.DType)
            array: npt.NDArray[Any] = tensor.numpy()
            part: npt.NDArray[Any] = tensor[1:2, ..., None, 3]
            for chunk in tensor.chunks():
                chunk.tobytes()
            array[...] = part
    convert.save(convert.load(source, include=["w"]), target, separator="/", metadata={"a": "b"}, verify=True)
    convert.save({"a": {"b": np.zeros(3)}}, target, to="npz")
    specs = {"w": convert.TensorSpec("float32", (3,)), "v": convert.TensorSpec(np.dtype("f4"), ())}
    with convert.writer(target, specs, compress=True) as out:
        assert_type(out, convert.Writer)
        out.write("w", b"")
        out.write("w", np.zeros(3))
    assert_type(out.report, convert.Report)
    with convert.open(source) as checkpoint, convert.writer(target, checkpoint):
        pass
    convert.writer(target, {"w": np.zeros(3)})
    try:
        assert_type(convert.diff(source, target), convert.Comparison)
    except convert.PolicyError as err:
        assert_type(err.problems, tuple[convert.ConvertError, ...])
        assert_type(err.tensor, str | None)
    assert_type(convert.convert_folder(source, target, to="safetensors"), convert.BatchReport)
    wrapper("in.npz", overwrite=True)
"""

WRONG = [
    'convert.convert_file("a", "b", overwriet=True)',
    'convert.convert_file("a", "b", compress="fast")',
    'convert.save([1], "b")',
    'convert.save({"w": 1}, "b", jobs="many")',
    'convert.load("a")["w"].no_such_method()',
    'convert.writer("a", {"w": ("float32", (3,))})',
    'convert.writer("a", {}, dry_run=True)',
    'convert.open("a")[0]',
    "convert.open(3)",
    "convert.no_such_name",
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment in which the packages are installed as from a wheel: checkers look for `py.typed`."""
    folder = tmp_path_factory.mktemp("env")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    scripts = "Scripts" if sys.platform == "win32" else "bin"
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    for package in ("convert", "readers", "writers"):
        shutil.copytree(ROOT / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    return folder / scripts / "python"


def mypy(program: Path, python: Path) -> subprocess.CompletedProcess[str]:
    options = ["--strict", f"--python-executable={python}", "--config-file=", f"--cache-dir={program.parent / 'cache'}"]
    return subprocess.run(
        [sys.executable, "-m", "mypy", *options, program],
        cwd=program.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip


def pyright(program: Path, python: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("pyright", reason="pip install pyright, and node")
    if shutil.which("node") is None:
        pytest.skip("pyright would download node")
    return subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", python, program],
        cwd=program.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_a_program_that_uses_everything(tmp_path: Path, python: Path, checker: object) -> None:
    """No complaint, and no `Any` where a type is promised."""
    program = tmp_path / "program.py"
    program.write_text(RIGHT, "utf-8")
    done = checker(program, python)  # type: ignore[operator]
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_slips_are_found(tmp_path: Path, python: Path, checker: object) -> None:
    """Each line that is wrong is complained about, misspelt options included."""
    program = tmp_path / "program.py"
    program.write_text("import convert\n" + "\n".join(WRONG) + "\n", "utf-8")
    done = checker(program, python)  # type: ignore[operator]
    for number, line in enumerate(WRONG, 2):
        assert f"program.py:{number}:" in done.stdout, f"{line}\n{done.stdout}{done.stderr}"
