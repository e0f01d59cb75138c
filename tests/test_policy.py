"""What every policy does: each kind and action once, on a file that needs it; and how rules are read and combined."""

from __future__ import annotations

import copy
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import convert
from convert.policy import BY_KIND, KINDS, PRESETS, Policy, Rule, actions_of

from . import oracle

Array = npt.NDArray[Any]
HAS_X87 = np.finfo(np.longdouble).nmant == 63 and np.dtype(np.longdouble).itemsize == 16


def saved(**arrays: Any) -> Callable[[Path], Path]:
    """A source made by numpy."""

    def make(folder: Path) -> Path:
        np.savez(folder / "in.npz", **arrays)
        return folder / "in.npz"

    return make


def referenced(metadata: dict[str, str] | None = None, **arrays: Array) -> Callable[[Path], Path]:
    """A source made by the safetensors library."""

    def make(folder: Path) -> Path:
        oracle.save_with_reference(folder / "in.safetensors", arrays, metadata)
        return folder / "in.safetensors"

    return make


def with_blob(folder: Path) -> Path:
    """An archive with a member that is no array."""
    with zipfile.ZipFile(folder / "in.npz", "w") as archive:
        archive.writestr("README.txt", b"hello")
        with archive.open("w.npy", "w") as member:
            np.lib.format.write_array(member, np.arange(3, dtype=np.int32))
    return folder / "in.npz"


def contents(path: Path) -> dict[str, oracle.Entry]:
    """Type, shape and bytes of every tensor, by the eyes of the reference readers."""
    if path.suffix == ".safetensors":
        return oracle.read_safetensors(path)[1]
    if path.suffix == ".npy":
        arrays: dict[str, Array] = {"in": np.load(path)}
    else:
        with np.load(path) as archive:
            arrays = {name: archive[name] for name in archive.files}
    return {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in arrays.items()}


def entry(code: str, array: Array, shape: tuple[int, ...] | None = None) -> oracle.Entry:
    """What `contents` shall find."""
    return code, array.shape if shape is None else shape, oracle.canonical(array)


class Case(NamedTuple):
    """One kind and action; `expected` is what comes out, or the words of the refusal."""

    kind: str
    action: str
    make: Callable[[Path], Path]
    target: str
    expected: dict[str, oracle.Entry] | str

    def __str__(self) -> str:
        return f"{self.kind}={self.action}"


def without_stray_bytes(array: Array) -> Array:
    """Long doubles with zeros where numpy leaves whatever was in memory, so that the file shows what it holds."""
    if HAS_X87:
        array.view(np.uint8).reshape(-1, 16)[:, 10:] = 0
    return array


BF16 = np.array([[1.5, -2.0, 3.25]], ml_dtypes.bfloat16)
F8 = np.array([[1.5, -0.5], [0.0, 448.0]], ml_dtypes.float8_e4m3fn)
F4 = np.array([[0.5, 6.0, -1.0, 2.0]], ml_dtypes.float4_e2m1fn)
BITS = np.array([0, 1, 1], np.uint8)
VOID = np.frombuffer(bytes(range(10)), "V5").reshape(1, 2)
LONG = without_stray_bytes(np.array([[0.5], [1e300]], np.longdouble))
THIRDS = without_stray_bytes(LONG / 3)
COMPLEX = np.array([[1 + 2j, -0.0 + 0.5j]])
DATES = np.array(["2020-02-29", "NaT"], "datetime64[D]")
SPANS = np.array([[1, -5]], "timedelta64[ms]")
BYTES = np.array([b"ab", b"c"], "S3")
TEXTS = np.array(["äb", ""], "U2")
RECORDS = np.array([(1, 2.5), (3, 4.5)], np.dtype([("a", "i2"), ("b", ">f4")], align=True))
OBJECT = np.array({"x": np.arange(3), "y": {"z": 2.5}}, object)
PLAIN = np.arange(3, dtype=np.int32)

FROM_VOID2 = saved(w=BF16.view("V2"))
FROM_VOID1 = saved(w=BITS.view("V1"))
FROM_BF16 = referenced(w=BF16)
FROM_F8 = referenced(w=F8)
FROM_F4 = referenced(w=F4)
FROM_METADATA = referenced({"note": "hello"}, w=PLAIN)
F4_BYTES = bytes([0x71, 0x4A])

