"""Names are data: as files they stay in their folder and apart from each other, on a terminal they do nothing."""

# ruff: noqa: E501 -- tables of names

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import convert
from convert.cli.main import run
from convert.errors import printable, quoted
from writers.npy import file_names

TRAVERSAL = [
    "../x", "../../etc/passwd", "a/../../x", "a/..", "..", ".", "./x", "a/./b", "a//b", "/etc/passwd", "//server/share", "/",
    "a/", "/..", "...", "....//x", "..\\x", "a\\..\\..\\x", "C:\\x", "C:x", "c:/x", "\\\\server\\share\\x", "\\\\?\\C:\\x",
    "\\\\.\\COM1", "file:///x", "x:stream", "x::$DATA", "~", "~root/x", "$HOME", "%2e%2e/x", "%2e%2e%2fx", "..%2fx",
    "..%c0%afx", "\N{FULLWIDTH FULL STOP}\N{FULLWIDTH FULL STOP}/x", "\N{TWO DOT LEADER}/x", "\N{DIVISION SLASH}etc",
    "a\0b", "../x\0.npy", "-rf", "--help", "| sh", "`id`", "$(id)", "x;y", "x\ny", ".npy", "x.npy", "x.npy/y", ".hidden/x",
]  # fmt: skip
DEVICES = [
    "con", "PRN", "Aux", "nul", "COM1", "com9", "LPT1", "lpt0", "con.txt", "con.a.b", "nul ", "con .txt", "COM\u00b9", "LPT\u00b3",
    "CONIN$", "conout$", "a/con/b", "a/aux.weight", "con/x", "x/nul",
]  # fmt: skip
EDGES = [
    "w.",
    "w ",
    " w",
    "w. ",
    "w...",
    "a./b",
    "a /b",
    " /b",
    "x.NPY",
    "a.npy/b",
    "a.Npy/b",
    "?",
    "*",
    "<>",
    '"',
    "a|b",
    "%",
    "%41",
]
CONTROLS = ["\x1b[31mred", "\x9b2J", "a\rb", "a\bb", "\x07", "\u202etxt.exe", "\u2066x\u2069", "\u200b", "\ufeffx", "\u2028", "x\x7f",
            "\u00a0", "\u3000", "e\u0301\u200d", "\U000e0041", "\x1b]0;title\x07", "\x1b]8;;http://x\x1b\\y"]  # fmt: skip
SAME = [
    ("A", "a"), ("a/B", "a/b"), ("A/x", "a/y"), ("a/b/C", "A/b/c"), ("é", "e\u0301"), ("É", "é"), ("ß", "ss"), ("ſ", "s"), ("K", "\u212a"),
    ("\u00c5", "\u212b"), ("ı", "i"), ("İ", "i̇"), ("ﬁ", "fi"), ("Σ", "ς"), ("ς", "σ"), ("ᾳ", "αι"), ("ǆ", "ǅ"), ("\u1e9e", "ß"),
    ("ṩ", "s\u0323\u0307"), ("s\u0307\u0323", "s\u0323\u0307"), ("Ａ", "ａ"), ("𐐀", "𐐨"), ("x%41", "x%61"), ("a", "a/b"), ("ǰ", "J\u030c"),
]  # fmt: skip
RESERVED = re.compile(
    r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9\u00b9\u00b2\u00b3])[ ]*(\..*)?", re.IGNORECASE | re.DOTALL
)


