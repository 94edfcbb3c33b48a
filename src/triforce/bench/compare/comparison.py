"""Rows of engines as tables, and what they come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triforce.bench.compare.run import ENGINES, OURS, PLAIN
from triforce.eval import Table
from triforce.eval.tables import percent, tokens

Row = dict[str, Any]


def summary(found: Sequence[Row]) -> list[Row]:
    """Return by context the fastest accepted setting of each engine, and our tokens/s over the best of the others.

    `decode` is of our best mode, `plain` of our plain decoding, `prefill` of tokens/s of prefill; None where there is
    nothing to compare with.
    """
    made = []
    for context in sorted({row["context"] for row in found}):
        counted = [row for row in found if row["context"] == context and row.get("accepted")]
        ours, others = ([row for row in counted if (row["engine"] == OURS) == mine] for mine in (True, False))
        plain = [row for row in ours if (row["engine"], row["variant"]) == PLAIN]
        best = {engine: _most([r for r in counted if r["engine"] == engine], "tokens_per_second") for engine in ENGINES}
        made.append({
            "context": context, "best": {name: most for name, most in best.items() if most},
            "decode": _ratio(ours, others, "tokens_per_second"), "plain": _ratio(plain, others, "tokens_per_second"),
            "prefill": _ratio(ours, others, "prefill_tokens_per_second"),
        })  # fmt: skip
    return made


def _ratio(ours: Sequence[Row], others: Sequence[Row], name: str) -> float | None:
    mine, theirs = _most(ours, name), _most(others, name)
    return mine / theirs if mine and theirs else None


def _most(rows: Sequence[Row], name: str) -> float | None:
    return max((float(row[name]) for row in rows), default=None)


def tables(found: Sequence[Row]) -> list[Table]:
    """A table for each context, and what is missing."""
    made = [_table(context, found) for context in sorted({row["context"] for row in found})]
    absent = {(row["engine"], row["variant"]): row.get("missing") or row.get("failed") for row in found}
    lines = [[f"{ENGINES[engine].title}, {variant}", why] for (engine, variant), why in absent.items() if why]
    note = "An engine without an extra is left out; one that failed says why."
    return [*made, *([Table("Not compared", note, ["engine", "why"], lines)] if lines else [])]


def _table(context: int, found: Sequence[Row]) -> Table:
    rows = [row for row in found if row["context"] == context and "tokens_per_second" in row]
    plain = next((row for row in rows if (row["engine"], row["variant"]) == PLAIN), None)
    lines = []
    for row in rows:
        ratio = f"{row['tokens_per_second'] / plain['tokens_per_second']:.2f}" if plain else "-"
        name = f"{ENGINES[row['engine']].title} {row['version']}, {row['variant']}"
        busy = f"{row['busy_cores']:.2f}" + ("" if row["accepted"] else ", rejected")
        lines.append([
            name, f"{row['prefill_seconds']:.1f}", f"{row['tokens_per_second']:.1f}", ratio, busy,
            percent(row["as_plain"]) or "-", percent(row["repeated_8_grams"]),
        ])  # fmt: skip
    note = (
        "Greedy; seconds to the first token, then tokens/s of the others, and these over our plain decoding's; medians "
        "of three runs, or one of a minute. Rows with too few busy cores (1.7 of 2) are rejected. As plain: the share "
        "of tokens before the first that differs from our plain decoding's; other engines round otherwise, so theirs "
        "may part anywhere. Repeats: the share of 8-grams that the text had before, which lookup lives on."
    )
    header = ["engine", "prefill, s", "tokens/s", "of plain", "busy cores", "as plain", "repeats"]
    return Table(f"Decoding after {tokens(context)} tokens", note, header, lines)
