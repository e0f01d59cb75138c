"""Plain values mean the same whether Typer's adapters or ours read them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.cli import main

CALLS = {
    "no options": (["in.npz", "out.npz"], 0),
    "numbers": (["in.npz", "out.npz", "--align", "64", "--jobs", "2"], 0),
    "a number with a sign": (["in.npz", "out.npz", "--align", "+64"], 0),
    "no number": (["in.npz", "out.npz", "--align", "big"], 2),
    "a fraction": (["in.npz", "out.npz", "--jobs", "1.5"], 2),
    "an optional number": (["in.npz", "out.npz", "--compress", "3"], 0),
    "texts": (["in.npz", "out.npz", "--include", "a*", "--include", "b*", "--metadata", "k=v"], 0),
    "no source": (["in.npz"], 2),
    "nothing": (["--quiet"], 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_both_ways_agree(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status and output file are the same; a wrong number is a usage error that names it."""
    argv, status = CALLS[name]
    monkeypatch.chdir(tmp_path)
    np.savez("in.npz", a=np.arange(3), b=np.arange(4.0))
    outcomes: list[int | bytes] = []
    for plainly in (True, False):
        with monkeypatch.context() as patch:
            if not plainly:
                patch.setattr(main, "coerce_plainly", _forget)
            outcomes.append(main.run(argv))
        out = Path("out.npz")
        outcomes.append(out.read_bytes() if out.exists() else b"")
        out.unlink(missing_ok=True)
        said = capsys.readouterr().err
        assert "--align" in said if "big" in argv else "--jobs" in said if "1.5" in argv else True
    assert outcomes[:2] == outcomes[2:]
    assert outcomes[0] == status


def _forget(params: Iterable[Any]) -> None:
    """Parameters live as long as their command: take our reader away again."""
    for param in params:
        if type(getattr(param, "_runtime_param", None)).__name__ == "_Plain":
            param._runtime_param = None


def test_a_conversion_starts_without_the_validation_library(tmp_path: Path) -> None:
    """pydantic is not imported for plain options (with the Typer that the shortcut knows)."""
    np.savez(tmp_path / "in.npz", a=np.arange(3))
    code = (
        "import sys; from convert.cli.main import run; "
        f"status = run([{str(tmp_path / 'in.npz')!r}, {str(tmp_path / 'out.safetensors')!r}, '--quiet']); "
        "import typer.core; known = hasattr(typer.core._TyperParameter, 'get_runtime_param') "
        "if hasattr(typer.core, '_TyperParameter') else False; "
        "print(status, known, 'pydantic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    status, known, imported = done.stdout.split()
    assert status == "0"
    assert known == "False" or imported == "False"
