"""`triforce bench lossless`: the certificate. Exit code 1 if anything differs."""

from __future__ import annotations

import json
from argparse import Namespace
from functools import partial
from typing import Any

from tqdm import tqdm

from triforce.bench.lossless import PLAIN, LosslessConfig, certificate, rows, tables
from triforce.bench.results_file import ResultsFile
from triforce.bench.speed import WORKLOADS
from triforce.cli.bench.setup import about, load, machine, modes, show, sources, write
from triforce.cli.progress import Prefill
from triforce.engine.inputs import known
from triforce.engine.tier_builder import COUPLINGS, LOWER_TIERS, MODES
from triforce.errors import RequestError
from triforce.llm import LLM

AXES = ("contexts", "temperatures", "batches", "workloads", "couplings", "tokens")
SETTINGS = ("model", "draft", "texts", "dtype", "kv_dtype", "modes", "lower_tiers", "retrieval_budget", *AXES)
"""Settings that must be the same for a file that is not whole to be continued."""


def run(options: Namespace) -> int:
    """Prints what was compared, and last of all a line of JSON. A file that was cut off goes on where it ended."""
    _require_sense(options)
    settings = {name: getattr(options, name) for name in SETTINGS}
    results = ResultsFile(options.json, about() | settings, SETTINGS, "lossless")
    print(machine())
    for lower in options.lower_tiers:
        llm = load(Namespace(**vars(options) | {"lower_tiers": lower}))
        plan = _plan(llm, options)
        texts = sources(llm, options.texts)
        cells = rows(llm, texts, plan, partial(Prefill, options.quiet), results.cells)
        for found in tqdm(cells, desc=f"lossless, {lower}", disable=options.quiet or None, leave=False):
            results.add(found)
    return _report(results.rows, options.json)


def _report(found: list[dict[str, Any]], file: str | None) -> int:
    verdict = certificate(found)
    show(tables(found))
    for row in verdict["where"]:
        print(f"DIFFERS: {json.dumps(row)}")
    result = about() | verdict
    write(file, result | {"rows": found})
    print(json.dumps(result))
    return 0 if verdict["lossless"] else 1


def _plan(llm: LLM, options: Namespace) -> LosslessConfig:
    context = llm.target.config.context
    if max(options.contexts) > context:
        raise RequestError(f"--contexts {max(options.contexts):,} is beyond the model's {context:,} positions")
    names = modes(llm, options.modes, [mode for mode in MODES if mode != PLAIN])
    return LosslessConfig(modes=names, **{name: getattr(options, name) for name in AXES})


def _require_sense(options: Namespace) -> None:
    """Raises RequestError for what cannot be compared, before a model is loaded."""
    lists = (
        (options.couplings, "coupling", COUPLINGS),
        (options.workloads, "workload", WORKLOADS),
        (options.lower_tiers, "lower_tiers", LOWER_TIERS),
    )
    for values, kind, allowed in lists:
        for value in values:
            known(kind, value, allowed)
    if min(options.tokens, *options.batches) < 1 or min(options.contexts) < 2:
        raise RequestError("--tokens and --batches must be at least 1, --contexts at least 2")
