"""What will be written is decided before any byte moves, and all that stands against it is told at once."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import convert
from convert.dtypes import BY_NAME
from convert.files import MemoryFile
from convert.plan import Cast, Wishes, make_plan
from convert.tensor import Checkpoint, Extent, Tensor
from writers import safetensors as safetensors_writer

from . import oracle

Array = npt.NDArray[Any]


def npz(folder: Path, **arrays: Any) -> Path:
    """A source made by numpy."""
    np.savez(folder / "in.npz", **arrays)
    return folder / "in.npz"


def named(folder: Path, *names: str) -> Path:
    """Tensors of these names, each holding its number."""
    return npz(folder, **{name: cast(Any, np.array([index], np.uint8)) for index, name in enumerate(names)})


def tensors(path: Path) -> dict[str, oracle.Entry]:
    """Name -> code, shape, bytes."""
    return oracle.read_safetensors(path)[1]


def out(folder: Path) -> Path:
    """Where the tests write to."""
    return folder / "out.safetensors"


# --- all problems together ---------------------------------------------------------------------------------------


def five_problems(folder: Path) -> Path:
    """A file with five tensors that safetensors cannot hold, for five reasons, between two that it can."""
    return npz(
        folder,
        first=np.zeros(3),
        date=np.array(["2020-01-01"], "M8[D]"),
        pickled=np.array([None], object),
        record=np.zeros(2, [("a", "i4")]),
        pair=np.zeros(2, complex),
        text=np.array(["a"]),
        last=np.zeros(3),
    )


def test_five_problems_give_five_messages(tmp_path: Path) -> None:
    """One run is enough to learn all that must be decided: each tensor, its reason and its hint, in file order."""
    source = five_problems(tmp_path)
    with pytest.raises(convert.PolicyError) as caught:
        convert.convert_file(source, out(tmp_path))
    problems = caught.value.problems
    assert [problem.tensor for problem in problems] == ["date", "pickled", "record", "pair", "text"]
    kinds = ["datetime64", "object", "structured", "complex128", "str"]
    for problem, kind in zip(problems, kinds, strict=True):
        assert problem.path == str(source)
        assert f"--policy {kind}=" in str(problem.hint)
    lines = str(caught.value).splitlines()
    assert len(lines) == 10
    assert [line.split(":")[0] for line in lines] == [str(source), "hint"] * 5
    assert os.listdir(tmp_path) == ["in.npz"]


def test_what_the_hints_say_together_solves_all_five(tmp_path: Path) -> None:
    """The first word of each hint, taken together, is a policy under which the file converts."""
    source = five_problems(tmp_path)
    with pytest.raises(convert.PolicyError) as caught:
        convert.convert_file(source, out(tmp_path))
    rules = [str(problem.hint).split()[1] for problem in caught.value.problems]
    rules = ["object=skip" if rule.startswith("object") else rule for rule in rules]  # None has no tensor
    convert.convert_file(source, out(tmp_path), policy=convert.Policy.parse(rules))
    assert set(tensors(out(tmp_path))) == {"first", "date", "record.a", "pair", "text", "last"}


def test_different_kinds_of_problems_are_told_together(tmp_path: Path) -> None:
    """A tensor that cannot be read, one that does not map and a slip in the call: the worst gives the exit status."""
    with zipfile.ZipFile(tmp_path / "in.npz", "w") as archive:
        archive.writestr("broken.npy", b"\x93NUMPY\x01\x00\x02\x00{}")
        with archive.open("pair.npy", "w") as member:
            np.lib.format.write_array(member, np.zeros(2, complex))
    with pytest.raises(convert.InputError) as caught:
        convert.convert_file(tmp_path / "in.npz", out(tmp_path), rename=[("pair", "broken")], include=["*", "nothing"])
    kinds = [type(problem) for problem in caught.value.problems]
    assert kinds == [convert.CorruptError, convert.PolicyError, convert.UsageError]
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("compress", [None, 1])
@pytest.mark.parametrize("jobs", [1, 4])
def test_all_damaged_tensors_are_named_together(tmp_path: Path, compress: int | None, jobs: int) -> None:
    """Damage found in the data, small and large tensors alike: each is named once, whatever the threads."""
    arrays = {name: np.full(size, 7.0) for name, size in (("a", 50), ("b", 50), ("c", 400_000), ("d", 400_000))}
    source = npz(tmp_path, **cast(Any, arrays))
    data = bytearray(source.read_bytes())
    with zipfile.ZipFile(source) as archive:
        for name in ("a.npy", "c.npy", "d.npy"):
            data[archive.getinfo(name).header_offset + 300] ^= 1
    source.write_bytes(data)
    target = tmp_path / ("out.npz" if compress else "out.safetensors")
    with pytest.raises(convert.CorruptError) as caught:
        convert.convert_file(source, target, compress=compress, jobs=jobs)
    assert sorted(str(problem.tensor) for problem in caught.value.problems) == ["a", "c", "d"]
    assert all("CRC" in problem.message for problem in caught.value.problems)
    assert os.listdir(tmp_path) == ["in.npz"]
    convert.convert_file(source, target, compress=compress, jobs=jobs, exclude=["a", "[cd]"])


# --- which tensors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("include", "exclude", "found"),
    [
        ([], [], ["a", "a.b", "a/b", "A", "[x]"]),
        (["a"], [], ["a"]),
        (["a*"], [], ["a", "a.b", "a/b"]),
        (["*b"], ["a/*"], ["a.b"]),
        (["A", "a"], [], ["a", "A"]),
        ([], ["a*", "A"], ["[x]"]),
        (["[[]x]"], [], ["[x]"]),
        (["?"], [], ["a", "A"]),
        (["a*"], ["a*"], []),
    ],
)
def test_globs_choose(tmp_path: Path, include: list[str], exclude: list[str], found: list[str]) -> None:
    """Included if any glob matches the whole name, in its case; `*` matches slashes too; exclusion wins."""
    source = named(tmp_path, "a", "a.b", "a/b", "A", "[x]")
    report = convert.convert_file(source, out(tmp_path), include=include, exclude=exclude)
    assert sorted(tensors(out(tmp_path))) == sorted(found)
    assert [tensor.name for tensor in report.tensors] == found
    left = [name for name in ("a", "a.b", "a/b", "A", "[x]") if name not in found]
    assert [skipped.name for skipped in report.skipped] == left


def test_what_is_excluded_causes_no_problems(tmp_path: Path) -> None:
    """A tensor that does not map, or cannot be read, is no obstacle when nobody wants it."""
    source = five_problems(tmp_path)
    convert.convert_file(source, out(tmp_path), include=["first", "last"])
    assert set(tensors(out(tmp_path))) == {"first", "last"}


def test_an_include_that_matches_nothing_is_a_slip(tmp_path: Path) -> None:
    """Refused, with the names there are; one of several too."""
    source = named(tmp_path, "model.w", "model.b")
    with pytest.raises(convert.UsageError, match="no tensor matches --include 'model'") as caught:
        convert.convert_file(source, out(tmp_path), include=["model.*", "model"])
    assert "'model.w', 'model.b'" in str(caught.value.hint)
    assert not out(tmp_path).exists()


@pytest.mark.parametrize(
    ("wishes", "note"),
    [
        ({"exclude": ["x"]}, "--exclude x matched nothing"),
        ({"rename": [("^x", "y")]}, "--rename ^x matched nothing"),
        ({"cast": [("float32", "float16")]}, "--cast float32=float16 matched nothing"),
    ],
)
def test_other_wishes_that_match_nothing_are_noted(tmp_path: Path, wishes: dict[str, Any], note: str) -> None:
    """Harmless, since nothing was to be changed, but most likely a slip."""
    report = convert.convert_file(named(tmp_path, "a"), out(tmp_path), **wishes)
    assert report.notes == [note]


# --- names -------------------------------------------------------------------------------------------------------


def test_names_are_changed_in_turn(tmp_path: Path) -> None:
    """Each regular expression sees what the one before made; groups and anchors work; only names change."""
    rename = [("^model\\.", ""), (r"layers\.(\d+)", r"h.\1"), ("weight$", "w")]
    source = named(tmp_path, "model.layers.10.weight", "head.weight", "weights")
    report = convert.convert_file(source, out(tmp_path), rename=rename)
    assert {name: facts[2] for name, facts in tensors(out(tmp_path)).items()} == {
        "h.10.w": b"\0",
        "head.w": b"\1",
        "weights": b"\2",
    }
    assert [(change.source, change.name, change.how) for change in report.changes] == [
        ("model.layers.10.weight", "h.10.w", "renamed"),
        ("head.weight", "head.w", "renamed"),
    ]


def test_names_may_be_swapped(tmp_path: Path) -> None:
    """What counts is that the names differ in the end."""
    convert.convert_file(named(tmp_path, "a", "b"), out(tmp_path), rename=[("^a$", "c"), ("^b$", "a"), ("^c$", "b")])
    assert tensors(out(tmp_path))["a"][2] == b"\1"


def test_names_that_collide_are_refused(tmp_path: Path) -> None:
    """Each name that two tensors would have is named; none is lost."""
    source = named(tmp_path, "a.1", "a.2", "b.1", "b.2", "c")
    with pytest.raises(convert.PolicyError) as caught:
        convert.convert_file(source, out(tmp_path), rename=[(r"\.\d$", "")])
    assert [(problem.tensor, problem.message) for problem in caught.value.problems] == [
        ("a", "two tensors would have this name"),
        ("b", "two tensors would have this name"),
    ]
    assert not out(tmp_path).exists()


def test_policies_and_casts_go_by_the_names_of_the_source(tmp_path: Path) -> None:
    """As the documentation says: include, exclude, casts and policy first, renames after."""
    source = npz(tmp_path, old=np.zeros(2, complex), other=np.zeros(2, np.float32))
    policy = convert.Policy.parse(["old:complex128=pair", "new:complex128=error"])
    convert.convert_file(
        source,
        out(tmp_path),
        policy=policy,
        rename=[("old", "new"), ("other", "small")],
        cast=[Cast("other", "float32", "float16")],
        include=["o*"],
    )
    assert {name: facts[0] for name, facts in tensors(out(tmp_path)).items()} == {"new": "F64", "small": "F16"}


@pytest.mark.parametrize(
    ("pattern", "replacement", "why"),
    [("(", "x", "unterminated"), ("*", "x", "nothing to repeat"), ("a", r"\1", "invalid group"), ("a", r"\g<n>", "n")],
)
def test_a_bad_regular_expression_is_a_usage_error(tmp_path: Path, pattern: str, replacement: str, why: str) -> None:
    """With the reason that Python gives."""
    with pytest.raises(convert.UsageError, match="invalid rename") as caught:
        convert.convert_file(named(tmp_path, "a"), out(tmp_path), rename=[(pattern, replacement)])
    assert why in caught.value.message


@pytest.mark.parametrize(
    ("target", "name"), [("out.safetensors", "__metadata__"), ("out.npz", "a\0b"), ("out.npz", "n" * 65532)]
)
def test_names_that_the_target_cannot_hold_are_refused(tmp_path: Path, target: str, name: str) -> None:
    """Reserved, cut by other readers, too long: and a rename is the way out."""
    convert.save({"a": np.zeros(1)}, tmp_path / "in.safetensors")
    with pytest.raises(convert.PolicyError, match="name") as caught:
        convert.convert_file(tmp_path / "in.safetensors", tmp_path / target, rename=[("a", name.replace("\\", "/"))])
    assert "--rename" in str(caught.value.hint)
    assert os.listdir(tmp_path) == ["in.safetensors"]


# --- casts -------------------------------------------------------------------------------------------------------

NUMBERS = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
           "float8_e5m2", "float8_e4m3fn", "float16", "bfloat16", "float32", "float64", "complex64"]  # fmt: skip


def dtype_of(name: str) -> np.dtype[Any]:
    """numpy's or ml_dtypes'."""
    return np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize("source", NUMBERS)
def test_casts_are_those_of_numpy_and_ml_dtypes(tmp_path: Path, source: str) -> None:
    """Small whole numbers to every type, halves and thirds to every float: the same bytes as `astype`."""
    values = np.arange(2 if source == "bool" else 12)
    whole = values.astype(np.float32).astype(dtype_of(source))
    convert.save({"w": whole}, tmp_path / "in.safetensors")
    for target in NUMBERS:
        if target == "bool" and source != "bool":
            continue
        convert.convert_file(tmp_path / "in.safetensors", out(tmp_path), cast=[(source, target)], overwrite=True)
        wide = whole.astype(np.complex64 if source == "complex64" else np.float64)
        wanted = wide if target == "complex64" else wide.real
        assert tensors(out(tmp_path))["w"] == (
            oracle.SAFETENSORS_CODES[target],
            whole.shape,
            oracle.canonical(wanted.astype(dtype_of(target))),
        ), target


@pytest.mark.parametrize("target", ["float8_e5m2", "float8_e4m3fn", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_values_are_rounded_to_nearest_even(tmp_path: Path, target: str, order: str) -> None:
    """Random float32, of either byte order, in C and Fortran order."""
    values = np.random.default_rng(5).normal(size=(37, 41)).astype(f"{order}f4")
    source = npz(tmp_path, c=values, f=np.asfortranarray(values))
    convert.convert_file(source, out(tmp_path), cast=[("float32", target)])
    wanted = values.astype(np.float32).astype(dtype_of(target)).tobytes()
    assert [facts[2] for facts in tensors(out(tmp_path)).values()] == [wanted] * 2


def test_overflow_is_refused_and_the_way_out_works(tmp_path: Path) -> None:
    """A finite value does not become infinite unless that was asked for; infinities stay."""
    source = npz(tmp_path, w=np.array([1.0, np.inf, 1e6, -1e6], np.float32))
    with pytest.raises(convert.PolicyError, match="element 2") as caught:
        convert.convert_file(source, out(tmp_path), cast=[("float32", "float16")])
    assert "--cast-overflow inf" in str(caught.value.hint)
    assert caught.value.tensor == "w"
    assert not out(tmp_path).exists()
    convert.convert_file(source, out(tmp_path), cast=[("float32", "float16")], cast_overflow="inf")
    assert tensors(out(tmp_path))["w"][2] == np.array([1, np.inf, np.inf, -np.inf], np.float16).tobytes()


@pytest.mark.parametrize(
    ("array", "cast"),
    [
        (np.array([0.0, 0.5]), ("float64", "int32")),
        (np.array([0.0, 300.0]), ("float64", "uint8")),
        (np.array([0.0, -1.0]), ("float64", "uint64")),
        (np.array([0.0, np.nan]), ("float64", "int64")),
        (np.array([1, 2]), ("int64", "bool")),
        (np.array([1, 1j]), ("complex128", "float64")),
        (np.array([1.0, np.inf]), ("float64", "float8_e4m3fn")),
    ],
)
def test_what_a_cast_would_lose_is_refused(tmp_path: Path, array: Array, cast: tuple[str, str]) -> None:
    """Integers take only what they hold exactly; no fraction, sign, imaginary part or infinity disappears."""
    with pytest.raises(convert.PolicyError, match="at element 1") as caught:
        convert.convert_file(npz(tmp_path, w=array), out(tmp_path), cast=[cast], cast_overflow="inf")
    assert caught.value.tensor == "w"
    assert os.listdir(tmp_path) == ["in.npz"]


def test_v2_is_cast_as_the_bfloat16_it_is(tmp_path: Path) -> None:
    """npz to npz, where `<V2` needs no policy: the wish for bfloat16=float32 is about it all the same."""
    values = np.array([1.5, -2.0, 3e38], ml_dtypes.bfloat16)
    source = npz(tmp_path, w=values.view("V2"))
    convert.convert_file(source, tmp_path / "out.npz", cast=[("bfloat16", "float32")])
    with np.load(tmp_path / "out.npz") as archive:
        assert archive["w"].dtype == np.float32
        assert archive["w"].tobytes() == values.astype(np.float32).tobytes()
    convert.convert_file(source, tmp_path / "same.npz")
    with np.load(tmp_path / "same.npz") as archive:
        assert archive["w"].dtype == np.dtype("V2")


def test_casts_narrowed_by_a_glob(tmp_path: Path) -> None:
    """Only the tensors whose names match are cast; the first cast that fits is taken."""
    source = npz(tmp_path, **cast(Any, {name: np.ones(2, np.float32) for name in ("a.w", "a.b", "c")}))
    casts = [Cast("a.w", "float32", "float64"), Cast("a.*", "float32", "float16")]
    convert.convert_file(source, out(tmp_path), cast=casts)
    assert {name: facts[0] for name, facts in tensors(out(tmp_path)).items()} == {
        "a.w": "F64",
        "a.b": "F16",
        "c": "F32",
    }


def test_casts_may_swap_types(tmp_path: Path) -> None:
    """Casts follow one another, each type once, so that a circle ends where it began."""
    source = npz(tmp_path, a=np.ones(2, np.float32), b=np.ones(2, np.float64))
    convert.convert_file(source, out(tmp_path), cast=[("float64", "float32"), ("float32", "float16")])
    assert {name: facts[0] for name, facts in tensors(out(tmp_path)).items()} == {"a": "F16", "b": "F16"}


def test_small_floats_are_cast_too(tmp_path: Path) -> None:
    """The packed types widen exactly, then round once."""
    values = np.array([0.5, 6.0, -1.0, 2.0], ml_dtypes.float4_e2m1fn)
    oracle.save_with_reference(tmp_path / "in.safetensors", {"w": values})
    convert.convert_file(tmp_path / "in.safetensors", out(tmp_path), cast=[("float4_e2m1fn", "bfloat16")])
    wanted = values.astype(np.float32).astype(ml_dtypes.bfloat16).tobytes()
    assert tensors(out(tmp_path))["w"] == ("BF16", (4,), wanted)


@pytest.mark.parametrize(
    ("cast", "message", "hint"),
    [
        (("float23", "float16"), "unknown dtype 'float23'", "float32"),
        (("float32", "bf16"), "unknown dtype 'bf16'", "bfloat16"),
        (("float32", "Float16"), "unknown dtype 'Float16'", "float16"),
        (("float32", "float4_e2m1fn"), "no cast to float4_e2m1fn", None),
    ],
)
def test_slips_in_casts_are_usage_errors(tmp_path: Path, cast: tuple[str, str], message: str, hint: str | None) -> None:
    """All dtypes are listed, and the nearest is suggested."""
    with pytest.raises(convert.UsageError, match=message) as caught:
        convert.convert_file(npz(tmp_path, w=np.ones(2, np.float32)), out(tmp_path), cast=[cast])
    assert hint is None or f"did you mean {hint}?" == caught.value.hint
    assert "unknown" not in message or "float8_e4m3fn" in caught.value.message


# --- metadata, alignment, layout ---------------------------------------------------------------------------------


def test_metadata_is_carried_over_and_added_to(tmp_path: Path) -> None:
    """Key by key: the caller's replaces the source's; through npz and back nothing is lost."""
    oracle.save_with_reference(tmp_path / "in.safetensors", {"w": np.zeros(1)}, {"format": "tf", "note": "ä\n"})
    report = convert.convert_file(
        tmp_path / "in.safetensors", tmp_path / "out.npz", metadata={"format": "pt", "more": ""}
    )
    wanted = {"format": "pt", "note": "ä\n", "more": ""}
    assert report.metadata == wanted
    convert.convert_file(tmp_path / "out.npz", out(tmp_path))
    assert oracle.read_safetensors(out(tmp_path))[0] == wanted


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, {"a": None}])
def test_metadata_is_text(tmp_path: Path, metadata: Any) -> None:
    """safetensors holds nothing else."""
    with pytest.raises(convert.UsageError, match="metadata must be texts"):
        convert.convert_file(named(tmp_path, "a"), out(tmp_path), metadata=metadata)


@pytest.mark.parametrize("align", [1, 64, 4096, 1 << 15])
def test_data_is_aligned(tmp_path: Path, align: int) -> None:
    """In safetensors the data as a whole, in a stored npz that of every member: ready to be mapped."""
    source = npz(tmp_path, a=np.zeros(3, np.uint8), b=np.arange(5.0), c=np.zeros((0, 2)))
    convert.convert_file(source, out(tmp_path), align=align)
    length = int.from_bytes(out(tmp_path).read_bytes()[:8], "little")
    assert (8 + length) % max(align, 8) == 0
    assert set(tensors(out(tmp_path))) == {"a", "b", "c"}
    convert.convert_file(source, tmp_path / "out.npz", align=align)
    data = (tmp_path / "out.npz").read_bytes()
    with zipfile.ZipFile(tmp_path / "out.npz") as archive:
        assert archive.testzip() is None
        for info in archive.infolist():
            at = info.header_offset
            begin = at + 30 + int.from_bytes(data[at + 26 : at + 28], "little")
            begin += int.from_bytes(data[at + 28 : at + 30], "little")
            begin += 10 + int.from_bytes(data[begin + 8 : begin + 10], "little")
            assert begin % align == 0
    with np.load(tmp_path / "out.npz") as arrays:
        assert arrays["b"].tobytes() == np.arange(5.0).tobytes()


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("out.safetensors", {"align": 3}, "power of two"),
        ("out.safetensors", {"align": 0}, "power of two"),
        ("out.safetensors", {"align": 1 << 16}, "power of two"),
        ("out.npy", {"align": 128}, "an alignment of its own"),
        ("out.safetensors", {"compress": True}, "cannot be compressed"),
        ("out.npz", {"compress": 0}, "from 1 to 9"),
        ("out.npz", {"compress": 10}, "from 1 to 9"),
        ("out.safetensors", {"byteorder": "big"}, "always little-endian"),
        ("out.safetensors", {"order": "keep"}, "always little-endian and row-major"),
        ("out.npz", {"byteorder": "middle"}, "byteorder must be one of little, big, native, keep"),
        ("out.npz", {"order": "F"}, "order must be one of C, keep"),
        ("out.npz", {"cast_overflow": "wrap"}, "cast_overflow must be one of error, inf"),
        ("out.npz", {"jobs": 0}, "jobs must be from 1"),
        ("out.npz", {"jobs": 1000}, "jobs must be from 1"),
        ("out.npz", {"to": "hdf5"}, "unknown format 'hdf5'"),
    ],
)
def test_wishes_that_cannot_be_are_usage_errors(
    tmp_path: Path, target: str, options: dict[str, Any], message: str
) -> None:
    """Values out of range, and what the format has no room for."""
    with pytest.raises(convert.UsageError, match=message):
        convert.convert_file(named(tmp_path, "a"), tmp_path / target, **options)
    assert os.listdir(tmp_path) == ["in.npz"]


@pytest.mark.parametrize(
    ("byteorder", "order", "descrs", "fortran"),
    [
        ("little", "C", ["<f8", "<f8", "|u1"], [False, False, False]),
        ("big", "C", [">f8", ">f8", "|u1"], [False, False, False]),
        ("keep", "keep", ["<f8", ">f8", "|u1"], [False, True, False]),
    ],
)
def test_byte_order_and_layout_of_npz(
    tmp_path: Path, byteorder: str, order: str, descrs: list[str], fortran: list[bool]
) -> None:
    """As wished; the values are the same however they lie."""
    values = np.arange(6.0).reshape(2, 3)
    source = npz(tmp_path, a=values, b=np.asfortranarray(values.astype(">f8")), c=np.zeros(2, np.uint8))
    convert.convert_file(source, tmp_path / "out.npz", byteorder=byteorder, order=order)
    with np.load(tmp_path / "out.npz") as archive:
        arrays = [archive[name] for name in "abc"]
    assert [array.dtype.str for array in arrays] == descrs
    assert [bool(array.flags.f_contiguous and not array.flags.c_contiguous) for array in arrays] == fortran
    assert all(np.array_equal(array, values) for array in arrays[:2])


# --- dry run -----------------------------------------------------------------------------------------------------


def facts(report: convert.Report) -> dict[str, Any]:
    """A report without what a dry run cannot know."""
    return {
        name: value
        for name, value in report.to_dict().items()
        if name not in ("dry_run", "target_bytes", "seconds", "verified")
    }


def test_a_dry_run_says_what_the_run_does(tmp_path: Path) -> None:
    """The same tensors, changes, omissions and notes; and nothing is written."""
    source = five_problems(tmp_path)
    options: dict[str, Any] = {
        "policy": convert.Policy.parse(["lossy", "text:str=skip"]),
        "rename": [("first", "1st"), ("nothing", "")],
        "cast": [("float64", "float16")],
        "metadata": {"format": "pt"},
    }
    dry = convert.convert_file(source, out(tmp_path), dry_run=True, **options)
    assert os.listdir(tmp_path) == ["in.npz"]
    assert (dry.dry_run, dry.target_bytes) == (True, 0)
    run = convert.convert_file(source, out(tmp_path), **options)
    assert (run.dry_run, run.target_bytes) == (False, out(tmp_path).stat().st_size)
    assert facts(dry) == facts(run)
    assert run.changes
    assert run.skipped
    assert run.notes
    assert json.loads(run.to_json()) == json.loads(json.dumps(run.to_dict()))


def test_a_dry_run_refuses_what_the_run_refuses(tmp_path: Path) -> None:
    """The same words, before anything is done."""
    source = five_problems(tmp_path)
    said = []
    for dry_run in (True, False):
        with pytest.raises(convert.PolicyError) as caught:
            convert.convert_file(source, out(tmp_path), dry_run=dry_run)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_a_dry_run_reads_headers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the file: what is read is its header, not its data."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [1 << 36], "data_offsets": [0, 1 << 36]}}).encode()
    with (tmp_path / "in.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 36))
    read = 0
    real = os.pread

    def counted(fd: int, count: int, at: int) -> bytes:
        nonlocal read
        read += count
        return real(fd, count, at)

    monkeypatch.setattr(os, "pread", counted)
    monkeypatch.delattr(os, "preadv")
    report = convert.convert_file(
        tmp_path / "in.safetensors", tmp_path / "out.npz", dry_run=True, cast=[("uint8", "int8")]
    )
    assert report.tensors[0].nbytes == 1 << 36
    assert read < 4096


def test_a_sub_byte_tensor_that_ends_within_a_byte_is_refused() -> None:
    """Readers of other formats may know such; safetensors has no padding for them."""
    tensor = Tensor("w", BY_NAME["float4_e2m1fn"], (3,), Extent(MemoryFile(bytes(2)), 0, 2))
    checkpoint = Checkpoint("in", "other", [tensor])
    with pytest.raises(convert.PolicyError, match="3 elements of float4_e2m1fn do not fill whole bytes"):
        make_plan(checkpoint, "out.safetensors", "safetensors", safetensors_writer, Wishes())
