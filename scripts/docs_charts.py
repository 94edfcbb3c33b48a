"""Bar charts of rows in benchmarks/results, as SVG that can be read on light and on dark pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from scripts.docs_pictures import svg

LEFT = 300
"""Pixels of the labels."""
WIDTH = 400
"""Pixels of the longest bar."""
RIGHT = 120
"""Pixels of the figures behind the bars."""
BAR = 16
"""Pixels of the height of a bar."""
GAP = 10
"""Pixels between two groups."""
TOP = 58
"""Pixels above the first group."""


class Bar(NamedTuple):
    """A bar of one kind, from 0 to `least`. If it shows several figures, a paler part extends to `most`."""

    kind: str
    least: float
    most: float

    @property
    def figures(self) -> str:
        """The figures as text."""
        return f"{self.least:.2f}" + (f" to {self.most:.2f}" if self.most > self.least else "")


class Group(NamedTuple):
    """Bars with one label."""

    label: str
    bars: Sequence[Bar]


def chart(title: str, scale: str, kinds: dict[str, str], groups: Sequence[Group]) -> str:
    """Return a chart. scale: the meaning of 1. kinds: the legend, as text by kind of bar."""
    longest = max(bar.most for group in groups for bar in group.bars)
    unit = WIDTH / longest
    parts: list[list[Any]] = [["text", 20, 24, title, "bold"], ["text", 20, 44, f"line at 1: {scale}", "soft"]]
    for n, (kind, text) in enumerate(kinds.items()):
        x = LEFT + 170 * n
        parts += [["box", x, 32, 26, 14, kind], ["text", x + 34, 44, text, "soft"]]
    y = TOP
    for group in groups:
        middle = y + BAR * len(group.bars) / 2 + 4.5
        parts.append(["text", LEFT - 12, middle, group.label, "end"])
        for bar in group.bars:
            parts += _bar(y, bar, unit)
            y += BAR
        y += GAP
    parts.append(["box", round(LEFT + unit, 1), TOP - 4, 1, y - TOP, "line"])
    return svg({"size": [LEFT + WIDTH + RIGHT, y + 4], "title": title, "parts": parts})


def _bar(y: int, bar: Bar, unit: float) -> Iterator[list[Any]]:
    least, most = (round(unit * figure, 1) for figure in (bar.least, bar.most))
    if most > least:
        yield ["box", LEFT, y, most, BAR - 2, "plain"]
    yield ["box", LEFT, y, least, BAR - 2, bar.kind]
    yield ["text", LEFT + most + 8, y + BAR - 4, bar.figures, "soft"]
