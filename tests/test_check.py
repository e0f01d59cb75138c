"""`convert check`: each rule with a file that breaks exactly it, and agreement with what can be read."""

from __future__ import annotations

import bz2
import json
import random
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import convert
from convert import formats
from convert.checking import all_rules
from convert.findings import MAX_PER_RULE, Finding, Findings, Rule, apart
from tests.brokenfiles import (
    ARRAY,
    CASES,
    EIGHT,
    EXAMPLES,
    INDEX,
    MARKER,
    ROOT,
    SAMPLES,
    SHARD,
    WITH,
    Runs,
    Zip,
    agree,
    array_header,
    deflated,
    entry,
    errors,
    ids,
    index_of,
    laid_out,
    npy,
    objects,
    one,
    overlapping,
    pickled,
    st_file,
)

from .strategies import SETTINGS, npy_bytes
from .test_property import headers, mutated

# --- the rules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", EXAMPLES)
def test_a_rule_is_broken_alone(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example breaks the rule and no other; it is refused or read as the rule's severity says; nothing runs."""
    monkeypatch.chdir(tmp_path)
    path = laid_out(EXAMPLES[rule], tmp_path)
    found = agree(path)
    assert ids(found) == {rule, *WITH.get(rule, ())}
    severity = next(known.severity for known in all_rules() if known.id == rule)
    assert {finding.severity for finding in found if finding.rule == rule} == {severity}
    assert not Path(MARKER).exists()


def test_every_rule_has_an_example() -> None:
    """FILE-004 is for formats without a checker, and has a test of its own; ids are unique."""
    known = [rule.id for rule in all_rules()]
    assert sorted(known) == sorted({*EXAMPLES, "FILE-004"})


def test_the_page_of_the_rules_is_current() -> None:
    """docs/rules.md is what docs/make_rules.py prints."""
    command: list[str | Path] = [sys.executable, ROOT / "docs" / "make_rules.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == (ROOT / "docs" / "rules.md").read_text("utf-8")


# --- agreement with the readers ----------------------------------------------------------------------------------

FILES = [
    path
    for path in sorted([*SAMPLES.iterdir(), *CASES.rglob("*.*")])
    if path.suffix.lower() in (".npy", ".npz", ".safetensors", ".json") and path.name != "expected.json"
]
SMALL = [path for path in FILES if path.stat().st_size < 20_000 and path.suffix != ".json"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_has_no_errors_can_be_read(path: Path) -> None:
    """And the other way round, for each sample and each hard file from the real world."""
    agree(path)


def test_the_samples_have_no_errors() -> None:
    """A folder is checked file by file; numpy's and safetensors' own files break no rule."""
    assert errors(convert.check(SAMPLES)) == set()


@pytest.mark.parametrize("batch", range(4))
def test_damaged_files_agree(batch: int, tmp_path: Path) -> None:
    """Any damage: an error if and only if the file cannot be read to its end."""
    for seed in range(batch * 250, (batch + 1) * 250):
        rng = random.Random(seed)
        source = rng.choice(SMALL)
        path = tmp_path / f"w{source.suffix}"
        path.write_bytes(mutated(source.read_bytes(), rng))
        try:
            agree(path)
        except BaseException as err:
            err.add_note(f"seed {seed}, {source.name}")
            raise


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors"])
def test_every_prefix_agrees(suffix: str, tmp_path: Path) -> None:
    """A file that was cut off anywhere, and what is left of it behind the cut."""
    data = (SAMPLES / {"npy": "w_f32.npy", "npz": "small.npz", "safetensors": "plain.safetensors"}[suffix]).read_bytes()
    path = tmp_path / f"w.{suffix}"
    for length in range(0, len(data), 1 if len(data) < 300 else 13):
        for part in (data[:length], data[length:]):
            path.write_bytes(part)
            agree(path)


@settings(max_examples=200, **SETTINGS)
@given(headers(), st.binary(max_size=40), st.sampled_from([b"\x01\0", b"\x02\0", b"\x03\0"]))
def test_any_npy_header_agrees(
    tmp_path_factory: pytest.TempPathFactory, body: bytes, data: bytes, version: bytes
) -> None:
    """Headers as numpy writes them, or nearly so."""
    path = tmp_path_factory.mktemp("h") / "w.npy"
    length = len(body).to_bytes(2 if version[0] == 1 else 4, "little")
    path.write_bytes(b"\x93NUMPY" + version + length + body + data)
    agree(path)
    path.unlink()


_json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 9), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=8,
)
_entries = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from(["U8", "F32", "BOOL", "F4"]), _json),
        "shape": st.one_of(st.lists(st.integers(0, 3), max_size=3), _json),
        "data_offsets": st.one_of(st.tuples(st.integers(0, 16), st.integers(0, 16)).map(sorted), _json),
    },
    optional={"extra": _json},
)
_keys = st.one_of(st.text(max_size=3), st.sampled_from(["__metadata__", "weight_map", "dtype", "shape"]))


