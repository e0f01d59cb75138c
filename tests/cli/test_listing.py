"""`convert ls`: tables and trees that fit, sorted, chosen, with figures; folders, several files, and JSON."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from rich.cells import cell_len
from safetensors.numpy import save_file

import convert
from convert.cli.table import Column, Entry, laid_out, sparkline, wrapped
from convert.tree import MAX_DEPTH, Leaf, grow, largest, lines, natural, unfolded
from tests.program import Call
from tests.remoteservers import web_server


@pytest.fixture
def call(call: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    """`convert ls`, as wide as it takes."""
    monkeypatch.delenv("COLUMNS", raising=False)
    return lambda *argv: call("ls", *argv)


def model(path: str, layers: int = 12) -> None:
    """A checkpoint with equal layers."""
    tensors: dict[str, Any] = {"lm_head.weight": np.zeros((50, 8), np.float32), "step": np.array(7)}
    for index in range(layers):
        tensors[f"model.layers.{index}.attn.q.weight"] = np.full((8, 8), index, ml_dtypes.bfloat16)
        tensors[f"model.layers.{index}.norm"] = np.ones(8, np.float32)
    save_file(tensors, path, {"format": "pt"})


# --- the table ---------------------------------------------------------------------------------------------------


def test_compression_and_what_it_saves(call: Call) -> None:
    """How a member is compressed, and to what part of its size; JSON has both sizes."""
    np.savez_compressed("in.npz", zeros=np.zeros(10_000))
    outcome = call("in.npz")
    assert ["zeros", "float64", "10000", "78.1 KiB", "deflate 0 %"] in outcome.rows()
    (row,) = json.loads(call("in.npz", "--json").out)["tensors"]
    assert (row["compression"], row["nbytes"]) == ("deflate", 80_000)
    assert 0 < row["packed_nbytes"] < 500


def test_totals_and_shares(call: Call) -> None:
    """Tensors, bytes, size of the file, and each dtype with its share."""
    model("m.safetensors", 2)
    outcome = call("m.safetensors")
    size = os.path.getsize("m.safetensors")
    assert f"safetensors, 6 tensors, 1.9 KiB, file {size / 1024:.1f} KiB" in outcome.out
    assert "float32: 3 (1.6 KiB), bfloat16: 2 (256 B), int64: 1 (8 B)" in outcome.out
    found = json.loads(call("m.safetensors", "--json").out)
    assert (found["file_bytes"], found["nbytes"]) == (size, 1928)
    assert found["dtypes"]["bfloat16"] == {"tensors": 2, "nbytes": 256}


@pytest.mark.parametrize(
    ("sort", "names"),
    [
        ("file", ["b", "a10", "a9"]),
        ("name", ["a9", "a10", "b"]),
        ("size", ["a9", "b", "a10"]),
        ("dtype", ["b", "a9", "a10"]),
    ],
)
def test_orders(call: Call, sort: str, names: list[str]) -> None:
    """As in the file, by name with numbers in order, by size, by dtype."""
    np.savez("in.npz", b=np.zeros(2, np.float32), a10=np.zeros(1, np.int16), a9=np.zeros(9, np.float64))
    found = json.loads(call("in.npz", "--sort", sort, "--json").out)
    assert [row["name"] for row in found["tensors"]] == names


def test_globs_choose(call: Call) -> None:
    """As in the main job; what is left out is counted."""
    model("m.safetensors")
    outcome = call("m.safetensors", "--include", "*.norm", "--exclude", "*.1?.*")
    assert "10 of 26 tensors" in outcome.out
    assert "model.layers.9.norm" in outcome.out
    assert "lm_head" not in outcome.out
    assert "model.layers.10.norm" not in outcome.out


def test_names_that_are_wide_stay_in_their_columns(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """A character of East Asia takes two columns."""
    np.savez("in.npz", **{"重み" * 6: np.zeros(3), "w": np.zeros(3)})  # type: ignore[arg-type]
    for columns in (30, 40, 60):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines_of = call("in.npz").out.splitlines()
        assert max(map(cell_len, lines_of)) <= columns
    places = {cell_len(line[: line.index("float64")]) for line in lines_of if "float64" in line}
    assert places == {26}, lines_of


def test_empty_and_long_names(call: Call) -> None:
    """A name of nothing is seen; one of thousands of characters does not fill the screen."""
    save_file({"": np.zeros(1), "x" * 5000: np.zeros(2)}, "in.safetensors")
    outcome = call("in.safetensors")
    assert ["''", "float64", "1", "8 B"] in outcome.rows()
    assert "xxx... (5000 characters)" in outcome.out.replace("x...x", "xxx...x").replace("x (", "xxx... (")
    assert max(map(len, outcome.out.splitlines())) < 300


@pytest.mark.parametrize("columns", [10, 20, 33, 50, 79, 120])
@pytest.mark.parametrize("options", [[], ["--tree"], ["--stats"]])
def test_everything_fits(call: Call, monkeypatch: pytest.MonkeyPatch, columns: int, options: list[str]) -> None:
    """Tables, trees, figures, totals, metadata: nothing is wider than the terminal, nothing is lost."""
    model("m.safetensors")
    monkeypatch.setenv("COLUMNS", str(columns))
    outcome = call("m.safetensors", *options)
    assert (outcome.status, outcome.err) == (0, "")
    assert max(map(cell_len, outcome.out.splitlines())) <= columns
    squeezed = re.sub(r"\s", "", outcome.out)
    assert "lm_head.weight" in squeezed
    assert "50x8" in squeezed or ("--tree" in options and columns <= 50)


def test_light_columns_go_first() -> None:
    """Before a row is laid out in several lines, what matters least is left out."""
    columns = [Column("name"), Column("size", right=True), Column("dtype", light=True)]
    entries = [Entry(["a" * 22, "10 B", "float32"], [["more", "words"]])]
    assert list(laid_out(columns, lambda: entries, 28))[2:] == ["a" * 22 + "  10 B", "  more  words"]
    assert list(laid_out(columns, lambda: entries, 20)) == ["a" * 20, "aa", "  10 B  float32", "  more  words"]


def test_words_are_wrapped() -> None:
    """Whole where they fit, else cut."""
    assert wrapped(["one", "two", "three"], 8) == ["one  two", "three"]
    assert wrapped(["123456789"], 4) == ["1234", "5678", "9"]
    assert wrapped([], 4) == []


# --- the tree ----------------------------------------------------------------------------------------------------


def test_tree_has_subtotals_and_equal_layers_once(call: Call) -> None:
    """Twelve equal layers are one line, as are the lines below it; sums are of all twelve."""
    model("m.safetensors")
    rows = call("m.safetensors", "--tree").rows()
    assert ["lm_head.weight", "1", "1.6 KiB", "float32", "50 x 8"] in rows
    assert ["model.layers.", "24", "1.9 KiB", "bfloat16, float32"] in rows
    assert ["0..11.", "24", "1.9 KiB", "bfloat16, float32"] in rows
    assert ["attn.q.weight", "12", "1.5 KiB", "bfloat16", "8 x 8"] in rows
    assert ["norm", "12", "384 B", "float32", "8"] in rows
    assert len(rows) == 3 + 6 + 4


def test_layers_that_differ_are_told_apart(call: Call) -> None:
    """By dtype, shape, or the names below; a missing number ends a run."""
    tensors = {f"h.{index}.w": np.zeros((2, 2), np.float32) for index in (0, 1, 3, 4, 5)}
    tensors |= {
        "h.6.w": np.zeros((4, 1), np.float32),
        "h.7.w": np.zeros((2, 2), np.int32),
        "h.8.v": np.zeros((2, 2), "f4"),
    }
    save_file(tensors, "in.safetensors")
    labels = [row[0] for row in call("in.safetensors", "--tree").rows()[3:-3]]
    assert labels == ["h.", "0..1.w", "3..5.w", "6.w", "7.w", "8.v"]


def test_depth_folds_and_implies_the_tree(call: Call) -> None:
    """Levels below are in the sums."""
    model("m.safetensors")
    rows = call("m.safetensors", "--depth", "1").rows()
    assert [row[:2] for row in rows[3:6]] == [["lm_head.weight", "1"], ["model.layers.", "24"], ["step", "1"]]


def test_tree_by_size(call: Call) -> None:
    """The largest first, on every level."""
    model("m.safetensors")
    labels = [row[0] for row in call("m.safetensors", "--tree", "--sort", "size").rows()[3:]]
    assert labels[:5] == ["model.layers.", "0..11.", "attn.q.weight", "norm", "lm_head.weight"]


def test_sums_of_a_tree_are_those_of_its_leaves() -> None:
    """For names of every kind: separators at the ends, twice, alone, very many."""
    names = ["a.b", "a.c", "a", "a.", ".", "..", "/", "a//b", "", "x/y.z", "." * 5000, "1.2.3", "1.2.4", "ü.ö"]
    root = grow(Leaf(name, index, "f", None) for index, name in enumerate(names))
    assert (root.count, root.nbytes) == (len(names), sum(range(len(names))))
    printed = list(lines(root))
    leaves = [line for line in printed if line.node.leaf is not None]
    assert sum(line.times for line in leaves) == len(names)
    assert sum(line.node.nbytes * line.times for line in leaves if line.times == 1) <= root.nbytes
    assert max(line.depth for line in printed) <= MAX_DEPTH
    assert root.shares() == {"f": root.nbytes}


def test_only_the_largest_are_opened() -> None:
    """What is seen stays near the limit, however many leaves there are, in one node or deep below."""
    flat = grow(Leaf(f"t{index}", index, "f") for index in range(10_000))
    shown, rest = largest(flat, 50)
    assert [node.nbytes for node in shown] == list(range(9950, 10_000))
    assert rest is not None
    assert (rest.count, rest.nbytes, rest.label) == (9950, sum(range(9950)), "9950 smaller ones")
    deep = grow(Leaf(f"{index // 1000}.{index // 10}.{index}", index, "f") for index in range(10_000))
    opened = unfolded(deep, 300)
    seen = [child for node in _nodes(deep) if id(node) in opened for child in node.children]
    assert 100 < len(seen) <= 300
    assert any(child.label == "9." for child in seen)


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in node.children:
        yield from _nodes(child)


def test_numbers_sort_as_numbers() -> None:
    """Digits beyond what fits into a machine word too."""
    texts = ["a2", "a10", "b", "a", "a2b", "1" * 40, "2"]
    assert sorted(texts, key=natural) == ["2", "1" * 40, "a", "a2", "a2b", "a10", "b"]


# --- figures -----------------------------------------------------------------------------------------------------


def test_stats_below_each_tensor(call: Call) -> None:
    """Range, mean, deviation, what is odd, and a histogram; JSON has all of them."""
    np.savez("in.npz", w=np.array([0.0, 1.0, 1.0, np.nan, np.inf]), s=np.array(["a"]), e=np.zeros((0, 2)))
    text = call("in.npz", "--stats").out
    assert "min 0  max 1  mean 0.6667  std 0.4714  zeros 1  NaN 1  inf 1  [" in text
    assert "(no numbers)" in text
    assert "(no elements)" in text
    rows = json.loads(call("in.npz", "--stats", "--json").out)["tensors"]
    assert (rows[0]["stats"]["nans"], rows[0]["stats"]["mean"]) == (1, 2 / 3)
    assert sum(rows[0]["stats"]["counts"]) == 3
    assert rows[1]["stats"]["note"] == "no numbers"


def test_damage_is_told_and_the_rest_is_shown(call: Call) -> None:
    """Exit status 3, the tensor named, the others' figures there."""
    np.savez("in.npz", good=np.arange(5.0), bad=np.arange(100.0))
    data = bytearray(Path("in.npz").read_bytes())
    data[data.index(np.float64(50).tobytes())] ^= 1
    Path("in.npz").write_bytes(data)
    outcome = call("in.npz", "--stats")
    assert outcome.status == 3
    assert "min 0  max 4  mean 2" in outcome.out
    assert "!  CRC-32  mismatch:" in outcome.out
    assert "in.npz: tensor 'bad': CRC-32 mismatch" in outcome.err
    found = json.loads(call("in.npz", "--stats", "--json").out)
    assert found["error"]["problems"][0]["tensor"] == "bad"
    assert [row.get("problem") is not None for row in found["tensors"]] == [False, True]


