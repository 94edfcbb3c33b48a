"""Draws boxes, arrows and text as SVG that can be read on light and on dark pages.

Each picture brings its own background. Attributes have the light colours; where a style sheet is heeded, a dark scheme
replaces them. Lengths are in pixels of the picture's own size.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

LIGHT = {
    "page": "#ffffff", "ink": "#1f2328", "soft": "#59636e", "line": "#818b98", "plain": "#f3f4f6",
    "draft": "#fde9c8", "retrieval": "#cfe3fb", "full": "#cdeed6", "bad": "#fbd5d5",
}  # fmt: skip
DARK = {
    "page": "#151b23", "ink": "#f0f6fc", "soft": "#c3c9d2", "line": "#7d8590", "plain": "#262c36",
    "draft": "#6b4a12", "retrieval": "#174a80", "full": "#1a5c30", "bad": "#7a2626",
}  # fmt: skip
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


class Drawing:
    """One picture, `width` by `height`; `title` is what it shows, for those who cannot see it."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, lines: str | Sequence[str] = (), kind: str = "plain"
    ) -> None:
        """Draw a box with lines of text in its middle, the first of them bold where there are more."""
        self.parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6" '
            f'fill="{LIGHT[kind]}" stroke="{LIGHT["line"]}" stroke-width="1.2"/>'
        )
        lines = [lines] if isinstance(lines, str) else list(lines)
        top = y + height / 2 - 17 * (len(lines) - 1) / 2 + 4.5
        for i, line in enumerate(lines):
            self.text(x + width / 2, top + 17 * i, line, anchor="middle", bold=i == 0 and len(lines) > 1, soft=i > 0)

    def text(
        self, x: float, y: float, line: str, *, anchor: str = "start", bold: bool = False, soft: bool = False
    ) -> None:
        """Write one line; (x, y) is the start, the middle or the end of its base line."""
        kind, weight = ("soft" if soft else "ink"), ' font-weight="600"' if bold else ""
        size = 12 if soft else 13
        self.parts.append(
            f'<text class="{kind}-text" x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"{weight} '
            f'fill="{LIGHT[kind]}">{escape(line)}</text>'
        )

    def arrow(self, *points: tuple[float, float], label: str = "", dashed: bool = False) -> None:
        """Draw a line through the points, its head at the last; the label stands above its first stretch."""
        path = " ".join(f"{x},{y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<polyline class="wire" points="{path}" fill="none" stroke="{LIGHT["line"]}" stroke-width="1.6"{dash}/>'
        )
        (x1, y1), (x2, y2) = points[-2:]
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5 or 1.0
        ux, uy = (x2 - x1) / length * 8, (y2 - y1) / length * 8
        head = f"{x2},{y2} {x2 - ux - uy / 2},{y2 - uy + ux / 2} {x2 - ux + uy / 2},{y2 - uy - ux / 2}"
        self.parts.append(f'<polygon class="head" points="{head}" fill="{LIGHT["line"]}"/>')
        if label:
            (x1, y1), (x2, y2) = points[:2]
            self.text((x1 + x2) / 2, (y1 + y2) / 2 - 6, label, anchor="middle", soft=True)

    def svg(self) -> str:
        """Return the whole file."""
        fills = "".join(f".{kind}{{fill:{colour}}}" for kind, colour in DARK.items() if kind not in ("ink", "soft"))
        dark = (
            f"{fills}rect{{stroke:{DARK['line']}}}.wire{{stroke:{DARK['line']}}}.head{{fill:{DARK['line']}}}"
            f".ink-text{{fill:{DARK['ink']}}}.soft-text{{fill:{DARK['soft']}}}"
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
                f'viewBox="0 0 {self.width} {self.height}" role="img" font-family="{FONT}">',
                f"<title>{escape(self.title)}</title>",
                f"<style>@media (prefers-color-scheme: dark){{{dark}}}</style>",
                f'<rect class="page" x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="8" '
                f'fill="{LIGHT["page"]}" stroke="{LIGHT["line"]}" stroke-width="0.5"/>',
                *self.parts,
                "</svg>\n",
            ]
        )