@settings(max_examples=300, **SETTINGS)
@given(st.dictionaries(_keys, st.one_of(_entries, _json), max_size=3), st.binary(max_size=16))
def test_any_json_header_agrees(tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], body: bytes) -> None:
    """A safetensors header that is JSON of any kind."""
    path = tmp_path_factory.mktemp("h") / "w.safetensors"
    path.write_bytes(st_file(header, body, align=1))
    agree(path)
    path.unlink()


_names = st.sampled_from(["a.safetensors", "b.safetensors", "c.safetensors", "../a.safetensors", "", "\ud800"])
_maps = st.dictionaries(st.sampled_from(["w", "v", "u"]), st.one_of(_names, _names, _json), max_size=3)


@settings(max_examples=200, **SETTINGS)
@given(st.dictionaries(st.sampled_from(["weight_map", "metadata", "more"]), st.one_of(_maps, _json), max_size=3))
def test_any_index_agrees(tmp_path_factory: pytest.TempPathFactory, index: dict[str, Any]) -> None:
    """An index that is JSON of any kind, beside two shards."""
    folder = tmp_path_factory.mktemp("h")
    (folder / "a.safetensors").write_bytes(SHARD)
    (folder / "b.safetensors").write_bytes(st_file({"v": entry()}))
    (folder / INDEX).write_text(json.dumps(index), "utf-8")
    agree(folder / INDEX)
    for file in folder.iterdir():
        file.unlink()


CONTENTS = (
    ARRAY, ARRAY, ARRAY[:-1], ARRAY + b"\0", b"", b"text", b"\x93NUMPY", objects(1), objects(Runs()), bytes(70_000),
    npy(array_header("'<V2'"), EIGHT[:4]), npy_bytes(np.zeros(20_000)),
)  # fmt: skip
NAMES = (
    "w.npy",
    "v.npy",
    "w",
    "W.npy",
    "d/",
    "d/x.npy",
    "._w.npy",
    "data.pkl",
    b"\x82.npy",
    b"\xc3\xa9.npy",
    "a\0.npy",
)
FALSE: dict[str, tuple[Any, ...]] = {
    "flags": (0, 1, 8, 0x20, 0x800, 0x2000),
    "method": (0, 8, 9, 12, 14),
    "crc": (0, 1),
    "packed": (0, 1, 136, 137, 0xFFFFFFFF, 500),
    "size": (0, 1, 136, 137, 0xFFFFFFFF, 500),
    "raw": (b"", b"w.npy", b"\xff.npy"),
    "offset": (0, 1, 30, 171, 300, 0xFFFFFFFF),
    "disk": (0, 1, 0xFFFF),
    "attributes": (0, 0o120777 << 16),
    "system": (0, 3),
    "comment": (b"", b"{}", b"PK\x05\x06" + bytes(18)),
}


