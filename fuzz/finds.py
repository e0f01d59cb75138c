"""What to do with a broken promise: the smallest file of each kind is kept, and the work goes on."""

from __future__ import annotations

import hashlib
import shutil
import traceback
from pathlib import Path

from fuzz.body import Hang, Outcome, bounded, check


def key_of(err: BaseException) -> str:
    """Where in the project an exception came from; finds with the same key are one."""
    root = Path(__file__).resolve().parents[1]
    frames = traceback.extract_tb(err.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(root)]
    last = ours[-1] if ours else frames[-1]
    return f"{type(err).__name__} {Path(last.filename).name}:{last.name}:{last.lineno}"


def attempt(
    data: bytes, suffix: str, folder: Path, choice: int | None, finds: Path, alarm: bool = True
) -> Outcome | None:
    """`check`, with its bounds; a broken promise is stored in `finds` and gives None."""
    try:
        with bounded(alarm):
            return check(data, suffix, folder, choice)
    except (Exception, Hang) as err:
        _store(data, suffix, choice, err, finds)
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return None


def _store(data: bytes, suffix: str, choice: int | None, err: BaseException, finds: Path) -> None:
    key = key_of(err)
    finds.mkdir(parents=True, exist_ok=True)
    stem = hashlib.sha256(key.encode()).hexdigest()[:12]
    file, note = finds / f"{stem}{suffix}", finds / f"{stem}.txt"
    if file.exists() and file.stat().st_size <= len(data):
        return
    for old in finds.glob(f"{stem}.*"):
        old.unlink()
    file.write_bytes(data)
    trace = "".join(traceback.format_exception(err))
    note.write_text(f"{key}\nchoice {choice}\n{trace[-6000:]}", "utf-8", "replace")
