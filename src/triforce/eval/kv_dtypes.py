"""Comparison of KV dtypes of one model: the cost of rounding, by the same measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triforce.tables import Table, percent, tokens

Row = dict[str, Any]
"""Results of one KV dtype: its name (`kv`), the `model`, tokens of a window (`context`), results by measurement."""
MEASURED = ("bits", "positions", "far", "needle", "copy")
"""Measurements that depend on KV and on the target only."""


def tables(kv_rows: Sequence[Row], note: str = "") -> list[Table]:
    """Return tables of the measurements that all rows have. The first row is the reference of the others."""
    shared_names = {
        name for name in MEASURED if name in kv_rows[0] and not any("skipped" in row[name] for row in kv_rows)
    }
    by_position = {"positions": "", "far": ", longest readings"}
    quality = [_quality_table(kv_rows, note)] if shared_names - by_position.keys() else []
    return quality + [
        _loss_table(kv_rows, name, title_suffix) for name, title_suffix in by_position.items() if name in shared_names
    ]


def _quality_table(kv_rows: Sequence[Row], note: str) -> Table:
    exact_row = kv_rows[0]
    lines = []
    for row in kv_rows:
        cells = [row["kv"]]
        for kind, figures in _section(row, "bits", "kinds").items():
            bits = figures["target"]
            exact_bits = exact_row["bits"]["kinds"][kind]["target"]
            cells += [f"{bits:.4f}", f"{bits / exact_bits - 1:+.2%}"]
        lines.append([*cells, _needles(row), *(percent(copy_row["again"]) or "-" for copy_row in _copies(row))])
    kinds = [cell for kind in _section(exact_row, "bits", "kinds") for cell in (f"bits per byte, {kind}", "change")]
    copied = [f"copied from {tokens(copy_row['distance'])}" for copy_row in _copies(exact_row)]
    words = (
        f"Readings of {tokens(exact_row['context'])} tokens. Needles: greedy answers that name the right number. "
        "Copied: tokens predicted right when a passage comes again at this distance."
    )
    return Table(f"KV of {exact_row['model']}", f"{words} {note}".strip(), ["KV", *kinds, "needles", *copied], lines)


def _section(row: Row, name: str, field: str) -> dict[str, Any]:
    """Return a field of a measurement's result; an empty object if it was skipped."""
    section: dict[str, Any] = row.get(name, {}).get(field, {})
    return section


def _needles(row: Row) -> str:
    """Return the number of right answers as text, over all lengths and in the longest haystacks."""
    cells = row.get("needle", {}).get("cells", [])
    if not cells:
        return "-"
    longest = max(cell["length"] for cell in cells)
    longest_cells = [cell for cell in cells if cell["length"] == longest]
    return f"{_right_of_asked(cells)}; {_right_of_asked(longest_cells)} in {tokens(longest)}"


def _right_of_asked(cells: Sequence[Row]) -> str:
    return f"{sum(cell['right'] for cell in cells)} of {sum(cell['asked'] for cell in cells)}"


def _copies(row: Row) -> list[Row]:
    copies: list[Row] = row.get("copy", {}).get("distances", [])
    return copies


def _loss_table(kv_rows: Sequence[Row], name: str, title_suffix: str) -> Table:
    """Return a table of the increase of the loss by position, of the first kind of text that was measured."""
    exact_row = kv_rows[0]
    kind = next(iter(_section(exact_row, name, "kinds")), "")
    buckets = [_section(row, name, "kinds").get(kind, []) for row in kv_rows]
    lines = []
    for n, bucket in enumerate(buckets[0]):
        increases = [f"{kv_buckets[n]['nats'] - bucket['nats']:+.4f}" for kv_buckets in buckets[1:]]
        lines.append([f"{tokens(bucket['from'])} to {tokens(bucket['to'])}", f"{bucket['nats']:.3f}", *increases])
    note = "Nats per token with KV that is not rounded, and the increase with each other kind of KV."
    header = ["position", *(row["kv"] for row in kv_rows)]
    return Table(f"Loss by position of {exact_row['model']}, {kind}{title_suffix}", note, header, lines)
