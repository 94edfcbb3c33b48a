"""`triforce bench speed`: modes against plain decoding, cell by cell."""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triforce.bench.results_file import ResultsFile
from triforce.bench.speed import WORKLOADS, Cell, cells_named, covering, grid
from triforce.cli.bench.setup import (
    about,
    load,
    machine,
    make_folder,
    modes,
    require_temperatures,
    show,
    sources,
    write,
)
from triforce.cli.progress import Prefill
from triforce.errors import RequestError
from triforce.interface.sampling_params import SamplingParams

if TYPE_CHECKING:
    from triforce.llm import LLM

Row = dict[str, Any]
SETTINGS = (
    "model", "draft", "texts", "tokens", "top_p", "modes", "coupling", "lower_tiers", "dtype", "kv_dtype",
    "weight_inputs", "draft_tokens", "speculative_tokens", "retrieval_budget", "searched_layers",
)  # fmt: skip
"""Settings that must be the same for a file of rows to be continued."""

MODEL_OPTIONS = "model", "modes", "temperatures", "batches", "workloads", "cells", "caches", "texts"
"""Options that cannot be given together with `--synthetic`."""

MODES = ("ar", "retrieval", "triforce", "draft-ngram", "auto")
"""Default modes: plain decoding, the fixed modes that may be fastest, and `auto`."""

DEFAULT_AXES: dict[str, list[Any]] = {
    "contexts": [4096, 16_384],
    "batches": [1],
    "temperatures": [0.0, 0.6],
    "workloads": ["books"],
}
"""Defaults of the other axes if at least one axis is given."""

HEAD = (
    f"{'mode':<10} {'context':>8} {'batch':>5} {'T':>4} {'workload':<9} prefill/s  tokens/s  speedup  spread  "
    "full/token  acceptance"
)


def run(options: Namespace) -> int:
    """Print a line for each row as it is measured, then the lost cells, and a line of JSON. Raises RequestError."""
    _require_valid_options(options)
    if options.synthetic:
        return _synthetic(options)
    cells = _cells(options)
    llm = load(options)
    if oversized_cells := [cell for cell in cells if cell.context > llm.target.config.context]:
        cells = [cell for cell in cells if cell not in oversized_cells]
        print(f"{len(oversized_cells)} cells are left out: the model has {llm.target.config.context:,} positions")
    if not cells:
        raise RequestError("no cell is left to measure; give smaller --contexts")
    return _report(_measure(llm, cells, modes(llm, options.modes, MODES), options))


def _measure(llm: LLM, cells: list[Cell], names: list[str], options: Namespace) -> list[Row]:
    from triforce.bench import speed
    from triforce.bench.prompts import PromptCache

    settings = {name: getattr(options, name) for name in SETTINGS if hasattr(options, name)}
    settings |= {"model": llm.target.path.name, "modes": names}
    results = ResultsFile(options.json, about() | settings, (*SETTINGS, "level"))
    unmeasured_cells = [cell for cell in cells if str(cell) not in results.cells]
    texts = sources(llm, options.texts)
    print(f"{machine()}\n{HEAD}")
    for row in results.rows:
        print(line(row))
    plan = speed.SpeedConfig(names, options.top_p, options.tokens, options.repeats, options.minutes * 60)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.caches or temporary)
        make_folder("--caches", folder)
        prompts = PromptCache(llm, folder, partial(Prefill, options.quiet))
        for rows in speed.rows(llm, texts, unmeasured_cells, plan, prompts, keep_prompts=bool(options.caches)):
            results.add(rows)
            for row in rows:
                print(line(row), flush=True)
    return results.rows


def _report(rows: list[Row]) -> int:
    from triforce.bench.speed import speed_tables, verdict

    summary = verdict(rows)
    show(speed_tables(rows))
    if summary["mean"] is not None:
        of_best = summary["of_best"]
        best_note = f"; {of_best:.3f} of the best fixed setting's tokens/s" if of_best is not None else ""
        print(f"auto: {summary['mean']:.2f} times plain decoding on average over {summary['cells']} cells{best_note}")
        lost_cells = (
            "unknown, as --repeats 1 gives no spread"
            if summary["lost"] is None
            else ", ".join(summary["lost"]) or "none"
        )
        print(f"cells lost: {lost_cells}")
    print(json.dumps(summary))
    return 0


