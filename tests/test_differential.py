"""Damaged files through our readers, numpy and safetensors: where they disagree, docs/strictness.md says why."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

import convert
from fuzz import differ, made
from fuzz.archives import Member, archive
from fuzz.differ import Disagreement, all_disagreements, disagreements, listed, template

FINDS = Path(__file__).resolve().parent / "fuzz_finds"
CHANGES = 15


def test_every_class_of_disagreement_is_listed() -> None:
    """Samples, hard cases and earlier finds, as they are and damaged; each class has its reason in the docs."""
    found = all_disagreements(CHANGES)
    new = {one: places for one, places in found.items() if one not in listed()}
    assert new == {}
    assert len(found) > 25  # else it is the comparison that is damaged


def npy(array: Any) -> bytes:
    """As np.save writes it."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def judged(path: Path, data: bytes) -> set[Disagreement]:
    """The verdict on bytes under a name."""
    path.write_bytes(data)
    return disagreements(path)


def test_right_files_are_read_alike(tmp_path: Path) -> None:
    """What the references wrote, or could have."""
    array = np.arange(6, dtype=">f4").reshape(2, 3)
    assert judged(tmp_path / "w.npy", npy(np.asfortranarray(array))) == set()
    assert judged(tmp_path / "w.npy", npy(np.zeros(3, [("a", ">i2"), ("b", "S3"), ("c", "<f8", 2)]))) == set()
    assert judged(tmp_path / "w.npz", archive((Member(b"a.npy", npy(array), 8), Member(b"b.txt", b"text")))) == set()
    assert judged(tmp_path / "w.safetensors", save({"a": array.astype("<f4"), "b": np.zeros((0, 2))})) == set()
    accepted = 0
    for seed in range(300):
        accepted += judged(tmp_path / "w.safetensors", made.safetensors(random.Random(seed))) == set()
    assert accepted == 300


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_both_refuse_noise(suffix: str, tmp_path: Path) -> None:
    """No disagreement without a file."""
    assert judged(tmp_path / f"w{suffix}", b"\x93NUM") == judged(tmp_path / f"w{suffix}", b"") == set()


def test_a_disagreement_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other bytes, types, shapes and names, and a refusal on either side."""
    data = npy(np.arange(6, dtype="<f4").reshape(2, 3))
    ours = {"w": differ.Content("float32", (2, 3), np.arange(6, dtype="<f4").tobytes())}
    cases = {
        "different: bytes of float32": ({"w": ours["w"]._replace(data=bytes(24))}, None),
        "different: type: int32 for float32": ({"w": ours["w"]._replace(dtype="int32")}, None),
        "different: shape": ({"w": ours["w"]._replace(shape=(3, 2))}, None),
        "refused: no such name": ({}, None),
        "refused: too ugly": ({}, "too ugly (expected a nicer one, found 7)"),
        "refused: odd": ({"w": ours["w"]._replace(refusal="odd: '7'")}, None),
    }
    for expected, answer in cases.items():
        monkeypatch.setattr(differ, "_ours", lambda _, answer=answer: answer)
        (found,) = judged(tmp_path / "w.npy", data)
        assert f"{found.side}: {found.what}" == expected
    monkeypatch.setattr(differ, "_ours", lambda _: (ours, None))
    assert judged(tmp_path / "w.npy", data) == set()
    (found,) = judged(tmp_path / "w.npy", data[:-1])
    assert found.side == "accepted"


def test_templates_leave_particulars_out() -> None:
    """Names, numbers and lists are those of one file."""
    assert template("the data is cut short (expected 24 bytes for float32 [2, 3], found 23)") == "the data is cut short"
    assert template("two names 'a' and \"b\" at byte 17") == "two names '...' and '...' at byte N"
    assert template("ValueError: descr is not a valid dtype descriptor: '<f1'").endswith("descriptor")
    assert template("cannot reshape array of size 6 into shape (2,3)") == "cannot reshape array of size N into shape"


def test_the_list_is_read() -> None:
    """All three tables of the page."""
    sides = {one.side for one in listed()}
    assert sides == {"refused", "accepted", "different"}
    assert Disagreement("safetensors", "refused", "duplicate key '...' in the header") in listed()
    assert Disagreement("numpy", "different", "shape") in listed()


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("bytes_as_key.npy", "no plain Python literal"),
        ("utf8_flags_differ.npz", "differ on whether the name is UTF-8"),
    ],
)
def test_what_was_too_lax_is_refused(file: str, message: str) -> None:
    """Found by comparing: numpy refuses these, and so do we now."""
    with pytest.raises(convert.CorruptError, match=message):
        convert.load(FINDS / file)


@pytest.mark.parametrize("shape", [(1 << 62, 8, 0), (3, 1 << 62, 1 << 62, 0)])
def test_no_output_that_nobody_can_read(shape: tuple[int, ...], tmp_path: Path) -> None:
    """The reference multiplies the sizes of a shape one by one: an empty tensor can be too large for it."""
    (tmp_path / "w.npy").write_bytes(empty(shape))
    with pytest.raises(convert.PolicyError, match="before a zero") as caught:
        convert.convert_file(tmp_path / "w.npy", tmp_path / "out.safetensors")
    assert caught.value.tensor == "w"
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("shape", [(0, 1 << 62, 8), (1 << 62, 0, 8)])
def test_the_legal_neighbour_is_written(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Once the product is zero it stays zero."""
    (tmp_path / "w.npy").write_bytes(empty(shape))
    convert.convert_file(tmp_path / "w.npy", tmp_path / "out.safetensors")
    assert disagreements(tmp_path / "out.safetensors") == set()
    with convert.open(tmp_path / "out.safetensors") as checkpoint:
        assert checkpoint["w"].shape == shape


def empty(shape: tuple[int, ...]) -> bytes:
    """A .npy file without data."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header
