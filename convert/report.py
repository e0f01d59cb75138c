"""What a conversion did, for people and programs."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from convert.plan import Change, Skipped


class Written(NamedTuple):
    """A tensor in the target; `sha256` of its little-endian row-major bytes where they were verified."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sha256: str | None = None


@dataclass
class Report:
    """The outcome of one conversion.

    Attributes:
        sources: Paths as given.
        target: Path as given.
        source_formats: Of the sources, each once.
        target_format: Of the target.
        tensors: What was written, in the source's order.
        changes: Tensors that came out other than they went in, and by which option or policy.
        skipped: Tensors and other members left out, and why.
        notes: What else is worth knowing.
        metadata: Written to the target.
        source_bytes: Size of the source files.
        target_bytes: Size of the target; 0 in a dry run.
        seconds: Wall time.
        verified: The target was read back and every byte compared.
        dry_run: Nothing was written.
    """

    sources: list[str]
    target: str
    source_formats: list[str]
    target_format: str
    tensors: list[Written] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    source_bytes: int = 0
    target_bytes: int = 0
    seconds: float = 0.0
    verified: bool = False
    dry_run: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers, ready for JSON."""
        found = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        for name in ("tensors", "changes", "skipped"):
            found[name] = [row._asdict() for row in found[name]]
        return found

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False)
