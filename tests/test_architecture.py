"""The shape of the house: who imports whom, what a run loads, what is shipped, and how others add a format."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert import formats

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("convert", "convert.cli", "readers", "writers")
MODULES = sorted(path for package in PACKAGES for path in ROOT.joinpath(*package.split(".")).glob("*.py"))
LONGEST_FILE_LINES = 450

THIRD_PARTY: dict[str, set[str]] = {
    # What is not the standard library, and the only modules that may name it outside of functions and type checking.
    "isal": {"convert.codec"},
    "numpy": {
        "convert.arrays",
        "convert.numeric",
        "convert.slicing",
        "convert.longdouble",
        "convert.statistics",
        "convert.transpose",
        "convert.comparenum",
    },
    "ml_dtypes": {"convert.numeric"},
    "typer": {
        "convert.cli.main",
        "convert.cli.job",
        "convert.cli.limits",
        "convert.cli.listing",
        "convert.cli.plain",
        "convert.cli.batch",
        "convert.cli.check",
        "convert.cli.diff",
        "convert.cli.complete",
        "convert.cli.shared",
    },
}
OPTIONAL = {"fsspec": "remote", "distributed": "distributed"}
"""What an extra brings, and which."""
LAZY: dict[str, set[str]] = {
    # What functions may import when they run.
    "fsspec": {"convert.remote", "convert.remotefile", "convert.remoteoutput"},
    "distributed": {"convert.cluster"},
    "numpy": {"convert.dtypes", "convert.encodings", "convert.records", "convert.turning", "convert.transpose"},
    "ml_dtypes": {"convert.dtypes"},
    "tqdm": {"convert.cli.job"},
    "rich": {"convert.cli.listing", "convert.cli.ls", "convert.cli.table"},
}


def module_name(path: Path) -> str:
    """`convert/cli/main.py` -> `convert.cli.main`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node: ast.AST) -> bool:
    """`if TYPE_CHECKING:`"""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(path: Path) -> list[tuple[str, str]]:
    """Full names of all that a module imports, and when: 'always', 'called' or 'typing'."""
    found: list[tuple[str, str]] = []

    def visit(node: ast.AST, when: str) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            found.extend((f"{node.module}.{alias.name}", when) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            inside = when
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and when == "always":
                inside = "called"
            if is_type_checking(node) and child in node.body:  # type: ignore[attr-defined]
                inside = "typing"
            visit(child, inside)

    visit(ast.parse(path.read_text("utf-8")), "always")
    return found


ALL_IMPORTS = [(module_name(path), name, when) for path in MODULES for name, when in imports(path)]


@pytest.mark.parametrize(
    ("package", "allowed"),
    [("convert", {"convert"}), ("readers", {"convert", "readers"}), ("writers", {"convert", "writers"})],
)
def test_imports_point_inwards(package: str, allowed: set[str]) -> None:
    """The core knows no format; readers and writers know the core and their own kind, never each other."""
    ours = {"convert", "readers", "writers", "tests", "samples", "benchmarks"}
    wrong = [
        (module, name)
        for module, name, _ in ALL_IMPORTS
        if module.split(".")[0] == package and name.split(".")[0] in ours - allowed
    ]
    assert wrong == []


def test_only_the_table_names_readers_and_writers() -> None:
    """Dotted names of readers and writers stand in `convert/formats.py`, as text, and nowhere else in the core."""
    for path in MODULES:
        if path.is_relative_to(ROOT / "convert"):
            texts = [
                node.value for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Constant)
            ]
            named = {text for text in texts if isinstance(text, str) and text.startswith(("readers.", "writers."))}
            assert bool(named) == (module_name(path) == "convert.formats"), path


def test_the_core_does_not_need_the_command_line() -> None:
    """A library that prints is none: only `convert.cli`, and `python -m convert`, import it."""
    users = {module for module, name, _ in ALL_IMPORTS if name.startswith("convert.cli")}
    assert {user for user in users if not user.startswith("convert.cli")} == {"convert.__main__"}


@pytest.mark.parametrize("when", ["always", "called"])
def test_third_parties_come_in_at_few_places(when: str) -> None:
    """Each dependency has its modules; `readers` and `writers` need none of them."""
    allowed = THIRD_PARTY if when == "always" else LAZY
    found: dict[str, set[str]] = {}
    for module, name, how in ALL_IMPORTS:
        top = name.split(".")[0]
        if how == when and top not in {*sys.stdlib_module_names, "convert", "readers", "writers"}:
            found.setdefault(top, set()).add(module)
    assert {top: modules - allowed.get(top, set()) for top, modules in found.items()} == {top: set() for top in found}


