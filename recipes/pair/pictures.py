"""Draws the pictures of the model card as small SVG files. Needs matplotlib (`make install-dev`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from triforce.tables import tokens

Results = dict[str, Any]


def draw(results: Results, folder: Path) -> list[tuple[str, str]]:
    """Draw the pictures whose results of `triforce eval` exist. Returns their file names and captions."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "triforce", "svg.fonttype": "none", "font.size": 9, "axes.grid": True}
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [(name, caption) for name, (picture, caption) in PICTURES.items() if picture(results, folder / name)]
    return drawn


def _positions(results: Results, path: Path) -> bool:
    """Draw loss over position, with a line for each kind of text. Lines of the longest readings are dashed.

    Returns whether the picture was drawn.
    """
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    ends = set()
    for name, style in (("positions", "o-"), ("far", "s--")):
        for kind, buckets in results[name].get("kinds", {}).items():
            label = kind + (", longest readings" if name == "far" else "")
            axes.plot([bucket["to"] for bucket in buckets], [bucket["nats"] for bucket in buckets], style, label=label)
            ends |= {bucket["to"] for bucket in buckets}
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ends), map(tokens, sorted(ends)))
    axes.set(xlabel="position, up to", ylabel="nats per token")
    axes.legend()
    return _save(figure, path)


def _needles(results: Results, path: Path) -> bool:
    """Draw the share of right answers by depth and length. Returns whether the picture was drawn."""
    from matplotlib import pyplot

    cells = results["needle"].get("cells", [])
    if not cells:
        return False
    lengths, depths = (sorted({cell[what] for cell in cells}) for what in ("length", "depth"))
    shares = {(cell["depth"], cell["length"]): cell["right"] / cell["asked"] for cell in cells}
    grid = [[shares[depth, length] for length in lengths] for depth in depths]
    figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    axes.grid(False)
    image = axes.imshow(grid, aspect="auto", cmap="viridis", vmin=0, vmax=1)
    axes.set_xticks(range(len(lengths)), map(tokens, lengths))
    axes.set_yticks(range(len(depths)), map("{:.0%}".format, depths))
    axes.set(xlabel="length in tokens", ylabel="depth of the needle")
    figure.colorbar(image, label="right answers")
    return _save(figure, path)


def _save(figure: Any, path: Path) -> bool:
    from matplotlib import pyplot

    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True


PICTURES: dict[str, tuple[Callable[[Results, Path], bool], str]] = {
    "positions.svg": (_positions, "Loss by position"),
    "needles.svg": (_needles, "Needles found, by depth and length"),
}
