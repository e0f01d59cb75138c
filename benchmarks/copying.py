"""Which way of copying a file is fastest here: chunk size, threads, buffer, preallocation, advice, copy_file_range.

`python -m benchmarks.copying [--mib N] [--runs R] [--dir DIR]` prints medians as ratios to `cp` in the same round, so
that the noise of a shared machine cancels. docs/decisions/0002-data-path.md quotes its output.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from convert.codec import crc32
from convert.threads import new_buffer

_SPAN_BYTES = 16 << 20


class Way(NamedTuple):
    """One way to copy."""

    name: str
    chunk_bytes: int
    threads: int
    checksum: bool = True
    reserve: bool = True
    advise: bool = False
    in_kernel: bool = False
    paged: bool = True


WAYS = (
    *(
        Way(f"{chunk >> 10} KiB chunks, {threads} thread{'s' * (threads > 1)}", chunk, threads)
        for chunk in (64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20)
        for threads in (1, 2)
    ),
    Way("256 KiB chunks, 4 threads", 256 << 10, 4),
    *(
        Way(
            f"256 KiB chunks, {threads} thread{'s' * (threads > 1)}, 16 bytes behind a page",
            256 << 10,
            threads,
            paged=False,
        )
        for threads in (1, 2)
    ),
    Way("256 KiB chunks, 2 threads, no checksum", 256 << 10, 2, checksum=False),
    Way("256 KiB chunks, 2 threads, no preallocation", 256 << 10, 2, reserve=False),
    Way("256 KiB chunks, 2 threads, sequential advice", 256 << 10, 2, advise=True),
    Way("copy_file_range, 1 thread, no checksum", 1 << 30, 1, checksum=False, reserve=False, in_kernel=True),
    Way("copy_file_range, 2 threads, no checksum", 1 << 30, 2, checksum=False, in_kernel=True),
)


def copy(source: Path, target: Path, way: Way) -> None:
    """Copy a file in one way."""
    size = source.stat().st_size
    reading = os.open(source, os.O_RDONLY)
    writing = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if way.reserve:
            os.posix_fallocate(writing, 0, size)
        if way.advise:
            os.posix_fadvise(reading, 0, size, os.POSIX_FADV_SEQUENTIAL)
        begins = iter(range(0, size, _SPAN_BYTES))
        lock = threading.Lock()

        def work() -> None:
            nbytes = 0 if way.in_kernel else way.chunk_bytes
            buffer = new_buffer(nbytes) if way.paged else new_buffer(nbytes + 16)[16:]
            while True:
                with lock:
                    begin = next(begins, None)
                if begin is None:
                    return
                end = min(begin + _SPAN_BYTES, size)
                _span(reading, writing, begin, end, buffer, way)

        threads = [threading.Thread(target=work) for _ in range(way.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        os.close(reading)
        os.close(writing)


def _span(reading: int, writing: int, begin: int, end: int, buffer: memoryview, way: Way) -> None:
    while begin < end:
        if way.in_kernel:
            begin += os.copy_file_range(reading, writing, end - begin, begin, begin)
            continue
        part = buffer[: min(len(buffer), end - begin)]
        done = os.preadv(reading, [part], begin)
        if way.checksum:
            crc32(part[:done])
        os.pwrite(writing, part[:done], begin)
        begin += done


def _seconds(run: Callable[[], object], target: Path) -> float:
    target.unlink(missing_ok=True)
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        with source.open("wb") as file:
            for _ in range(args.mib):
                file.write(os.urandom(1 << 20))
        ratios: dict[str, list[float]] = {way.name: [] for way in WAYS}
        for _ in range(args.runs):
            for way in WAYS:
                plain = _seconds(lambda: subprocess.run(["cp", source, target], check=True), target)
                ours = _seconds(lambda way=way: copy(source, target, way), target)  # type: ignore[misc]
                ratios[way.name].append(ours / plain)
    print(f"{args.mib} MiB, {args.runs} rounds; wall time as a ratio to cp in the same round: median (min, max)")
    for name, found in ratios.items():
        print(f"{name:58} {statistics.median(found):5.2f} ({min(found):.2f}, {max(found):.2f})")


if __name__ == "__main__":
    main()
