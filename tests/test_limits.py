"""Hostile files meet a limit, in bounded memory; what is honest passes; every limit has a name that works.

Each file is opened by a process of its own that may take 1 GiB of memory and no more. The time out is only against
hanging.
"""

from __future__ import annotations

import base64
import bz2
import dataclasses
import io
import json
import pickle
import pickletools
import re
import resource
import shlex
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert.cli.main import run
from convert.limits import DEFAULT, SETTINGS, Limits, exceeded

GIB = 1 << 30
HANGING = 300
"""Seconds, on the busiest machine."""


# --- making files ------------------------------------------------------------------------------------------------


def head(text: str, version: int = 1) -> bytes:
    """The header of a npy file, padded as numpy does."""
    body = text.encode()
    room = 10 if version == 1 else 12
    body += b" " * (-(room + len(body) + 1) % 64) + b"\n"
    return b"\x93NUMPY" + bytes((version, 0)) + len(body).to_bytes(room - 8, "little") + body


def described(descr: str = "'<f4'", shape: str = "(1,)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"


ONE = head(described()) + bytes(4)
"""A whole npy file of one float32."""


@dataclasses.dataclass
class Member:
    """One member of an archive, as its headers are to describe it."""

    name: bytes
    data: bytes
    size: int
    method: int = 0
    crc: int = 0
    extra: bytes = b""
    comment: bytes = b""

    def local(self) -> bytes:
        size = min(self.size, 0xFFFFFFFF)
        return struct.pack(
            "<4s5H3L2H", b"PK\3\4", 20, 0, self.method, 0, 33, self.crc, len(self.data), size, len(self.name), 0
        )

    def central(self, offset: int) -> bytes:
        size, extra = self.size, self.extra
        if size >= 0xFFFFFFFF:
            size, extra = 0xFFFFFFFF, struct.pack("<2HQ", 1, 8, self.size) + extra
        lengths = (len(self.name), len(extra), len(self.comment))
        fixed = (b"PK\1\2", 20, 20, 0, self.method, 0, 33, self.crc, len(self.data), size, *lengths, 0, 0, 0, offset)
        return struct.pack("<4s6H3L5H2L", *fixed) + self.name + extra + self.comment


def stored(name: bytes, data: bytes = ONE) -> Member:
    return Member(name, data, len(data), crc=zlib.crc32(data))


def deflated(name: bytes, data: bytes) -> Member:
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    return Member(name, deflate.compress(data) + deflate.flush(), len(data), 8, zlib.crc32(data))


def end_record(count: int, size: int, begin: int, comment: bytes = b"") -> bytes:
    """With the zip64 form before it where there are many members."""
    out = b""
    if count >= 0xFFFF:
        out = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, begin)
        out += struct.pack("<4sLQL", b"PK\6\7", 0, begin + size, 1)
        count = 0xFFFF
    return out + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, size, begin, len(comment)) + comment


def archive(path: Path, members: Iterable[Member], comment: bytes = b"") -> None:
    directory = bytearray()
    count = 0
    with path.open("wb") as file:
        for member in members:
            directory += member.central(file.tell())
            file.write(member.local() + member.name + member.data)
            count += 1
        begin = file.tell()
        file.write(bytes(directory) + end_record(count, len(directory), begin, comment))


def safetensors(path: Path, text: str, data: bytes = b"") -> None:
    header = text.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def object_array(value: object) -> np.ndarray[Any, Any]:
    array = np.empty((), object)
    array[()] = value
    return array


# --- opening them in a small process -----------------------------------------------------------------------------

_OPENER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
import convert
try:
    with convert.open(sys.argv[1]) as checkpoint:
        problems = [tensor.problem for tensor in checkpoint.tensors if tensor.problem is not None]
        print("opened", len(checkpoint), len(problems))
        sys.stdout.write(str(problems[-1]) if problems else "")
except convert.ConvertError as err:
    print(type(err).__name__)
    sys.stdout.write(str(err))