def any_archive(rng: random.Random) -> bytes:
    """A few members, some of which are lies."""
    archive = Zip()
    packers: tuple[tuple[int, Callable[[bytes], bytes]], ...] = ((0, bytes), (8, deflated), (12, bz2.compress))
    for _ in range(rng.randint(0, 3)):
        data = rng.choice(CONTENTS)
        method, pack = rng.choice(packers)
        there, here = (
            {name: rng.choice(values) for name, values in FALSE.items() if rng.random() < chance}
            for chance in (0.06, 0.03)
        )
        facts: dict[str, Any] = {"method": method, "packed": pack(data)} | {
            f: there.pop(f) for f in ("method",) if f in there
        }
        if "packed" in there:
            here["packed"] = there.pop("packed")
        archive.add(rng.choice(NAMES), data, local=here, written=rng.random() < 0.97, **facts, **there)
        if rng.random() < 0.05:
            archive.gap(rng.choice([b"\0", bytes(16), b"PK\x03\x04" + bytes(40)]))
    lies: dict[str, Any] = {"count": (None, 1, 2), "disk": (0, 1), "shift": (0, 1, 4), "comment": (b"", b"note")}
    end = archive.end(**{name: rng.choice(values) for name, values in lies.items() if rng.random() < 0.05})
    return end + (b"" if rng.random() < 0.97 else b"\0")


