"""What the documentation says is what the code does."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import convert
from convert.policy import KINDS

ROOT = Path(__file__).resolve().parents[1]


def test_matrix_is_made_from_the_code() -> None:
    """docs/matrix.md is what docs/make_matrix.py prints."""
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_matrix.py"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == (ROOT / "docs" / "matrix.md").read_text("utf-8")


def test_readme_lists_every_policy_kind_and_its_default() -> None:
    """The README's policy table has every kind, with the default action in bold."""
    text = (ROOT / "README.md").read_text("utf-8")
    for kind in KINDS:
        row = next(line for line in text.splitlines() if line.startswith("| ") and f"`{kind.name}`" in line)
        assert f"**{next(iter(kind.actions))}**" in row, kind.name


def test_library_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's library example works as it stands."""
    text = (ROOT / "README.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    np.savez("in.npz", w=np.arange(6, dtype="<f4"))
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    arrays = names["arrays"]
    assert isinstance(arrays, dict)
    assert arrays["w"].tobytes() == np.arange(6, dtype="<f4").tobytes()


@pytest.mark.parametrize(("script", "made"), [("make_api.py", "api.md"), ("make_man.py", "tensor-convert.1")])
def test_pages_are_made_from_the_code(script: str, made: str) -> None:
    """Names and manual page are what their scripts print; `python docs/SCRIPT > docs/PAGE` renews them."""
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / script], capture_output=True, text=True, check=True, cwd=ROOT, encoding="utf-8"
    )
    assert done.stdout == (ROOT / "docs" / made).read_text("utf-8")


def test_every_public_name_is_on_the_page() -> None:
    """By its home, which is what the site shows."""
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    for name in convert.__all__:
        value = getattr(convert, name)
        assert name == "__version__" or f"::: {value.__module__}.{value.__qualname__}\n" in text + "\n", name


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_the_manual_page_is_one() -> None:
    """groff has nothing to complain about, and shows every option of every command."""
    page = ROOT / "docs" / "tensor-convert.1"
    shown = subprocess.run(
        ["groff", "-ww", "-man", "-Tascii", "-P-c", page], capture_output=True, text=True, check=True, encoding="utf-8"
    )
    assert shown.stderr == ""
    text = re.sub(r".\x08", "", shown.stdout)
    for option in ("--from", "--max-shard-size", "--max-pickle-memo", "--scheduler", "--rtol", "--explain", "--tree"):
        assert option in text


def test_links_lead_to_their_place_on_the_site() -> None:
    """Links out of docs/ become those to pages of the site, to files of it, or words."""
    spec = importlib.util.spec_from_file_location("outside", ROOT / "docs" / "outside.py")
    assert spec is not None
    assert spec.loader is not None
    outside = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(outside)
    moved = outside.moved
    assert moved("[a](../README.md#use) [b](ls.md)", "start.md") == "[a](manual.md#use) [b](ls.md)"
    assert (
        moved("[a](../matrix.md) [b](../../SECURITY.md)", "formats/npy.md") == "[a](../matrix.md) [b](../security.md)"
    )
    assert moved("[a](docs/ls.md) ![b](docs/speed.svg)", "manual.md") == "[a](ls.md) ![b](docs/speed.svg)"
    assert moved("[a](../examples/to_mlx.py) [b](../examples)", "x.md") == "[a](files/examples/to_mlx.py) b"
    assert moved("[a](https://x.org/y) [b](#c)", "x.md") == "[a](https://x.org/y) [b](#c)"


def test_links_of_the_documentation_lead_somewhere() -> None:
    """Every relative link in README and docs names a file that is there."""
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