def test_the_library_never_prints_nor_exits() -> None:
    """No print, no sys.exit, no warnings outside of the command line."""
    for path in MODULES:
        if path.is_relative_to(ROOT / "convert" / "cli"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called not in ("print", "sys.exit", "exit", "warnings.warn", "sys.stdout.write"), f"{path}: {called}"


def test_files_stay_short() -> None:
    """What does not fit into 450 lines is two things."""
    lengths = {module_name(path): len(path.read_text("utf-8").splitlines()) for path in MODULES}
    assert {name: count for name, count in lengths.items() if count > LONGEST_FILE_LINES} == {}


# --- what a run loads --------------------------------------------------------------------------------------------


def loaded(folder: Path, *argv: str) -> set[str]:
    """Top names of all modules in memory when the program has done its work."""
    code = (
        "import sys, json\nfrom convert.cli.main import run\nstatus = run(sys.argv[1:])\n"
        "open('loaded.json', 'w').write(json.dumps(sorted(sys.modules)))\nsys.exit(status)"
    )
    subprocess.run([sys.executable, "-c", code, *argv], check=True, cwd=folder, capture_output=True)
    modules: list[str] = json.loads((folder / "loaded.json").read_text("utf-8"))
    return {name.split(".")[0] for name in modules} | {name for name in modules if name.startswith("convert")}


def test_the_version_loads_next_to_nothing(tmp_path: Path) -> None:
    """`convert --version` needs neither numpy nor rich, and no part of a conversion."""
    found = loaded(tmp_path, "--version")
    assert not found & {"numpy", "rich", "ml_dtypes", "safetensors", "tqdm", "isal", "readers", "writers"}
    assert {name for name in found if name.startswith("convert.")} == {
        "convert.cli", "convert.cli.complete", "convert.cli.job", "convert.cli.limits", "convert.cli.listing",
        "convert.cli.main", "convert.cli.plain", "convert.cli.shared", "convert.errors", "convert.limits",
        "convert.shown", "convert.version",
    }  # fmt: skip


COPYING = (
    "api", "cli", "cli.complete", "cli.job", "cli.limits", "cli.listing", "cli.main", "cli.plain", "cli.shared",
    "codec", "dtypes", "encodings", "errors", "files", "formats", "jsontext", "limits", "locks", "memory",
    "options", "output", "outputfolder", "plan", "policy", "progress", "records", "report", "settings", "shown",
    "steps", "tensor", "threads", "transfer", "version", "writing",
)  # fmt: skip
"""All that a plain copy may load of the core."""


@pytest.mark.parametrize(
    ("target", "options"),
    [("out.safetensors", []), ("out.npz", []), ("out.npz", ["--compress"]), ("out/", ["--byteorder", "keep"])],
)
def test_a_plain_copy_loads_no_numpy(tmp_path: Path, target: str, options: list[str]) -> None:
    """Bytes are moved, and swapped, without it: starting takes no longer than it must."""
    np.savez(tmp_path / "in.npz", a=np.zeros((2, 3)), b=np.zeros(4, ">i2"))
    found = loaded(tmp_path, "in.npz", target, *options)
    assert not found & {"numpy", "ml_dtypes", "safetensors", "tqdm", "rich"}
    assert {name for name in found if name.startswith("convert.")} <= {f"convert.{name}" for name in COPYING}


def test_importing_the_library_loads_nothing(tmp_path: Path) -> None:
    """Names are imported when they are used."""
    code = (
        "import convert, sys; print(*sorted(n for n in sys.modules if n.startswith('convert')), 'numpy' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout.split() == ["convert", "convert.version", "False"]


# --- what is shipped ---------------------------------------------------------------------------------------------

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_the_wheel_holds_the_packages_and_nothing_else() -> None:
    """Every folder of the product with code is a package, and no test, sample or benchmark is."""
    assert tuple(PROJECT["tool"]["setuptools"]["packages"]) == PACKAGES
    for package in PACKAGES:
        assert ROOT.joinpath(*package.split("."), "__init__.py").exists()
    folders = {path.parent for top in ("convert", "readers", "writers") for path in (ROOT / top).rglob("*.py")}
    assert {".".join(folder.relative_to(ROOT).parts) for folder in folders} == set(PACKAGES)


def test_types_are_shipped() -> None:
    """Type checkers of those who use the library see its annotations."""
    for package in ("convert", "readers", "writers"):
        assert (ROOT / package / "py.typed").exists()
        assert PROJECT["tool"]["setuptools"]["package-data"][package] == ["py.typed"]


def test_the_scripts_lead_to_the_program() -> None:
    """Both names of the command, and the version that the package has."""
    for target in PROJECT["project"]["scripts"].values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
    assert set(PROJECT["project"]["scripts"]) == {"convert", "tensor-convert"}
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "convert.version.__version__"


def test_every_dependency_is_declared_and_used() -> None:
    """What is imported is in the list, and what is in the list is imported."""
    declared = {text.split(";")[0].split(">")[0].strip() for text in PROJECT["project"]["dependencies"]}
    used = {*THIRD_PARTY, *LAZY}
    assert declared == used - {"rich", *OPTIONAL}  # rich is typer's own
    for name, extra in OPTIONAL.items():
        assert any(text.startswith(name) for text in PROJECT["project"]["optional-dependencies"][extra])


@pytest.mark.parametrize("name", convert.__all__)
def test_every_public_name_has_a_docstring(name: str) -> None:
    """And its public methods too; all names are those of the package, lazily or not."""
    value = getattr(convert, name)
    if name == "__version__":
        assert value.count(".") == 2
        return
    assert inspect.getdoc(value), name
    assert value.__doc__, f"{name} inherits its docstring"
    if inspect.isclass(value) and not issubclass(value, Exception):
        for method, function in vars(value).items():
            if not method.startswith("_") and (
                inspect.isfunction(function) or isinstance(function, (property, classmethod))
            ):
                assert function.__doc__ or issubclass(value, dict) or method in ("close", "problems"), (
                    f"{name}.{method}"
                )


def test_the_public_names_are_those_of_the_package() -> None:
    """`dir` shows them, others are an AttributeError."""
    assert set(convert.__all__) <= set(dir(convert))
    with pytest.raises(AttributeError, match="no attribute 'convert_flie'"):
        convert.convert_flie  # type: ignore[attr-defined]  # noqa: B018


# --- a format of a third party -----------------------------------------------------------------------------------

READER = '''
"""One line of JSON, then the bytes of one tensor."""
import json
from convert.dtypes import BY_NAME
from convert.errors import CorruptError
from convert.files import SourceFile
from convert.limits import DEFAULT
from convert.tensor import Checkpoint, Extent, Tensor

def open(path, limits=DEFAULT):
    file = SourceFile(path)
    start = file.read(0, min(file.size, 1000))
    end = start.find(b"\\n")
    if end < 0:
        file.close()
        raise CorruptError("no header", path=path)
    head = json.loads(start[4:end])
    data = Extent(file, end + 1, file.size - end - 1)
    tensor = Tensor(head["name"], BY_NAME[head["dtype"]], tuple(head["shape"]), data)
    return Checkpoint(str(path), "lined", [tensor], files=[file])
'''
WRITER = '''
"""The other way."""
import json
from convert.errors import PolicyError
from convert.output import OutputFile, committed
from convert.transfer import Slot, fill

def holds(tensor):
    return tensor.dtype.kind in ("plain", "bfloat16")

def remembers(metadata, encoded):
    return not metadata and not encoded

def check(plan):
    if len(plan.tensors) == 1:
        return []
    return [PolicyError("one tensor only", path=plan.target, hint="--include NAME chooses one")]

def write(plan, settings):
    tensor = plan.tensors[0]
    head = json.dumps({"name": tensor.name, "dtype": tensor.dtype.name, "shape": tensor.shape})
    head = b"LINE" + head.encode() + b"\\n"
    output = OutputFile(plan.target, overwrite=settings.overwrite)
    with committed(output):
        output.write_at(0, head)
        fill([Slot(tensor, output, len(head))], settings.jobs, progress=settings.progress)
    return output
'''
ROW = """
from convert import Format
row = Format("lined", (".lined",), ((0, b"LINE"),), "lined.reader", "lined.writer", "One line [of JSON]")
"""


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that brings a format by its entry point."""
    site = tmp_path / "site"
    package, info = site / "lined", site / "lined-1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text(ROW, "utf-8")
    (package / "reader.py").write_text(READER, "utf-8")
    (package / "writer.py").write_text(WRITER, "utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lined\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text("[convert.formats]\nlined = lined:row\n", "utf-8")
    monkeypatch.syspath_prepend(str(site))
    yielded = tmp_path / "work"
    yielded.mkdir()
    for name in [name for name in sys.modules if name.split(".")[0] == "lined"]:
        monkeypatch.delitem(sys.modules, name)
    return yielded


def test_a_third_partys_format_is_read_and_written(third_party: Path) -> None:
    """By content and by suffix, with verification, and by all that a built-in one has."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    convert.save({"w": array}, third_party / "a.npz")
    report = convert.convert_file(third_party / "a.npz", third_party / "b.lined", verify=True)
    assert (report.target_format, report.verified) == ("lined", True)
    (third_party / "b.lined").rename(third_party / "b.bin")
    report = convert.convert_file(third_party / "b.bin", third_party / "c.safetensors")
    assert report.source_formats == ["lined"]
    assert convert.load(third_party / "c.safetensors")["w"].tobytes() == array.tobytes()
    assert convert.load(third_party / "b.bin")["w"].tobytes() == array.tobytes()
    convert.convert_file(third_party / "a.npz", third_party / "d", to="lined")
    assert (third_party / "d").read_bytes() == (third_party / "b.bin").read_bytes()


def test_a_third_partys_refusals_are_ours(third_party: Path) -> None:
    """Its writer's problems come with the others, its reader's errors like ours."""
    np.savez(third_party / "a.npz", w=np.zeros(2, complex), v=np.zeros(1), u=np.zeros(1))
    with pytest.raises(convert.PolicyError) as caught:
        convert.convert_file(third_party / "a.npz", third_party / "b.lined")
    assert [problem.tensor for problem in caught.value.problems] == ["w", None]
    assert "lined" in caught.value.problems[0].message
    (third_party / "broken").write_bytes(b"LINE")
    with pytest.raises(convert.CorruptError, match="no header"):
        convert.open(third_party / "broken")
    assert sorted(os.listdir(third_party)) == ["a.npz", "broken"]


def test_a_third_partys_format_is_listed(third_party: Path) -> None:
    """In messages, and on the command line with its own words as they are."""
    assert [row.name for row in formats.all_formats()] == ["npy", "npz", "safetensors", "shards", "lined"]
    with pytest.raises(convert.UsageError, match="npy, npz, safetensors, shards, lined") as caught:
        formats.by_name("line")
    assert caught.value.hint == "did you mean lined?"
    env = {**os.environ, "PYTHONPATH": os.fspath(third_party.parent / "site")}
    command = [sys.executable, "-m", "convert", "formats"]
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    assert "One line [of JSON]" in result.stdout


@pytest.mark.parametrize(
    ("code", "message"),
    [("row = 1", "is no convert.formats.Format"), ("import missing_package_xyz", "cannot be loaded: No module named")],
)
def test_a_broken_third_party_is_named(third_party: Path, code: str, message: str) -> None:
    """It does not bring the program down where only built-in formats are concerned; elsewhere it is named."""
    (third_party.parent / "site" / "lined" / "__init__.py").write_text(code, "utf-8")
    convert.save({"w": np.zeros(1)}, third_party / "a.npz")
    convert.convert_file(third_party / "a.npz", third_party / "b.safetensors")
    with pytest.raises(convert.UsageError, match=message) as caught:
        convert.convert_file(third_party / "a.npz", third_party / "b.lined")
    assert "'lined'" in caught.value.message


@pytest.mark.parametrize(("half", "message"), [("reader", "can only be read"), ("writer", "can only be written")])
def test_half_a_format_is_welcome(third_party: Path, half: str, message: str) -> None:
    """Read-only and write-only formats work one way and refuse the other."""
    row = ROW.replace('"lined.writer"', '""') if half == "reader" else ROW.replace('"lined.reader"', '""')
    (third_party.parent / "site" / "lined" / "__init__.py").write_text(row, "utf-8")
    convert.save({"w": np.zeros(1, np.uint8)}, third_party / "a.npz")
    (third_party / "in.lined").write_bytes(b'LINE{"name": "w", "dtype": "uint8", "shape": [1]}\n\0')
    if half == "reader":
        assert convert.load(third_party / "in.lined")["w"].tobytes() == b"\0"
        with pytest.raises(convert.UsageError, match=message):
            convert.convert_file(third_party / "a.npz", third_party / "b.lined")
    else:
        convert.convert_file(third_party / "a.npz", third_party / "b.lined")
        assert (third_party / "b.lined").read_bytes() == (third_party / "in.lined").read_bytes()
        for options in ({"format": "lined"}, {}):
            with pytest.raises(convert.UsageError, match=message):
                convert.open(third_party / "in.lined", **options)  # type: ignore[arg-type]