@pytest.mark.parametrize("batch", range(4))
def test_any_archive_agrees(batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Archives put together from true and false parts."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "w.npz"
    for seed in range(batch * 250, (batch + 1) * 250):
        path.write_bytes(any_archive(random.Random(seed)))
        try:
            agree(path)
        except BaseException as err:
            err.add_note(f"seed {seed}")
            raise
    assert not Path(MARKER).exists()


# --- everything is told, with its place --------------------------------------------------------------------------


def only(found: list[Finding], rule: str) -> list[Finding]:
    return [finding for finding in found if finding.rule == rule]


def test_all_damaged_members_are_told(tmp_path: Path) -> None:
    """One bad checksum hides no other, nor a bad header; the places are those of the bytes in the file."""
    archive = Zip().add("a.npy", crc=1).add("b.npy").add("c.npy", crc=2).add("d.npy", ARRAY[:-1]).end()
    path = laid_out({"a.npz": archive}, tmp_path)
    found = convert.check(path)
    damaged = only(found, "NPZ-018")
    assert [finding.tensor for finding in damaged] == ["a.npy", "c.npy"]
    for finding in damaged:
        assert finding.offset is not None
        assert archive[finding.offset : finding.offset + len(ARRAY)] == ARRAY
        assert finding.found == f"{zlib.crc32(ARRAY):08x}"
    (short,) = only(found, "NPY-011")
    assert (short.tensor, short.inside) == ("d.npy", False)
    assert short.offset is not None
    assert archive[short.offset - 7 : short.offset] == ARRAY[128:-1]


@pytest.mark.parametrize(
    "local",
    [{"raw": b"v.npy"}, {"method": 8}, {"crc": 1}, {"packed": 1}, {"size": 1}, {"flags": 0x800}],
    ids=lambda local: next(iter(local)),
)
def test_whatever_two_headers_disagree_on_is_told(tmp_path: Path, local: dict[str, Any]) -> None:
    """Name, method, checksum, both sizes, and whether the name is UTF-8."""
    name = "é.npy".encode() if "flags" in local else b"w.npy"
    found = agree(laid_out({"a.npz": one(name, local=local)}, tmp_path))
    assert errors(found) == {"NPZ-011"}


def test_places_in_an_inflated_member_are_told_apart(tmp_path: Path) -> None:
    """What is compressed has no place in the file; the place counts in the member, and the text says so."""
    data = npy(array_header(fortran="0"))
    path = laid_out({"a.npz": one(data=data, method=8, packed=deflated(data))}, tmp_path)
    (finding,) = only(convert.check(path), "NPY-008")
    assert finding.inside
    assert finding.offset is not None
    assert data[finding.offset :].startswith(b"'fortran_order'")
    assert "of the inflated member" in str(finding)


def test_all_values_of_a_header_are_told(tmp_path: Path) -> None:
    """Keys, shape, order and every field of the type, each at its key."""
    header = "{'descr': [('a', 'l'), ('b', '<f4'), ('c', 'zz')], 'fortran_order': 2, 'shape': (True, -1), 'x': 1, }"
    data = npy(header)
    found = convert.check(laid_out({"a.npy": data}, tmp_path))
    assert [finding.rule for finding in found] == ["NPY-006", "NPY-007", "NPY-007", "NPY-008", "NPY-010", "NPY-010"]
    keys = [b"'x'", b"'shape'", b"'shape'", b"'fortran_order'", b"'descr'", b"'descr'"]
    for finding, key in zip(found, keys, strict=True):
        assert finding.offset is not None
        assert data[finding.offset :].startswith(key)


def test_all_entries_of_a_header_are_told(tmp_path: Path) -> None:
    """Every entry with all that is wrong in it, at its key; names are found though they are escaped."""
    header = '{"é": {"dtype": "f32", "shape": [-1], "data_offsets": [0]}, "\\u0077": {"dtype": "U8"}, "x": 3}'
    data = st_file(header)
    found = convert.check(laid_out({"a.safetensors": data}, tmp_path))
    assert [(finding.rule, finding.tensor) for finding in found] == [
        ("ST-010", "é"), ("ST-011", "é"), ("ST-012", "é"), ("ST-009", "w"), ("ST-009", "w"), ("ST-009", "x"),
    ]  # fmt: skip
    keys = {"é": '"é"', "w": '"\\u0077"', "x": '"x"'}
    for finding in found:
        assert finding.offset is not None
        assert finding.tensor is not None
        assert data[finding.offset :].startswith(keys[finding.tensor].encode())


def test_ranges_are_told_by_their_place_in_the_file(tmp_path: Path) -> None:
    """A hole, an overlap and bytes behind the end, in one file."""
    header = {
        "a": entry(shape=[1], offsets=[0, 4]),
        "b": entry(shape=[1], offsets=[2, 6]),
        "c": entry(shape=[1], offsets=[8, 12]),
    }
    data = st_file(header, bytes(16))
    found = convert.check(laid_out({"a.safetensors": data}, tmp_path))
    begin = len(data) - 16
    places = [(finding.rule, finding.offset and finding.offset - begin) for finding in found]
    assert places == [("ST-014", 2), ("ST-102", 2), ("ST-015", 6), ("ST-017", 12)]


def test_the_parts_of_an_index_are_told_by_their_place(tmp_path: Path) -> None:
    """Shards that are missing where they are named first, tensors and fields at their keys."""
    index = {"weight_map": {"é": "b.safetensors", "w": "a.safetensors", "v": "/x"}, "metadata": {}, "version": 2}
    text = json.dumps(index, ensure_ascii=False).encode()
    found = convert.check(laid_out({INDEX: text, "a.safetensors": st_file({"é": entry()})}, tmp_path))
    begins = {
        finding.rule: text[finding.offset :] for finding in found if finding.rule != "SHARD-103" and finding.offset
    }
    assert begins["SHARD-102"].startswith(b'"version"')
    assert begins["SHARD-004"].startswith(b'"v"')
    assert begins["SHARD-005"].startswith(b'"b.safetensors"')
    assert begins["SHARD-006"].startswith(b'"w"')
    assert begins["SHARD-008"].startswith('"é"'.encode())


def test_without_a_directory_the_members_are_looked_for(tmp_path: Path) -> None:
    """In an archive that was cut off, each member that is left is checked, and the one that was cut is named."""
    whole = Zip().add("a.npy", crc=1).add("b.npy", b"text").gap(b"junk").add("c.npy")
    found = convert.check(laid_out({"a.npz": bytes(whole.body)[:-5]}, tmp_path))
    assert [(finding.rule, finding.tensor) for finding in found] == [
        ("NPZ-001", None), ("NPZ-017", "c.npy"), ("NPZ-018", "a.npy"), ("NPY-001", "b.npy"), ("NPZ-002", "b.npy"),
    ]  # fmt: skip
    assert found[0].found == "local headers of 3 members"


def test_what_lies_in_a_member_is_no_member(tmp_path: Path) -> None:
    """Headers inside of an array, such as those of an archive in an archive, are passed over."""
    whole = bytearray(overlapping())
    found = convert.check(laid_out({"a.npz": bytes(whole[:-30])}, tmp_path))
    assert [finding.found for finding in found] == ["local headers of 1 member"]


def test_numpys_own_archive_cut_anywhere_keeps_its_members(tmp_path: Path) -> None:
    """The local headers of np.savez have their sizes in zip64 fields."""
    path = tmp_path / "a.npz"
    np.savez(path, a=np.zeros(3), b=np.ones(3))
    path.write_bytes(path.read_bytes()[:-30])
    assert [finding.found for finding in convert.check(path)] == ["local headers of 2 members"]


def test_a_damaged_directory_entry_hides_no_other(tmp_path: Path) -> None:
    """Behind it the next one is looked for."""
    archive = bytearray(Zip().add("a.npy").add("b.npy", crc=1).end())
    at = archive.index(b"PK\x01\x02")
    archive[at] = 0
    found = convert.check(laid_out({"a.npz": bytes(archive)}, tmp_path))
    assert only(found, "NPZ-007")[0].offset == at
    assert [finding.tensor for finding in only(found, "NPZ-018")] == ["b.npy"]


def test_the_start_may_be_lost(tmp_path: Path) -> None:
    """A file whose content tells nothing is checked as its suffix says, if it is not plainly something else."""
    archive = b"\0" + Zip().add("a.npy").add("b.npy", crc=1).end()[1:]
    found = convert.check(laid_out({"a.npz": archive}, tmp_path))
    assert [(finding.rule, finding.tensor) for finding in found] == [("NPZ-010", "a.npy"), ("NPZ-018", "b.npy")]
    assert ids(convert.check(laid_out({"b.npz": b"\x1f\x8b" + archive}, tmp_path))) == {"FILE-002"}
    assert ids(convert.check(laid_out({"c": archive}, tmp_path))) == {"FILE-002"}
    nothing_else = Zip().add("d/", b"", written=False).end()
    assert ids(agree(laid_out({"d.npz": nothing_else}, tmp_path))) == {"FILE-002"}
    assert only(convert.check(tmp_path / "c", format="npz"), "NPZ-018")


def test_every_global_of_a_pickle_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name with its place, also behind the first; nothing is imported or called."""
    monkeypatch.chdir(tmp_path)
    stream = b"\x80\x02]q\0(cos\nmkdir\nX\x0d\0\0\0CONVERT_PWNED\x85Rcshutil\nrmtree\ncos\nmkdir\ne."
    data = pickled(stream)
    found = convert.check(laid_out({"a.npy": data}, tmp_path))
    named = only(found, "PKL-002")
    assert ["os.mkdir" in named[0].message, "shutil.rmtree" in named[1].message] == [True, True]
    assert [data[finding.offset : (finding.offset or 0) + 3] for finding in named] == [b"cos", b"csh"]
    assert len(named) == 2
    assert not Path(MARKER).exists()


def test_what_a_policy_refuses_is_no_error(tmp_path: Path) -> None:
    """Long doubles, dates, strings, records and plain objects."""
    np.savez(
        tmp_path / "a.npz", a=np.zeros(2, np.longdouble), b=np.zeros(2, "M8[s]"), c=np.array(["x"]),
        d=np.zeros(2, "V3"), e=np.zeros(2, [("x", "<f4"), ("y", "S2")]),
        f=np.array([{"k": np.arange(3)}, None][:1], object),
    )  # fmt: skip
    assert ids(convert.check(tmp_path / "a.npz")) == {"NPY-106"}


# --- bounds ------------------------------------------------------------------------------------------------------


def test_many_findings_are_counted(tmp_path: Path) -> None:
    """At most `MAX_PER_RULE` of a rule are listed; the last one says how many more there are."""
    header = {f"t{index}": entry("f32") for index in range(MAX_PER_RULE + 30)}
    found = only(convert.check(laid_out({"a.safetensors": st_file(header)}, tmp_path)), "ST-010")
    assert [finding.more for finding in found] == [0] * (MAX_PER_RULE - 1) + [30]


def test_headers_only(tmp_path: Path) -> None:
    """Without data neither checksums nor pickles nor booleans are looked at, but headers are."""
    archive = Zip().add("a.npy", crc=1).add("b.npy", ARRAY[:-1]).add("c.npy", objects(Runs()))
    path = laid_out({"a.npz": archive.add("d.npy", npy(array_header("'|b1'"), b"\1\2")).end()}, tmp_path)
    assert ids(convert.check(path)) == {"NPZ-018", "NPY-011", "NPZ-002", "NPY-106", "PKL-002", "NPY-107"}
    assert ids(convert.check(path, data=False)) == {"NPY-011", "NPZ-002", "NPY-106"}


def test_members_that_share_bytes_are_not_read(tmp_path: Path) -> None:
    """Else a small archive could keep the check busy for ever: the bad checksum stays unseen."""
    found = convert.check(laid_out({"a.npz": overlapping(crc=1)}, tmp_path))
    assert ids(found) == {"NPZ-012"}


def test_what_exceeds_a_limit_is_not_read(tmp_path: Path) -> None:
    """A bomb is told by its directory; the limit that was exceeded is named with the option that raises it."""
    zeros = npy_bytes(np.zeros(1 << 16))
    path = laid_out({"a.npz": one(data=zeros, method=8, packed=deflated(zeros), crc=1)}, tmp_path)
    assert ids(convert.check(path)) == {"NPZ-018"}
    (finding,) = convert.check(path, limits=convert.Limits(total_bytes=1000))
    assert (finding.rule, finding.expected) == ("FILE-003", "at most 1000 bytes")
    assert "--max-total" in str(finding.hint)


def test_deep_nesting_and_long_numbers_are_findings(tmp_path: Path) -> None:
    """No header exhausts a stack or time."""
    for text in ("[" * 100_000, '{"a":' * 100_000, '{"w": ' + "1" * 5000 + "}"):
        found = convert.check(laid_out({"a.safetensors": st_file("{" + text if text[0] == "[" else text)}, tmp_path))
        assert ids(found) == {"ST-005"}
    for text in ("(" * 60_000, array_header(shape="(" + "1" * 50_000 + ",)")):
        assert ids(convert.check(laid_out({"a.npy": npy(text)}, tmp_path))) == {"NPY-005"}


def test_a_file_full_of_signatures(tmp_path: Path) -> None:
    """Local headers and end records without end: bounded by the limits."""
    data = b"PK\x03\x04" * 50_000
    found = convert.check(laid_out({"a.npz": data}, tmp_path))
    assert "NPZ-001" in ids(found)
    assert len(found) < 200
    found = convert.check(laid_out({"b.npz": b"PK\x03\x04" + b"PK\x05\x06" * 10_000}, tmp_path))
    assert errors(found)


# --- several files -----------------------------------------------------------------------------------------------


def test_a_folder_is_checked_with_its_shards_once(tmp_path: Path) -> None:
    """Tensor files in all folders below; what the index tells of a shard is not told again for the shard."""
    (tmp_path / "sub" / ".hidden").mkdir(parents=True)
    bad = st_file({"w": entry("f32")})
    laid_out({INDEX: index_of({"w": "a.safetensors"}), "a.safetensors": bad, "notes.txt": b"x"}, tmp_path)
    laid_out({"b.NPY": ARRAY[:-1]}, tmp_path / "sub")
    laid_out({"c.npy": b"x", ".d.npy": b"x"}, tmp_path / "sub" / ".hidden")
    found = convert.check(tmp_path)
    assert [(finding.rule, finding.path) for finding in found] == [
        ("ST-010", str(tmp_path / "a.safetensors")), ("NPY-011", str(tmp_path / "sub" / "b.NPY")),
    ]  # fmt: skip


def test_what_is_remote_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of URLs, with its shards, as one on this machine; a URL's secrets are not told."""
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    index = index_of({"w": "a.safetensors", "v": "b.safetensors"})
    files = {"a.npz": one(crc=1), "sub/b.npy": ARRAY[:-1], INDEX: index, "a.safetensors": SHARD, "notes.txt": b"x"}
    for name, data in files.items():
        store.pipe(f"/checked/{name}", data)
    try:
        found = convert.check("memory://checked/")
    finally:
        store.rm("/checked", recursive=True)
    assert [(finding.rule, finding.path) for finding in found] == [
        ("NPZ-018", "memory://checked/a.npz"), ("SHARD-005", f"memory://checked/{INDEX}"),
        ("NPY-011", "memory://checked/sub/b.npy"),
    ]  # fmt: skip
    findings = Findings("https://me:secret@host/a.npz")
    findings.add(Rule("X-001", "t", "a"), "bad")
    assert "secret" not in json.dumps(findings.listed()[0].to_dict())


def test_what_cannot_be_opened_is_an_exception(tmp_path: Path) -> None:
    """A path that is not there is the caller's mistake, and no finding; so is a folder of nothing."""
    with pytest.raises(convert.InputError, match="No such file"):
        convert.check(tmp_path / "a.npz")
    with pytest.raises(convert.InputError, match="holds no tensor files"):
        convert.check(tmp_path)
    with pytest.raises(convert.UsageError, match="unknown format 'npzz'"):
        convert.check(laid_out({"a.npz": ARRAY}, tmp_path), format="npzz")


def test_a_format_without_a_checker_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another package's format the reader's word is taken: for the file, for each tensor, and for the data."""
    (tmp_path / "lined_reader.py").write_text(
        "from readers import npz\nfrom convert.errors import CorruptError\n"
        "def open(path, limits):\n"
        "    if str(path).endswith('b.lined'): raise CorruptError('no (expected 1, found 2)')\n"
        "    return npz.open(str(path) + '.npz', limits)\n",
        "utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    row = formats.Format("lined", (".lined",), ((0, b"LINE"),), "lined_reader", "", "Lines")
    monkeypatch.setattr(formats, "all_formats", lambda: (*formats.BUILT_IN, row))
    archive = Zip().add("a.npy", crc=1).add("b.npy", ARRAY[:-1]).add("c.npy").end()
    path = laid_out({"a.lined": b"LINE1", "b.lined": b"LINE2", "a.lined.npz": archive}, tmp_path)
    assert [(finding.rule, finding.tensor) for finding in convert.check(path)] == [
        ("FILE-004", "a"), ("FILE-004", "b.npy")
    ]  # fmt: skip
    assert [finding.tensor for finding in convert.check(path, data=False)] == ["b.npy"]
    (finding,) = convert.check(tmp_path / "b.lined")
    assert (finding.rule, finding.message, finding.expected, finding.found) == ("FILE-004", "no", "1", "2")


# --- findings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "apart_from", "facts"),
    [
        ("plain", "plain", {}),
        ("a (b) c", "a (b) c", {}),
        ("bad (expected 3)", "bad", {"expected": "3", "found": None}),
        ("bad (found ')(' at byte 7)", "bad", {"expected": None, "found": "')('", "offset": 7}),
        ("bad (expected a, found b (c)): again", "bad: again", {"expected": "a", "found": "b (c)"}),
        ("bad (expected a", "bad (expected a", {}),
        ("x (found 1 at character 5)", "x", {"expected": None, "found": "1"}),
    ],
)
def test_facts_are_taken_from_a_refusal(message: str, apart_from: str, facts: dict[str, Any]) -> None:
    """Expected, found and place of the messages that readers raise."""
    assert apart(message) == (apart_from, facts)


def test_a_finding_is_one_printable_line() -> None:
    """Control and direction characters of names are escaped; a finding is a line, whatever a file holds."""
    finding = Finding("X-001", "error", "a\nb", "bad", tensor="w\u202e\x1b[2J", found="'\n'", offset=3)
    assert str(finding).isprintable()
    assert str(finding).endswith("bad (found '\\n' at byte 3) [X-001]")
    assert finding.to_dict()["tensor"] == "w\u202e\x1b[2J"


def test_findings_count_what_they_do_not_keep() -> None:
    """Memory stays bounded."""
    findings = Findings("a")
    rule, other = Rule("X-001", "t", "a"), Rule("X-101", "t", "a")
    for index in range(1000):
        findings.add(rule, f"{index}")
        findings.add(other, "w")
    assert (findings.errors, findings.counts["X-101"], len(findings.listed())) == (1000, 1000, 2 * MAX_PER_RULE)
