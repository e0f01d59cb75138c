"""What a format cannot say natively, written where other readers ignore it, so that the way back is exact.

An `Origin` (type, shape and encoding before a tensor was encoded) and the free-text metadata of a file are kept as
small JSON objects under the key `tensor-convert`: in the comments of an npz archive and its members, and in
`__metadata__` of a safetensors file. A note that does not fit its tensor, or is not ours, is left alone.
"""

from __future__ import annotations

import base64
import json
import zlib
from math import prod
from typing import Any

from convert.dtypes import by_name
from convert.errors import PolicyError
from convert.jsontext import is_unicode, parse_json
from convert.limits import DEFAULT, Limits
from convert.tensor import Checkpoint, Origin, Tensor

KEY = "tensor-convert"
COMMENT_BYTES = 0xFFFF
_LARGEST_METADATA_BYTES = 100_000_000
_MAX_DIMENSIONS = 255
_TEXTS_BYTES = 16 << 20
"""What all strings that come back from the metadata may take together; a note can claim far more than its text."""
ENCODINGS = ("bytes", "unpack", "float32", "text")


def dump_origin(origin: Origin) -> bytes:
    """The comment of an archive member."""
    return _json({KEY: _origin_object(origin)})


def load_origin(comment: bytes, tensor: Tensor) -> Origin | None:
    """The origin a member's comment tells of, or None if there is none that fits the tensor."""
    found = _object(comment, DEFAULT)
    return None if found is None else _origin(found.get(KEY), tensor)


def dump_metadata(metadata: dict[str, str], path: str) -> bytes:
    """The comment of an archive; compressed when it would be too long otherwise."""
    if not metadata:
        return b""
    plain = _json({KEY: {"metadata": metadata}})
    if len(plain) <= COMMENT_BYTES:
        return plain
    packed = base64.b85encode(zlib.compress(_json(metadata), 9)).decode()
    text = _json({KEY: {"packed_metadata": packed}})
    if len(text) > COMMENT_BYTES:
        raise PolicyError(
            f"the metadata does not fit into an npz (expected at most {COMMENT_BYTES} bytes packed, found {len(text)})",
            path=path,
            hint="--policy metadata=skip leaves it out",
        )
    return text


def load_metadata(comment: bytes, limits: Limits = DEFAULT) -> dict[str, str] | None:
    """The metadata in an archive's comment, or None if the comment is not ours.

    Raises:
        LimitError: It unpacks to more than `limits` allow.
    """
    found = (_object(comment, limits) or {}).get(KEY)
    if not isinstance(found, dict):
        return None
    metadata = found.get("metadata")
    packed = found.get("packed_metadata")
    if isinstance(packed, str):
        try:
            inflate = zlib.decompressobj()
            unpacked = inflate.decompress(base64.b85decode(packed), _LARGEST_METADATA_BYTES)
        except (ValueError, zlib.error):
            return None
        metadata = _object(unpacked, limits)
    if isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values()):
        return metadata if is_unicode("".join([*metadata, *metadata.values()])) else None  # else no file can hold it
    return None


def dump_origins(origins: dict[str, Origin]) -> str:
    """The value of our key in `__metadata__`: origins by tensor name."""
    return _json({name: _origin_object(origins[name]) for name in sorted(origins)}).decode()


def take_origins(checkpoint: Checkpoint, limits: Limits = DEFAULT) -> None:
    """Move the origins in a checkpoint's metadata to its tensors; what fits none stays metadata."""
    text = checkpoint.metadata.get(KEY)
    found = None if text is None else _object(text.encode("utf-8", "surrogatepass"), limits)
    if found is None:
        return
    by_tensor = {tensor.name: tensor for tensor in checkpoint.tensors}
    known = len(checkpoint.tensors)
    room = _TEXTS_BYTES
    for name, value in found.items():
        tensor = by_tensor.get(name)
        if tensor is not None:
            tensor.origin = _origin(value, tensor)
        elif name == KEY or name not in checkpoint.metadata or not isinstance(value, dict):
            continue
        elif value.get("encoding") == "text":
            room -= _take_text(checkpoint, name, value, min(room, limits.text_bytes))
    if len(checkpoint.tensors) > known or any(tensor.origin is not None for tensor in checkpoint.tensors):
        del checkpoint.metadata[KEY]


def _take_text(checkpoint: Checkpoint, name: str, value: dict[str, Any], room: int) -> int:
    """Bytes of the string that came back as a tensor; 0 if it did not."""
    from convert.encodings import text_tensor

    dtype = by_name(str(value.get("dtype")))
    if dtype is None or dtype.item_bytes > room:
        return 0
    tensor = text_tensor(name, dtype, checkpoint.metadata[name], checkpoint.path)
    if tensor is None:
        return 0
    del checkpoint.metadata[name]
    checkpoint.tensors.append(tensor)
    return dtype.item_bytes


def _origin_object(origin: Origin) -> dict[str, object]:
    return {"dtype": origin.dtype, "encoding": origin.encoding, "shape": list(origin.shape)}


def _origin(value: object, tensor: Tensor) -> Origin | None:
    if not isinstance(value, dict):
        return None
    dtype, shape, encoding = by_name(str(value.get("dtype"))), value.get("shape"), value.get("encoding")
    if dtype is None or encoding not in ENCODINGS or not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
        return None
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in shape):
        return None
    origin = Origin(dtype.name, tuple(shape), encoding)
    count = prod(shape)
    if count * dtype.bits % 8:
        return None
    if encoding == "bytes":
        fits = dtype.nbytes(count) == tensor.nbytes and tensor.dtype.kind in ("plain", "V1", "V2")
        fits = fits and _is_shape_of(tensor.shape, origin, dtype.kind == "subbyte")
        # The bytes are taken as they lie, so they must lie as the original's would.
        fits = fits and (origin.shape == tensor.shape or not tensor.stored_fortran)
        fits = fits and (dtype.swap == tensor.dtype.swap or not tensor.stored_big)
        fits = fits and (dtype.kind != "blob" or (tensor.dtype.name == "uint8" and len(shape) == 1))
    elif encoding == "unpack":
        fits = dtype.kind == "subbyte" and tensor.dtype.name == "uint8" and origin.shape == tensor.shape
    else:
        fits = dtype.kind in ("bfloat16", "float8", "subbyte") and tensor.dtype.name == "float32"
        fits = fits and origin.shape == tensor.shape and encoding == "float32"
    return origin if fits else None


def _is_shape_of(encoded: tuple[int, ...], origin: Origin, packed: bool) -> bool:
    """Whether bytes of the original's shape came to have this one: the same, or with an axis of an element's parts."""
    if packed:
        return encoded[:-1] == origin.shape[:-1] or len(encoded) == 1
    return origin.shape in (encoded, encoded[:-1])


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _object(data: bytes, limits: Limits) -> dict[str, Any] | None:
    if not data.startswith(b"{"):
        return None
    try:
        found = parse_json(data.decode("utf-8"), "the remembered metadata", limits)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