def test_json_is_a_line_whatever_the_names(call: Call) -> None:
    """What a terminal could obey is escaped, in names, metadata and paths; the texts come back as they were."""
    names = ["bell\x07", "red\x1b[31m", "\u202eevil", "new\nline", "größe", '"quoted"', ""]
    save_file({name: np.zeros(size, np.uint8) for size, name in enumerate(names)}, "in.safetensors", {"k\n": "v\u2028"})
    text = call("in.safetensors", "--json").out
    assert text.endswith("}\n")
    assert text[:-1].isprintable()
    found = json.loads(text)
    assert sorted(row["name"] for row in found["tensors"]) == sorted(names)
    assert found["metadata"] == {"k\n": "v\u2028"}


def test_sparkline_of_plain_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the terminal's encoding has no blocks; what is not empty always shows."""
    assert sparkline([0, 1, 4, 1000]) == " ▁▁█"
    assert sparkline([]) == ""

    class Plain:
        encoding = "ascii"

    monkeypatch.setattr("sys.stdout", Plain())
    assert sparkline([0, 1, 500, 1000]) == " .=@"


# --- files, folders, mistakes ------------------------------------------------------------------------------------


def test_several_files_and_their_sum(call: Call) -> None:
    """One that cannot be read keeps none of the others from being listed."""
    np.savez("a.npz", x=np.zeros(2))
    np.savez("b.npz", x=np.zeros(3), y=np.zeros(1))
    outcome = call("a.npz", "missing.npz", "b.npz")
    assert outcome.status == 3
    assert outcome.out.splitlines()[-1] == "3 files, 3 tensors, 48 B"
    assert "missing.npz: cannot be read" in outcome.err


