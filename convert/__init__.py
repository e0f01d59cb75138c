"""Convert tensor files: npy, npz and safetensors, each into each; exact or refused, in constant memory.

    import convert

    report = convert.convert_file("in.npz", "out.safetensors", policy=convert.Policy(V2="bfloat16"))
    with convert.open("in.npz") as checkpoint:      # a mapping from name to Tensor; nothing read but headers
        weight = checkpoint["w"].numpy()
    convert.save({"w": weight}, "out.safetensors", metadata={"format": "pt"})
    arrays = convert.load("out.safetensors")

Names are imported when they are first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from convert.version import __version__

if TYPE_CHECKING:
    from convert.api import convert_file, load, open, save
    from convert.batch import convert_folder
    from convert.batchrun import BatchReport
    from convert.checking import check
    from convert.compare import diff
    from convert.comparison import Comparison, Difference
    from convert.dtypes import DType
    from convert.errors import (
        ConvertError,
        CorruptError,
        InputError,
        LimitError,
        OutputError,
        PolicyError,
        TargetExistsError,
        UnsupportedError,
        UsageError,
    )
    from convert.findings import Finding
    from convert.formats import Format
    from convert.keywords import Options
    from convert.limits import Limits
    from convert.policy import Policy
    from convert.report import Report
    from convert.statistics import Stats, stats
    from convert.streaming import TensorSpec, Writer, writer
    from convert.tensor import Checkpoint, Tensor

_HOMES = {
    "api": ("convert_file", "load", "open", "save"),
    "batch": ("convert_folder",),
    "batchrun": ("BatchReport",),
    "checking": ("check",),
    "compare": ("diff",),
    "comparison": ("Comparison", "Difference"),
    "dtypes": ("DType",),
    "errors": (
        "ConvertError",
        "CorruptError",
        "InputError",
        "LimitError",
        "OutputError",
        "PolicyError",
        "TargetExistsError",
        "UnsupportedError",
        "UsageError",
    ),
    "findings": ("Finding",),
    "formats": ("Format",),
    "keywords": ("Options",),
    "limits": ("Limits",),
    "policy": ("Policy",),
    "report": ("Report",),
    "statistics": ("Stats", "stats"),
    "streaming": ("TensorSpec", "Writer", "writer"),
    "tensor": ("Checkpoint", "Tensor"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BatchReport",
    "Checkpoint",
    "Comparison",
    "ConvertError",
    "CorruptError",
    "DType",
    "Difference",
    "Finding",
    "Format",
    "InputError",
    "LimitError",
    "Limits",
    "Options",
    "OutputError",
    "Policy",
    "PolicyError",
    "Report",
    "Stats",
    "TargetExistsError",
    "Tensor",
    "TensorSpec",
    "UnsupportedError",
    "UsageError",
    "Writer",
    "__version__",
    "check",
    "convert_file",
    "convert_folder",
    "diff",
    "load",
    "open",
    "save",
    "stats",
    "writer",
]


if not TYPE_CHECKING:  # checkers know the names from above, and shall complain about others

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'convert' has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(f"convert.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
