"""Pictures of docs/data/pictures.toml, as SVG that can be read on light and on dark pages.

Each picture has its own background. Attributes have the light colours, and a style sheet has the dark colours.
"""

from __future__ import annotations

import tomllib
from html import escape
from pathlib import Path
from typing import Any

LIGHT = {
    "page": "#ffffff", "ink": "#1f2328", "soft": "#59636e", "line": "#818b98", "plain": "#f3f4f6",
    "draft": "#fde9c8", "retrieval": "#cfe3fb", "full": "#cdeed6", "bad": "#fbd5d5",
}  # fmt: skip
DARK = {
    "page": "#151b23", "ink": "#f0f6fc", "soft": "#c3c9d2", "line": "#7d8590", "plain": "#262c36",
    "draft": "#6b4a12", "retrieval": "#174a80", "full": "#1a5c30", "bad": "#7a2626",
}  # fmt: skip
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def box(x: float, y: float, width: float, height: float, kind: str, *lines: str) -> list[str]:
    """Return a box with lines of text in its middle. The first of several lines is bold."""
    rect = (
        f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6" '
        f'fill="{LIGHT[kind]}" stroke="{LIGHT["line"]}" stroke-width="1.2"/>'
    )
    top = y + height / 2 - 17 * (len(lines) - 1) / 2 + 4.5
    bold = ["bold"] * (len(lines) > 1)
    texts = [
        text(x + width / 2, top + 17 * i, line, "middle", *(["soft"] if i else bold))[0] for i, line in enumerate(lines)
    ]
    return [rect, *texts]


def text(x: float, y: float, line: str, *how: str) -> list[str]:
    """Return one line of text; (x, y) is the start, the middle or the end of its base line."""
    anchor = "middle" if "middle" in how else "end" if "end" in how else "start"
    kind, size = ("soft", 12) if "soft" in how else ("ink", 13)
    weight = ' font-weight="600"' if "bold" in how else ""
    start = f'<text class="{kind}-text" x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"{weight} '
    return [f'{start}fill="{LIGHT[kind]}">{escape(line)}</text>']


def arrow(*parts: Any) -> list[str]:
    """Return a line through the points, with its head at the last point and its label above the first segment."""
    points = [part for part in parts if isinstance(part, list)]
    label = [part for part in parts if part != "dashed"][-1]
    path = " ".join(f"{x},{y}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if "dashed" in parts else ""
    (x1, y1), (x2, y2) = points[-2:]
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5 or 1.0
    ux = (x2 - x1) / length * 8
    uy = (y2 - y1) / length * 8
    head = f"{x2},{y2} {x2 - ux - uy / 2},{y2 - uy + ux / 2} {x2 - ux + uy / 2},{y2 - uy - ux / 2}"
    (x1, y1), (x2, y2) = points[:2]
    return [
        f'<polyline class="wire" points="{path}" fill="none" stroke="{LIGHT["line"]}" stroke-width="1.6"{dash}/>',
        f'<polygon class="head" points="{head}" fill="{LIGHT["line"]}"/>',
        *(text((x1 + x2) / 2, (y1 + y2) / 2 - 6, label, "middle", "soft") if isinstance(label, str) and label else []),
    ]


def svg(picture: dict[str, Any]) -> str:
    """Return a picture as the text of an SVG file."""
    (width, height), draw = picture["size"], {"box": box, "text": text, "arrow": arrow}
    fills = "".join(f".{kind}{{fill:{colour}}}" for kind, colour in DARK.items() if kind not in ("ink", "soft"))
    dark = (
        f"{fills}rect{{stroke:{DARK['line']}}}.wire{{stroke:{DARK['line']}}}.head{{fill:{DARK['line']}}}"
        f".ink-text{{fill:{DARK['ink']}}}.soft-text{{fill:{DARK['soft']}}}"
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="{FONT}">',
        f"<title>{escape(picture['title'])}</title>",
        f"<style>@media (prefers-color-scheme: dark){{{dark}}}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" '
        f'fill="{LIGHT["page"]}" stroke="{LIGHT["line"]}" stroke-width="0.5"/>',
    ]
    return "\n".join([*lines, *(line for kind, *part in picture["parts"] for line in draw[kind](*part)), "</svg>\n"])


def files(root: Path) -> dict[Path, str]:
    """Return all pictures, by their files."""
    pictures = tomllib.loads((root / "docs" / "data" / "pictures.toml").read_text(encoding="utf-8"))
    return {root / "docs" / "pictures" / f"{name}.svg": svg(picture) for name, picture in pictures.items()}
