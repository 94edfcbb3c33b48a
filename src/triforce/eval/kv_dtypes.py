"""Kinds of KV of one model beside each other: what rounding costs, by the same measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triforce.eval.tables import Table, percent, tokens

Row = dict[str, Any]
"""A kind of KV: its name (`kv`), the `model`, tokens of a reading (`context`), and results by measurement."""
MEASURED = ("bits", "positions", "far", "needle", "copy")
"""Measurements that depend on KV, and on nothing but the target."""


def tables(found: Sequence[Row], note: str = "") -> list[Table]:
    """Return tables of what all kinds were measured by; the first kind is what the others are compared with."""
    some = {name for name in MEASURED if name in found[0] and not any("skipped" in row[name] for row in found)}
    by_position = {"positions": "", "far": ", longest readings"}
    quality = [_quality(found, note)] if some - by_position.keys() else []
    return quality + [_losses(found, name, which) for name, which in by_position.items() if name in some]


def _quality(found: Sequence[Row], note: str) -> Table:
    exact = found[0]
    lines = []
    for row in found:
        cells = [row["kv"]]
        for kind, figures in _of(row, "bits", "kinds").items():
            bits = figures["target"]
            before = exact["bits"]["kinds"][kind]["target"]
            cells += [f"{bits:.4f}", f"{bits / before - 1:+.2%}"]
        lines.append([*cells, _needles(row), *(percent(each["again"]) or "-" for each in _copies(row))])
    kinds = [cell for kind in _of(exact, "bits", "kinds") for cell in (f"bits per byte, {kind}", "change")]
    copied = [f"copied from {tokens(each['distance'])}" for each in _copies(exact)]
    words = (
        f"Readings of {tokens(exact['context'])} tokens. Needles: greedy answers that name the right number. Copied: "
        "tokens predicted right the second time, so far behind the first."
    )
    return Table(f"KV of {exact['model']}", f"{words} {note}".strip(), ["KV", *kinds, "needles", *copied], lines)


def _of(row: Row, name: str, field: str) -> dict[str, Any]:
    """Return a part of a result; nothing where it was left out."""
    found: dict[str, Any] = row.get(name, {}).get(field, {})
    return found


def _needles(row: Row) -> str:
    """Return how many were found, and of these in the longest readings."""
    cells = row.get("needle", {}).get("cells", [])
    if not cells:
        return "-"
    longest = max(cell["length"] for cell in cells)
    far = [cell for cell in cells if cell["length"] == longest]
    return f"{_found(cells)}; {_found(far)} in {tokens(longest)}"


def _found(cells: Sequence[Row]) -> str:
    return f"{sum(cell['right'] for cell in cells)} of {sum(cell['asked'] for cell in cells)}"


def _copies(row: Row) -> list[Row]:
    copies: list[Row] = row.get("copy", {}).get("distances", [])
    return copies


def _losses(found: Sequence[Row], name: str, which: str) -> Table:
    """Return the increase of the loss by position, of prose or what there is, as measured in these readings."""
    exact = found[0]
    kind = next(iter(_of(exact, name, "kinds")), "")
    buckets = [_of(row, name, "kinds").get(kind, []) for row in found]
    lines = []
    for n, bucket in enumerate(buckets[0]):
        more = [f"{each[n]['nats'] - bucket['nats']:+.4f}" for each in buckets[1:]]
        lines.append([f"{tokens(bucket['from'])} to {tokens(bucket['to'])}", f"{bucket['nats']:.3f}", *more])
    note = "Nats per token with KV that is not rounded, and how many more with each other kind."
    header = ["position", *(row["kv"] for row in found)]
    return Table(f"Loss by position of {exact['model']}, {kind}{which}", note, header, lines)
