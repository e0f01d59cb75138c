"""What is measured, against what, and the bounds that are promised.

Commands are run in the folder of the inputs, so paths are bare names. In front, `python` stands for the running
interpreter, `convert` for `python -m convert`, and `cp` copies bytes even where the file system could share blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

Command = tuple[str, ...]

IN, OUT = "{in}", "{out}"
"""Stand for the job's source and target in commands."""


@dataclass(frozen=True)
class Peer:
    """What a job is measured against.

    Attributes:
        name: For the table.
        command: What runs; it writes OUT.
        factor: Bound: seconds of ours <= factor x seconds of the peer's + extra; None if there is none.
        extra: Seconds.
        rss_mib: Bound on the peak memory of ours.
        no_larger: Bound: our output is no larger than the peer's.
        inputs: What the command reads besides IN.
        needs: A module without which the row is left out.
    """

    name: str
    command: Command
    factor: float | None = None
    extra: float = 0.0
    rss_mib: int | None = None
    no_larger: bool = False
    inputs: tuple[str, ...] = ()
    needs: str = ""


@dataclass(frozen=True)
class Job:
    """One command of ours and its peers.

    Attributes:
        name: For `--only` and the table.
        source: Key of `inputs.BUILDERS`, or '' for none.
        target: Bare name of the output; with a slash a folder.
        peers: In the order of the rows.
        options: Of `convert`.
        command: Where it is not `convert IN OUT OPTIONS`.
        repeat: Multiplies the number of runs, for what takes a fraction of a second.
    """

    name: str
    source: str
    target: str
    peers: tuple[Peer, ...]
    options: tuple[str, ...] = ()
    command: Command = ()
    repeat: int = 1


_LOAD = {
    "npz": "tensors = dict(np.load(source))\n",
    "safetensors": "tensors = load_file(source)\n",
    "npy": "tensors = {'weight': np.load(source)}\n",
    "folder": "tensors = {file[:-4]: np.load(f'{source}/{file}') for file in os.listdir(source)}\n",
}
_SAVE = {
    "npz": "np.savez(target, **tensors)\n",
    "deflated": "np.savez_compressed(target, **tensors)\n",
    # The plain save_file(tensors, target) writes wrong bytes for what is not C-contiguous.
    "safetensors": "save_file({name: np.asarray(a, order='C') for name, a in tensors.items()}, target)\n",
    "npy": "[array] = tensors.values()\nnp.save(target, array)\n",
    "folder": "os.mkdir(target)\nfor name, array in tensors.items(): np.save(f'{target}/{name}.npy', array)\n",
}
_TO_BFLOAT16 = "tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}\n"

_TYPER = """
import typer
app = typer.Typer()
def show(value: bool):
    if value:
        print("bare 1.0")
        raise typer.Exit
@app.command()
def main(version: bool = typer.Option(False, "--version", callback=show, is_eager=True)): pass
app()
"""
FILES = {"bare.py": _TYPER}
"""Programs that peers run from a file."""


def _script(load: str, save: str, change: str = "", module: str = "") -> Command:
    """Load, change and save, with the imports that needs; `module` is imported on top."""
    names = ["load_file"] * (load == "safetensors") + ["save_file"] * (save == "safetensors")
    lines = [
        "import os, sys" if "folder" in (load, save) else "import sys",
        "import numpy as np",
        f"import {module}" if module else "",
        f"from safetensors.numpy import {', '.join(names)}" if names else "",
        "source, target = sys.argv[1:]",
    ]
    text = "\n".join(line for line in lines if line)
    return ("python", "-c", f"{text}\n{_LOAD[load]}{change}{_SAVE[save]}", IN, OUT)


def script(load: str, save: str, factor: float | None = None, *, change: str = "", module: str = "") -> Peer:
    """numpy and safetensors as their documentation shows them, made correct."""
    return Peer("script", _script(load, save, change, module), factor)


def deflating(source: str) -> Peer:
    """np.savez_compressed."""
    return Peer("savez_compressed", _script(source, "deflated"), 0.05, no_larger=True)


CP = Peer("cp", ("cp", "-R", IN, OUT), 1.35, 0.2, rss_mib=96)
_CP_ONLY_TIMED = Peer("cp", ("cp", "-R", IN, OUT))


def mlx(save: str) -> Peer:
    """Load and save in MLX."""
    code = f"import sys\nimport mlx.core as mx\ntensors = mx.load(sys.argv[1])\n{save}\n"
    return Peer("mlx", ("python", "-c", code, IN, OUT), needs="mlx.core")


