"""Measured rows as tables, and as the page docs/results/acceptance.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks import study
from benchmarks.acceptance.measure import SELECTIONS, Case, Row
from triforce.tables import Table

Report = dict[str, Any]

SWEPT = {"budget": "budget", "chunk": "chunk size", "full_layers": "layers seen in full"}
"""Settings that are varied one at a time, and their names on the page."""

WORKLOADS = ("prose", "code", "needle", "copy")


def mean(rows: Iterable[Row], value: str) -> float | None:
    """Return the mean over all positions of some rows; None if there are none."""
    weighted = [(row[value] * row["positions"], row["positions"]) for row in rows]
    return sum(x for x, _ in weighted) / sum(n for _, n in weighted) if weighted else None


def default_case(report: Report) -> Case:
    """Return the setting that is kept while another is varied."""
    return Case(**report["usual"])


def rows_of(report: Report, workload: str, case: dict[str, Any]) -> list[Row]:
    """Return the rows of a workload that have these settings."""
    wanted_row = case | {"workload": workload}
    return [row for row in report["acceptance"] if wanted_row.items() <= row.items()]


def swept(report: Report, selection: str, what: str) -> dict[int, list[Row]]:
    """Return rows of one selection on prose, by the value of the varied setting; other settings are the default."""
    fixed = default_case(report)._replace(selection=selection)._asdict()
    del fixed[what]
    rows = rows_of(report, "prose", fixed)
    return {value: [row for row in rows if row[what] == value] for value in sorted({row[what] for row in rows})}


def tables(report: Report) -> list[tuple[Table, str]]:
    """Return all tables, and the pictures that stand beside them on the page."""
    swept = [(sweep_table(report, what), f"acceptance_{what}") for what in SWEPT]
    return [(workload_table(report), ""), *swept, (draft_table(report), ""), (locality_table(report), "locality")]


def markdown(report: Report) -> str:
    """Return the whole page docs/results/acceptance.md."""
    parts = [_head(report), *(_section(*pair) for pair in tables(report))]
    return "\n\n".join(parts) + "\n"


def _section(table: Table, picture: str) -> str:
    """Return a heading, the note, perhaps a picture, and the table."""
    drawn = f"![{table.title}](pictures/{picture}.svg)\n\n" if picture else ""
    return f"## {table.title}\n\n{table.note}\n\n{drawn}{table.grid() if table.rows else 'Nothing was measured.'}"


def cell(rows: list[Row]) -> str:
    """Return acceptance under both couplings."""
    means = [mean(rows, coupling) for coupling in ("rejection", "seeded")]
    return " / ".join("-" if x is None else f"{x:.3f}" for x in means)


def selections(report: Report) -> list[str]:
    """Return the selections that were measured, in their usual order."""
    return [name for name in SELECTIONS if any(row["selection"] == name for row in report["acceptance"])]


def _head(report: Report) -> str:
    sources = ", ".join(sorted({f"`{row['source']}`" for row in report["acceptance"]}))
    return f"""# Acceptance on text

This page compares selection policies by their acceptance. It is generated from `benchmarks/results/acceptance.json`,
which this command writes:

    {report["command"]}

Model: {report["model"]}. Machine: {report["machine"]}; {report["seconds"]:.0f} s.{study.origin(report)}

The text is given (teacher forcing). Each verification scores {report["width"]} positions: first the retrieval view
scores them, then the exact view, whose attention some policies use for the next selection. The temperature is
{report["temperature"]}, and top-p is {report["top_p"]}. A cell has two means over the positions. The first is the
acceptance probability under `rejection`, sum min(p, q). The second is the probability under `seeded` that both views
pick the same token. Both are computed from the distributions, so the only noise is the choice of texts. Prompts have
{report["context"]:,} tokens of {sources}."""


def workload_table(report: Report) -> Table:
    """Return acceptance by selection and workload."""
    fixed = default_case(report)
    by_name = {name: rows for name in WORKLOADS if (rows := rows_of(report, name, fixed._asdict()))}
    lines = []
    for selection in selections(report):
        case = fixed._replace(selection=selection)._asdict()
        lines.append([f"`{selection}`", *(cell(rows_of(report, name, case)) for name in by_name)])
    right_shares = (f"{mean(rows, 'right'):.3f}" for rows in by_name.values())
    lines.append(["target's most probable token is the text's", *right_shares])
    lines.append(["positions", *(str(sum(row["positions"] for row in rows)) for rows in by_name.values())])
    note = f"""`recent` has the sinks and the latest tokens, as mode `streaming` (StreamingLLM). `h2o` has the tokens
with the most attention so far in one half of its budget, and the latest tokens in the other half. `oracle` selects by
the attention of the verifying pass itself, which no decoder knows in advance (Top-K). `mean_key, once` selects only
once, after the prompt, as the paper's code does. The workload `copy` repeats a passage of the context's first quarter.
`needle` asks for numbers of the first half of the context, and only their digits count. The budget is {fixed.budget},
in chunks of {fixed.chunk}."""
    return Table("By selection and workload", note, ["selection", *by_name], lines)


def sweep_table(report: Report, what: str) -> Table:
    """Return acceptance by selection and by the value of the varied setting."""
    columns = {selection: swept(report, selection, what) for selection in selections(report)}
    values = sorted({value for rows in columns.values() for value in rows})
    lines = [[f"`{name}`", *(cell(rows.get(value, [])) for value in values)] for name, rows in columns.items()]
    settings = ", ".join(f"{SWEPT[name]} {getattr(default_case(report), name)}" for name in SWEPT if name != what)
    return Table(f"By {SWEPT[what]}", f"The workload is prose; {settings}.", [SWEPT[what], *map(str, values)], lines)


def draft_table(report: Report) -> Table:
    """Return acceptance of the draft by verifier and workload; no rows without a draft model."""
    draft_rows = report["draft"]
    verifiers = list(dict.fromkeys(row["verifier"] for row in draft_rows))
    names = [name for name in WORKLOADS if any(row["workload"] == name for row in draft_rows)]
    cells = {(judge, name): list[Row]() for judge in verifiers for name in names}
    for row in draft_rows:
        cells[row["verifier"], row["workload"]].append(row)
    lines = [[judge, *(cell(cells[judge, name]) for name in names)] for judge in verifiers]
    note = "This table has the acceptance of the draft model's tokens, by the exact view and by the retrieval view."
    return Table("The draft model", note, ["verifier", *names], lines)


def by_layer(report: Report) -> dict[int, list[Row]]:
    """Return rows of locality by their layer."""
    layers = sorted({row["layer"] for row in report["locality"]})
    return {layer: [row for row in report["locality"] if row["layer"] == layer] for layer in layers}


def locality_table(report: Report) -> Table:
    """Return overlap and attention by layer, at the first selection and at the end."""
    curves = ("overlap", "recovered", "recovered_once")
    lines = []
    for layer, rows in by_layer(report).items():
        ends = [[row[curve][at] for row in rows] for at in (0, -1) for curve in curves]
        lines.append([str(layer), *(f"{sum(end) / len(end):.3f}" for end in ends)])
    last_place = max((row["tokens"][-1] for row in report["locality"]), default=0)
    head = ["selected before", "attention", "attention, selected once"]
    columns = ["layer", *(f"{name}, {when}" for when in ("at first", f"after {last_place}") for name in head)]
    selection = default_case(report).selection
    note = f"""*Selected before* is the share of the first selection's chunks that `{selection}` still selects.
*Attention* is the share of the attention mass on visible tokens, with a selection after each verification and with one
selection only."""
    return Table("Locality", note, columns, lines)