"""


def opened(path: Path, memory_bytes: int = GIB) -> str:
    """What comes of opening a file in so much memory: 'opened COUNT BROKEN', or kind and message of a refusal."""
    command = [sys.executable, "-c", _OPENER, str(path), str(memory_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGING, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


# --- bombs -------------------------------------------------------------------------------------------------------


def many(count: int, member: Callable[[bytes], Member]) -> Iterator[Member]:
    """The same member under many names, compressed once."""
    first = member(b"0.npy")
    return (dataclasses.replace(first, name=b"%d.npy" % number) for number in range(count))


def long_header(fields: int = 66_000) -> bytes:
    descr = "[" + ",".join(f"('{number}','<f4')" for number in range(fields)) + "]"
    return head(described(descr, "(0,)"), 2)


def bzip2_bomb(path: Path) -> None:
    """A hundred million zeros in 120 bytes."""
    whole = head(described("'|u1'", "(100000000,)")) + bytes(100_000_000)
    archive(path, [Member(b"w.npy", bz2.compress(whole), len(whole), 12)])


def one_body(path: Path, count: int = 200_000, said: int | None = None) -> None:
    """Very many members of one body, whose long header would be inflated for each."""
    member = deflated(b"w.npy", long_header(20_000))
    local = member.local() + member.name + member.data
    central = member.central(0)
    path.write_bytes(local + count * central + end_record(said or count, count * len(central), len(local)))


def quoted_members(path: Path) -> None:
    """Each stream begins with a stored block that holds the next member's header, and goes on into that member."""
    members = [deflated(b"%d.npy" % number, bytes(1 << 20)) for number in range(3)]
    body, places = b"", []
    for member in reversed(members):
        block = b"\0" + struct.pack("<2H", len(body), len(body) ^ 0xFFFF) if body else b""
        member.data = block + (body if body else member.data)
        body = member.local() + member.name + member.data
    at = 0
    for member in members:
        places.append(at)
        at += len(member.local()) + len(member.name) + 5
    directory = b"".join(member.central(place) for member, place in zip(members, places, strict=True))
    path.write_bytes(body + directory + end_record(3, len(directory), len(body)))


def end_records(path: Path, comment: bytes) -> None:
    member = stored(b"w.npy")
    local, central = member.local() + member.name + member.data, member.central(0)
    path.write_bytes(local + central + end_record(1, len(central), len(local), comment))


def fitting_records(path: Path) -> None:
    """A comment of end records, each with a comment that reaches to the end of the file."""
    records = [struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 9, 9, 9, 9, 22 * left) for left in reversed(range(2900))]
    end_records(path, b"".join(records))


def metadata_bomb(path: Path) -> None:
    """A comment of 62 KB that unpacks to 17 million lists."""
    text = '{"a":[' + "[]," * 17_000_000 + "0]}"
    packed = base64.b85encode(zlib.compress(text.encode(), 9)).decode()
    archive(path, [stored(b"w.npy")], json.dumps({"tensor-convert": {"packed_metadata": packed}}).encode())


def in_json(item: str, count: int) -> Callable[[Path], None]:
    return lambda path: safetensors(path, '{"a":[' + item * count + "0]}")


_ENTRY = '"%d":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'


def entries(count: int, size: int = 4) -> str:
    return "{" + ",".join(_ENTRY % (number, 4 * number, 4 * number + size) for number in range(count)) + "}"


