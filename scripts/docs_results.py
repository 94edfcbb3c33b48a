"""Tables and charts of docs/results/benchmarks.md, and tables of docs/results/cells.md, from benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from scripts.docs_charts import Bar, Group, chart
from scripts.docs_reference import code, filled, table
from triforce.bench.speed import AUTO, LOST_SPEEDUP, PLAIN

Row = dict[str, Any]
Rows = list[list[str]]
RESULTS = "benchmarks/results"
DOCS = "docs/results"


def report(root: Path, name: str) -> Row:
    content: Row = json.loads((root / RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def size(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 else str(tokens)


def speed(root: Path) -> Rows:
    """Return mean speedups of the shipped pair by context, and the least of `auto`."""
    rows = report(root, "speed")["rows"]
    modes = ("retrieval", "triforce", AUTO)
    shown = [["tokens read", "cells", *map(code, modes), "least of `auto`"]]
    for context in sorted({row["context"] for row in rows}):
        speedups = {
            mode: [float(row["speedup"]) for row in rows if (row["context"], row["mode"]) == (context, mode)]
            for mode in modes
        }
        means = [f"{mean(speedups[mode]):.2f}" for mode in modes]
        shown.append([size(context), str(len(speedups[AUTO])), *means, f"{min(speedups[AUTO]):.2f}"])
    return shown


def speed_cells(root: Path) -> Rows:
    """Return each cell of the shipped pair: plain decoding's tokens/s, and the speedup of each mode."""
    rows = report(root, "speed")["rows"]
    modes = list(dict.fromkeys(row["mode"] for row in rows if row["mode"] != PLAIN))
    return [["cell", "plain, tokens/s", *map(code, modes)], *cell_rows(rows, modes)]


def cell_rows(rows: Sequence[Row], modes: Sequence[str], column_field: str = "mode") -> Iterator[list[str]]:
    """Yield a row for each cell, with a speedup for each of `modes`; a speedup of `auto` below `LOST_SPEEDUP` is bold.

    column_field: the field of a row that names its column.
    """
    for cell in dict.fromkeys(cell_name(row) for row in rows):
        of_cell = [row for row in rows if cell_name(row) == cell]
        plain = next(row for row in of_cell if row["mode"] == PLAIN)
        speedups = {row[column_field]: row for row in of_cell if row["mode"] != PLAIN}
        figures = [speedup_text(speedups[mode]) if mode in speedups else "-" for mode in modes]
        yield [code(cell), f"{plain['tokens_per_second']:,.0f}", *figures]


def cell_name(row: Row) -> str:
    """Return the name of a cell, without the profile."""
    return str(row["cell"]).removesuffix(f" {row.get('profile')}")


def speedup_text(row: Row) -> str:
    figure = f"{row['speedup']:.2f}"
    return f"**{figure}**" if row["mode"] == AUTO and row["speedup"] < LOST_SPEEDUP else figure


UNSEEN = {"unseen_texts": "shipped pair", "unseen_texts_smollm2": "`smollm2`"}


def unseen(root: Path) -> Rows:
    """Return speedups of `auto` on texts by which no constant of the planner was tuned, by model and profile."""
    shown = [["model", "profile", "cells", "mean", "least", f"cells below {LOST_SPEEDUP}"]]
    for name, model in UNSEEN.items():
        auto = [row for row in report(root, name)["rows"] if row["mode"] == AUTO]
        for profile in dict.fromkeys(row["profile"] for row in auto):
            speedups = [float(row["speedup"]) for row in auto if row["profile"] == profile]
            lost_count = sum(speedup < LOST_SPEEDUP for speedup in speedups)
            figures = [f"{mean(speedups):.2f}", f"{min(speedups):.2f}", str(lost_count)]
            shown.append([model, profile, str(len(speedups)), *figures])
    return shown