CASES = [
    Case("V2", "bfloat16", FROM_VOID2, ".safetensors", {"w": entry("BF16", BF16)}),
    Case("V2", "uint16", FROM_VOID2, ".safetensors", {"w": entry("U16", BF16)}),
    Case("V2", "error", FROM_VOID2, ".safetensors", "V2 cannot be held exactly"),
    Case("V1", "error", FROM_VOID1, ".safetensors", "V1 is .* many 8-bit types; it needs a policy"),
    *(
        Case("V1", name, FROM_VOID1, ".safetensors", {"w": (code, (3,), BITS.tobytes())})
        for name, code in oracle.SAFETENSORS_CODES.items()
        if name in BY_KIND["V1"].actions
    ),
    Case("void", "error", saved(w=VOID), ".safetensors", "V5 cannot be held exactly"),
    Case("void", "uint8", saved(w=VOID), ".safetensors", {"w": ("U8", (1, 2, 5), bytes(range(10)))}),
    Case("longdouble", "exact", saved(w=LONG), ".safetensors", {"w": entry("F64", LONG.astype(np.float64))}),
    Case("longdouble", "round", saved(w=THIRDS), ".safetensors", {"w": entry("F64", THIRDS.astype(np.float64))}),
    Case("longdouble", "bytes", saved(w=LONG), ".safetensors", {"w": entry("U8", LONG, (2, 1, 16))}),
    Case("longdouble", "error", saved(w=LONG), ".safetensors", "float128 cannot be held exactly"),
    Case("complex128", "error", saved(w=COMPLEX), ".safetensors", "complex128 cannot be held exactly"),
    Case("complex128", "pair", saved(w=COMPLEX), ".safetensors", {"w": entry("F64", COMPLEX, (1, 2, 2))}),
    Case("complex128", "complex64", saved(w=COMPLEX), ".safetensors", {"w": entry("C64", COMPLEX.astype("c8"))}),
    Case("complex128", "round", saved(w=COMPLEX / 3), ".safetensors", {"w": entry("C64", (COMPLEX / 3).astype("c8"))}),
    Case("datetime64", "error", saved(w=DATES), ".safetensors", r"datetime64\[D\] cannot be held exactly"),
    Case("datetime64", "int64", saved(w=DATES), ".safetensors", {"w": entry("I64", DATES)}),
    Case("timedelta64", "error", saved(w=SPANS), ".safetensors", r"timedelta64\[ms\] cannot be held exactly"),
    Case("timedelta64", "int64", saved(w=SPANS), ".safetensors", {"w": entry("I64", SPANS)}),
    Case("bytes", "error", saved(w=BYTES), ".safetensors", "S3 cannot be held exactly"),
    Case("bytes", "uint8", saved(w=BYTES), ".safetensors", {"w": ("U8", (2, 3), b"ab\0c\0\0")}),
    Case("bytes", "metadata", saved(w=BYTES), ".safetensors", r"only 0-d strings .*\[2\]"),
    Case("str", "error", saved(w=TEXTS), ".safetensors", "U2 cannot be held exactly"),
    Case("str", "uint32", saved(w=TEXTS), ".safetensors", {"w": ("U32", (2, 2), "äb\0\0".encode("utf-32-le"))}),
    Case("str", "metadata", saved(w=TEXTS), ".safetensors", r"only 0-d strings .*\[2\]"),
    Case("structured", "error", saved(w=RECORDS), ".safetensors", "structured cannot be held exactly"),
    Case(
        "structured",
        "split",
        saved(w=RECORDS),
        ".safetensors",
        {"w.a": entry("I16", RECORDS["a"]), "w.b": entry("F32", RECORDS["b"])},
    ),
    Case("object", "error", saved(w=OBJECT), ".safetensors", "object is a pickle; it needs a policy"),
    Case("object", "unpickle", saved(w=OBJECT), ".safetensors", {"w.x": entry("I64", np.arange(3))}),
    Case("blob", "skip", with_blob, ".safetensors", {"w": entry("I32", PLAIN)}),
    Case("blob", "uint8", with_blob, ".safetensors", {"README.txt": ("U8", (5,), b"hello"), "w": entry("I32", PLAIN)}),
    Case("blob", "error", with_blob, ".safetensors", "blob is a member of an npz that is no array; it needs a policy"),
    Case("bfloat16", "V2", FROM_BF16, ".npz", {"w": entry("|V2", BF16)}),
    Case("bfloat16", "uint16", FROM_BF16, ".npz", {"w": entry("<u2", BF16)}),
    Case("bfloat16", "float32", FROM_BF16, ".npz", {"w": entry("<f4", BF16.astype(np.float32))}),
    Case("float8", "V1", FROM_F8, ".npz", {"w": entry("|V1", F8)}),
    Case("float8", "uint8", FROM_F8, ".npz", {"w": entry("|u1", F8)}),
    Case("float8", "float32", FROM_F8, ".npz", {"w": entry("<f4", F8.astype(np.float32))}),
    Case("subbyte", "error", FROM_F4, ".npz", "float4_e2m1fn cannot be held exactly in npz"),
    Case("subbyte", "packed", FROM_F4, ".npz", {"w": ("|u1", (1, 2), F4_BYTES)}),
    Case("subbyte", "unpack", FROM_F4, ".npz", {"w": ("|u1", (1, 4), bytes([1, 7, 10, 4]))}),
    Case("subbyte", "float32", FROM_F4, ".npz", {"w": entry("<f4", F4.astype(np.float32))}),
    Case("metadata", "report", FROM_METADATA, ".npy", {"in": entry("<i4", PLAIN)}),
    Case("metadata", "error", FROM_METADATA, ".npy", "npy has no room for metadata 'note'"),
    Case("metadata", "skip", FROM_METADATA, ".npy", {"in": entry("<i4", PLAIN)}),
]
SKIPS = {kind.name: next(case for case in CASES if case.kind == kind.name) for kind in KINDS if kind.name != "metadata"}


