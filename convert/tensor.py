"""What a reader hands out: facts about a tensor and a way to get its bytes, nothing read yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from convert.dtypes import DType
from convert.errors import ConvertError

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Buffer


class RandomAccess(Protocol):
    """Anything that reads at offsets: a file, memory, a spool."""

    @property
    def path(self) -> str: ...

    def readinto(self, offset: int, view: memoryview) -> None: ...

    def read(self, offset: int, count: int) -> bytes: ...


class Extent:
    """Stored bytes at a place in a file, readable in any order.

    Attributes:
        file: Where they are.
        offset: First byte.
        nbytes: How many.
        crc: CRC-32 that `seed` continued over all of them must give, or None where none is owed.
        seed: CRC-32 of what the checksum covers before them.
    """

    __slots__ = ("crc", "file", "nbytes", "offset", "seed")

    def __init__(self, file: RandomAccess, offset: int, nbytes: int, crc: int | None = None, seed: int = 0) -> None:
        self.file = file
        self.offset = offset
        self.nbytes = nbytes
        self.crc = crc
        self.seed = seed


class Stream(Protocol):
    """Stored bytes that come only from first to last, such as those of a compressed member.

    One that unpacks them may have the attributes `compression`, a word for how, and `packed_nbytes`.
    """

    nbytes: int
    path: str

    def chunks(self, chunk_bytes: int) -> Iterator[Buffer]:
        """All bytes, each chunk but the last of exactly `chunk_bytes`, valid until the next is asked for.

        Asking again starts anew. The last chunk is handed out only after every checksum was found right.
        """
        ...


def path_of(data: Extent | Stream) -> str:
    """The file that stored bytes come from."""
    return data.file.path if isinstance(data, Extent) else data.path


class Step(NamedTuple):
    """An elementwise change: every `in_bytes` become `out_bytes`, whatever their neighbours.

    `apply(chunk, first)` takes whole units (it may overwrite them) and the number of the first; it returns a buffer.
    """

    in_bytes: int
    out_bytes: int
    apply: Callable[[memoryview, int], Buffer]


class Origin(NamedTuple):
    """What an encoded tensor was before, so that the way back gives it exactly.

    `encoding` is 'bytes' (the same bytes under another type), 'unpack', 'float32' or 'text'.
    """

    dtype: str
    shape: tuple[int, ...]
    encoding: str


class Text(NamedTuple):
    """What goes into the metadata instead of becoming a tensor.

    `dtype` names what it was; `origin` is set where the way back is known.
    """

    name: str
    dtype: str
    text: str
    origin: Origin | None = None


class Tensor:
    """One named tensor: its type and shape, and where its bytes come from. Immutable; changes give a new one.

    Attributes:
        name: Exactly as in the file, any Unicode.
        dtype: Element type of the bytes handed out.
        shape: Sizes, outermost first.
        data: The stored bytes.
        stored: Element type of the stored bytes, before `steps`.
        stored_big: Whether they are big-endian.
        stored_fortran: Whether they lie in Fortran order.
        stored_shape: The shape in which they lie; `shape` has one axis more where an element became several.
        steps: Elementwise changes on the way out.
        big: Whether to hand out big-endian bytes (only npy and npz can hold them).
        fortran: Whether to hand out Fortran order.
        origin: What it was before it was encoded, if the file remembers.
        unpickle: For type object only: read the pickle, give the tensors and texts in it.
        problem: Why it cannot be read, if the reader found out; raised when its bytes are asked for.
    """

    __slots__ = (
        "big",
        "data",
        "dtype",
        "fortran",
        "name",
        "origin",
        "problem",
        "shape",
        "steps",
        "stored",
        "stored_big",
        "stored_fortran",
        "stored_shape",
        "unpickle",
    )

    def __init__(
        self,
        name: str,
        dtype: DType,
        shape: tuple[int, ...],
        data: Extent | Stream,
        stored_big: bool = False,
        stored_fortran: bool = False,
    ) -> None:
        self.name = name
        self.dtype = self.stored = dtype
        self.shape = self.stored_shape = shape
        self.data = data
        self.stored_big = stored_big
        self.stored_fortran = stored_fortran
        self.steps: tuple[Step, ...] = ()
        self.big = self.fortran = False
        self.origin: Origin | None = None
        self.unpickle: Callable[[], list[Tensor | Text]] | None = None
        self.problem: ConvertError | None = None

    def changed(self, **values: Any) -> Self:
        """A copy with some attributes replaced."""
        copy = object.__new__(type(self))
        for name in Tensor.__slots__:
            setattr(copy, name, values.pop(name) if name in values else getattr(self, name))
        if values:
            raise TypeError(f"a tensor has no {', '.join(values)}")
        return copy

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes handed out, sub-byte types packed; for an object, those of its pickle."""
        return self.dtype.nbytes(prod(self.shape)) if self.steps else self.data.nbytes

    @property
    def path(self) -> str:
        """The file it comes from."""
        return path_of(self.data)

    @property
    def compression(self) -> str | None:
        """How its stored bytes are compressed, 'deflate' for one; None if they are not."""
        return getattr(self.data, "compression", None)

    @property
    def packed_nbytes(self) -> int:
        """What it takes in its file, compressed where it is."""
        return getattr(self.data, "packed_nbytes", self.data.nbytes)

    def chunks(self, chunk_bytes: int = 1 << 20) -> Iterator[memoryview]:
        """Little-endian, row-major bytes in order, about `chunk_bytes` at a time.

        Chunks hold whole elements and are valid until the next one is asked for; asking again starts anew. Memory
        stays bounded: a Fortran-order tensor goes through a temporary file where its rows are too far apart.

        Raises:
            InputError: The file is damaged, which may come to light only at the end of the data.
        """
        from convert.transfer import chunks

        return chunks(self, chunk_bytes)

    def numpy(self) -> np.ndarray[Any, Any]:
        """The tensor as a new C-ordered array; ml_dtypes types for bfloat16 and the 8-bit and smaller floats.

        Sub-byte types come one element a byte. Memory is that of the array.

        Raises:
            InputError: The file is damaged.
            UsageError: numpy cannot hold it: an object, or more than 64 dimensions.
        """
        from convert.arrays import to_numpy

        return to_numpy(self)

    def __getitem__(self, key: Any) -> np.ndarray[Any, Any]:
        """A part of the tensor as a new C-ordered array, by numpy's basic indexing; only what is needed is read.

        Args:
            key: Whole numbers, slices with any step, `...` and None, alone or in a tuple, as for an ndarray; the result
                is always an array, of no dimensions where numpy would give a number.

        Checksums cover whole tensors: they are verified only if the key asks for everything, or the last byte of a
        compressed tensor is needed.

        Raises:
            IndexError: As numpy would.
            InputError: The file is damaged.
            UsageError: An index of another kind, or numpy cannot hold the tensor.
        """
        from convert.slicing import take

        return take(self, key)

    def __repr__(self) -> str:
        return f"<Tensor {self.name!r} {self.dtype} {list(self.shape)}>"


@dataclass(eq=False)
class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a file (or several), by name, in file order; nothing read but headers.

    Lifetime: its tensors read from it until `close`. Use it in a `with` block.

    Attributes:
        path: The source as given.
        format: Name of its format.
        tensors: In file order; names are unique.
        metadata: Free text the file carries beside its tensors.
        notes: What a user may want to know about the file, such as a suffix that does not fit.
        files: What must be closed, and must not have changed while it was read.
        version: What the file says of the version of its format, 'npy 1.0' for one; empty where it says nothing.
    """

    path: str
    format: str
    tensors: list[Tensor]
    metadata: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    files: list[Any] = field(default_factory=list)
    version: str = ""

    def __post_init__(self) -> None:
        self._by_name: dict[str, Tensor] | None = None

    def _index(self) -> dict[str, Tensor]:
        if self._by_name is None:
            self._by_name = {tensor.name: tensor for tensor in self.tensors}
        return self._by_name

    def __getitem__(self, name: str) -> Tensor:
        return self._index()[name]

    def __iter__(self) -> Iterator[str]:
        return (tensor.name for tensor in self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
