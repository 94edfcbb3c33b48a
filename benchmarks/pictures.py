"""Pictures of measured rows as small SVG files: of `triforce bench speed`, and of acceptance. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.acceptance.report import SWEPT, Report, mean, selections, swept
from triforce.bench.speed_tables import PLAIN, label, means


def draw_speed(rows: list[dict[str, Any]], folder: Path) -> None:
    """speed.svg: the mean speedup of each mode along each axis that has several values."""
    from matplotlib import pyplot

    styled()
    several = ("context", "temperature", "workload", "batch")
    axes = [axis for axis in several if len({row[axis] for row in rows}) > 1] or ["context"]
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


def draw_acceptance(report: Report, folder: Path) -> None:
    """Draw a picture for each thing that is varied, and one of locality."""
    styled()
    folder.mkdir(parents=True, exist_ok=True)
    for what in SWEPT:
        save(_sweep(report, what), folder / f"acceptance_{what}.svg")
    save(_locality(report), folder / "locality.svg")


def _sweep(report: Report, what: str) -> Any:
    """Plot acceptance by what is varied: a panel for each coupling, a line for each selection."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for panel, coupling in zip(panels, ("rejection", "seeded"), strict=True):
        for selection in selections(report):
            points = {value: mean(rows, coupling) for value, rows in swept(report, selection, what).items()}
            style = "--" if selection == "oracle" else "-"
            panel.plot([str(value) for value in points], list(points.values()), style, marker=".", label=selection)
        panel.set(title=coupling, xlabel=SWEPT[what])
    panels[0].set_ylabel("acceptance")
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    return figure


def _locality(report: Report) -> Any:
    """Plot chunks kept and attention in sight by tokens since the first selection, a line a layer."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(11, 3.2), sharey=True, layout="constrained")
    titles = {"overlap": "chunks kept", "recovered": "attention, anew", "recovered_once": "attention, once"}
    for panel, (curve, title) in zip(panels, titles.items(), strict=True):
        for layer in sorted({row["layer"] for row in report["locality"]}):
            rows = [row for row in report["locality"] if row["layer"] == layer]
            steps = [sum(values) / len(values) for values in zip(*(row[curve] for row in rows), strict=True)]
            panel.plot(rows[0]["tokens"], steps, label=f"layer {layer}")
        panel.set(title=title, xlabel="tokens since the first selection", ylim=(0, 1))
    panels[0].set_ylabel("share")
    figure.legend(*panels[2].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    return figure


def styled() -> None:
    """Set a style in which pictures of the same rows are the same files."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "triforce", "svg.fonttype": "none", "font.size": 9, "axes.grid": True}


def save(figure: Any, path: Path) -> None:
    """Save a figure, without the time of day."""
    from matplotlib import pyplot

    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