def needs_x87(kind: str) -> None:
    """numpy writes x87 long doubles on x86 only."""
    if kind == "longdouble" and not HAS_X87:
        pytest.skip("no x87 long doubles here")


def run(case: Case, folder: Path, action: str) -> tuple[convert.Report, dict[str, oracle.Entry]]:
    """Convert the case's source under its kind and an action."""
    target = folder / f"out{case.target}"
    report = convert.convert_file(case.make(folder), target, policy=Policy.parse([f"{case.kind}={action}"]))
    return report, contents(target)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_action_does_what_it_says(case: Case, tmp_path: Path) -> None:
    """Type, shape and bytes are exactly those promised; or the refusal says what cannot be, and leaves nothing."""
    needs_x87(case.kind)
    if isinstance(case.expected, str):
        with pytest.raises(convert.PolicyError, match=case.expected) as caught:
            run(case, tmp_path, case.action)
        assert [path.name[:3] for path in tmp_path.iterdir()] == ["in."]
        assert caught.value.exit_code == 4
        assert caught.value.hint
        return
    report, found = run(case, tmp_path, case.action)
    assert found == case.expected
    assert not [note for note in report.notes if case.action != "report"]


@pytest.mark.parametrize("kind", SKIPS)
def test_skip_works_for_every_kind(kind: str, tmp_path: Path) -> None:
    """The tensor is left out, and the report names it, its type and the reason."""
    needs_x87(kind)
    report, found = run(SKIPS[kind], tmp_path, "skip")
    assert "w" not in found or kind == "blob"
    assert [skipped.name for skipped in report.skipped] == ["README.txt" if kind == "blob" else "w"]
    assert report.skipped[0].reason == f"policy {kind}=skip"
    assert report.skipped[0].dtype


def test_every_kind_and_action_is_shown() -> None:
    """A new row of the table needs a case here."""
    shown = {(case.kind, case.action) for case in CASES} | {(kind, "skip") for kind in SKIPS}
    assert shown == {(kind.name, action) for kind in KINDS for action in actions_of(kind.name)}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name != "metadata"], ids=lambda kind: kind.name)
def test_the_default_is_the_first_action(kind: Any, tmp_path: Path) -> None:
    """What happens without any policy is what the table lists first."""
    needs_x87(kind.name)
    default = next(case for case in CASES if (case.kind, case.action) == (kind.name, next(iter(kind.actions))))
    target = tmp_path / f"out{default.target}"
    if isinstance(default.expected, str):
        with pytest.raises(convert.PolicyError, match=default.expected):
            convert.convert_file(default.make(tmp_path), target)
    else:
        convert.convert_file(default.make(tmp_path), target)
        assert contents(target) == default.expected