def check_paths(names: list[str]) -> list[str]:
    """The paths for these names, after they have been proved harmless, distinct and decodable."""
    paths = file_names(names)
    assert len(paths) == len(names)
    for name, path in zip(names, paths, strict=True):
        assert path.endswith(".npy")
        assert unquote(path.removesuffix(".npy")) == name
        assert path.isprintable()
        assert not set(path) & set('<>:"|?*\\\0')
        assert not os.path.isabs(path)
        assert os.path.normpath(path) == path
        for part in path.split("/"):
            assert part not in ("", ".", "..")
            assert part[0] not in ". "
            assert part[-1] not in ". "
            assert not RESERVED.fullmatch(part)
        for folder in path.split("/")[:-1]:
            assert not folder.lower().endswith(".npy")
    places: dict[str, str] = {}
    for path in paths:
        parts = path.split("/")
        for count in range(1, len(parts) + 1):
            place = "/".join(parts[:count])
            for folded in (
                unicodedata.normalize("NFC", place).casefold(),
                unicodedata.normalize("NFD", place).casefold(),
                unicodedata.normalize("NFC", place.upper()),
                unicodedata.normalize("NFD", place.lower()),
            ):
                assert places.setdefault(folded, place) == place
    assert len(set(paths)) == len(paths)
    return paths


@pytest.mark.parametrize("name", [*TRAVERSAL, *DEVICES, *EDGES, *CONTROLS])
def test_a_hostile_name_is_one_harmless_file(name: str, tmp_path: Path) -> None:
    """It stays in the folder, and comes back exactly."""
    check_paths([name, "other"])
    source = tmp_path / "in.safetensors"
    convert.save({name: np.arange(3, dtype="i4"), "other": np.zeros(2, "f4")}, source)
    before = sorted(tmp_path.iterdir())
    target = tmp_path / "deep" / "er" / "out"
    target.parent.mkdir(parents=True)
    convert.convert_file(source, f"{target}/")
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "deep"])
    assert list(target.parent.iterdir()) == [target]
    assert sum(len(files) for _, _, files in os.walk(target)) == 2
    back = convert.load(target)
    assert sorted(back) == sorted([name, "other"])
    assert back[name].tobytes() == np.arange(3, dtype="i4").tobytes()


@pytest.mark.parametrize("pair", SAME, ids=ascii)
def test_names_that_file_systems_confuse_are_told_apart(pair: tuple[str, str], tmp_path: Path) -> None:
    """Case, normalisation, ligatures: two files wherever the folder is copied to, and both come back."""
    check_paths(list(pair))
    arrays = {name: np.full(2, number, "i2") for number, name in enumerate(pair)}
    convert.save(arrays, tmp_path / "in.safetensors")
    convert.convert_file(tmp_path / "in.safetensors", f"{tmp_path}/out/")
    back = convert.load(tmp_path / "out")
    assert {name: array.tolist() for name, array in back.items()} == {n: a.tolist() for n, a in arrays.items()}


def test_plain_names_are_left_as_they_are() -> None:
    """The legal neighbour: what people call tensors is what files are called."""
    names = [
        "model.layers.0.weight",
        "a/b/c",
        "w",
        "Größe",
        "重み",
        "x-1_2 (3)",
        "конечно",
        "a.b/c.d",
        "emoji😀",
        "console",
        "com",
        "lpt10",
    ]
    assert file_names(names) == [f"{name}.npy" for name in names]


PART = st.text(st.sampled_from("aAbBéÉ\u0301ßsſKkİıi.\u0307 %/\\:*con\x00\x1b\u202e\u200bＡ1¹$~-NPYnpy"), max_size=8)


@given(
    st.lists(
        st.one_of(
            PART,
            st.text(max_size=6).filter(lambda t: not re.search("[\ud800-\udfff]", t)),
            st.sampled_from([*TRAVERSAL, *DEVICES, *EDGES, *CONTROLS]),
        ),
        unique=True,
        max_size=8,
    )
)
def test_any_names_give_harmless_distinct_paths(names: list[str]) -> None:
    """Whatever is thrown together."""
    check_paths([name for name in names if name])


