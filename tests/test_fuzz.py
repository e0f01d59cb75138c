"""Any bytes give tensors or a ConvertError, in bounded time and memory: as much of it as fits into the suite.

The long forms are `python -m fuzz --exhaustive` and `python -m fuzz --minutes N`; their finds are in `fuzz_finds/`.
"""

from __future__ import annotations

import io
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import convert
from convert.files import SourceFile
from convert.tensor import Checkpoint
from fuzz import archives, body, fields, finds, mutate
from fuzz.fields import SUFFIXES
from fuzz.seeds import ROOT, Seed, packed, seeds, unpacked
from readers import npy

FINDS = Path(__file__).resolve().parent / "fuzz_finds"
SEEDS = seeds()
GROUPS = 12
OF_EACH = 5
"""Prefixes, bit flips and field changes of every file that are tried here; all of them are by --exhaustive."""
posix = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no limits on time and memory here")


def some(changes: Iterator[bytes], rng: random.Random, count: int) -> list[bytes]:
    """A few of very many, spread over all of them."""
    step = rng.randrange(1, 60)
    return list(itertools.islice(changes, rng.randrange(step), step * count * 4, step))[:count]


def few_changes(seed: Seed) -> Iterator[bytes]:
    """The file, and a few of its systematic and random changes; always the same."""
    rng = random.Random(seed.name)
    yield seed.data
    for _ in range(min(OF_EACH, len(seed.data))):
        yield seed.data[: rng.randrange(len(seed.data))]
        at = rng.randrange(len(seed.data))
        yield seed.data[:at] + bytes([seed.data[at] ^ 1 << rng.randrange(8)]) + seed.data[at + 1 :]
    yield from some(mutate.field_changes(seed.data, seed.suffix), rng, OF_EACH)
    for _ in range(OF_EACH):
        yield mutate.changed(seed.data, seed.suffix, rng)


@pytest.mark.parametrize("group", range(GROUPS))
def test_damaged_files(group: int, tmp_path: Path) -> None:
    """Every sample, hard case and earlier find, damaged in each way."""
    for number, seed in enumerate(SEEDS[group::GROUPS]):
        for count, data in enumerate(few_changes(seed)):
            choice = (number + count) % body.CHOICES if count % 5 == 0 else None
            try:
                with body.bounded():
                    body.check(data, seed.suffix, tmp_path, choice)
            except BaseException as err:
                err.add_note(f"{seed.name}, change {count}, choice {choice}: {data[:600]!r}")
                raise


@pytest.mark.parametrize(
    "path", sorted(path for path in FINDS.iterdir() if path.suffix != ".md"), ids=lambda path: path.name
)
def test_earlier_finds_stay_fixed(path: Path, tmp_path: Path) -> None:
    """Files that once broke a promise, read and converted in every way."""
    suffix = next(suffix for suffix in SUFFIXES if path.name.endswith(suffix))
    for choice in (None, *range(body.CHOICES)):
        with body.bounded():
            body.check(path.read_bytes(), suffix, tmp_path, choice)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(SEEDS), st.integers(0, 1 << 32), st.integers(0, 4 * body.CHOICES))
def test_changes_at_random(seed: Seed, change: int, choice: int) -> None:
    """The same, with hypothesis at the dice: it keeps what failed, and finds simpler files that fail."""
    data = mutate.changed(seed.data, seed.suffix, random.Random(change))
    with tempfile.TemporaryDirectory() as folder, body.bounded():
        body.check(data, seed.suffix, Path(folder), choice if choice < body.CHOICES else None)


STARTS = [
    b"",
    b"\x93NUMPY\x01\x00",
    b"PK\x03\x04",
    b"PK\x05\x06" + bytes(18),
    b"\x10\0\0\0\0\0\0\0{",
    b'{"weight_map": {',
]


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(STARTS), st.binary(max_size=400), st.sampled_from(SUFFIXES))
def test_noise(start: bytes, rest: bytes, suffix: str) -> None:
    """Bytes without any sense, behind the signature of a format or not."""
    with tempfile.TemporaryDirectory() as folder, body.bounded():
        body.check(start + rest, suffix, Path(folder))


# --- the body itself can fail ------------------------------------------------------------------------------------

GOOD = (ROOT / "samples" / "w_f32.npy").read_bytes()


def broken(monkeypatch: pytest.MonkeyPatch, how: Any) -> None:
    """Put `how(path, checkpoint)` behind the npy reader."""
    original = npy.open

    def opened(path: str, limits: Any) -> Checkpoint:
        checkpoint = original(path, limits)
        how(Path(path), checkpoint)
        return checkpoint

    monkeypatch.setattr(npy, "open", opened)


def escapes(path: Path, checkpoint: Checkpoint) -> None:
    checkpoint.close()
    raise KeyError("w")


def names_nothing(path: Path, checkpoint: Checkpoint) -> None:
    checkpoint.close()
    raise convert.CorruptError("wrong")


