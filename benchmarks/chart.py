"""An SVG of ratios, written by hand; it brings its own background, so that it is legible on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from benchmarks.run import Row

_WIDTH, _LEFT, _RIGHT, _TOP, _STEP, _GAP, _BAR = 920, 310, 150, 78, 20, 7, 12
_STEPS = tuple(10.0**power * digit for power in range(-5, 3) for digit in (1, 2, 5))
_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
.quiet { fill: #59636e; }
.title { font-size: 16px; font-weight: 600; }
.back { fill: #ffffff; }
.grid { stroke: #d1d9e0; }
.one { stroke: #59636e; stroke-width: 1.5; }
.ok { fill: #2a78d6; }
.over { fill: #c2410c; }
.bound { stroke: #1f2328; stroke-width: 2.5; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; }
  .quiet { fill: #9198a1; }
  .back { fill: #0d1117; }
  .grid { stroke: #3d444d; }
  .one { stroke: #9198a1; }
  .ok { fill: #4c94eb; }
  .over { fill: #f0883e; }
  .bound { stroke: #f0f6fc; }
}
"""


def draw(rows: Sequence[Row], about: str) -> str:
    """One bar per row, from 1 (as fast as the peer) to the ratio, on a logarithmic axis; a tick where the bound is."""
    shown = [row for row in rows if not row.problem]
    values = [value for row in shown for value in (row.ratio, row.limit) if value is not None]
    low = max(step for step in _STEPS if step <= min([0.5, *values]))
    high = max([2.0, *values]) * 1.1
    tops = _tops(shown)
    height = (tops[-1] if tops else _TOP) + _STEP + 56
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="Seconds of convert relative to its peers">',
        f"<style>{_STYLE}</style>",
        f'<rect class="back" width="{_WIDTH}" height="{height}" rx="6"/>',
        _text(20, 30, "Seconds of convert / seconds of the peer", "title"),
        _text(20, 50, about, "quiet"),
        *_axis(low, high, height - 46),
    ]
    for index, (row, top) in enumerate(zip(shown, tops, strict=True)):
        parts += _bar(row, index == 0 or row.job.name != shown[index - 1].job.name, top, low, high)
    parts.append("</svg>\n")
    return "\n".join(parts)


def _tops(rows: Sequence[Row]) -> list[int]:
    """Where bars begin; those of a job stand close together."""
    tops: list[int] = []
    before, top = "", _TOP - _STEP - _GAP
    for row in rows:
        top += _STEP if row.job.name == before else _STEP + _GAP
        before = row.job.name
        tops.append(top)
    return tops


def _x(value: float, low: float, high: float) -> float:
    share = math.log(value / low) / math.log(high / low)
    return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x: float, top: float, bottom: float, kind: str) -> str:
    return f'<line x1="{x}" x2="{x}" y1="{top}" y2="{bottom}" class="{kind}"/>'


def _axis(low: float, high: float, bottom: float) -> Iterator[str]:
    for value in _STEPS:
        if not low <= value <= high:
            continue
        x = _x(value, low, high)
        yield _line(x, _TOP - 6, bottom, "one" if value == 1 else "grid")
        yield _text(x, bottom + 16, f"{value:g}", "quiet", "middle")
    yield _text(
        20,
        bottom + 38,
        "Left of 1 convert is faster. A thick tick is the most the bound allows; orange bars are over a bound.",
        "quiet",
    )


def _bar(row: Row, is_first: bool, top: float, low: float, high: float) -> Iterator[str]:
    middle = top + _BAR - 2
    if is_first:
        yield _text(20, middle, row.job.name)
    yield _text(_LEFT - 12, middle, row.peer.name, "quiet", "end")
    begin, end = sorted((_x(row.ratio, low, high), _x(1, low, high)))
    kind = "over" if row.over else "ok"
    width = max(1.0, round(end - begin, 1))
    yield f'<rect class="{kind}" x="{begin}" y="{top}" width="{width}" height="{_BAR}" rx="2"/>'
    if row.limit is not None:
        yield _line(_x(row.limit, low, high), top - 3, top + _BAR + 3, "bound")
    over = f" over: {', '.join(row.over)}" if row.over else ""
    yield _text(_WIDTH - _RIGHT + 12, middle, f"{row.ratio:.3g}{over}")
