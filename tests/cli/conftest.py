"""For the tests of the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def small(tmp_path: Path) -> str:
    """The name of a file of two tensors in the current folder."""
    np.savez(tmp_path / "in.npz", w=np.arange(6, dtype=np.float32).reshape(2, 3), b=np.zeros(4))
    return "in.npz"
