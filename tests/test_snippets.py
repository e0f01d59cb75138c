"""Every command and every snippet of README and docs, run as a reader would, page by page and in their order."""

from __future__ import annotations

import gc
import importlib
import io
import os
import re
import shlex
import shutil
import signal
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import typer

import convert
from convert import formats
from convert.cli import main
from convert.cli.job import COMMANDS

from . import oracle

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "examples" / "third_party"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

ELSEWHERE = {
    "docs/library.md": "tests/test_examples.py",
    "docs/pipelines.md": "tests/test_examples.py",
    "docs/third-party.md": "the files of a package, which are compared and used below",
}
"""Pages whose Python is run by other tests, and which."""
ONLY_PARSED = {
    "s3://": "a bucket; tests/test_remote.py has servers of its own",
    "https://HOST": "a server",
    "--scheduler": "a cluster; tests/test_cluster.py starts one",
    "/shared/": "a cluster's folders",
    "many.npz": "a million members; tests/test_limits.py makes some",
    "--install-completion": "changes the shell's own files",
}
"""What a command may have in it that is not here; its options must exist all the same."""
STATUS = {
    "convert samples/unmappable.npz out.safetensors": 4,
    "convert diff a.npz b.safetensors": 6,
    "convert diff f32.safetensors bf16.safetensors --ignore-dtype --rtol 0.004": 0,
    "convert diff before.safetensors after.safetensors --rtol 1e-5 --atol 1e-8": 0,
}
"""Exit statuses other than 0, or that matter."""