# --- what the actions refuse or add ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "policy", "found"),
    [
        (THIRDS, "longdouble=exact", "at element 0"),
        (np.array([0.5, 1e300j]), "complex128=complex64", "at element 1"),
        (np.array([0.5, 1e300j]), "complex128=round", "at element 1"),
        (np.array("a\ud800"), "str=metadata", "not valid Unicode"),
        (np.array(b"\xff"), "bytes=metadata", "not valid Unicode"),
    ],
)
def test_an_action_refuses_what_it_would_damage(tmp_path: Path, array: Array, policy: str, found: str) -> None:
    """`exact` is exact; rounding does not make infinities; text that is none does not become text."""
    needs_x87("longdouble" if "longdouble" in policy else "")
    np.savez(tmp_path / "in.npz", w=array)
    with pytest.raises(convert.PolicyError, match=found) as caught:
        convert.convert_file(tmp_path / "in.npz", tmp_path / "out.safetensors", policy=Policy.parse([policy]))
    assert caught.value.tensor == "w"
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("array", "policy", "text"),
    [(np.array("äb"), "str=metadata", "äb"), (np.array(b"ab", "S5"), "bytes=metadata", "ab")],
)
def test_a_0d_string_goes_into_the_metadata(tmp_path: Path, array: Array, policy: str, text: str) -> None:
    """Where any safetensors reader finds it; the way back makes the array again."""
    np.savez(tmp_path / "in.npz", text=array)
    convert.convert_file(tmp_path / "in.npz", tmp_path / "out.safetensors", policy=Policy.parse([policy]))
    metadata, tensors = oracle.read_safetensors(tmp_path / "out.safetensors")
    assert tensors == {}
    assert metadata["text"] == text
    convert.convert_file(tmp_path / "out.safetensors", tmp_path / "back.npz")
    assert contents(tmp_path / "back.npz") == {"text": (array.dtype.str, (), array.tobytes())}


def test_a_text_does_not_replace_metadata(tmp_path: Path) -> None:
    """Two things of one name in the metadata: refused."""
    np.savez(tmp_path / "in.npz", note=np.array("a"))
    with pytest.raises(convert.PolicyError, match="already"):
        convert.convert_file(
            tmp_path / "in.npz", tmp_path / "out.safetensors", policy=Policy(str="metadata"), metadata={"note": "b"}
        )


def test_numbers_and_texts_of_a_pickle_go_into_the_metadata(tmp_path: Path) -> None:
    """Arrays become tensors; a lone number in a dictionary is no tensor, and is not lost."""
    np.savez(tmp_path / "in.npz", w=np.array({"a": np.arange(2), "note": "hello"}, object))
    convert.convert_file(tmp_path / "in.npz", tmp_path / "out.safetensors", policy=Policy(object="unpickle"))
    metadata, tensors = oracle.read_safetensors(tmp_path / "out.safetensors")
    assert tensors == {"w.a": entry("I64", np.arange(2))}
    assert metadata["w.note"] == "hello"


def test_split_takes_nested_fields_and_subarrays(tmp_path: Path) -> None:
    """`name.field.field`; a subarray adds its axes; fields of no bytes and empty records too."""
    inner = np.dtype([("c", ">i4", (2, 1)), ("d", "S0")])
    records = np.zeros((2, 1), np.dtype([("a", "u1"), ("b", inner)]))
    records["b"]["c"] = [[[[1], [2]]], [[[3], [4]]]]
    np.savez(tmp_path / "in.npz", w=records, none=records[:0])
    policy = Policy(structured="split", bytes="uint8")
    convert.convert_file(tmp_path / "in.npz", tmp_path / "out.safetensors", policy=policy)
    assert contents(tmp_path / "out.safetensors") == {
        "w.a": ("U8", (2, 1), bytes(2)),
        "w.b.c": ("I32", (2, 1, 2, 1), np.arange(1, 5, dtype="<i4").tobytes()),
        "w.b.d": ("U8", (2, 1, 0), b""),
        "none.a": ("U8", (0, 1), b""),
        "none.b.c": ("I32", (0, 1, 2, 1), b""),
        "none.b.d": ("U8", (0, 1, 0), b""),
    }


