"""The examples, and the code in docs/library.md and docs/pipelines.md, do what they say."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import convert

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
NEEDS = {"from_torch.py": "torch", "from_flax.py": "flax", "to_mlx.py": "mlx", "layer_by_layer.py": "numpy"}


def run(script: str, folder: Path, *arguments: str) -> str:
    if importlib.util.find_spec(NEEDS[script]) is None:
        pytest.skip(f"{NEEDS[script]} is not installed")
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command as it stands in a file for others, with the `convert` of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-ec", command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": path},
    )


def test_every_script_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(NEEDS)


def test_from_torch(tmp_path: Path) -> None:
    printed = run("from_torch.py", tmp_path).splitlines()
    assert printed[0] == "'0.weight', '2.weight' share their memory (tied weights); each is written in full"
    back = convert.load(tmp_path / "model.safetensors")
    assert back["0.weight"].dtype == ml_dtypes.bfloat16
    assert back["0.weight"].tobytes() == back["2.weight"].tobytes()


def test_from_flax(tmp_path: Path) -> None:
    assert run("from_flax.py", tmp_path, "a.safetensors") == "the same\n"
    assert "params/layers_0/kernel" in convert.load(tmp_path / "a.safetensors")


def test_to_mlx(tmp_path: Path) -> None:
    values = np.arange(6.0).reshape(2, 3)
    np.savez(tmp_path / "model.npz", w=values, b=values.astype(ml_dtypes.bfloat16).view("V2"))
    assert run("to_mlx.py", tmp_path) == "b mlx.core.bfloat16 (2, 3)\nw mlx.core.float32 (2, 3)\n"


def test_layer_by_layer(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    arrays = {"w": rng.standard_normal((700, 30)).astype(ml_dtypes.bfloat16), "s": np.array(3, np.int64)}
    convert.save(arrays, tmp_path / "a.safetensors")
    convert.save({**arrays, "w": arrays["w"] * np.asarray(3, arrays["w"].dtype)}, tmp_path / "b.safetensors")
    report = json.loads(run("layer_by_layer.py", tmp_path, "a.safetensors", "b.safetensors", "c.safetensors"))
    assert report["target_bytes"] == (tmp_path / "c.safetensors").stat().st_size
    b = convert.load(tmp_path / "b.safetensors")["w"].astype(np.float32)
    expected = ((arrays["w"].astype(np.float32) + b) / 2).astype(ml_dtypes.bfloat16)
    back = convert.load(tmp_path / "c.safetensors")
    assert back["w"].tobytes() == expected.tobytes()
    assert back["s"] == 3


def test_the_steps_of_the_workflow(tmp_path: Path) -> None:
    """Those after the installation, as they stand: they pass for a whole file, and fail for a damaged one."""
    text = (EXAMPLES / "github-workflow.yml").read_text("utf-8")
    single = re.findall(r"^ +run: (convert .*)$", text, re.MULTILINE)
    (block,) = re.findall(r"^ +run: \|\n((?: {10}.*\n)+)", text, re.MULTILINE)
    (tmp_path / "models").mkdir()
    np.savez(tmp_path / "models" / "model.npz", w=np.arange(1000.0))
    for command in (*single, block):
        done = shell(command, tmp_path)
        assert done.returncode == 0, done.stderr
    data = bytearray((tmp_path / "models" / "model.npz").read_bytes())
    data[2000] ^= 1
    (tmp_path / "models" / "model.npz").write_bytes(data)
    for command in (*single, block.replace("--verify", "--overwrite")):
        assert shell(command, tmp_path).returncode == 3


def test_the_hook(tmp_path: Path) -> None:
    """It takes the files it is for, passes for whole ones and fails for one that was cut off."""
    text = (EXAMPLES / "pre-commit-config.yaml").read_text("utf-8")
    (entry,), (files,) = re.findall(r"entry: (.*)", text), re.findall(r"files: (.*)", text)
    assert [bool(re.search(files, f"a.{suffix}")) for suffix in ("npy", "npz", "safetensors", "py")] == [1, 1, 1, 0]
    np.savez(tmp_path / "a.npz", w=np.arange(10))
    convert.convert_file(tmp_path / "a.npz", tmp_path / "b.safetensors")
    assert shell(f"{entry} a.npz b.safetensors", tmp_path).returncode == 0
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "b.safetensors").read_bytes()[:-1])
    assert shell(f"{entry} a.npz b.safetensors", tmp_path).returncode == 3


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text("utf-8"), re.DOTALL)


def test_the_code_of_docs_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of the page, one after another, in one program."""
    monkeypatch.chdir(tmp_path)
    np.savez("in.npz", w=np.arange(20_000, dtype="<f4").reshape(100, 200), b=np.zeros(200, "<f4"))
    names: dict[str, object] = {}
    found = blocks("library.md")
    assert len(found) >= 5
    for code in found:
        exec(compile(code, "docs/library.md", "exec"), names)
    assert sorted(convert.load("merged.safetensors")) == ["b", "w"]
    assert names["column"].tolist() == [float(row * 200 + 3) for row in range(100)]  # type: ignore[attr-defined]


def test_the_code_of_docs_pipelines() -> None:
    """Every line of it is a line of an example, which is run above."""
    lines = {line.strip() for path in EXAMPLES.glob("*.py") for line in path.read_text("utf-8").splitlines()}
    shown = [line.strip() for block in blocks("pipelines.md") for line in block.splitlines()]
    assert shown
    assert [line for line in shown if line not in lines] == []
