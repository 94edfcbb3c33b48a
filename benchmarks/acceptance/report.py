"""Measured rows as tables, and as the page docs/results/acceptance.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks import study
from benchmarks.acceptance.measure import SELECTIONS, Case, Row
from triforce.eval import Table

Report = dict[str, Any]

SWEPT = {"budget": "budget", "chunk": "chunk size", "full_layers": "layers seen in full"}
"""Things varied, the rest being as usual, and their names."""

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
    """Return rows on prose of one selection by the value of what is varied, the rest being as usual."""
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

Made from the rows in `benchmarks/results/acceptance.json`, do not edit:

    {report["command"]}

Model: {report["model"]}. Machine: {report["machine"]}; {report["seconds"]:.0f} s.{study.origin(report)}

How much of what one view proposes the next one keeps, where the text is given (teacher forcing). Each verification
scores {report["width"]} positions: the retrieval view scores them, then the exact view, whose attention the next
selection may go by. Temperature {report["temperature"]}, top-p {report["top_p"]}. A cell has the mean over positions
under `rejection`, sum min(p, q), and under `seeded`, the chance that both picks are one token: none is drawn, so there
is no sampling noise beyond the choice of texts. Prompts of {report["context"]:,} tokens of {sources}."""


def workload_table(report: Report) -> Table:
    """Return acceptance by selection and workload."""
    fixed = default_case(report)
    by_name = {name: rows for name in WORKLOADS if (rows := rows_of(report, name, fixed._asdict()))}
    lines = []
    for selection in selections(report):
        case = fixed._replace(selection=selection)._asdict()
        lines.append([f"`{selection}`", *(cell(rows_of(report, name, case)) for name in by_name)])
    lines.append(["target's first choice is the text", *(f"{mean(rows, 'right'):.3f}" for rows in by_name.values())])
    lines.append(["positions", *(str(sum(row["positions"] for row in rows)) for rows in by_name.values())])
    note = f"""`recent` is what the mode `streaming` sees: sinks and the latest tokens (StreamingLLM). `h2o` keeps what
drew the most attention so far, and in the other half of its budget the latest tokens. `oracle` picks by the attention
of the very pass that verifies, which no decoder can know (Top-K). `mean_key, once` selects after the prompt only, as
the paper's code does. `copy` repeats a passage of the first quarter of the context; `needle` asks for numbers given in
its first half, and only the digits count. Budget {fixed.budget}, chunks of {fixed.chunk}."""
    return Table("Where relevance matters", note, ["selection", *by_name], lines)


def sweep_table(report: Report, what: str) -> Table:
    """Return acceptance by selection and the value of what is varied."""
    columns = {selection: swept(report, selection, what) for selection in selections(report)}
    values = sorted({value for rows in columns.values() for value in rows})
    lines = [[f"`{name}`", *(cell(rows.get(value, [])) for value in values)] for name, rows in columns.items()]
    settings = ", ".join(f"{SWEPT[name]} {getattr(default_case(report), name)}" for name in SWEPT if name != what)
    return Table(f"By {SWEPT[what]}", f"On prose; {settings}.", [SWEPT[what], *map(str, values)], lines)


def draft_table(report: Report) -> Table:
    """Return acceptance of the draft by verifier and workload; no rows without a draft model."""
    draft_rows = report["draft"]
    verifiers = list(dict.fromkeys(row["verifier"] for row in draft_rows))
    names = [name for name in WORKLOADS if any(row["workload"] == name for row in draft_rows)]
    cells = {(judge, name): list[Row]() for judge in verifiers for name in names}
    for row in draft_rows:
        cells[row["verifier"], row["workload"]].append(row)
    lines = [[judge, *(cell(cells[judge, name]) for name in names)] for judge in verifiers]
    note = "What the exact view, and the retrieval view, keep of what the draft model proposes."
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
    head = ["kept", "attention", "attention, once"]
    columns = ["layer", *(f"{name}, {when}" for when in ("at first", f"after {last_place}") for name in head)]
    selection = default_case(report).selection
    note = f"""Of the chunks that `{selection}` selected at first, the share still selected; and the share
of the attention mass that falls on what is in sight, when selected anew at each verification and when selected once."""
    return Table("Locality", note, columns, lines)
