"""The README's table of what other tools make of awkward arrays is what a run of them gives."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_the_table_of_the_readme_is_what_was_run() -> None:
    """benchmarks/comparison.py prints it, with numpy's, safetensors' and MLX's releases of the day."""
    pytest.importorskip("mlx.core")
    from benchmarks import comparison

    text = (Path(__file__).resolve().parents[1] / "README.md").read_text("utf-8")
    assert comparison.table() + "\n" in text