def test_a_folder_of_arrays_is_one_checkpoint(call: Call) -> None:
    """As it is for a conversion."""
    Path("in/sub").mkdir(parents=True)
    np.save("in/a.npy", np.zeros(2))
    np.save("in/sub/b.npy", np.zeros(3))
    found = json.loads(call("in", "--json").out)
    assert [row["name"] for row in found["tensors"]] == ["a", "sub/b"]


def test_any_other_folder_lists_each_checkpoint_in_it(call: Call) -> None:
    """An index stands for its shards; temporary and hidden files are none."""
    Path("in/sub").mkdir(parents=True)
    convert.save({"a": np.zeros(1000), "b": np.zeros(1000)}, "in/sub/m.safetensors", max_shard_size=9000)
    np.savez("in/x10.npz", x=np.zeros(1))
    np.savez("in/x9.npz", x=np.zeros(1))
    Path("in/.hidden.npz").write_bytes(b"")
    Path("in/config.json").write_text("{}")
    found = [json.loads(line) for line in call("in", "--json").out.splitlines()]
    assert [(row["path"], row["format"], len(row["tensors"])) for row in found] == [
        (os.path.join("in", "sub", "m.safetensors.index.json"), "shards", 2),
        (os.path.join("in", "x9.npz"), "npz", 1),
        (os.path.join("in", "x10.npz"), "npz", 1),
    ]
    assert json.loads(call("in/sub", "--json").out)["format"] == "shards"


