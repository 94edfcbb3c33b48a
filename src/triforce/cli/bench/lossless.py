"""`triforce bench lossless`: the certificate. Exit code 1 if any text differs."""

from __future__ import annotations

import json
from argparse import Namespace
from functools import partial
from typing import Any

from tqdm import tqdm

from triforce.bench.lossless import PLAIN, LosslessConfig, certificate, rows, tables
from triforce.bench.results_file import ResultsFile
from triforce.bench.speed import WORKLOADS
from triforce.cli.bench.setup import about, load, machine, modes, require_temperatures, show, sources, write
from triforce.cli.progress import Prefill
from triforce.engine.inputs import known
from triforce.engine.tier_builder import COUPLINGS, LOWER_TIERS, MODES
from triforce.errors import RequestError, argument
from triforce.llm import LLM

AXES = ("contexts", "temperatures", "batches", "workloads", "couplings", "tokens")
SETTINGS = (
    "model",
    "draft",
    "texts",
    "dtype",
    "kv_dtype",
    "weight_inputs",
    "modes",
    "lower_tiers",
    "retrieval_budget",
    *AXES,
)
"""Settings that must be the same for an unfinished file to be continued."""


def run(options: Namespace) -> int:
    """Print the comparison, and at the end a line of JSON. An unfinished file is continued."""
    _require_valid_options(options)
    settings = {name: getattr(options, name) for name in SETTINGS}
    results = ResultsFile(options.json, about() | settings, (*SETTINGS, "level"), "lossless")
    for lower_tiers in options.lower_tiers:
        llm = load(Namespace(**vars(options) | {"lower_tiers": lower_tiers}))
        plan = _plan(llm, options)
        texts = sources(llm, options.texts)
        if lower_tiers == options.lower_tiers[0]:
            print(machine())
        cells = rows(llm, texts, plan, partial(Prefill, options.quiet), results.cells)
        for cell_rows in tqdm(cells, desc=f"lossless, {lower_tiers}", disable=options.quiet or None, leave=False):
            results.add(cell_rows)
    return _report(results.rows, options.json)


def _report(measured_rows: list[dict[str, Any]], file: str | None) -> int:
    verdict = certificate(measured_rows)
    show(tables(measured_rows))
    for row in verdict["where"]:
        print(f"DIFFERS: {json.dumps(row)}")
    result = about() | verdict
    write(file, result | {"rows": measured_rows})
    print(json.dumps(result))
    return 0 if verdict["lossless"] else 1


def _plan(llm: LLM, options: Namespace) -> LosslessConfig:
    context = llm.target.config.context
    if max(options.contexts) > context:
        raise RequestError(f"--contexts {max(options.contexts):,} is beyond the model's {context:,} positions")
    names = modes(llm, options.modes, [mode for mode in MODES if mode != PLAIN])
    return LosslessConfig(modes=names, **{name: getattr(options, name) for name in AXES})


def _require_valid_options(options: Namespace) -> None:
    """Raise RequestError for values that cannot be compared, before a model is loaded."""
    checks = (
        (options.couplings, "coupling", COUPLINGS),
        (options.workloads, "workload", WORKLOADS),
        (options.lower_tiers, argument("lower_tiers"), LOWER_TIERS),
    )
    for values, kind, allowed in checks:
        for value in values:
            known(kind, value, allowed)
    if min(options.tokens, *options.batches) < 1 or min(options.contexts) < 2:
        raise RequestError("--tokens and --batches must be at least 1, --contexts at least 2")
    require_temperatures(options.temperatures)
