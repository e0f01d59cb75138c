"""Print docs/tensor-convert.1, the manual page, from the program's own options."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from convert.cli import main
from convert.cli.job import COMMANDS
from convert.version import __version__

_EXIT = """0 done, 1 a bug, 2 usage, 3 bad or unreadable input, 4 refused by policy, 5 output failed,
6 diff found differences, 130 interrupted."""
_ABOUT = """A tensor comes out with its exact name, shape and values, or the run stops with one message and no output.
A file named like a command is given as ./NAME. Results go to stdout, messages to stderr."""
_ENVIRONMENT = {
    "CONVERT_JOBS": "Threads, where --jobs does not say.",
    "NO_COLOR": "No colours.",
    "COLUMNS": "Width of tables, also in a pipe.",
}
_FILES = {"convert.toml": "Policies of a project; the nearest one from the current folder upwards.",
          "pyproject.toml": "The same, in its table [tool.convert]."}  # fmt: skip


def roff(text: object) -> str:
    """Text that troff prints as it is."""
    shown = str(text).replace("\\", "\\e").replace("-", "\\-")
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line for line in shown.splitlines())


def options_of(command: Any, title: str) -> list[str]:
    """A command's sentence, arguments and options, panel by panel."""
    lines = [f".SS {roff(title)}", roff(command.help.partition("\n\n")[0].strip())]
    panels: dict[str, list[Any]] = {}
    for param in command.params:
        if param.param_type_name == "argument":
            lines += [".TP", f".I {roff(param.metavar)}", roff(param.help)]
        elif not param.hidden:
            panels.setdefault(getattr(param, "rich_help_panel", None) or "Options", []).append(param)
    for panel, params in panels.items():
        lines += [".PP", f".I {roff(panel)}"]
        for param in params:
            default = param.default
            shown = f" Default: {default}." if default not in (None, False, "", ()) else ""
            names = ", ".join(roff(name) for name in param.opts)
            metavar = f" \\fI{roff(param.metavar)}\\fR" if param.metavar else ""
            lines += [".TP", f"\\fB{names}\\fR{metavar}", roff(f"{inspect.cleandoc(param.help or '')}{shown}")]
    return lines


def page() -> str:
    """The whole of it."""
    main._install()
    main._install_late([])
    group: Any = typer.main.get_command(main.app)
    job = group.commands[main._MAIN]
    lines = [
        f'.TH TENSOR\\-CONVERT 1 "" "tensor\\-convert {__version__}" "User commands"',
        ".SH NAME",
        "tensor\\-convert, convert \\- npy, npz and safetensors, each into each; exact or refused",
        ".SH SYNOPSIS",
        ".B convert\n[\\fIOPTIONS\\fR] \\fISOURCE... TARGET\\fR",
    ]
    for name in COMMANDS:
        metavars = [param.metavar for param in group.commands[name].params if param.param_type_name == "argument"]
        lines += [".br", f".B convert {name}\n[\\fIOPTIONS\\fR] \\fI{roff(' '.join(metavars))}\\fR"]
    lines += [".SH DESCRIPTION", roff(_ABOUT), ".SH COMMANDS"]
    lines += options_of(job, "convert")
    for name in COMMANDS:
        lines += options_of(group.commands[name], f"convert {name}")
    for title, entries in (("ENVIRONMENT", _ENVIRONMENT), ("FILES", _FILES)):
        lines.append(f".SH {title}")
        for key, about in entries.items():
            lines += [".TP", f".B {roff(key)}", roff(about)]
    lines += [".SH EXIT STATUS", roff(_EXIT), ".SH EXAMPLES", ".nf"]
    lines += [roff(example) for examples in main.EXAMPLES.values() for example in examples]
    return "\n".join([*lines, ".fi"])


if __name__ == "__main__":
    print(page())  # noqa: T201
