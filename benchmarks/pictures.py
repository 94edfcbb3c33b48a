"""Pictures of measured rows as small SVG files: of `triforce bench speed`, and of acceptance. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.acceptance.report import SWEPT, Report, by_layer, mean, selections, swept
from triforce.bench.speed import PLAIN, label, mean_speedups


@contextmanager
def panels(file: Path, count: int, width: float, ylabel: str) -> Iterator[Any]:
    """Yield panels side by side, `width` inches together; with a legend of what the last one has they are saved.

    Pictures of the same rows are the same files: they do not have the time of day.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "triforce", "svg.fonttype": "none", "font.size": 9, "axes.grid": True}
    from matplotlib import pyplot

    size = (width, 3.2)
    figure, (axes,) = pyplot.subplots(1, count, figsize=size, sharey=True, squeeze=False, layout="constrained")
    yield axes
    axes[0].set_ylabel(ylabel)
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def draw_speed(rows: list[dict[str, Any]], folder: Path) -> None:
    """speed.svg: the mean speedup of each mode along each axis that has several values."""
    several = ("context", "temperature", "workload", "batch")
    axes = [axis for axis in several if len({row[axis] for row in rows}) > 1] or ["context"]
    with panels(folder / "speed.svg", len(axes), 3.3 * len(axes), "speedup over plain decoding") as panel_axes:
        for panel, axis in zip(panel_axes, axes, strict=True):
            for mode in dict.fromkeys(row["mode"] for row in rows if row["mode"] != PLAIN):
                points = mean_speedups(rows, mode, axis)
                panel.plot([label(axis, value) for value in points], list(points.values()), marker=".", label=mode)
            panel.axhline(1, color="black", linewidth=0.8)
            panel.set(title=f"by {axis}")
            panel.tick_params(axis="x", rotation=45)


def draw_acceptance(report: Report, folder: Path) -> None:
    """Draw a picture for each thing that is varied, and one of locality."""
    folder.mkdir(parents=True, exist_ok=True)
    for what in SWEPT:
        _draw_sweep(report, what, folder / f"acceptance_{what}.svg")
    _draw_locality(report, folder / "locality.svg")


def _draw_sweep(report: Report, what: str, file: Path) -> None:
    """Plot acceptance by what is varied: a panel for each coupling, a line for each selection."""
    with panels(file, 2, 9, "acceptance") as panel_axes:
        for panel, coupling in zip(panel_axes, ("rejection", "seeded"), strict=True):
            for selection in selections(report):
                points = {value: mean(rows, coupling) for value, rows in swept(report, selection, what).items()}
                style = "--" if selection == "oracle" else "-"
                panel.plot([str(value) for value in points], list(points.values()), style, marker=".", label=selection)
            panel.set(title=coupling, xlabel=SWEPT[what])


def _draw_locality(report: Report, file: Path) -> None:
    """Plot chunks kept and attention in sight by tokens since the first selection, a line a layer."""
    titles = {"overlap": "chunks kept", "recovered": "attention, anew", "recovered_once": "attention, once"}
    with panels(file, 3, 11, "share") as panel_axes:
        for panel, (curve, title) in zip(panel_axes, titles.items(), strict=True):
            for layer, rows in by_layer(report).items():
                steps = [sum(values) / len(values) for values in zip(*(row[curve] for row in rows), strict=True)]
                panel.plot(rows[0]["tokens"], steps, label=f"layer {layer}")
            panel.set(title=title, xlabel="tokens since the first selection", ylim=(0, 1))