def arrays() -> dict[str, Any]:
    """What most files hold: names and types that the pages speak of."""
    rng = np.random.default_rng(2026)
    return {
        "w": np.arange(6, dtype="<f4").reshape(2, 3),
        "encoder.weight": rng.normal(size=(4, 5)).astype("<f4"),
        "layer.0.b": np.arange(4.0),
        "b": np.arange(3, dtype="<i2"),
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with all files that the pages begin with; and the third party's package."""
    monkeypatch.chdir(tmp_path)
    install_third_party(tmp_path / "site", monkeypatch)
    given = arrays()
    for name in ("in", "model", "a", "b"):
        np.savez(f"{name}.npz", **given)
    for name in ("in", "before", "after", "f32", "out"):
        oracle.save_with_reference(f"{name}.safetensors", given, {})
    rounded = {n: a.astype(ml_dtypes.bfloat16) if a.dtype.kind == "f" else a for n, a in given.items()}
    oracle.save_with_reference("bf16.safetensors", rounded, {})
    oracle.save_with_reference("b.safetensors", {**given, "w": given["w"] + 1}, {})
    for name in ("a", "b", "big", "big_endian"):
        np.save(f"{name}.npy", np.arange(4, dtype=">f4"))
    for name in ("src", "checkpoints"):
        Path(name).mkdir()
        np.savez(f"{name}/model.npz", **given)
    Path("examples").symlink_to(ROOT / "examples")
    Path("samples").symlink_to(ROOT / "samples")
    handler, collects = signal.getsignal(signal.SIGTERM), gc.isenabled()
    yield tmp_path
    signal.signal(signal.SIGTERM, handler)
    if collects:
        gc.enable()


def install_third_party(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `pip install examples/third_party` does, without pip: modules, and entry points as its pyproject says."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text("utf-8"))["project"]
    shutil.copytree(PACKAGE / "tensor_raw", site / "tensor_raw", ignore=shutil.ignore_patterns("__pycache__"))
    info = site / "tensor_raw-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = project["entry-points"]["convert.formats"]
    lines = ["[convert.formats]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(site))
    for name in [name for name in sys.modules if name.split(".")[0] == "tensor_raw"]:
        monkeypatch.delitem(sys.modules, name)


def commands(block: str) -> list[str]:
    """Lines that are typed: those of a program's name, with or without a prompt; no comments, and no second program."""
    found = []
    for line in block.splitlines():
        text = line.removeprefix("$ ")
        if re.match(r"(convert|tensor-convert) ", text):
            words = shlex.split(text, comments=True)
            found.append(shlex.join(words[: words.index("|")] if "|" in words else words))
    return found


def all_commands() -> list[tuple[str, str]]:
    """Page and command."""
    return [
        (page.relative_to(ROOT).as_posix(), command)
        for page in PAGES
        for language, block in BLOCK.findall(page.read_text("utf-8"))
        if not language
        for command in commands(block)
    ]


def parsed(argv: list[str]) -> Any:
    """The command's parameters; a usage error for an option or a command that is none."""
    main._install()
    main._install_late([])
    group: Any = typer.main.get_command(main.app)
    name, rest = (argv[0], argv[1:]) if argv[0] in COMMANDS else (main._MAIN, argv)
    return group.commands[name].make_context("convert", rest, resilient_parsing=False).params


def one_file_or_shards(shards: bool) -> None:
    """model.safetensors as the command wants it: the one would contradict the other."""
    for path in Path().glob("model*.safetensors*"):
        path.unlink()
    if shards:
        convert.save(arrays(), "model.safetensors.index.json", max_shard_size=100)
    else:
        oracle.save_with_reference("model.safetensors", arrays(), {})


def run(command: str) -> None:
    """Type it."""
    argv = shlex.split(command)[1:]
    if argv == ["--install-completion"]:
        return
    paths = parsed(argv).get("paths")
    if any(what in command for what in ONLY_PARSED):
        return
    if "model.safetensors" in command:
        one_file_or_shards("model.safetensors.index.json" in command)
    if paths and paths[-1] not in paths[:-1] and os.path.exists(paths[-1]):
        shutil.rmtree(paths[-1]) if os.path.isdir(paths[-1]) else os.unlink(paths[-1])  # of an earlier example
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        status = main.run(argv)
    err.seek(0)
    said = err.read()
    expected = STATUS.get(command, (0, 6) if argv[0] == "diff" else 0)
    assert status == expected or (isinstance(expected, tuple) and status in expected), f"{command}\n{said}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_shows_works(folder: Path, page: Path) -> None:
    """Commands end with the status they should, Python runs to its end, TOML and JSON are some."""
    name = page.relative_to(ROOT).as_posix()
    names: dict[str, Any] = {"convert": convert}
    for language, block in BLOCK.findall(page.read_text("utf-8")):
        if language == "python" and name not in ELSEWHERE:
            with redirect_stdout(io.StringIO()):
                if name == "docs/diff.md":
                    shutil.copy("before.safetensors", "b.safetensors")  # its example asserts that they are the same
                exec(compile(block, name, "exec"), names)
        elif language == "toml":
            tomllib.loads(block)
        elif not language:
            for command in commands(block):
                run(command)


def test_there_is_something_to_run() -> None:
    """The pages are found, and most of their commands are run; what is excused is still there."""
    found = [command for _, command in all_commands()]
    executed = [command for command in found if not any(what in command for what in ONLY_PARSED)]
    assert len(executed) > 50
    for what in ONLY_PARSED:
        assert any(what in command for command in found), f"{what} need not be excused any more"
    for command in STATUS:
        assert command in found, command


# --- the package of docs/third-party.md --------------------------------------------------------------------------


def test_the_page_shows_the_package() -> None:
    """Its blocks are the files, byte for byte."""
    blocks = [block for _, block in BLOCK.findall((ROOT / "docs" / "third-party.md").read_text("utf-8"))]
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".toml") and "build" not in path.parts]
    assert len(files) == 4
    for path in files:
        assert path.read_text("utf-8") in blocks, path.name


def test_the_package_reads_and_writes(folder: Path) -> None:
    """By content and suffix, with verification, on the way back exactly; it is listed."""
    report = convert.convert_file("in.npz", "w.raw", include=["w"], verify=True)
    assert (report.target_format, report.verified) == ("raw", True)
    assert Path("w.raw").read_bytes() == (
        b'RAW1{"name": "w", "dtype": "float32", "shape": [2, 3]}\n' + arrays()["w"].tobytes()
    )
    os.rename("w.raw", "w.bin")
    assert convert.load("w.bin")["w"].tobytes() == arrays()["w"].tobytes()
    assert "raw" in [row.name for row in formats.all_formats()]


def test_the_package_refuses_as_ours_do(folder: Path) -> None:
    """Two tensors, a type that it has not, and any beginning of a file: a ConvertError, and no file."""
    for include in (["w", "b"], ["when"]):
        np.savez("more.npz", when=np.zeros(2, "M8[s]"), **arrays())
        with pytest.raises(convert.PolicyError):
            convert.convert_file("more.npz", "x.raw", include=include)
        assert not Path("x.raw").exists()
    convert.convert_file("in.npz", "w.raw", include=["w"])
    whole = Path("w.raw").read_bytes()
    for end in range(4, len(whole)):
        Path("part.bin").write_bytes(whole[:end])
        with pytest.raises(convert.InputError):
            convert.load("part.bin")
    # fmt: off
    heads = [b"[]", b"{}", b"[" * 2000, b"1", b"null", b'{"name": 1, "dtype": "int8", "shape": []}',
             b'{"name": "w", "dtype": "int8", "shape": [-1]}', b'{"name": "w", "dtype": "int8", "shape": 1}',
             b'{"name": "w", "dtype": [], "shape": []}', b'{"name": "w", "dtype": "int3", "shape": []}',
             b'{"name": "w", "dtype": "int8", "shape": [1.0]}', b'{"name": "w", "dtype": "int8", "shape": [9]}']
    # fmt: on
    for head in heads:
        Path("part.bin").write_bytes(b"RAW1" + head + b"\n\0")
        with pytest.raises(convert.InputError):
            convert.load("part.bin")


def test_the_packages_module_is_the_one_of_the_example(folder: Path) -> None:
    """Not another that happens to be installed."""
    module = importlib.import_module("tensor_raw")
    assert str(folder) in str(module.__file__)