def unseen_cells(name: str) -> Callable[[Path], Rows]:
    """Return a function that makes the table of cells of such texts. name: the file of rows."""

    def rows_of(root: Path) -> Rows:
        rows = [row for row in report(root, name)["rows"] if row["mode"] in (PLAIN, AUTO)]
        profiles = list(dict.fromkeys(row["profile"] for row in rows))
        return [["cell", "plain, tokens/s", *profiles], *cell_rows(rows, profiles, column_field="profile")]

    return rows_of


FOLDERS = {"compare": "", "compare_int8": ", int8 KV"}
"""Files of engines on a folder of safetensors, each with the suffix of the names of triforce's settings in it."""

ENGINES = {"llamacpp": "llama.cpp", "ikllamacpp": "ik_llama.cpp", "openvino": "OpenVINO", "onnx": "ONNX Runtime"}
OURS = ("ar", AUTO)


def engines(root: Path) -> Rows:
    """Return ratios of triforce's tokens/s to those of the fastest other engine, each with its best setting."""
    head = ["file", "tokens read", "reading", "plain", code(AUTO), "what loses"]
    return [head, *on_folder(root), *on_file(report(root, "compare_file")["summary"])]


def on_folder(root: Path) -> Iterator[list[str]]:
    for name, kv in FOLDERS.items():
        content = report(root, name)
        for best in content["summary"]:
            context = best["context"]
            best_rival = max(x for at, x in best["best"].items() if at != "triforce")
            ours = {
                row["variant"]: row["tokens_per_second"]
                for row in content["rows"]
                if (row["engine"], row["context"]) == ("triforce", context)
            }
            ratios = {"reading": best["prefill"]} | {mode: ours[mode + kv] / best_rival for mode in OURS}
            losing = [f"{what} {x:.2f}" for what, x in ratios.items() if x < 1]
            yield [
                code(f"{name}.json"),
                size(context),
                *(f"{x:.2f}" for x in ratios.values()),
                "; ".join(losing) or "none",
            ]


def on_file(summary: Sequence[Row]) -> Iterator[list[str]]:
    """Yield a row for each context, with the least and the largest ratio of its four texts."""
    for context in sorted({row["context"] for row in summary}):
        context_rows = [row for row in summary if row["context"] == context]
        (reading,), decoding = (
            [row for row in context_rows if row["what"] == what] for what in ("prefill", "decoding")
        )
        texts = [(f"{row['workload']} at {row['temperature']:g}", ratios_to_others(row, AUTO)) for row in decoding]
        losing = [
            f"{what}, {engine_of(at)} {x:.2f}"
            for what, over in [("reading", ratios_to_others(reading, "ar")), *texts]
            for at, x in over.items()
            if x < 1
        ]
        spans = [span(min(ratios_to_others(row, mode).values()) for row in decoding) for mode in OURS]
        least_ratio = f"{min(ratios_to_others(reading, 'ar').values()):.2f}"
        yield [code("compare_file.json"), size(context), least_ratio, *spans, "; ".join(losing) or "none"]


def ratios_to_others(row: Row, mode: str) -> dict[str, float]:
    """Return ratios of a mode's tokens/s to those of each setting of other engines."""
    return {at: x for at, x in row["over"][mode].items() if not at.startswith("triforce")}


def engine_of(setting: str) -> str:
    """Return the usual name of an engine, followed by `lookup` if the setting looks up n-grams."""
    engine, _, kind = setting.partition(" ")
    return " ".join([ENGINES[engine], *([kind] if kind == "lookup" else [])])


def span(values: Iterable[float]) -> str:
    ordered = sorted(values)
    return f"{ordered[0]:.2f} to {ordered[-1]:.2f}"


DRAFT_TEXTS = {"books": "a book", "questions": "answers"}
DRAFT_LEVELS = {"draft_speed": "AVX512-BF16", "draft_speed_avx2": "AVX2"}


def draft_ratios(root: Path) -> Iterator[tuple[str, int, dict[tuple[str, float], dict[str, float]]]]:
    """Yield level, context, and speedups with the draft of `smollm2`, by text and temperature and then by mode."""
    for name, level in DRAFT_LEVELS.items():
        summary = [row for row in report(root, name)["summary"] if row["what"] == "decoding"]
        for context in sorted({row["context"] for row in summary}):
            yield (
                level,
                context,
                {
                    (row["workload"], row["temperature"]): {
                        mode: row["over"][mode]["triforce ar"] for mode in (AUTO, "draft")
                    }
                    for row in summary
                    if row["context"] == context
                },
            )


