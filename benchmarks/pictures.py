"""Pictures of the rows of `triforce bench speed`. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from triforce.bench.acceptance.pictures import save, styled
from triforce.bench.tables import size

Row = dict[str, Any]


def draw(rows: list[Row], folder: Path) -> None:
    """speed.svg: the mean speedup of each mode by context, by temperature and by workload."""
    from matplotlib import pyplot

    styled()
    axes = [
        axis for axis in ("context", "temperature", "workload", "batch") if len({row.get(axis) for row in rows}) > 1
    ]
    figure, panels = pyplot.subplots(
        1, max(1, len(axes)), figsize=(3.3 * max(1, len(axes)), 3.2), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, axis in zip(panels[0], axes or ["context"], strict=True):
        values = (
            list(dict.fromkeys(row[axis] for row in rows)) if axis == "workload" else sorted({r[axis] for r in rows})
        )
        for mode in dict.fromkeys(row["mode"] for row in rows if row["mode"] != "ar"):
            points = {v: [r["speedup"] for r in rows if r["mode"] == mode and r[axis] == v] for v in values}
            shown = {v: fmean(found) for v, found in points.items() if found}
            panel.plot([_name(axis, v) for v in shown], list(shown.values()), marker=".", label=mode)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(title=f"by {axis}")
        panel.tick_params(axis="x", rotation=45)
    panels[0][0].set_ylabel("speedup over plain decoding")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    save(figure, folder / "speed.svg")


def _name(axis: str, value: Any) -> str:
    return size(value) if axis == "context" else str(value)
