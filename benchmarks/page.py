"""Makes build/benchmarks.md, docs/results/acceptance.md and pictures of results from the rows in benchmarks/results.

    python -m benchmarks.page

What has not been measured is said to be missing, with the command that measures it.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import draft_acceptance, kv_quality, pictures, plain_draft, quality, study, unseen_texts
from benchmarks.acceptance.report import markdown as acceptance_page
from benchmarks.compare import on_file_tables, on_folder
from benchmarks.paper.__main__ import EXPERIMENTS, absent
from triforce.bench import lossless
from triforce.bench.speed import speed_tables, speedup, verdict
from triforce.tables import Table, percent

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs" / "results"
TABLES = ROOT / "build" / "benchmarks.md"
Report = dict[str, Any]

HEAD = """# Benchmarks

Made by `python -m benchmarks.page` from the rows in `benchmarks/results`, do not edit. Speedups are ratios of one
process, of turns that took place one after another; their spread is the range of the middle half of the turns. Absolute
figures are those of one shared machine and good for little else. Losses are listed like gains. Commits and benches
behind the commands: [where a figure comes from](../contributing/measuring.md#where-a-figure-comes-from)."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="the rows")
    parser.add_argument("--docs", type=Path, default=DOCS, metavar="FOLDER", help="where acceptance and pictures go")
    parser.add_argument("--tables", type=Path, default=TABLES, metavar="FILE", help="where tables of all rows go")


def make(options: Namespace) -> None:
    """Write the pages and their pictures."""
    (options.docs / "pictures").mkdir(parents=True, exist_ok=True)
    reports = {name: read(options.results / f"{name}.json") for name in (*SECTIONS, "acceptance")}
    options.tables.parent.mkdir(parents=True, exist_ok=True)
    options.tables.write_text(page(reports), encoding="utf-8")
    if report := reports["acceptance"]:
        (options.docs / "acceptance.md").write_text(acceptance_page(report), encoding="utf-8")
        pictures.draw_acceptance(report, options.docs / "pictures")
    if report := reports["speed"]:
        pictures.draw_speed(report["rows"], options.docs / "pictures")


def read(file: Path) -> Report | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def page(reports: dict[str, Report | None]) -> str:
    """Return tables of all rows."""
    parts = [HEAD]
    for name, (title, command, section) in SECTIONS.items():
        report = reports.get(name)
        missing = f"Not measured yet: `{command} --json benchmarks/results/{name}.json`."
        parts.append(f"## {title}\n\n{section(report) if report else missing}")
    return "\n\n".join(parts) + "\n"


def _speed(report: Report) -> str:
    judged = verdict(report["rows"])
    drawn = "![speed](pictures/speed.svg)"
    paragraphs = [] if judged["lost"] is None else [_judgement(judged)]
    return "\n\n".join(
        [_source(report), *paragraphs, drawn, *(table.markdown() for table in speed_tables(report["rows"]))]
    )


def _judgement(judged: Report) -> str:
    best = f", and {judged['of_best']:.3f} of the best fixed setting's tokens/s" if judged["of_best"] else ""
    return (
        f"Mode `auto` has {judged['mean']:.2f} times the tokens/s of plain decoding in the mean of {judged['cells']} "
        f"cells{best}. Cells lost (95 % upper bound below 0.97): {', '.join(judged['lost']) or 'none'}."
    )


def _tables(tables: Callable[[list[Report]], Iterable[Table]]) -> Callable[[Report], str]:
    return lambda report: "\n\n".join([_source(report), *(table.markdown() for table in tables(report["rows"]))])


def _unseen(report: Report) -> str:
    texts = ", ".join(dict.fromkeys(row["cell"].split(" ")[0] for row in report["rows"]))
    sentence = (
        f"No constant of the planner was chosen by these texts, but the shipped pair was trained on them: {texts}."
    )
    return "\n\n".join(
        [_source(report), sentence, *(table.markdown() for table in unseen_texts.tables(report["rows"]))]
    )


def _paper(report: Report) -> str:
    parts = ["The paper is Sun et al. 2024, arXiv 2404.11912."]
    for name, experiment in EXPERIMENTS.items():
        if experiment_report := report.get(name):
            parts.append(f"{experiment.shown(experiment_report['rows']).markdown()}\n\n{_source(experiment_report)}")
    return "\n\n".join([*parts, absent().markdown()])


def _kernels(rows: Sequence[Report]) -> list[Table]:
    """Return of each kernel its time, what it reads and computes, and the share of what the machine can do."""
    lines = []
    for row in rows:
        where = [f"{name} {row[name]:,}" for name in ("context", "width", "vocabulary", "temperature") if name in row]
        where += [f"union {row['union']:.1f}"] if row.get("union", 1) > 1 else []
        name = ", ".join([row["kernel"], *([row["shape"]] if "shape" in row else []), *where])
        took = f"{row['seconds'] * 1e6:,.0f}" if "seconds" in row else "-"
        speed = f"{row['gb_per_second']:.1f}" if "gb_per_second" in row else "-"
        least_time = f"{row['least_seconds'] * 1e6:,.0f}" if "least_seconds" in row else "-"
        flops = f"{row['gflop_per_second']:,.0f}" if "gflop_per_second" in row else "-"
        lines.append([name, took, speed, flops, least_time, percent(row.get("fraction")) or "-"])
    note = (
        "Bytes must be read at least once: weights, and keys and values in sight. The least that a kernel can take is "
        "the time for its bytes at the measured bandwidth, or for its operations at the measured peaks if that is more."
        " A union is how many times a token's experts a pass reads."
    )
    header = ["kernel", "microseconds", "GB/s", "GFLOP/s", "the least", "share"]
    return [Table("Against the machine", note, header, lines)]


def _synthetic(rows: Sequence[Report]) -> list[Table]:
    """Return the speed of each mode over random KV, and how much of it is what bytes and operations allow."""
    lines = []
    for row in rows:
        share = row["least_seconds"] and row["least_seconds"] / row["seconds"]
        where = f"{row['shape']}, {row['layers']} layers", f"{row['context']:,}", f"{row['mode']}, {row['kv_dtype']} KV"
        lines.append([*where, f"{row['tokens_per_second']:.1f}", speedup(row), percent(share) or "-"])
    note = (
        "Of random weights and random KV, whose draft tokens are accepted with given probabilities. Speedups are over "
        "the first row of a context, plain decoding. The share is of what bytes and operations of passes allow."
    )
    header = ["shape", "context", "mode", "tokens/s", "speedup", "share"]
    return [Table("Tokens per second", note, header, lines)]


def _source(report: Report) -> str:
    return f"`{report['command']}`, on {report['machine']}.{study.origin(report)}"


SECTIONS: dict[str, tuple[str, str, Callable[[Report], str]]] = {
    "speed": ("Speed", "triforce bench speed", _speed),
    "unseen_texts": (
        "Texts that nothing was chosen by",
        "python -m benchmarks.unseen_texts --texts FOLDER",
        _unseen,
    ),
    "unseen_texts_smollm2": (
        "The same texts with smollm2",
        "python -m benchmarks.unseen_texts smollm2 --texts FOLDER --contexts 2048,7168",
        _unseen,
    ),
    "compare": ("Other engines", "triforce bench compare", _tables(on_folder.tables)),
    "compare_int8": (
        "Other engines beside int8 KV",
        "triforce bench compare --engines triforce,openvino,llamacpp",
        _tables(on_folder.tables),
    ),
    "compare_file": (
        "Other engines on a GGUF file",
        "triforce bench compare smollm2",
        _tables(on_file_tables.tables),
    ),
    "lossless": ("The certificate", "triforce bench lossless", _tables(lossless.tables)),
    "lossless_int8": (
        "The certificate over int8 KV",
        "triforce bench lossless --kv-dtype int8",
        _tables(lossless.tables),
    ),
    "quality": ("What eviction costs", "python -m benchmarks.quality", _tables(quality.tables)),
    "kv_quality": ("What int8 KV costs", "python -m benchmarks.kv_quality", _tables(kv_quality.tables)),
    "kv_quality_128k": (
        "What int8 KV costs in 128K tokens",
        "python -m benchmarks.kv_quality --max-context 131072 --windows 1 --only far",
        _tables(kv_quality.tables),
    ),
    "draft_acceptance": (
        "The draft for smollm2",
        "python -m benchmarks.draft_acceptance smollm2 --texts FOLDER",
        _tables(draft_acceptance.tables),
    ),
    "draft_speed": (
        "Speed with the draft for smollm2",
        "triforce bench compare smollm2 --engines triforce --texts FOLDER --modes ar,draft,auto",
        _tables(on_file_tables.tables),
    ),
    "draft_speed_avx2": (
        "Speed with that draft at the level AVX2",
        "TRIFORCE_KERNELS=avx2 triforce bench compare smollm2 --engines triforce --texts FOLDER --modes ar,draft,auto",
        _tables(on_file_tables.tables),
    ),
    "plain_draft": (
        "A plain draft for smollm2",
        "python -m benchmarks.plain_draft smollm2 --train FOLDER --texts FOLDER",
        _tables(plain_draft.tables),
    ),
    "kernels_cpu": ("Kernels", "triforce bench kernels", _tables(_kernels)),
    "kernels_cpu_avx2": (
        "Kernels at the level AVX2",
        "TRIFORCE_KERNELS=avx2 triforce bench kernels",
        _tables(_kernels),
    ),
    "kernels_families": (
        "Kernels at shapes of experts and windows",
        "triforce bench kernels --shapes qwen3-30b-a3b,qwen3-30b-a3b-uniform,gpt-oss-20b,gemma-3-4b",
        _tables(_kernels),
    ),
    "synthetic": (
        "Shapes at a given acceptance",
        "triforce bench speed --synthetic 0.92,0.6 --shapes NAME,...",
        _tables(_synthetic),
    ),
    "synthetic_int8": (
        "Shapes at a given acceptance over int8 KV",
        "triforce bench speed --synthetic 0.92,0.6 --kv-dtype int8 --shapes NAME,...",
        _tables(_synthetic),
    ),
    "synthetic_int8_avx2": (
        "The same at the level AVX2",
        "TRIFORCE_KERNELS=avx2 triforce bench speed --synthetic 0.92,0.6 --kv-dtype int8 --shapes NAME,...",
        _tables(_synthetic),
    ),
    "paper": ("The paper's tables and figures", "python -m benchmarks.paper", _paper),
}
"""Sections by the name of a file of rows: title, the command that makes it, and its text."""

main = study.command("page", __doc__, add_arguments, make)

if __name__ == "__main__":
    sys.exit(main())