def draft(root: Path) -> Rows:
    """Return speedups with the draft of `smollm2`: of mode `auto`, and of mode `draft` in brackets."""
    head = [f"{text_name}, T = {temperature:g}" for text_name in DRAFT_TEXTS.values() for temperature in (0, 0.6)]
    shown = [["kernels", "tokens read", *head]]
    for level, context, ratios in draft_ratios(root):
        of_texts = [ratios[text, temperature] for text in DRAFT_TEXTS for temperature in (0.0, 0.6)]
        figures = [f"{modes[AUTO]:.2f} ({modes['draft']:.2f})" for modes in of_texts]
        shown.append([level, size(context), *figures])
    return shown


def draft_chart(root: Path) -> str:
    """Return the chart of `auto` with the draft of `smollm2`: a bar for each text at both temperatures."""
    kinds = {"draft": "a book", "full": "answers"}
    groups = []
    for level, context, ratios in draft_ratios(root):
        bars = []
        for kind, text in zip(kinds, DRAFT_TEXTS, strict=True):
            speedups = sorted(ratios[text, temperature][AUTO] for temperature in (0.0, 0.6))
            bars.append(Bar(kind, *speedups))
        groups.append(Group(f"{size(context)} tokens, {level}", bars))
    title = "Speedup of mode auto with the draft for smollm2, at temperatures 0 and 0.6"
    return chart(title, "plain decoding", kinds, groups)


ENGINE_LABELS = {
    "compare.json": "shipped pair",
    "compare_int8.json": "shipped pair, int8 KV",
    "compare_file.json": "smollm2, GGUF file",
}
"""Labels of the files of the engines' chart."""


def engines_chart(root: Path) -> str:
    """Return the chart of triforce's tokens/s over those of the fastest other engine, by plain decoding and `auto`."""
    groups = []
    for file, context, _, plain, auto, _ in engines(root)[1:]:
        bars = [Bar(kind, *span_ends(figures)) for kind, figures in (("draft", plain), ("full", auto))]
        groups.append(Group(f"{ENGINE_LABELS[file.strip('`')]}, {context} tokens", bars))
    kinds = {"draft": "plain decoding", "full": "mode auto"}
    return chart("Tokens/s of triforce over those of the fastest other engine", "the other engine", kinds, groups)


def span_ends(figures: str) -> tuple[float, float]:
    """Return both ends of a span that `span` wrote; a single figure is both ends."""
    least, _, most = figures.partition(" to ")
    return float(least), float(most or least)


Table = Callable[[Path], Rows]
TABLES: dict[str, dict[str, Table]] = {
    "benchmarks.md": {"speed.json": speed, "unseen_texts*.json": unseen},
    "cells.md": {
        "speed.json": speed_cells,
        "unseen_texts.json": unseen_cells("unseen_texts"),
        "unseen_texts_smollm2.json": unseen_cells("unseen_texts_smollm2"),
        "compare*.json": engines,
        "draft_speed*.json": draft,
    },
}
"""The function that makes each table, by its page and then by its files of rows."""
CHARTS: dict[str, Callable[[Path], str]] = {"engines": engines_chart, "draft": draft_chart}
"""The function that makes each chart, by its name in docs/results/pictures."""


def files(root: Path) -> dict[Path, str]:
    """Return the pages with the tables of the rows, and the charts, by their files."""
    texts = {root / DOCS / "pictures" / f"{name}.svg": draw(root) for name, draw in CHARTS.items()}
    for page, tables in TABLES.items():
        text = (root / DOCS / page).read_text(encoding="utf-8")
        for source, rows in tables.items():
            text = filled(text, f"{RESULTS}/{source}", table(rows(root)))
        texts[root / DOCS / page] = text
    return texts
