"""A hook of mkdocs: pages and files outside of docs/ that its pages link to become part of the site.

The sources stay readable where they lie: a link is relative to the file it stands in, on the site as in the checkout.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "manual.md", "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md"}
"""Files of the checkout, and the pages they become."""
_ORIGINS = {page: origin for origin, page in PAGES.items()}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages, and the examples as files."""
    from mkdocs.structure.files import File

    for origin, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / origin).read_text("utf-8")))
    for path in sorted((ROOT / "examples").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            name = f"files/{path.relative_to(ROOT).as_posix()}"
            files.append(File.generated(config, name, content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Let links lead to where their files are on the site."""
    return moved(markdown, page.file.src_uri)


def moved(markdown: str, page: str) -> str:
    """The text of a page with its links as they must be on the site; those to folders of code become words."""
    origin = _ORIGINS.get(page, f"docs/{page}")

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), found[2]))
        if target.startswith("docs/"):
            there = target.removeprefix("docs/")
        elif target in PAGES:
            there = PAGES[target]
        elif (ROOT / target).is_file():
            there = f"files/{target}"
        else:
            return found[1]
        return f"[{found[1]}]({posixpath.relpath(there, posixpath.dirname(page) or '.')}{found[3] or ''})"

    return _LINK.sub(link, markdown)