def test_names_too_long_for_a_file_are_refused_with_a_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,000 bytes are a name, and no file; all such names are told together, and the hint works."""
    monkeypatch.chdir(tmp_path)
    names = ["n" * 4000, "é" * 2000, "/".join(["d" * 200] * 20), "x" * 241, "%" * 90, "fine", "y" * 236]
    convert.save({name: np.zeros(1) for name in names}, "in.safetensors")
    assert run(["in.safetensors", "out/"]) == 4
    said = capsys.readouterr().err
    assert said.count("the name is too long for a file") == 5
    assert "hint: --rename" in said
    assert not Path("out").exists()
    assert run(["in.safetensors", "out/", "--rename", r"^(.{20}).{200,}$=\1", "--rename", "^%+$=percent"]) == 0
    for target in ("out.npz", "back.safetensors"):  # elsewhere they are names like others
        convert.convert_file("in.safetensors", target)
        assert sorted(convert.load(target)) == sorted(names)


def test_a_npz_keeps_hostile_names_as_names(tmp_path: Path) -> None:
    """Members are called as the tensors are; nothing is unpacked, whatever they are called."""
    arrays = {name: np.full(1, number) for number, name in enumerate([*TRAVERSAL, *DEVICES]) if "\0" not in name}
    convert.save(arrays, tmp_path / "a.safetensors")
    before = sorted(tmp_path.rglob("*"))
    convert.convert_file(tmp_path / "a.safetensors", tmp_path / "b.npz")
    convert.convert_file(tmp_path / "b.npz", tmp_path / "c.safetensors")
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "b.npz", tmp_path / "c.safetensors"])
    assert (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


def test_a_folder_with_links_out_of_it_is_not_written_through(tmp_path: Path) -> None:
    """A link that waits where a tensor's folder would be: the target is made anew, not written into."""
    outside = tmp_path / "outside"
    outside.mkdir()
    target = tmp_path / "out"
    target.mkdir()
    (target / "a").symlink_to(outside)
    convert.save({"a/b": np.zeros(2)}, tmp_path / "in.safetensors")
    try:
        convert.convert_file(tmp_path / "in.safetensors", f"{target}/", overwrite=True)
    except convert.OutputError:
        assert (target / "a").is_symlink()
    else:
        assert not (target / "a").is_symlink()
    assert list(outside.iterdir()) == []


# --- on a terminal -----------------------------------------------------------------------------------------------

NASTY = [
    "\x1b[2J\x1b[31m",
    "\x9b31m",
    "\u202egnp.exe",
    "a\rb\nc",
    "\x1b]0;pwned\x07",
    "\u2066\u200b\U000e0001",
    "[red]markup[/red]",
    "\x00",
]
ALLOWED = re.compile(r"\x1b\[[0-9;]*m")
"""What rich itself may write: colours."""


def is_harmless(text: str) -> bool:
    """No character that moves, hides, turns around or breaks a line where none was meant."""
    return all(character.isprintable() or character == "\n" for character in ALLOWED.sub("", text))


def hostile_files(folder: Path) -> dict[str, str]:
    """Files whose names, tensors, metadata, dtypes and members are all nasty."""
    found = {}
    for number, nasty in enumerate(NASTY):
        plain = nasty.replace("\0", "")
        path = folder / f"{number}{plain.replace('/', '')}.safetensors"
        convert.save({nasty: np.zeros(2, "f4"), "x" + nasty: np.zeros(1, "i1")}, path, metadata={nasty: nasty * 3})
        found[f"good{number}"] = str(path)
        entry = {nasty: {"dtype": nasty, "shape": [1], "data_offsets": [0, 1]}, "b": {nasty: nasty}, "c" + nasty: nasty}
        text = json.dumps(entry).encode()
        broken = folder / f"broken{number}.safetensors"
        broken.write_bytes(len(text).to_bytes(8, "little") + text + b"x")
        found[f"broken{number}"] = str(broken)
        if plain:
            npz = folder / f"{number}.npz"
            arrays = {plain: np.zeros(3, "M8[s]")}
            buffer = io.BytesIO()
            np.savez(buffer, **arrays)  # type: ignore[arg-type]
            npz.write_bytes(buffer.getvalue())
            found[f"npz{number}"] = str(npz)
        descr = f"{{'descr': {nasty!r}, 'fortran_order': False, 'shape': (1,), {nasty!r}: 1}}".encode() + b"\n"
        npy = folder / f"{number}{plain.replace('/', '')}.npy"
        npy.write_bytes(b"\x93NUMPY\x02\0" + len(descr).to_bytes(4, "little") + descr)
        found[f"npy{number}"] = str(npy)
    return found


