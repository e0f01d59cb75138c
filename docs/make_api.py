"""Print docs/api.md: every public name, with its docstring when the site is built."""

from __future__ import annotations

import inspect

import convert

_INTRO = """# Every name of the library

Made by `docs/make_api.py`. [The library](library.md) explains how they belong together; what is not here may change in
any version. Every refusal is a `ConvertError`; all names are typed.
"""


def page() -> str:
    """Functions first, then what they give and take, then errors."""
    names = [name for name in convert.__all__ if name != "__version__"]
    groups = {"Functions": [], "Classes": [], "Errors": []}  # type: dict[str, list[str]]
    for name in names:
        value = getattr(convert, name)
        is_error = inspect.isclass(value) and issubclass(value, Exception)
        groups["Errors" if is_error else "Classes" if inspect.isclass(value) else "Functions"].append(name)
    lines = [_INTRO]
    for title, found in groups.items():
        lines += [f"## {title}\n", *(f"::: {_home(name)}\n" for name in found)]
    return "\n".join(lines).rstrip("\n")


def _home(name: str) -> str:
    value = getattr(convert, name)
    return f"{value.__module__}.{value.__qualname__}"


if __name__ == "__main__":
    print(page())  # noqa: T201
