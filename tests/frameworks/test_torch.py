"""Tensors of the real torch, on the CPU: every type and layout, to files that torch and safetensors read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert

torch: Any = pytest.importorskip("torch")
safetensors_torch: Any = pytest.importorskip("safetensors.torch")

TYPES = [
    "float32", "float64", "float16", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32",
    "uint64", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def of_type(name: str, *shape: int) -> Any:
    """Random bits as a tensor of a type: NaN payloads and all."""
    dtype = getattr(torch, name)
    size = 1 if dtype == torch.bool else torch.empty(0, dtype=dtype).element_size()
    rng = np.random.default_rng(len(name))
    raw = rng.integers(0, 2 if name == "bool" else 256, (*shape, size), np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def raw(tensor: Any) -> bytes:
    return bytes(tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy())


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.T,
    "strided": lambda t: t[::2, 1::3],
    "one column": lambda t: t[:, 3],
    "expanded": lambda t: t[0].expand(4, *t.shape[1:]),
    "0-d": lambda t: t[1, 2],
    "empty": lambda t: t[:0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TYPES)
def test_every_type_in_every_layout(tmp_path: Path, name: str, layout: str) -> None:
    """safetensors.torch reads back the same bits."""
    tensor = LAYOUTS[layout](of_type(name, 6, 7))
    convert.save({"w": tensor}, tmp_path / "a.safetensors")
    back = safetensors_torch.load_file(tmp_path / "a.safetensors")["w"]
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert raw(back) == raw(tensor)


@pytest.mark.parametrize("name", TYPES)
def test_through_npz_and_back(tmp_path: Path, name: str) -> None:
    """What numpy lacks is remembered on the way."""
    tensor = of_type(name, 5, 3).T
    convert.save({"w": tensor}, tmp_path / "a.npz", policy=convert.Policy.preset("lossless"))
    convert.convert_file(tmp_path / "a.npz", tmp_path / "b.safetensors")
    back = safetensors_torch.load_file(tmp_path / "b.safetensors")["w"]
    assert back.dtype == tensor.dtype
    assert raw(back) == raw(tensor)


def test_the_file_is_the_librarys(tmp_path: Path) -> None:
    """Byte for byte, metadata too."""
    tensors = {name: of_type(name, 4, 4) for name in TYPES}
    safetensors_torch.save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    convert.save(tensors, tmp_path / "b.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_parameters_gradients_and_lazy_views(tmp_path: Path) -> None:
    """requires_grad, conjugates and negatives are resolved; the caller's tensors stay as they are."""
    parameter = torch.nn.Parameter(of_type("float32", 3, 3).nan_to_num())
    result = parameter * 2
    conjugate = of_type("complex64", 3).conj()
    negative = conjugate.imag
    assert negative.is_neg()
    made = {"p": parameter, "r": result, "c": conjugate, "n": negative}
    convert.save(made, tmp_path / "a.safetensors")
    back = safetensors_torch.load_file(tmp_path / "a.safetensors")
    assert {name: raw(tensor) for name, tensor in back.items()} == {name: raw(tensor) for name, tensor in made.items()}
    assert parameter.requires_grad
    assert conjugate.is_conj()


def test_tied_and_shared_storage(tmp_path: Path) -> None:
    """safetensors.torch refuses tied weights; here each name is written, and the report says so."""
    embedding = torch.nn.Embedding(10, 4)
    head = torch.nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    fused = torch.arange(12.0)
    tensors = {"e": embedding.weight, "h": head.weight, "q": fused[:6], "k": fused[6:], "t": embedding.weight.T}
    report = convert.save(tensors, tmp_path / "a.safetensors")
    assert report.notes == ["'e', 'h', 't' share their memory (tied weights); each is written in full"]
    back = safetensors_torch.load_file(tmp_path / "a.safetensors")
    assert {name: raw(tensor) for name, tensor in back.items()} == {
        name: raw(tensor) for name, tensor in tensors.items()
    }


def test_nothing_is_copied_for_types_that_numpy_lacks() -> None:
    """A view of the caller's memory, strides and all: saving a model does not take its size once more."""
    from convert.arrays import _as_numpy

    for name in ("bfloat16", "float8_e4m3fn", "float32"):
        tensor = of_type(name, 6, 7).T
        assert _as_numpy("w", tensor).__array_interface__["data"][0] == tensor.data_ptr()


def test_subclasses_of_tensors(tmp_path: Path) -> None:
    """Defined anywhere."""

    class Mine(torch.Tensor):  # type: ignore[misc]
        pass

    tensor = of_type("bfloat16", 3).as_subclass(Mine)
    convert.save({"w": tensor}, tmp_path / "a.safetensors")
    assert raw(safetensors_torch.load_file(tmp_path / "a.safetensors")["w"]) == raw(of_type("bfloat16", 3))


REFUSED: dict[str, Any] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "scaled": lambda: torch.zeros(3, dtype=torch.bits8),
    "meta": lambda: torch.empty(3, device="meta"),
    "module": lambda: torch.nn.Linear(2, 2),
    "packed": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_bytes_to_write(tmp_path: Path, kind: str) -> None:
    """Named, and nothing is written."""
    with pytest.raises(convert.ConvertError, match="tensor 'x'"):
        convert.save({"w": np.zeros(1), "x": REFUSED[kind]()}, tmp_path / "a.safetensors")
    assert not (tmp_path / "a.safetensors").exists()


def test_a_module_in_place_of_its_state(tmp_path: Path) -> None:
    """The obvious slip; the hint is the way."""
    model = torch.nn.Linear(2, 2)
    with pytest.raises(convert.UsageError, match="state_dict"):
        convert.save(model, tmp_path / "a.safetensors")
    convert.save(model.state_dict(), tmp_path / "a.safetensors")
    assert sorted(safetensors_torch.load_file(tmp_path / "a.safetensors")) == ["bias", "weight"]


def test_a_streaming_writer_takes_tensors(tmp_path: Path) -> None:
    """Specs from meta tensors, chunks from real ones."""
    with torch.device("meta"):
        model = torch.nn.Linear(40, 30, dtype=torch.bfloat16)
    weight, bias = of_type("bfloat16", 30, 40), of_type("bfloat16", 30)
    with convert.writer(tmp_path / "a.safetensors", model.state_dict()) as out:
        for rows in weight.split(7):
            out.write("weight", rows)
        out.write("bias", bias)
    back = safetensors_torch.load_file(tmp_path / "a.safetensors")
    assert (raw(back["weight"]), raw(back["bias"])) == (raw(weight), raw(bias))


def test_what_is_loaded_goes_back_into_torch(tmp_path: Path) -> None:
    """As docs/pipelines.md has it: numpy's types as they are, the others by their bits."""
    tensor = of_type("bfloat16", 3, 2)
    safetensors_torch.save_file({"w": tensor}, tmp_path / "a.safetensors")
    array = convert.load(tmp_path / "a.safetensors")["w"]
    back = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    assert raw(back) == raw(tensor)