def test_fields_have_policies_of_their_own(tmp_path: Path) -> None:
    """What is split is mapped like any tensor, under its new name."""
    records = np.zeros(2, np.dtype([("z", "c16"), ("t", "M8[s]")]))
    np.savez(tmp_path / "in.npz", w=records)
    rules = ["structured=split", "w.z:complex128=pair"]
    with pytest.raises(convert.PolicyError, match=r"datetime64\[s\]") as caught:
        convert.convert_file(tmp_path / "in.npz", tmp_path / "out.safetensors", policy=Policy.parse(rules))
    assert caught.value.tensor == "w.t"
    policy = Policy.parse([*rules, "datetime64=int64"])
    convert.convert_file(tmp_path / "in.npz", tmp_path / "out.safetensors", policy=policy)
    assert {name: found[:2] for name, found in contents(tmp_path / "out.safetensors").items()} == {
        "w.z": ("F64", (2, 2)),
        "w.t": ("I64", (2,)),
    }


def test_a_policy_is_silent_where_the_target_holds_the_thing(tmp_path: Path) -> None:
    """npz to npz keeps a datetime64 as it is, whatever the policy would make of it elsewhere."""
    made: dict[str, Any] = {
        "date": DATES,
        "text": TEXTS,
        "records": RECORDS,
        "c": COMPLEX,
        "bytes": BYTES,
        "void": VOID,
    }
    np.savez(tmp_path / "in.npz", **made)
    policy = Policy.parse(["lossless", "structured=split"])
    report = convert.convert_file(tmp_path / "in.npz", tmp_path / "out.npz", policy=policy)
    with np.load(tmp_path / "out.npz") as archive:
        for name, array in made.items():
            assert archive[name].dtype == array.dtype.newbyteorder("<")
            assert oracle.canonical(archive[name]) == oracle.canonical(array)
    assert report.changes == []


def test_metadata_that_npy_cannot_hold_is_reported(tmp_path: Path) -> None:
    """By default it is left out and the report says so; `skip` says nothing."""
    source = FROM_METADATA(tmp_path)
    report = convert.convert_file(source, tmp_path / "a.npy")
    assert any("cannot remember" in note and "note" in note for note in report.notes)
    assert convert.convert_file(source, tmp_path / "b.npy", policy=Policy(metadata="skip")).notes == []


# --- rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "name", "action"),
    [
        ([], "a", "error"),
        (["object=skip"], "a", "skip"),
        (["opt/*:object=skip"], "opt/a/b", "skip"),
        (["opt/*:object=skip"], "model/a", "error"),
        (["OPT/*:object=skip"], "opt/a", "error"),
        (["opt:object=skip"], "opt/a", "error"),
        (["opt*:object=skip", "object=unpickle"], "opt", "unpickle"),
        (["object=unpickle", "opt*:object=skip"], "opt", "skip"),
        (["object=unpickle", "opt*:object=skip"], "other", "unpickle"),
        (["a:b*:object=skip"], "a:bc", "skip"),
        (["a=b:object=skip"], "a=b", "skip"),
        (["[ab]?:object=skip"], "ax", "skip"),
        (["*:object=skip"], "", "skip"),
        (["lossy"], "a", "skip"),
        (["lossy", "object=error"], "a", "error"),
        (["object=unpickle", "lossy"], "a", "skip"),
        (["lossy", "strict"], "a", "error"),
        (["strict", "lossy"], "a", "skip"),
        (["complex128=pair"], "a", "error"),
    ],
)
def test_rules_narrow_and_the_later_wins(texts: list[str], name: str, action: str) -> None:
    """Globs match whole names and their case; presets are rules like others; `strict` takes back."""
    assert Policy.parse(texts).action("object", name) == action


def test_a_glob_decides_tensor_by_tensor(tmp_path: Path) -> None:
    """In one file, one kind may get several actions."""
    np.savez(tmp_path / "in.npz", **dict.fromkeys(("a/x", "a/y", "b"), cast(Any, COMPLEX)))
    policy = Policy.parse(["complex128=pair", "a/*:complex128=complex64", "a/y:complex128=skip"])
    convert.convert_file(tmp_path / "in.npz", tmp_path / "out.safetensors", policy=policy)
    found = contents(tmp_path / "out.safetensors")
    assert {name: facts[0] for name, facts in found.items()} == {"a/x": "C64", "b": "F64"}