def test_a_folder_without_tensors_is_an_error(call: Call) -> None:
    """And says where to look what would be one."""
    Path("in").mkdir()
    outcome = call("in")
    assert outcome.status == 3
    assert outcome.err == "in: the folder holds no tensor files\nhint: convert formats shows the suffixes\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--sort", "bytes"], "--sort must be one of file, name, size, dtype (found 'bytes')"),
        (["--sort", "nmae"], "hint: did you mean name?"),
        (["--depth", "0"], "--depth must be 1 or more (found 0)"),
        (["--tree", "--json"], "--tree folds tensors, --json is about each of them"),
        (["--depth", "2", "--stats"], "--tree folds tensors, --stats is about each of them"),
        (["--tree", "--html", "x.html"], "a page has a picture instead"),
        (["--overwrite"], "--overwrite is for --html FILE"),
        (["--jobs", "0"], "jobs must be from 1 to"),
    ],
)
def test_mistakes_are_usage_errors(call: Call, argv: list[str], words: str) -> None:
    """Found before any file is opened."""
    outcome = call("missing.npz", *argv)
    assert outcome.status == 2
    assert words in outcome.err
    assert outcome.out == ""


def test_a_glob_that_matches_nothing_lists_nothing(call: Call) -> None:
    """And says of how many."""
    model("m.safetensors")
    outcome = call("m.safetensors", "--include", "nothing*")
    assert outcome.status == 0
    assert "0 of 26 tensors" in outcome.out


