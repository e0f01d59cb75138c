"""What the documentation says is what the code does."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

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


def test_format_example_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader and the writer of docs/formats.md work as they stand."""
    import convert
    from convert import formats

    text = (ROOT / "docs" / "formats.md").read_text("utf-8")
    row, reader, writer = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text(row)
    (package / "reader.py").write_text(reader)
    (package / "writer.py").write_text(writer)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("my_package")
    monkeypatch.setattr(formats, "all_formats", lambda: (*formats.BUILT_IN, module.FORMAT))
    target = tmp_path / "out.raw"
    convert.save({"x": np.arange(5, dtype=np.uint8)}, target)
    assert target.read_bytes() == b"RAW1\0\1\2\3\4"
    assert convert.load(target)["data"].tolist() == [0, 1, 2, 3, 4]


def test_links_of_the_documentation_lead_somewhere() -> None:
    """Every relative link in README and docs names a file that is there."""
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