def test_the_library_takes_kinds_and_rules() -> None:
    """Keyword arguments for all tensors, triples for some; both are the rules of the command line."""
    assert Policy(V2="uint16", object="skip") == Policy.parse(["V2=uint16", "object=skip"])
    assert Policy([("a*", "V2", "skip")], V2="uint16").rules == (Rule("a*", "V2", "skip"), Rule("*", "V2", "uint16"))
    assert Policy.preset("strict") == Policy() == Policy.parse(["strict"])


def test_policies_are_values() -> None:
    """Frozen, hashable, and the same in another process."""
    policy = Policy.parse(["lossy", "a*:V2=skip"])
    assert {policy: 1}[pickle.loads(pickle.dumps(policy))] == 1
    assert copy.deepcopy(policy) == policy
    with pytest.raises(AttributeError):
        policy.rules = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "listed", "near"),
    [
        ("objekt=skip", list(BY_KIND), "object"),
        ("bf16=V2", list(BY_KIND), "convert policies"),
        ("=skip", list(BY_KIND), "convert policies"),
        ("object=", actions_of("object"), "convert policies"),
        ("object=unpikle", actions_of("object"), "unpickle"),
        ("V1=float8_e4m3", actions_of("V1"), "float8_e4m3fn"),
        ("complex128=exact", actions_of("complex128"), "convert policies"),
        ("a*:subbyte=packedd", actions_of("subbyte"), "packed"),
        ("losless", list(PRESETS), "lossless"),
        ("", list(PRESETS), "convert policies"),
        ("object", list(PRESETS), "convert policies"),
    ],
)
def test_a_slip_lists_the_right_words(text: str, listed: list[str], near: str) -> None:
    """A usage error that names what was found, all that could be meant, and the nearest."""
    with pytest.raises(convert.UsageError) as caught:
        Policy.parse([text])
    assert f"expected one of {', '.join(listed)})" in caught.value.message
    assert near in str(caught.value.hint)
    assert caught.value.exit_code == 2


def test_presets_are_made_of_known_rules() -> None:
    """They parse, and say nothing that the table does not have."""
    for name in PRESETS:
        assert len(Policy.preset(name).rules) == len(PRESETS[name])
    for kind in KINDS:
        assert kind.about
        assert all(kind.actions.values())


def everything(folder: Path) -> Path:
    """One tensor of every kind that npz holds."""
    made: dict[str, Any] = {
        "V2": BF16.view("V2"), "V1": BITS.view("V1"), "void": VOID, "complex128": COMPLEX / 3, "datetime64": DATES,
        "timedelta64": SPANS, "bytes": BYTES, "str": TEXTS, "plain": PLAIN,
    }  # fmt: skip
    if HAS_X87:
        made["longdouble"] = THIRDS
    np.savez(folder / "in.npz", **made)
    return folder / "in.npz"


def test_lossless_takes_everything_and_gives_it_back(tmp_path: Path) -> None:
    """Encoded reversibly: there and back, the same types, shapes and bytes."""
    source = everything(tmp_path)
    lossless = Policy.preset("lossless")
    convert.convert_file(source, tmp_path / "out.safetensors", policy=lossless)
    convert.convert_file(tmp_path / "out.safetensors", tmp_path / "back.npz", policy=lossless)
    assert contents(tmp_path / "back.npz") == contents(source)


def test_lossless_refuses_to_forget(tmp_path: Path) -> None:
    """npy has no room for metadata, which is lossless no longer."""
    with pytest.raises(convert.PolicyError, match="npy has no room for metadata"):
        convert.convert_file(FROM_METADATA(tmp_path), tmp_path / "out.npy", policy=Policy.preset("lossless"))


def test_lossy_takes_everything(tmp_path: Path) -> None:
    """Rounds, splits records, skips pickles and names them."""
    np.savez(tmp_path / "more.npz", object=OBJECT, records=RECORDS)
    sources = [everything(tmp_path), tmp_path / "more.npz"]
    report = convert.convert_file(sources, tmp_path / "out.safetensors", policy=Policy.preset("lossy"))
    found = contents(tmp_path / "out.safetensors")
    assert found["complex128"] == entry("C64", (COMPLEX / 3).astype("c8"))
    assert {"records.a", "records.b", "V1", "str"} <= found.keys()
    assert [skipped.name for skipped in report.skipped] == ["object"]