def test_versions_of_headers(call: Call) -> None:
    """Of a file, an archive, a folder; safetensors has none."""
    latin, other = np.zeros(2, [("a", "<f4")]), np.zeros(2, [("重", "<f4")])
    Path("in").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy finds version 3.0 worth a warning
        np.save("in/new.npy", other)
        np.savez("in.npz", a=latin, b=other)
    np.save("in/old.npy", latin)
    found = {
        path: json.loads(call(path, "--json").out)["version"] for path in ("in/new.npy", "in/old.npy", "in.npz", "in")
    }
    assert found == {
        "in/new.npy": "npy 3.0",
        "in/old.npy": "npy 1.0",
        "in.npz": "npy 1.0, 3.0",
        "in": "npy 1.0, npy 3.0",
    }
    assert "file 518 B; npy 1.0, 3.0" in re.sub(r"file \d+ B", "file 518 B", call("in.npz").out)
    model("m.safetensors")
    assert json.loads(call("m.safetensors", "--json").out)["version"] == ""


# --- URLs --------------------------------------------------------------------------------------------------------


def test_headers_of_a_url_are_read_and_no_data(call: Call, tmp_path: Path) -> None:
    """Of 20 MiB less than 200 KB go over the net, for every format, and for shards."""
    pytest.importorskip("fsspec")
    pytest.importorskip("aiohttp")
    root = tmp_path / "web"
    root.mkdir()
    tensors: dict[str, Any] = {"large": np.zeros(20 << 20, np.uint8), "small": np.arange(10)}
    np.savez(root / "in.npz", **tensors)
    save_file(tensors, root / "in.safetensors")
    convert.save(tensors, root / "m.safetensors", max_shard_size="1MB")
    with web_server(root) as web:
        for name in ("in.npz", "in.safetensors", "m.safetensors.index.json"):
            web.sent = 0
            outcome = call(web.url + name, "--sort", "name")
            assert ["large", "uint8", "20971520", "20.0 MiB"] in outcome.rows()
            assert ["small", "int64", "10", "80 B"] in outcome.rows()
            assert 0 < web.sent < 200_000
        assert "zeros 20971520" in call(web.url + "in.npz", "--stats").out


def test_what_gives_access_to_a_url_is_not_shown(call: Call, tmp_path: Path) -> None:
    """Not in tables, JSON, pages and messages; a damaged tensor is found all the same."""
    pytest.importorskip("fsspec")
    pytest.importorskip("aiohttp")
    root = tmp_path / "web"
    root.mkdir()
    np.savez(root / "in.npz", good=np.arange(5.0), bad=np.arange(100.0))
    data = bytearray((root / "in.npz").read_bytes())
    data[data.index(np.float64(50).tobytes())] ^= 1
    (root / "in.npz").write_bytes(data)
    with web_server(root) as web:
        url = web.url.replace("://", "://me:swordfish@") + "in.npz"
        for argv in ([url], [url, "--json"], [url, "--stats"], [url, "--html", "x.html"], [url + "x", "--json"]):
            outcome = call(*argv)
            assert "swordfish" not in outcome.out + outcome.err
            assert "me:***@" in outcome.out or "--html" in argv
            assert outcome.status == (3 if "--stats" in argv or argv[0] != url else 0)
    assert "swordfish" not in Path("x.html").read_text("utf-8")
    assert "me:***@" in Path("x.html").read_text("utf-8")
