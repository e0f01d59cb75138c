"""The program run in this process, as the fixture `call` of conftest.py does it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple


class Outcome(NamedTuple):
    """What a run of the program did."""

    status: int
    out: str
    err: str

    def rows(self) -> list[list[str]]:
        """Cells of each line: what two spaces separate."""
        return [re.split(r"\s{2,}", line.strip()) for line in self.out.splitlines()]


Call = Callable[..., Outcome]
"""Takes the words of a command line."""