def speaks_too_much(path: Path, checkpoint: Checkpoint) -> None:
    checkpoint.close()
    raise convert.CorruptError("long " * 1000, path=path)


def leaves_a_file(path: Path, checkpoint: Checkpoint) -> None:
    (path.parent / "left").touch()


def changes_the_source(path: Path, checkpoint: Checkpoint) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def allocates(path: Path, checkpoint: Checkpoint) -> None:
    bytearray(body.MEMORY_BYTES + (64 << 20))


def hangs(path: Path, checkpoint: Checkpoint) -> None:
    signal.raise_signal(signal.SIGALRM)


def lies_about_its_size(path: Path, checkpoint: Checkpoint) -> None:
    checkpoint.tensors[0].shape = (4, 63)


def is_no_text(path: Path, checkpoint: Checkpoint) -> None:
    checkpoint.metadata["\ud800"] = ""


FAULTS = [escapes, names_nothing, speaks_too_much, leaves_a_file, changes_the_source, lies_about_its_size, is_no_text]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.__name__))
def test_a_broken_promise_is_seen(fault: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A reader with any of these faults does not pass."""
    with body.bounded():
        body.check(GOOD, ".npy", tmp_path)
    broken(monkeypatch, fault)
    with pytest.raises((AssertionError, KeyError, UnicodeEncodeError)):
        body.check(GOOD, ".npy", tmp_path)


@posix
@pytest.mark.parametrize(("fault", "seen"), [(allocates, MemoryError), (hangs, body.Hang)])
def test_the_bounds_hold(
    fault: Any, seen: type[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Too much memory is seen where the system can limit it, and so is a hang; afterwards there is no limit left."""
    if seen is MemoryError and sys.platform != "linux":
        pytest.skip("memory in use is read from /proc")
    broken(monkeypatch, fault)
    with pytest.raises(seen), body.bounded():
        body.check(GOOD, ".npy", tmp_path)
    assert len(bytearray(body.MEMORY_BYTES + (64 << 20))) > body.MEMORY_BYTES


class _NoRoom:
    """A decompressor of lzma for whose dictionary there is no memory."""

    eof, needs_input, unused_data = False, True, b""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def decompress(self, *_: object, **__: object) -> bytes:
        raise MemoryError


def test_memory_that_runs_out_is_no_damage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file is fine, and fine again when there is room."""
    (tmp_path / "w.npz").write_bytes(archives.archive((archives.Member(b"w.npy", GOOD, 14),)))
    with monkeypatch.context() as patch:
        patch.setattr("lzma.LZMADecompressor", _NoRoom)
        with pytest.raises(convert.LimitError, match="not enough memory"):
            convert.load(tmp_path / "w.npz")
    assert convert.load(tmp_path / "w.npz")["w"].shape == (4, 64)


def test_two_readings_that_differ_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bytes that change from one reading to the next."""
    counter = itertools.count()
    original = SourceFile.readinto

    def readinto(self: SourceFile, offset: int, view: memoryview) -> None:
        original(self, offset, view)
        view[0] = next(counter) % 256

    monkeypatch.setattr(SourceFile, "readinto", readinto)
    with pytest.raises(AssertionError, match=r"read twice|as an array"):
        body.check(GOOD, ".npy", tmp_path)


def test_a_conversion_that_changes_values_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The target is compared with the source."""
    from writers import safetensors as writer

    original = writer.write

    def write(plan: Any, settings: Any) -> Any:
        plan.tensors = [tensor.changed(shape=tensor.shape[::-1]) for tensor in plan.tensors]
        return original(plan, settings)

    monkeypatch.setattr(writer, "write", write)
    with pytest.raises(AssertionError, match="'w' was"):
        body.check(GOOD, ".npy", tmp_path, choice=2 * 4 * 2)  # to safetensors, defaults


# --- the tools ---------------------------------------------------------------------------------------------------


def test_an_index_has_its_shards(tmp_path: Path) -> None:
    """The index among the files to begin with can be read and converted."""
    (index,) = [seed for seed in SEEDS if seed.suffix == SUFFIXES[3]]
    assert body.check(index.data, index.suffix, tmp_path, 2 * 4 * 2) == (True, True)


def test_a_find_is_stored_once_with_its_smallest_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A note tells where it came from; the folder is empty for the next."""
    broken(monkeypatch, escapes)
    folder = tmp_path / "work"
    folder.mkdir()
    for data in (GOOD, GOOD + b"\0", GOOD[:-1]):
        finds.attempt(data, ".npy", folder, None, tmp_path / "finds")
    assert list(folder.iterdir()) == []
    (file,) = (tmp_path / "finds").glob("*.npy")
    assert file.read_bytes() == GOOD
    assert file.with_suffix(".txt").read_text().startswith("KeyError test_fuzz.py:escapes:")


def test_changes_are_the_same_each_time_and_do_change() -> None:
    """A number stands for a change."""
    for seed in SEEDS:
        first = [mutate.changed(seed.data, seed.suffix, random.Random(n)) for n in range(4)]
        assert first == [mutate.changed(seed.data, seed.suffix, random.Random(n)) for n in range(4)]
        if seed.data:
            assert any(data != seed.data for data in first), seed.name


def test_every_place_of_a_short_file_is_tried_and_the_ends_of_a_long_one() -> None:
    """All prefixes and all bits, but not within long data."""
    short, long = bytes(100), bytes(3 * mutate.EDGE_BYTES)
    assert [len(data) for data in mutate.prefixes(short)] == list(range(100))
    assert len(set(mutate.bit_flips(short))) == 800
    assert len(list(mutate.prefixes(long))) == 2 * mutate.EDGE_BYTES
    flipped = [data.find(b"\x80") for data in mutate.bit_flips(long)][7::8]
    assert flipped == [*range(mutate.EDGE_BYTES), *range(2 * mutate.EDGE_BYTES, 3 * mutate.EDGE_BYTES)]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_field_of_a_format_is_found(suffix: str) -> None:
    """Length, header and data of a file; in an archive the fields of all records, and those of the members."""
    kinds = {field.kind for seed in SEEDS if seed.suffix == suffix for field in fields.fields(seed.data, suffix)}
    assert (
        kinds
        >= {
            ".npy": {"number", "python", "data", "opcode"},
            ".npz": {"number", "python", "name", "extra"},
            ".safetensors": {"number", "json", "data"},
            ".safetensors.index.json": {"json"},
        }[suffix]
    )


def test_an_archive_with_a_zip64_end_is_one(tmp_path: Path) -> None:
    """zipfile and the product find the same members through it."""
    (seed,) = [seed for seed in SEEDS if seed.name == "zip64"]
    with zipfile.ZipFile(io.BytesIO(seed.data)) as archive:
        names = archive.namelist()
    assert names
    (tmp_path / "w.npz").write_bytes(seed.data)
    assert [f"{name}.npy" for name in convert.load(tmp_path / "w.npz")] == names


def test_archives_made_anew_are_archives() -> None:
    """What is not meant to be wrong is right: zipfile reads them."""
    made = 0
    for seed in SEEDS:
        found = archives.members(seed.data) if seed.suffix == ".npz" else ()
        if not found or any(member.flags & ~0x808 for member in found):
            continue
        for streamed in (False, True):
            with zipfile.ZipFile(io.BytesIO(archives.archive(found, b"note", streamed=streamed))) as archive:
                assert archive.comment == b"note"
                assert [archive.read(info) for info in archive.infolist()] == [member.content for member in found]
                made += 1
    assert made > 20


@pytest.mark.parametrize(
    "seed", [seed for seed in SEEDS if seed.name in ("small.npz", "plain.safetensors", "w_f32.npy")]
)
def test_repaired_changes_get_past_the_lengths(seed: Seed, tmp_path: Path) -> None:
    """A header that grew is read to its new end: many changes are accepted, or refused for what they say."""
    path = tmp_path / f"w{seed.suffix}"
    refused, accepted = set(), 0
    for data in itertools.islice(mutate.field_changes(seed.data, seed.suffix), 0, None, 23):
        path.write_bytes(data)
        try:
            with convert.open(path) as checkpoint:
                accepted += all(tensor.problem is None for tensor in checkpoint.tensors)
        except convert.ConvertError as err:
            refused.add(err.problems[0].message[:20])
    assert accepted > 5
    assert len(refused) > 5


def test_inputs_of_the_guided_form_are_files() -> None:
    """Suffix and conversion are in front of the contents, and any bytes are an input."""
    for seed in SEEDS[:20]:
        assert unpacked(packed(seed.data, seed.suffix, 7)) == (seed.data, seed.suffix, 7)
        assert unpacked(packed(seed.data, seed.suffix, None)) == (seed.data, seed.suffix, None)
    assert unpacked(b"") == (b"", ".npy", 0)
    assert unpacked(b"\xff\xff{") == (b"{", SUFFIXES[3], 255 % (3 * body.CHOICES))


def run(tmp_path: Path, *argv: str) -> dict[str, float]:
    """Counts that `python -m fuzz` prints last."""
    command = [sys.executable, "-m", "fuzz", *argv, "--jobs", "1", "--corpus", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    counts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return counts


def test_the_exhaustive_form(tmp_path: Path) -> None:
    """`python -m fuzz --exhaustive`, a small part of it."""
    counts = run(tmp_path, "--exhaustive", "--only", "[a-f]*.safetensors", "--every", "97")
    assert counts["finds"] == 0
    assert counts["executions"] > 100
    assert 0 < counts["converted"] < counts["accepted"] < counts["executions"]


def test_the_guided_form(tmp_path: Path) -> None:
    """`python -m fuzz --minutes N` runs, and its corpus can be replayed."""
    pytest.importorskip("atheris")
    counts = run(tmp_path, "--minutes", "0.05")
    assert counts["finds"] == 0
    assert counts["executions"] > 0
    again = run(tmp_path, "--replay", str(tmp_path / "inputs"))
    assert again["executions"] == len(list((tmp_path / "inputs").iterdir()))