_MLX_SAFETENSORS = mlx("mx.save_safetensors(sys.argv[2], tensors)")
_MLX_NPZ = mlx("mx.savez(sys.argv[2], **tensors)")


def bare(name: str, factor: float) -> Peer:
    """The least a Typer program can do."""
    return Peer(name, ("python", "bare.py", "--version"), factor)


def _stored(source: str, load: str, target: str, save: str, *more: Peer) -> Job:
    names = f"{load}-{save}"
    return Job(names, source, target, (CP, script(load, save, 0.6), *more))


def _loading(source: str, suffix: str) -> Job:
    """All arrays of a file, in memory."""
    load = "import sys\nimport convert\nconvert.load(sys.argv[1])\n"
    names = "from safetensors.numpy import load_file\n" if suffix == "safetensors" else ""
    theirs = f"import sys\nimport numpy as np\n{names}source = sys.argv[1]\n{_LOAD[suffix]}"
    peer = "load_file" if suffix == "safetensors" else "np.load"
    return Job(
        f"load-{source.partition('.')[0]}-{suffix}", source, "", (Peer(peer, ("python", "-c", theirs, IN)),),
        command=("python", "-c", load, IN),
    )  # fmt: skip


JOBS: tuple[Job, ...] = (
    # 1 GiB in 100 tensors
    _stored("tensors.npz", "npz", "out.safetensors", "safetensors", _MLX_SAFETENSORS),
    _stored("tensors.npz", "npz", "out/", "folder"),
    _stored("tensors.npz", "npz", "out.npz", "npz"),
    Job(
        "big-endian",
        "big-endian.npz",
        "out.safetensors",
        (Peer("little-endian", ("convert", "tensors.npz", OUT), 1.15, inputs=("tensors.npz",)),),
        repeat=2,
    ),
    _stored("tensors.safetensors", "safetensors", "out.safetensors", "safetensors"),
    _stored("tensors.safetensors", "safetensors", "out.npz", "npz", _MLX_NPZ),
    _stored("tensors.safetensors", "safetensors", "out/", "folder"),
    Job(
        "verify",
        "tensors.safetensors",
        "out.safetensors",
        (Peer("without --verify", ("convert", IN, OUT)),),
        ("--verify",),
    ),
    Job(
        "cast-bfloat16",
        "tensors.safetensors",
        "out.safetensors",
        (_CP_ONLY_TIMED, script("safetensors", "safetensors", change=_TO_BFLOAT16, module="ml_dtypes")),
        ("--cast", "float32=bfloat16"),
    ),
    Job("aligned", "aligned.safetensors", "out.safetensors", (CP,)),  # its data begins with a page
    _stored("tensors", "folder", "out.safetensors", "safetensors"),
    _stored("tensors", "folder", "out.npz", "npz"),
    # 1 GiB in one tensor
    _stored("one.npy", "npy", "out.safetensors", "safetensors"),
    _stored("one.npy", "npy", "out.npz", "npz"),
    # others
    Job("one-2gib", "large.safetensors", "out.npy", (CP, script("safetensors", "npy", 0.6))),
    Job(
        "bfloat16-npz",
        "bfloat16.safetensors",
        "out.npz",
        (_CP_ONLY_TIMED, script("safetensors", "npz", module="ml_dtypes")),
    ),
    Job(
        "fortran",
        "fortran.npy",
        "out.safetensors",
        (Peer("ascontiguousarray", _script("npy", "safetensors"), 0.4, rss_mib=128),),
    ),
    Job("deflate-weights", "weights.safetensors", "out.npz", (deflating("safetensors"),), ("--compress",)),
    Job("deflate-rounded", "rounded.safetensors", "out.npz", (deflating("safetensors"),), ("--compress",)),
    Job("deflate-indices", "indices.safetensors", "out.npz", (deflating("safetensors"),), ("--compress",)),
    Job("inflate", "deflated.npz", "out.safetensors", (script("npz", "safetensors", 0.35),)),
    # the library
    _loading("tensors.npz", "npz"),
    _loading("tensors.safetensors", "safetensors"),
    _loading("deflated.npz", "npz"),
    Job("many-tensors", "many.npz", "out.safetensors", (script("npz", "safetensors", 0.25),)),
    # start-up
    Job("version", "", "", (bare("bare Typer", 1.3),), command=("convert", "--version"), repeat=4),
    Job("tiny-file", "tiny.npz", "out.safetensors", (bare("bare Typer", 2.0),), repeat=4),
)