def _cells(options: Namespace) -> list[Cell]:
    from triforce.engine.inputs import known

    axis_values = {name: values for name in DEFAULT_AXES if (values := getattr(options, name)) is not None}
    if bool(axis_values) + bool(options.cells) + options.full > 1:
        raise RequestError("--cells, --full and the lists of values exclude one another; give one of them")
    if options.full:
        return grid()
    if options.cells and options.cells != ["paper"]:
        return cells_named(options.cells)
    for workload in axis_values.get("workloads", []):
        known("workload", workload, WORKLOADS)
    return grid(**(DEFAULT_AXES | axis_values)) if axis_values else covering(grid())


def _require_valid_options(options: Namespace) -> None:
    """Raise RequestError for values that cannot be measured."""
    contexts = options.contexts or DEFAULT_AXES["contexts"]
    if min(contexts) < 2:
        raise RequestError(f"--contexts {min(contexts)}: give prompts of at least 2 tokens")
    repeats = 1 if options.repeats is None else options.repeats
    if min(repeats, options.tokens, *(options.batches or [1])) < 1:
        raise RequestError("--repeats, --tokens and --batches must be at least 1")
    require_temperatures(options.temperatures or [])
    SamplingParams(top_p=1.0 if options.top_p is None else options.top_p)
    for name in ("shapes", "layers"):
        if getattr(options, name) and not options.synthetic:
            raise RequestError(f"--{name} is for the random weights of --synthetic; give that as well, or leave it out")
    if options.layers is not None and options.layers < 1:
        raise RequestError("--layers must be at least 1")
    if options.synthetic:
        if model_options := [name for name in MODEL_OPTIONS if getattr(options, name)]:
            raise RequestError(f"--{model_options[0]} is for a model; with --synthetic leave it out")
        if len(options.synthetic) != 2 or not all(0 <= rate <= 1 for rate in options.synthetic):
            raise RequestError("--synthetic takes two probabilities, OUTER,INNER, such as 0.95,0.6")
        if min(contexts) < 256 or options.retrieval_budget.endswith("%"):
            raise RequestError("--synthetic needs contexts of at least 256 tokens, and a --retrieval-budget in tokens")


def _synthetic(options: Namespace) -> int:
    from triforce.bench import speed, synthetic
    from triforce.bench.shapes import FAMILY_SHAPES, SHAPES
    from triforce.engine.inputs import known
    from triforce.engine.tier_builder import SpeculativeConfig
    from triforce.kvcache import RetrievalConfig
    from triforce.kvcache.retrieval_config import Budget

    speculation = SpeculativeConfig(
        options.draft_tokens,
        options.speculative_tokens,
        retrieval=RetrievalConfig(Budget.parse(options.retrieval_budget)),
        lower_tiers=options.lower_tiers,
    )
    contexts = options.contexts or DEFAULT_AXES["contexts"]
    repeats = options.repeats or speed.USUAL_TURNS
    shapes = [known("shape", shape, [*SHAPES, *FAMILY_SHAPES]) for shape in options.shapes or ["30m"]]
    acceptance_rates = tuple(options.synthetic)
    int8 = options.kv_dtype == "int8"
    rows = []
    print(f"{machine()}\n{HEAD}")
    for shape in shapes:
        for row in synthetic.rows(
            shape, contexts, acceptance_rates, speculation, options.tokens, repeats, int8, options.layers
        ):
            rows.append({"shape": shape, "lower_tiers": options.lower_tiers} | row)
            bound_note = (
                f", {row['least_seconds'] / row['seconds']:.0%} of the machine's limit" if row["least_seconds"] else ""
            )
            print(f"{line(row)}  {shape}, KV as {row['kv_dtype']}{bound_note}; {verification_note(row)}", flush=True)
            write(options.json, about() | {"rows": rows})
    return 0


def line(row: Row) -> str:
    """Return a row as text for people."""
    prefill = row["prefill_tokens_per_second"]
    shares = " ".join(f"{name} {share:.2f}" for name, share in row["acceptance"].items() if share is not None)
    return (
        f"{row['mode']:<10} {row['context']:>8,} {row['batch']:>5} {row['temperature']:>4} {row['workload']:<9} "
        f"{(prefill and f'{prefill:,.0f}') or '-':>9} {row['tokens_per_second']:>9.1f} {row['speedup']:>8.2f} "
        f"{_spread(row):>7} {row['full_passes'] / row['tokens']:>11.2f}  {shares}"
    )


def _spread(row: Row) -> str:
    return f"{row['spread']:.2f}" if row["turns"] > 1 else "-"


def verification_note(row: Row) -> str:
    """Return text that compares measured tokens per verification with the number expected by the acceptance rates."""
    measured_rate = row["tokens_per_verification"]
    expected_rate = row["expected_tokens_per_verification"]
    return f"{measured_rate:.2f} tokens per verification, {expected_rate:.2f} +- {row['deviation']:.2f} expected"
