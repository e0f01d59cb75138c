"""The program: `convert SOURCE... TARGET`, and its sub-commands."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from convert.cli.complete import WORDS, answered
from convert.cli.plain import coerce_plainly, show_plainly
from convert.cli.shared import EXIT_INTERRUPTED
from convert.errors import ConvertError, LimitError, OutputError
from convert.version import __version__

_MAIN = "SOURCE"
"""Name of the hidden command that the main job is; never typed."""
_GROUP_OPTIONS = ("--help", "-h", "--version", "--install-completion", "--show-completion")
_SHOWN_PROBLEMS = 100


EXAMPLES: dict[str, tuple[str, ...]] = {
    _MAIN: (
        "convert in.npz out.safetensors",
        "convert in.safetensors out.npz --compress",
        "convert a.npy b.npy all.npz",
        "convert in.npz folder/",
        "convert in.npz half.safetensors --cast float32=bfloat16",
        "convert in.npz some.safetensors --include 'w*' --verify",
        "convert in.npz out.safetensors --overwrite --dry-run",
    ),
    "ls": (
        "convert ls in.npz",
        "convert ls in.safetensors --tree --depth 2",
        "convert ls in.npz --sort size --stats",
        "convert ls . --html page.html",
    ),
    "batch": (
        "convert batch src dst --to safetensors",
        "convert batch src dst --to safetensors --dry-run",
        "convert batch src packed --to npz --compress --copy-others",
    ),
    "check": ("convert check in.npz in.safetensors", "convert check src --headers", "convert check --explain NPZ-002"),
    "diff": ("convert diff in.npz in.safetensors", "convert diff in.npz in.safetensors --rtol 1e-5 --include 'w*'"),
    "policies": ("convert policies", "convert policies --policy lossless --json"),
}
"""Shown by --help; all are run by the tests, in a folder with in.npz, in.safetensors, a.npy, b.npy and src/."""


class _StoppedError(Exception):
    """Ctrl-C, or a request to end."""


class _NoReaderError(Exception):
    """Whoever read our output has closed the pipe."""


@contextlib.contextmanager
def _ours() -> Iterator[None]:
    """Typer and rich have answers of their own to these two, which differ from version to version."""
    try:
        yield
    except KeyboardInterrupt:
        raise _StoppedError from None
    except BrokenPipeError:
        raise _NoReaderError from None
    except SystemExit as err:
        if err.code == 1:  # rich, when the pipe is closed
            raise _NoReaderError from None
        raise


class _Group(TyperGroup):
    """A first argument that is no sub-command is the main job."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _ours():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _ours():
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        visible = [name for name in self.commands if name != _MAIN]
        if args and args[0] not in visible and args[0] not in _GROUP_OPTIONS:
            args = [_MAIN, *args]
        coerce_plainly(self.get_params(ctx))
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        main = self.commands[_MAIN]
        main.format_help(type(ctx)(main, info_name=ctx.info_name, help_option_names=[]), formatter)  # they come below
        show_plainly(self.get_params(ctx))
        super().format_help(ctx, formatter)


class _Command(TyperCommand):
    """A command whose arguments are shown as they are typed, and read plainly."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        shown = [param.metavar for param in self.get_params(ctx) if param.param_type_name == "argument"]
        return ["[OPTIONS]", *map(str, shown)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        show_plainly(self.get_params(ctx))
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[WORDS] = list(args)
        coerce_plainly(self.get_params(ctx))
        return super().parse_args(ctx, args)


class _Main(_Command):
    """`--compress` takes a level if a number follows."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given: list[str] = []
        for index, arg in enumerate(args):
            if arg == "--":
                given += args[index:]
                break
            if arg == "--compress" and not (index + 1 < len(args) and args[index + 1].isdecimal()):
                from convert.codec import DEFAULT_LEVEL

                arg = f"--compress={DEFAULT_LEVEL}"
            given.append(arg)
        ctx.info_name = ctx.info_name if ctx.info_name != _MAIN else ""
        return super().parse_args(ctx, given)


