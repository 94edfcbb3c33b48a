"""Pictures of the rows of `triforce bench speed`. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.acceptance.pictures import save, styled
from triforce.bench.speed_tables import label, means
from triforce.bench.summary import PLAIN

Row = dict[str, Any]


AXES = ("context", "temperature", "workload", "batch")


def draw(rows: list[Row], folder: Path) -> None:
    """speed.svg: the mean speedup of each mode along each axis that has several values."""
    from matplotlib import pyplot

    styled()
    axes = [axis for axis in AXES if len({row[axis] for row in rows}) > 1] or ["context"]
    size = (3.3 * len(axes), 3.2)
    figure, panels = pyplot.subplots(1, len(axes), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for panel, axis in zip(panels[0], axes, strict=True):
        for mode in dict.fromkeys(row["mode"] for row in rows if row["mode"] != PLAIN):
            points = means(rows, mode, axis)
            panel.plot([label(axis, value) for value in points], list(points.values()), marker=".", label=mode)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(title=f"by {axis}")
        panel.tick_params(axis="x", rotation=45)
    panels[0][0].set_ylabel("speedup over plain decoding")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    save(figure, folder / "speed.svg")
