"""For all tests: the program as a fixture; no deadline for generated cases, for a busy machine is no fault of ours."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.program import Call, Outcome

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
settings.register_profile("project", deadline=None, print_blob=True)
settings.load_profile("project")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    """The program, run in this process and in an empty folder."""
    from convert.cli.main import run

    monkeypatch.chdir(tmp_path)
    handler, collects = signal.getsignal(signal.SIGTERM), gc.isenabled()

    def go(*argv: object) -> Outcome:
        capsys.readouterr()
        status = run([str(arg) for arg in argv])
        return Outcome(status, *capsys.readouterr())

    yield go
    signal.signal(signal.SIGTERM, handler)
    if collects:
        gc.enable()
