"""The tables of docs/results/benchmarks.md: what rows in benchmarks/results come to, losing cells named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from scripts.docs_reference import code, filled, table
from triforce.bench.speed import AUTO, LOST

Row = dict[str, Any]
Rows = list[list[str]]
RESULTS = "benchmarks/results"
PAGE = "docs/results/benchmarks.md"


def report(root: Path, name: str) -> Row:
    content: Row = json.loads((root / RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def size(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 else str(tokens)


def lost_cells(rows: Iterable[Row]) -> str:
    """Return the cells that lose to plain decoding, the worst first, with their speedups."""
    losing = sorted((row for row in rows if row["speedup"] < LOST), key=lambda row: float(row["speedup"]))
    names = [row["cell"].removesuffix(f" {row.get('profile')}") for row in losing]
    return ", ".join(f"{code(name)} {row['speedup']:.2f}" for name, row in zip(names, losing, strict=True)) or "none"


def verdict_columns(rows: Sequence[Row]) -> list[str]:
    """Return the mean and the least of some speedups, and the cells that lose."""
    speedups = [float(row["speedup"]) for row in rows]
    return [f"{mean(speedups):.2f}", f"{min(speedups):.2f}", lost_cells(rows)]


def speed(root: Path) -> Rows:
    """Return speedups of the shipped pair by context: means of fixed modes, and what becomes of `auto`."""
    rows = report(root, "speed")["rows"]
    fixed = ("retrieval", "triforce")
    shown = [["tokens read", "cells", *map(code, (*fixed, AUTO)), "least of `auto`", f"cells of `auto` below {LOST}"]]
    for context in sorted({row["context"] for row in rows}):
        context_rows = [row for row in rows if row["context"] == context]
        of = {mode: [row for row in context_rows if row["mode"] == mode] for mode in (*fixed, AUTO)}
        means = [f"{mean(row['speedup'] for row in of[mode]):.2f}" for mode in fixed]
        shown.append([size(context), str(len(of[AUTO])), *means, *verdict_columns(of[AUTO])])
    return shown


UNSEEN = {"unseen_texts": "shipped pair", "unseen_texts_smollm2": "`smollm2`"}


def unseen(root: Path) -> Rows:
    """Return what `auto` makes of texts that no constant of the planner was chosen by."""
    shown = [["model", "profile", "cells", "mean", "least", f"cells below {LOST}"]]
    for name, model in UNSEEN.items():
        auto = [row for row in report(root, name)["rows"] if row["mode"] == AUTO]
        for profile in dict.fromkeys(row["profile"] for row in auto):
            profile_rows = [row for row in auto if row["profile"] == profile]
            shown.append([model, profile, str(len(profile_rows)), *verdict_columns(profile_rows)])
    return shown


FOLDERS = {"compare": "", "compare_int8": ", int8 KV"}
"""Files of engines on a folder, and how the names of our settings end that are compared."""

ENGINES = {"llamacpp": "llama.cpp", "openvino": "OpenVINO", "onnx": "ONNX Runtime"}
OURS = ("ar", AUTO)


def engines(root: Path) -> Rows:
    """Return our tokens/s over those of the fastest other engine, each with its best setting."""
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
    """Yield a row for each context; of four texts the least ratio and the largest."""
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
    """Return tokens/s of a mode of ours over each setting of other engines."""
    return {at: x for at, x in row["over"][mode].items() if not at.startswith("triforce")}


def engine_of(setting: str) -> str:
    """Return what people call an engine, and `lookup` behind it if that setting looks up n-grams."""
    engine, _, kind = setting.partition(" ")
    return " ".join([ENGINES[engine], *([kind] if kind == "lookup" else [])])


def span(values: Iterable[float]) -> str:
    ordered = sorted(values)
    return f"{ordered[0]:.2f} to {ordered[-1]:.2f}"


def draft(root: Path) -> Rows:
    """Return what `auto`, and in brackets mode `draft`, make of plain decoding with the draft of `smollm2`."""
    texts = {"books": "a book", "questions": "answers"}
    head = [f"{text_name}, T = {temperature:g}" for text_name in texts.values() for temperature in (0, 0.6)]
    shown = [["kernels", "tokens read", *head]]
    for level, name in (("AVX512-BF16", "draft_speed"), ("AVX2", "draft_speed_avx2")):
        summary = [row for row in report(root, name)["summary"] if row["what"] == "decoding"]
        for context in sorted({row["context"] for row in summary}):
            of = {(row["workload"], row["temperature"]): row["over"] for row in summary if row["context"] == context}
            cells = [of[text, temperature] for text in texts for temperature in (0.0, 0.6)]
            ratios = [[over[mode]["triforce ar"] for mode in (AUTO, "draft")] for over in cells]
            shown.append([level, size(context), *(f"{auto:.2f} ({lookup_ratio:.2f})" for auto, lookup_ratio in ratios)])
    return shown


TABLES: dict[str, Callable[[Path], Rows]] = {
    "speed.json": speed,
    "unseen_texts*.json": unseen,
    "compare*.json": engines,
    "draft_speed*.json": draft,
}
"""The function that makes each table of the page, by its files."""


def files(root: Path) -> dict[Path, str]:
    """Return the page with the tables of the rows."""
    page = root / PAGE
    text = page.read_text(encoding="utf-8")
    for source, rows in TABLES.items():
        text = filled(text, f"{RESULTS}/{source}", table(rows(root)))
    return {page: text}