COMMANDS: list[list[str]] = [
    ["{file}", "out.npz", "--overwrite"], ["{file}", "out.safetensors", "--overwrite", "--json"],
    ["{file}", "new/", "--dry-run"], ["{file}", "out.npy", "--overwrite"],
    ["{file}", "out.npz", "--overwrite", "--include", "x*", "--rename", "x=y", "--exclude", "nothing"],
    ["ls", "{file}"], ["ls", "{file}", "--json"], ["check", "{file}"], ["check", "{file}", "--json"],
]  # fmt: skip


def test_no_command_lets_a_file_speak_to_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors, notes, plans, tables and JSON of files whose every text is hostile."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    shown = 0
    for file in hostile_files(tmp_path).values():
        for command in COMMANDS:
            status = run([part.format(file=file) for part in command])
            out, err = capsys.readouterr()
            assert status in (0, 2, 3, 4, 5), (command, err)
            assert is_harmless(out), (command, out)
            assert is_harmless(err), (command, err)
            if "--json" in command and out:
                for line in out.splitlines() if command[0] == "ls" else [out]:
                    json.loads(line)
            shown += len(out) + len(err)
    assert shown > 10_000


def test_batch_lets_no_file_speak_to_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table of failures too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    hostile_files(tmp_path / "in")
    for more in ([], ["--dry-run"], ["--json"]):
        run(["batch", "in", "out", "--to", "safetensors", *more])
        out, err = capsys.readouterr()
        assert out + err
        assert is_harmless(out), out
        assert is_harmless(err), err


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such terminals")
def test_the_progress_bar_shows_no_hostile_name(tmp_path: Path) -> None:
    """On a real terminal, with the name of the tensor beside the bar."""
    import fcntl
    import pty
    import struct
    import termios

    name = "\x1b]0;pwned\x07\u202e\x9b2J"
    code = (
        "import sys\nfrom convert.cli import job\n"
        "bar = job._Bar()\nbar._bar.delay = 0\nshow = bar.__enter__()\n"
        f"[show(done, 10, {name!r}) for done in range(10)]\nbar._bar.refresh()\nbar.__exit__()\n"
    )
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
    done = subprocess.run([sys.executable, "-c", code], stderr=follower, timeout=120, check=False)
    os.close(follower)
    said = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:
            break
        if not piece:
            break
        said += piece
    os.close(leader)
    assert done.returncode == 0
    text = said.decode("utf-8", "surrogateescape")
    assert "pwned" in text
    assert "]0;pwned\x07" not in text
    assert not {"\x07", "\u202e", "\x9b"} & set(text)


@pytest.mark.parametrize("text", NASTY)
def test_escapes_are_readable_and_exact(text: str) -> None:
    """What is escaped can be told, and what is printable stays."""
    assert printable(text).isprintable()
    assert quoted(text).isprintable()
    assert printable("Größe 重み 😀 [x]") == "Größe 重み 😀 [x]"


def test_json_escapes_mean_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A program that reads the JSON gets the names as they are."""
    names = [*NASTY, "\U000e0041\U0001f600", "Größe"]
    convert.save({name: np.zeros(1) for name in names}, tmp_path / "a.safetensors")
    assert run(["ls", str(tmp_path / "a.safetensors"), "--json"]) == 0
    out = capsys.readouterr().out
    assert is_harmless(out)
    assert "Größe" in out
    assert sorted(tensor["name"] for tensor in json.loads(out)["tensors"]) == sorted(names)