app = typer.Typer(
    cls=_Group,
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    rich_markup_mode="rich",
)


def _version(value: bool) -> None:
    if value:
        sys.stdout.write(f"convert {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Other commands: convert COMMAND --help tells more. A file named like a command is given as ./NAME."""


def _install() -> None:
    if app.registered_commands:  # `run` was called before
        return
    from convert.cli import job, listing
    from convert.cli.limits import with_limits

    _add(_MAIN, with_limits(job.run), _Main)
    _add("ls", with_limits(listing.ls))
    _add("formats", listing.show_formats)
    _add("policies", listing.show_policies)


def _add(name: str, function: Callable[..., int], kind: type[_Command] = _Command) -> None:
    """A command, with its examples below the first sentence of its help."""
    text = "\n\n".join(
        [function.__doc__ or "", *(["Examples:\n" + "\n".join(shown)] if (shown := EXAMPLES.get(name)) else [])]
    )
    app.command(name, cls=kind, hidden=name == _MAIN, help=text)(function)


_LATE = ("batch", "check", "diff")
"""Commands that are loaded only where they are called, listed or completed: other runs need them not."""


def _install_late(argv: list[str]) -> None:
    """Those of them that this run needs."""
    there = {command.name for command in app.registered_commands}
    all_of_them = not argv or argv[0] in _GROUP_OPTIONS[:2] or any(name.endswith("_COMPLETE") for name in os.environ)
    for name in _LATE:
        if name not in there and (all_of_them or argv[0] == name):
            from convert.cli.limits import with_limits

            module = import_module(f"convert.cli.{name}")
            command = module.command() if name == "batch" else with_limits(getattr(module, name))
            _add(name, command, _Main if name == "batch" else _Command)


def _terminated(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> None:
    """Run the program and exit with its status; never returns.

    Exit status: 0 done, 1 a bug (traceback), 2 usage, 3 bad or unreadable input, 4 refused by policy, 5 output failed,
    6 `diff` found differences, 130 interrupted.
    """
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    """Run the program and return its exit status."""
    gc.disable()  # a conversion makes no cycles worth looking for among its many small objects
    _install()
    _install_late(argv)
    if hasattr(signal, "SIGTERM") and os.name != "nt":
        signal.signal(signal.SIGTERM, _terminated)  # what is half done is cleaned up as after Ctrl-C
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may hold what the terminal's encoding lacks
    try:
        result = answered(lambda: app(argv, prog_name="convert", standalone_mode=False))
        sys.stdout.flush()
    except ConvertError as err:
        return fail(err)
    except (_StoppedError, KeyboardInterrupt, typer.Abort):
        sys.stderr.write("interrupted; nothing was written\n")
        return EXIT_INTERRUPTED
    except (_NoReaderError, BrokenPipeError):
        _give_up_stdout()
        return 0
    except MemoryError:
        return fail(
            LimitError("the memory ran out; nothing was written", hint="fewer --jobs, or a lower limit, need less")
        )
    except OSError as err:
        if err.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        _give_up_stdout()
        return fail(OutputError(f"the output cannot be written: {err.strerror}"))
    except typer.Exit as err:
        return err.exit_code
    except Exception as err:
        show = getattr(err, "show", None)
        if show is None:
            raise
        show()
        return int(getattr(err, "exit_code", 2))
    return result if isinstance(result, int) else 0


def _give_up_stdout() -> None:
    """Nothing more can be written there, nor need Python try when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(err: ConvertError) -> int:
    """Show a refusal and return its exit status."""
    problems = err.problems
    shown = [str(problem) for problem in problems[:_SHOWN_PROBLEMS]]
    if len(problems) > len(shown):
        shown.append(f"... and {len(problems) - len(shown)} more problems; --json lists them all")
    sys.stderr.write("\n".join(shown) + "\n")
    return err.exit_code
