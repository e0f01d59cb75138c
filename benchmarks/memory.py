"""Memory for names, shapes and places: the peak of whole processes over very many tensors.

    python -m benchmarks.memory [--tensors N]

Tensors of 64 bytes, with names of some 30 characters; `a tensor` is what each takes beyond ten of them. About two
minutes; docs/performance.md quotes its output.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.run import Bench, remove, timed, words

_FEW, _BYTES = 10, 64
WAYS: tuple[tuple[str, ...], ...] = (
    ("npz", "out.safetensors"),
    ("safetensors", "out.npz"),
    ("safetensors", "out.npz", "--compress"),
    ("safetensors", "out.safetensors", "--verify"),
    ("npz", "folder/"),
    ("folder/", "out.npz"),
    ("ls", "npz"),
    ("ls", "safetensors", "--json"),
    ("ls", "safetensors", "--tree"),
    ("ls", "safetensors", "--stats"),
    ("check", "safetensors"),
    ("diff", "npz", "safetensors"),
)
"""Arguments of convert; a format alone is a source of that format."""


def _peak(folder: Path, count: int, way: tuple[str, ...]) -> int:
    """Bytes, of one process that works in a folder of its own."""
    folder.mkdir(exist_ok=True)
    bench = Bench(folder, 1, keep=True)
    sources = {suffix: f"{count}x{_BYTES}.{suffix}" for suffix in ("npz", "safetensors")}
    for suffix in sources.keys() & set(way):
        bench.need(sources[suffix])
    command = ("convert", *(sources.get(word, word) for word in way))
    found = timed(words(command, "", ""), folder).rss_bytes
    for made in folder.glob("out.*"):
        remove(made)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=100_000)
    many: int = parser.parse_args().tensors
    with tempfile.TemporaryDirectory(prefix="convert-benchmarks-") as name:
        folder = Path(name).resolve()
        print(f"{'convert':44}{f'{_FEW} tensors':>16}{f'{many} tensors':>18}{'a tensor':>14}")
        for way in WAYS:
            few_bytes, many_bytes = (_peak(folder / str(count), count, way) for count in (_FEW, many))
            each = (many_bytes - few_bytes) / (many - _FEW)
            cells = (few_bytes / 2**20, many_bytes / 2**20, each)
            print("{:44}{:12.0f} MiB{:14.0f} MiB{:8.0f} bytes".format(" ".join(way), *cells), flush=True)


if __name__ == "__main__":
    main()
