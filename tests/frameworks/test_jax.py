"""Arrays of the real JAX, trees of them, and Flax's parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert

jax: Any = pytest.importorskip("jax")
jnp: Any = pytest.importorskip("jax.numpy")

from safetensors.flax import load_file  # noqa: E402  the oracle, which needs jax

TYPES = [
    "float32", "float16", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "uint16", "uint32", "complex64",
    "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_every_type(tmp_path: Path, name: str) -> None:
    """Bits as they are, in files that numpy and safetensors read."""
    array = jnp.arange(12).reshape(3, 4).astype(name).T
    expected = np.ascontiguousarray(np.asarray(array)).tobytes()
    convert.save({"w": array, "s": array[0, 0], "e": array[:0]}, tmp_path / "a.safetensors")
    back = convert.load(tmp_path / "a.safetensors")
    assert back["w"].dtype == array.dtype
    assert back["w"].tobytes() == expected
    assert (back["s"].shape, back["e"].shape) == ((), (0, 3))
    if not name.startswith("float8"):
        found = load_file(tmp_path / "a.safetensors")["w"]
        assert found.dtype == array.dtype
        assert np.asarray(found).tobytes() == expected


def test_trees_of_parameters(tmp_path: Path) -> None:
    """Names are joined by a separator of the caller's choice."""
    params = {"params": {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}}, "step": jnp.int32(7)}
    convert.save(params, tmp_path / "a.safetensors")
    assert sorted(convert.load(tmp_path / "a.safetensors")) == ["params.dense.bias", "params.dense.kernel", "step"]
    convert.save(params, tmp_path / "b.safetensors", separator="/")
    assert sorted(convert.load(tmp_path / "b.safetensors")) == ["params/dense/bias", "params/dense/kernel", "step"]


def test_shapes_without_arrays_are_specs(tmp_path: Path) -> None:
    """`jax.eval_shape` says what will come; the values follow."""

    def make(key: Any) -> Any:
        return {"w": jax.random.normal(key, (8, 5)), "b": jnp.zeros(5, jnp.bfloat16)}

    specs = jax.eval_shape(make, jax.random.key(0))
    made = make(jax.random.key(0))
    with convert.writer(tmp_path / "a.npz", specs) as out:
        out.write("b", made["b"])
        for row in made["w"]:
            out.write("w", row)
    back = convert.load(tmp_path / "a.npz")
    assert {name: array.tobytes() for name, array in back.items()} == {
        name: np.asarray(array).tobytes() for name, array in made.items()
    }


def test_tied_arrays(tmp_path: Path) -> None:
    shared = jnp.ones((3, 3))
    report = convert.save({"a": shared, "b": {"c": shared}}, tmp_path / "a.npz")
    assert report.notes == ["'a', 'b.c' share their memory (tied weights); each is written in full"]


def test_what_has_no_values(tmp_path: Path) -> None:
    """Keys of random numbers, 4-bit integers, and what is only being traced."""
    for value in (jax.random.key(0), jnp.zeros(3, jnp.int4)):
        with pytest.raises(convert.ConvertError, match="'x'"):
            convert.save({"x": value}, tmp_path / "a.npz")

    def traced(x: Any) -> Any:
        convert.save({"x": x}, tmp_path / "a.npz")
        return x

    with pytest.raises(convert.ConvertError, match="'x'"):
        jax.jit(traced)(jnp.zeros(3))
    assert not (tmp_path / "a.npz").exists()


def test_parameters_of_flax(tmp_path: Path) -> None:
    nn: Any = pytest.importorskip("flax.linen")
    variables = nn.Dense(3).init(jax.random.key(0), jnp.ones((1, 2)))
    convert.save(variables, tmp_path / "a.safetensors", separator="/")
    back = load_file(tmp_path / "a.safetensors")
    assert np.array_equal(back["params/kernel"], variables["params"]["kernel"])
