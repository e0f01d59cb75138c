"""The program in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

POSIX = os.name == "posix"
SCRIPTS = Path(sys.executable).parent
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def driver(code: str = "") -> list[str]:
    """A command that changes something and then is the program."""
    return [sys.executable, "-c", f"import sys\n{code}\nfrom convert.cli.main import main\nmain(sys.argv[1:])"]


def program(
    folder: Path, *argv: object, command: list[str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """The program, run in a process of its own."""
    env = {**os.environ, "PYTHONWARNINGS": "error", **options.pop("env", {})}
    for stream in ("stdout", "stderr"):
        options.setdefault(stream, subprocess.PIPE)
    full = [*(command or [sys.executable, "-m", "convert"]), *map(str, argv)]
    return subprocess.run(full, text=True, check=False, env=env, cwd=folder, **options)