BOMBS: dict[str, tuple[Callable[[Path], object], str]] = {
    # What it claims.
    "npy-terabytes": (lambda path: path.write_bytes(head(described(shape=f"({10**12},)"))), "CorruptError.*cut short"),
    "npz-terabytes": (
        lambda path: archive(path, [dataclasses.replace(deflated(b"w.npy", ONE), size=4 * 10**12)]),
        "LimitError.*--max-ratio [0-9]*, or limits=Limits",
    ),
    "safetensors-terabytes": (
        lambda path: safetensors(path, entries(1, 10**12)), "CorruptError.*do not fit the byte range",
    ),
    "safetensors-length": (
        lambda path: path.write_bytes((1 << 63).to_bytes(8, "little") + b"{}"), "LimitError.*over the limit",
    ),
    # What it inflates to.
    "bzip2": (bzip2_bomb, "LimitError.*inflate to too many bytes.*--max-ratio"),
    "one-body": (one_body, "CorruptError.*members overlap"),
    "quoted": (quoted_members, "CorruptError.*overlap"),
    "nested": (
        lambda path: archive(path, [stored(b"w.npy"), deflated(b"more.npz", bytes(1 << 24))]), "opened 2 0$",
    ),
    "metadata": (metadata_bomb, "LimitError.*remembered metadata.*--max-tensors"),
    # How many there are.
    "members": (
        lambda path: one_body(path, 600_000),
        "LimitError.*too many members .expected at most 500000, found 600000.*--max-tensors 600000,",
    ),
    "members-uncounted": (lambda path: one_body(path, 600_000, 5), "LimitError.*too many members"),
    "members-broken": (
        lambda path: archive(path, many(20_000, lambda name: stored(name, ONE[:-1]))),
        "opened 20000 20000\n.*cut short",
    ),
    "lists": (in_json("[],", 33_000_000), "LimitError.*too many values.*--max-tensors"),
    "objects": (in_json('{"a":0},', 12_000_000), "LimitError.*too many values"),
    "numbers": (in_json("1.5,", 24_000_000), "LimitError.*too many values"),
    "strings": (in_json('"ab",', 19_000_000), "LimitError.*too many values"),
    "objects-fewer": (in_json('{"a":0},', 3_300_000), "CorruptError.*not an object"),
    "spaces": (lambda path: safetensors(path, "{" + " " * 99_000_000 + "}"), "opened 0 0$"),
    "json-length": (
        lambda path: safetensors(path, "{" + " " * 100_000_000 + "}"),
        "LimitError.*expected at most 100000000 bytes.*--max-json 100000002,",
    ),
    "json-index": (
        lambda path: path.with_name("w.safetensors.index.json").write_text('{"weight_map": {"a": ' + "[],"* 9_000_000),
        "LimitError.*the index holds too many values",
    ),
    # How deep, how long.
    "json-deep": (lambda path: safetensors(path, '{"a":' + "[" * 10_000_000), "CorruptError.*nests too deeply"),
    "json-digits": (
        lambda path: safetensors(path, '{"a":' + "9" * 5_000 + "}"), "CorruptError.*an integer of thousands of digits",
    ),
    "json-many-digits": (in_json("9" * 4_200 + ",", 2_000), "CorruptError.*not an object"),
    "json-dimensions": (
        lambda path: safetensors(
            path, '{"w":{"dtype":"F32","shape":[' + "9223372036854775807," * 900_000 + '1],"data_offsets":[0,0]}}'
        ),
        "LimitError.*too many dimensions.*--max-dimensions 900001,",
    ),
    "json-name": (
        lambda path: safetensors(path, '{"' + "n" * 90_000_000 + '":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
        "LimitError.*the name is too long.*--max-name 90000000,",
    ),
    "npy-deep": (lambda path: path.write_bytes(head(described(shape="(" * 900_000), 2)), "LimitError.*--max-depth 32,"),
    "npy-minus": (lambda path: path.write_bytes(head(described(shape="-" * 900_000), 2)), "CorruptError.*literal"),
    "npy-digits": (lambda path: path.write_bytes(head(described(shape="9" * 5_000), 2)), "CorruptError.*5000 digits"),
    "npy-string": (lambda path: path.write_bytes(head(described("'" + "\\\\" * 400_000), 2)), "CorruptError.*literal"),
    "npy-header": (
        lambda path: path.write_bytes(long_header(80_000)), "LimitError.*the header is too long.*--max-header 1[0-9]*,",
    ),
    # What is slow for who reads it carelessly.
    "extra-fields": (
        lambda path: archive(
            path, [dataclasses.replace(stored(b"w.npy"), extra=struct.pack("<2H", 0x4444, 0) * 16_000)] * 500
        ),
        "CorruptError.*more than 100 extra fields",
    ),
    "long-comments": (
        lambda path: archive(
            path, (dataclasses.replace(each, comment=b"{" + b"[" * 65_000) for each in many(1_000, stored))
        ),
        "opened 1000 0$",
    ),
    "end-signatures": (lambda path: end_records(path, b"PK\5\6" * 16_000), "opened 1 0$"),
    "end-records": (fitting_records, "opened 1 0$"),
    "same-names": (lambda path: archive(path, [stored(b"w.npy")] * 100_000), "CorruptError.*same name"),
    "same-keys": (
        lambda path: safetensors(path, "{" + ",".join([_ENTRY % (1, 0, 4)] * 100_000) + "}"), "CorruptError.*duplicate",
    ),
}  # fmt: skip

SUFFIXES = {"npy": ".npy", "safetensors": ".safetensors", "json": ".safetensors"}


@pytest.mark.parametrize("what", BOMBS)
def test_a_hostile_file_is_refused_or_bounded(what: str, tmp_path: Path) -> None:
    """Opened in 1 GiB of address space: tensors, or a refusal that says why and, where a limit decides, names it."""
    make, pattern = BOMBS[what]
    path = tmp_path / f"w{SUFFIXES.get(what.partition('-')[0], '.any')}"
    make(path)
    (path,) = tmp_path.iterdir()
    found = opened(path)
    path.unlink()
    assert re.match(pattern, found, re.DOTALL), found[:1000]
    assert len(found) < 5_000  # of what a file says, no more is repeated than people read


def test_very_many_tensors_take_little_memory(tmp_path: Path) -> None:
    """About 500 bytes each, beside what Python itself takes."""
    path = tmp_path / "w.npz"
    archive(path, many(100_000, stored))
    assert opened(path, 300 << 20) == "opened 100000 0\n"


def test_long_headers_are_bounded_together(tmp_path: Path) -> None:
    """A header deflates a thousand times, and a structured type takes far more memory than its header."""
    header = long_header(1_500)
    archive(tmp_path / "a.npz", many(40, lambda name: deflated(name, header)))
    limits = Limits(header_bytes=len(header) + 10)
    with convert.open(tmp_path / "a.npz", limits=limits) as checkpoint:
        problems = [tensor.problem for tensor in checkpoint.tensors if tensor.problem is not None]
    assert len(problems) == 40 - 16
    assert "too long together" in str(problems[0])
    assert f"--max-header {2 * limits.header_bytes}," in str(problems[0])
    with convert.open(tmp_path / "a.npz", limits=Limits(header_bytes=2 * limits.header_bytes)) as checkpoint:
        assert sum(tensor.problem is not None for tensor in checkpoint.tensors) == 40 - 32


# --- honest neighbours -------------------------------------------------------------------------------------------


def test_honest_zeros_are_no_bomb(tmp_path: Path) -> None:
    """numpy deflates zeros a thousand times; that passes by default, and does not with a ratio of 100."""
    np.savez_compressed(tmp_path / "a.npz", w=np.zeros(100 << 20, np.uint8))
    assert 1000 * (tmp_path / "a.npz").stat().st_size < 100 << 20
    with convert.open(tmp_path / "a.npz") as checkpoint:
        assert checkpoint["w"].nbytes == 100 << 20
    with pytest.raises(convert.LimitError, match="inflate to too many bytes"):
        convert.open(tmp_path / "a.npz", limits=Limits(ratio=100))


@pytest.mark.parametrize("method", ["stored", "bzip2"])
def test_small_archives_may_inflate_as_they_like(method: str, tmp_path: Path) -> None:
    """64 MiB do no harm: a small array in bzip2 passes whatever its ratio."""
    whole = head(described("'|u1'", "(60000000,)")) + bytes(60_000_000)
    member = stored(b"w.npy", whole)
    if method == "bzip2":
        member = dataclasses.replace(member, data=bz2.compress(whole), method=12)
    archive(tmp_path / "a.npz", [member])
    with convert.open(tmp_path / "a.npz", limits=Limits(ratio=1)) as checkpoint:
        assert checkpoint["w"].nbytes == 60_000_000


def test_members_out_of_order_are_read(tmp_path: Path) -> None:
    """Only overlaps are refused, not a directory in another order than the members."""
    members = [stored(b"%d.npy" % number) for number in range(5)]
    places, body = [], b""
    for member in members:
        places.append(len(body))
        body += member.local() + member.name + member.data
    shuffled = [(members[number], places[number]) for number in (3, 0, 4, 1, 2)]
    directory = b"".join(member.central(place) for member, place in shuffled)
    (tmp_path / "a.npz").write_bytes(body + directory + end_record(5, len(directory), len(body)))
    assert sorted(np.load(tmp_path / "a.npz")) == ["0", "1", "2", "3", "4"]
    with convert.open(tmp_path / "a.npz") as checkpoint:
        assert list(checkpoint) == ["3", "0", "4", "1", "2"]


# --- the settings ------------------------------------------------------------------------------------------------


def nested_type(depth: int) -> list[object]:
    descr: object = "<f4"
    for _ in range(depth):
        descr = [("a", descr)]
    assert isinstance(descr, list)
    return descr


def npz_of(count: int) -> Callable[[Path], None]:
    arrays: dict[str, Any] = {f"t{number}": np.zeros(1, "f4") for number in range(count)}
    return lambda path: np.savez(path, **arrays)


def named(name: str) -> Callable[[Path], None]:
    arrays: dict[str, Any] = {name: np.zeros(1)}
    return lambda path: np.savez(path, **arrays)


def pickled(value: object) -> Callable[[Path], None]:
    return lambda path: np.savez(path, w=object_array(value))


def kept(path: Path) -> None:
    """A pickle that keeps 30 objects to refer to them again."""
    value = [["x"] for _ in range(30)]
    pickled(value)(path)


def zeros(path: Path) -> None:
    np.savez_compressed(path, w=np.zeros(80 << 20, np.uint8))


def string(path: Path) -> None:
    np.savez(path, w=np.array("x" * 300))


def index(path: Path) -> None:
    path.with_name("m.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    path.write_text(json.dumps({"weight_map": {}, "more": "x" * 1000}))


def sized(path: Path) -> None:
    np.savez(path, w=np.zeros(1000, "f4"))


def pickle_in(path: Path) -> bytes:
    with zipfile.ZipFile(path) as file:
        data = file.read("w.npy")
    return data[10 + int.from_bytes(data[8:10], "little") :]


def keeps(path: Path) -> int:
    return sum(code.name in ("MEMOIZE", "BINPUT") for code, _, _ in pickletools.genops(pickle_in(path)))


CASES: dict[str, list[tuple[str, Callable[[Path], object], int | Callable[[Path], int], str]]] = {
    # Limit: (name of the file, how to make it, the largest value that refuses, options).
    "header_bytes": [("a.npy", lambda path: path.write_bytes(head(described(), 2) + bytes(4)), 127, "")],
    "json_bytes": [
        ("a.safetensors", lambda path: safetensors(path, entries(2) + " " * 900, bytes(8)), 1006, ""),
        ("a.safetensors.index.json", index, 1029, ""),
    ],
    "directory_bytes": [("a.npz", npz_of(4), 207, "")],
    "tensors": [
        ("a.npz", npz_of(4), 3, ""),
        ("a.safetensors", lambda path: safetensors(path, entries(5), bytes(20)), 4, ""),
    ],
    "ratio": [("a.npz", zeros, lambda path: ((80 << 20) + 127) // path.stat().st_size, "")],
    "total_bytes": [("a.npz", sized, 3999, "")],
    "name_bytes": [("a.npz", named("n" * 300 + "é"), 301, "")],
    "dimensions": [
        ("a.npy", lambda path: np.save(path, np.zeros((1,) * 20, "f4")), 19, ""),
        ("a.npy", lambda path: np.save(path, np.zeros((1,) * 20, ">f4").T), 19, ""),
        (
            "a.safetensors",
            lambda path: safetensors(
                path, '{"w":{"dtype":"U8","shape":[' + "1," * 19 + '1],"data_offsets":[0,1]}}', b"1"
            ),
            19,
            "",
        ),
    ],
    "depth": [
        ("a.npy", lambda path: np.save(path, np.zeros(2, np.dtype(nested_type(10)))), 9, "--policy structured=split")
    ],
    "text_bytes": [("a.npz", string, 1199, "--policy str=metadata")],
    "pickle_bytes": [
        ("a.npz", pickled(b"x" * 1000), lambda path: len(pickle_in(path)) - 1, "--policy object=unpickle")
    ],
    "pickle_leaves": [("a.npz", pickled([np.zeros(2)] * 12), 11, "--policy object=unpickle")],
    "pickle_depth": [("a.npz", pickled([[[[np.zeros(2)]]]]), 4, "--policy object=unpickle")],
    "pickle_memo": [("a.npz", kept, lambda path: keeps(path) - 1, "--policy object=unpickle")],
}
FLAT = [(limit, *case) for limit, cases in CASES.items() for case in cases]


def test_every_limit_has_a_case_and_an_option() -> None:
    """No limit is left without a test, an option and a line in the documentation."""
    names = [field.name for field in dataclasses.fields(Limits)]
    assert names == list(SETTINGS) == list(CASES)
    page = (Path(__file__).resolve().parents[1] / "docs" / "limits.md").read_text("utf-8")
    for name, setting in SETTINGS.items():
        assert f"| `{setting.option}` | `{name}` |" in page


@pytest.mark.parametrize("case", range(len(FLAT)))
def test_each_limit_is_exact_and_its_hint_works(
    case: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused at one less than needed, by name; what the hint says, typed, converts; so does the default."""
    limit, name, make, largest, more = FLAT[case]
    monkeypatch.chdir(tmp_path)
    make(tmp_path / name)
    largest = largest if isinstance(largest, int) else largest(tmp_path / name)
    target = "out.npz" if more != "--policy str=metadata" else "out.safetensors"
    command = [name, target, "--overwrite", "--quiet", *shlex.split(more)]
    option = SETTINGS[limit].option
    assert run([*command, option, str(largest)]) == 3
    said = capsys.readouterr().err
    found = re.search(rf"hint: if you trust the file: ({option} [0-9]+), or limits=Limits\(({limit})=([0-9]+)\)", said)
    assert found, said
    assert not Path(target).exists()
    assert run([*command, *found[1].split()]) == 0, capsys.readouterr().err
    assert run([*command, option, str(largest + 1)]) == 0, capsys.readouterr().err
    assert run(command) == 0
    policy = convert.Policy.parse([more.removeprefix("--policy ")] if more else [])
    with pytest.raises(convert.LimitError):
        convert.convert_file(name, target, overwrite=True, policy=policy, limits=Limits(**{limit: largest}))


@pytest.mark.parametrize("limit", ["tensors", "total_bytes"])
def test_limits_hold_for_all_sources_together(limit: str, tmp_path: Path) -> None:
    """A folder, several files, and shards count as one source."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(4):
        np.save(folder / f"{number}.npy", np.zeros(10, "f4"))
    allowed = {"tensors": 4, "total_bytes": 160}[limit]
    for source in (folder, [folder / f"{number}.npy" for number in range(4)]):
        convert.open(source, limits=Limits(**{limit: allowed})).close()
        with pytest.raises(convert.LimitError, match="too"):
            convert.open(source, limits=Limits(**{limit: allowed - 1}))


def test_ls_and_batch_take_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same options for all that reads files."""
    (tmp_path / "in").mkdir()
    npz_of(4)(tmp_path / "in" / "a.npz")
    source = str(tmp_path / "in" / "a.npz")
    assert run(["ls", source, "--max-tensors", "3"]) == 3
    assert "--max-tensors 4" in capsys.readouterr().err
    assert run(["ls", source, "--max-tensors", "4"]) == 0
    batch = ["batch", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "safetensors"]
    assert run([*batch, "--max-tensors", "3"]) == 3
    assert "--max-tensors 4" in capsys.readouterr().err
    assert run([*batch, "--max-tensors", "4"]) == 0


def test_load_and_save_take_limits(tmp_path: Path) -> None:
    """So does the library, and what --verify reads back is held to the same."""
    npz_of(4)(tmp_path / "a.npz")
    with pytest.raises(convert.LimitError):
        convert.load(tmp_path / "a.npz", limits=Limits(tensors=3))
    assert len(convert.load(tmp_path / "a.npz", limits=Limits(tensors=4))) == 4
    long = {"n" * 3000: np.zeros(1, "f4")}
    limits = Limits(name_bytes=2000)
    with pytest.raises(convert.LimitError):
        convert.save(long, tmp_path / "b.safetensors", verify=True, limits=limits)
    convert.save(long, tmp_path / "b.safetensors", verify=True)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--max-tensors", "0"), ("--max-tensors", "-1"), ("--max-tensors", "many"), ("--max-tensors", "1.5"),
     ("--max-tensors", "9" * 30), ("--max-header", "0"), ("--max-header", "5 apples"), ("--max-depth", "101"),
     ("--max-ratio", "1MB"), ("--max-json", "")],
)  # fmt: skip
def test_what_is_no_limit_is_a_usage_error(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before any file is looked at."""
    assert run(["nowhere.npz", "out.safetensors", option, value]) == 2
    said = capsys.readouterr().err
    assert option in said or "depth" in said


@pytest.mark.parametrize("value", [0, -1, 1.5, "5", True, None])
def test_limits_of_the_library_are_whole_numbers(value: object) -> None:
    """A limit of no sense is the caller's mistake, not the file's."""
    with pytest.raises(convert.UsageError, match="tensors"):
        Limits(tensors=value)  # type: ignore[arg-type]


def test_sizes_may_be_written_as_people_do(tmp_path: Path) -> None:
    """--max-json 1KB, and with binary units."""
    safetensors(tmp_path / "a.safetensors", entries(2) + " " * 940, bytes(8))  # 1052 bytes
    command = ["ls", str(tmp_path / "a.safetensors"), "--max-json"]
    assert [run([*command, size]) for size in ("1KB", "1KiB", "1.1KB", "1MiB")] == [3, 3, 0, 0]


def test_limits_do_not_make_a_batch_start_again(tmp_path: Path) -> None:
    """They change nothing that is written: what is finished stays finished."""
    (tmp_path / "in").mkdir()
    npz_of(2)(tmp_path / "in" / "a.npz")
    convert.convert_folder(tmp_path / "in", tmp_path / "out", to="safetensors")
    report = convert.convert_folder(tmp_path / "in", tmp_path / "out", to="safetensors", limits=Limits(tensors=9))
    assert (report.done, report.skipped) == (0, 1)


def test_very_many_problems_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hundred are shown; --json has them all."""
    safetensors(tmp_path / "a.safetensors", entries(150, 3), bytes(600))
    assert run([str(tmp_path / "a.safetensors"), str(tmp_path / "out.npz")]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 101
    assert lines[-1] == "... and 50 more problems; --json lists them all"
    assert run([str(tmp_path / "a.safetensors"), str(tmp_path / "out.npz"), "--json"]) == 3
    assert len(json.loads(capsys.readouterr().out)["error"]["problems"]) == 150


def test_memory_that_runs_out_is_no_traceback(tmp_path: Path) -> None:
    """A pickle is held in memory: where there is too little, that is said, and nothing is left behind."""
    np.savez(tmp_path / "a.npz", w=object_array(b"x" * (200 << 20)))

    def little() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (300 << 20, 300 << 20))

    done = subprocess.run(
        [sys.executable, "-m", "convert", "a.npz", "out.npz", "--policy", "object=unpickle", "--jobs", "1"],
        cwd=tmp_path, preexec_fn=little, capture_output=True, text=True, timeout=HANGING, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("the memory ran out; nothing was written\nhint: ")
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_the_hint_never_exceeds_what_is_allowed() -> None:
    """Nesting has a last limit, beyond which no hint may lead."""
    assert exceeded("depth", "too deep", 90).hint is not None
    assert "--max-depth 100," in str(exceeded("depth", "too deep", 90))


def test_the_defaults_are_those_of_the_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What --help says is what holds."""
    monkeypatch.setenv("COLUMNS", "300")
    assert run(["ls", "--help"]) == 0
    said = capsys.readouterr().out
    for name, setting in SETTINGS.items():
        (line,) = (line for line in said.splitlines() if f" {setting.option} " in line)
        found = re.search(r"Default: ([0-9]+)([KMG]i?B)?\.|no limit", line)
        assert found, line
        if found[1]:
            units = {None: 1, "KB": 1000, "MB": 10**6, "KiB": 1024, "MiB": 1 << 20, "GiB": GIB}
            assert int(found[1]) * units[found[2]] == getattr(DEFAULT, name)


def test_a_pickle_of_zeros_is_bounded(tmp_path: Path) -> None:
    """A deflated pickle is as long as it says, and no longer than the limit."""
    array = object_array(bytes(64 << 20) + b"1")
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    archive(tmp_path / "a.npz", [deflated(b"w.npy", buffer.getvalue())])
    assert len(pickle.dumps(array)) > 64 << 20
    with pytest.raises(convert.LimitError, match="the pickle is too long"):
        convert.convert_file(
            tmp_path / "a.npz", tmp_path / "out.npz", policy=convert.Policy(object="unpickle"),
            limits=Limits(pickle_bytes=64 << 20),
        )  # fmt: skip
