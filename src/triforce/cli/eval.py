"""`triforce eval`: abilities of a model, measured on texts with the engine's own parts."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from triforce import __version__
from triforce.cli.options import NO_DRAFT, draft_named
from triforce.cli.progress import loading
from triforce.cli.text_files import book_file, read_texts, require_writable, write_text
from triforce.errors import RequestError

if TYPE_CHECKING:
    from triforce.eval import EvalConfig, EvalContext
    from triforce.eval.time_budget import TimeBudget


def run(options: Namespace) -> int:
    """Print each table as soon as it is measured; --json writes all figures at the end."""
    began = perf_counter()
    from triforce.backends.dispatch import require_torch

    require_torch("evaluations")
    from triforce.engine.inputs import known
    from triforce.eval import MEASUREMENTS, evaluate, shorten

    requested_names = MEASUREMENTS if options.only is None else options.only.split(",")
    names = [known("measurement", name.strip(), MEASUREMENTS) for name in requested_names]
    require_writable(options.json, "--json")
    texts = _texts(options)
    subject = _subject(options, texts)
    full_config = subject.config
    loaded_at = perf_counter()
    budget = shorten(subject, names) if options.quick else None
    if budget and not options.quiet:
        print(*_forecast(budget, full_config, subject.config), sep="\n", file=sys.stderr, flush=True)
    results = evaluate(subject, list(budget.predicted) if budget else names, _show, budget)
    measured_seconds = perf_counter() - loaded_at
    config = subject.config
    report = _provenance(subject)
    del subject  # the second model of a comparison may need its memory
    if budget:
        report["forecast"] = {"seconds": budget.total, "left_out": budget.left_out, "measured": measured_seconds}
    report |= {"seconds": perf_counter() - began, "results": results}
    _write(options, report)
    if report["kv_dtype"] == "int8" and not options.quick:
        report["beside"] = _compare_kv_dtypes(options, texts, report["model"], config, results)
        _write(options, report)
    if not options.quiet:
        forecast_note = (
            f"; measuring took {measured_seconds:.0f} s, and {budget.total:.0f} s were predicted" if budget else ""
        )
        print(f"In all {perf_counter() - began:.0f} s{forecast_note}.")
    return 0


def _forecast(budget: TimeBudget, full_config: EvalConfig, config: EvalConfig) -> list[str]:
    """Return lines that forecast the seconds of a --quick run, and name what is shortened and left out."""
    lines = [
        f"forecast: {budget.total:.0f} s, as this model reads {budget.rate:,.0f} tokens/s",
        f"shortened: readings of at most {config.longest_window:,} tokens "
        f"(without --quick {full_config.longest_window:,}), {config.max_windows} of each kind of text, "
        f"{config.prompts} continuations of {config.new_tokens} tokens "
        f"({full_config.prompts} of {full_config.new_tokens})",
    ]
    if budget.left_out:
        left_out_names = ", ".join(f"{name} ({seconds:.0f} s)" for name, seconds in budget.left_out.items())
        lines.append(f"left out: {left_out_names}; measure them with --only NAME, without --quick")
    return lines


def _texts(options: Namespace) -> dict[str, str]:
    if options.max_context < 128:
        raise RequestError(f"--max-context {options.max_context}: give at least 128 tokens")
    return read_texts(options.texts or [str(book_file())])


def _subject(options: Namespace, texts: dict[str, str]) -> EvalContext:
    from triforce.eval import EvalContext, eval_config, tokenize
    from triforce.llm import LLM

    draft = draft_named(options)
    with loading(options):
        placement = {name: getattr(options, name) for name in ("device", "dtype", "kv_dtype", "weight_inputs")}
        llm = LLM(options.model, draft, **placement)
    config = eval_config(llm.target.config.context, options.max_context)
    return EvalContext(llm, tokenize(llm, texts), config, options.quiet)


def _write(options: Namespace, report: dict[str, Any]) -> None:
    if options.json:
        write_text(options.json, json.dumps(report, indent=2) + "\n")


def _compare_kv_dtypes(
    options: Namespace, texts: dict[str, str], model: str, config: EvalConfig, results: dict[str, Any]
) -> dict[str, Any]:
    """Repeat the measurements that the KV dtype affects, with unrounded KV. Print both results; return the new ones."""
    from triforce.eval import evaluate, kv_dtypes

    if not (names := [name for name in kv_dtypes.MEASURED if name in results]):
        return {}
    subject = _subject(Namespace(**vars(options) | {"kv_dtype": "auto", "draft": NO_DRAFT}), texts)
    subject.config = config
    exact_results = evaluate(subject, names, lambda *_: None)
    labels = {"model": Path(model).name, "context": config.longest_window}
    results_by_dtype = {subject.llm.target.kv_dtype: exact_results, "int8": results}
    for table in kv_dtypes.tables(
        [labels | {"kv": kv_dtype} | kind_results for kv_dtype, kind_results in results_by_dtype.items()]
    ):
        print(f"\n{table.plain()}")
    return exact_results


def _show(name: str, result: dict[str, Any]) -> None:
    from triforce.eval import tables

    for table in tables(name, result):
        print(f"\n{table.plain()}")
    print(f"({name}: {result.get('skipped') or '{:.0f} s'.format(result['seconds'])})", flush=True)


def _provenance(subject: EvalContext) -> dict[str, Any]:
    """Return the model, the software and the texts behind the figures."""
    import torch

    llm = subject.llm
    drafter = subject.llm.draft or subject.llm.eagle_head
    return {
        "triforce": __version__,
        "torch": torch.__version__,
        "model": str(llm.target.path),
        "draft": str(drafter.path) if drafter else None,
        "device": subject.target.device,
        "dtype": subject.target.dtype,
        "kv_dtype": llm.target.kv_dtype,
        "threads": torch.get_num_threads(),
        "plan": asdict(subject.config),
        "texts": [{"name": t.name, "kind": t.kind, "tokens": len(t.ids_N)} for t in subject.texts],
    }
