"""`triforce eval`: the abilities of a model, measured on texts through the engine's own parts."""

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
    from triforce.engine.inputs import known
    from triforce.eval import MEASUREMENTS, evaluate, shorten

    only = MEASUREMENTS if options.only is None else options.only.split(",")
    names = [known("measurement", name.strip(), MEASUREMENTS) for name in only]
    require_writable(options.json, "--json")
    texts = _texts(options)
    subject = _subject(options, texts)
    whole = subject.plan
    loaded = perf_counter()
    budget = shorten(subject, names) if options.quick else None
    if budget and not options.quiet:
        print(*_forecast(budget, whole, subject.plan), sep="\n", file=sys.stderr, flush=True)
    results = evaluate(subject, list(budget.predicted) if budget else names, _show, budget)
    measured = perf_counter() - loaded
    plan = subject.plan
    everything = _about(subject)
    del subject  # another model may need its memory
    if budget:
        everything["forecast"] = {"seconds": budget.total, "left_out": budget.left_out, "measured": measured}
    everything |= {"seconds": perf_counter() - began, "results": results}
    _write(options, everything)
    if everything["kv_dtype"] == "int8" and not options.quick:
        everything["beside"] = _beside(options, texts, everything["model"], plan, results)
        _write(options, everything)
    if not options.quiet:
        promise = f", of which {measured:.0f} for measuring; {budget.total:.0f} were predicted" if budget else ""
        print(f"In all {perf_counter() - began:.0f} s{promise}.")
    return 0


def _forecast(budget: TimeBudget, whole: EvalConfig, plan: EvalConfig) -> list[str]:
    """Return lines on what the minute will be used for, and what is left out."""
    lines = [
        f"forecast: {budget.total:.0f} s, as this model reads {budget.rate:,.0f} tokens/s",
        f"shortened: readings of at most {plan.deepest:,} tokens (without --quick {whole.deepest:,}), "
        f"{plan.most} of each kind of text, {plan.prompts} continuations of {plan.new_tokens} tokens "
        f"({whole.prompts} of {whole.new_tokens})",
    ]
    if budget.left_out:
        each = ", ".join(f"{name} ({seconds:.0f} s)" for name, seconds in budget.left_out.items())
        lines.append(f"left out: {each}; have them with --only NAME, without --quick")
    return lines


def _texts(options: Namespace) -> dict[str, str]:
    if options.max_context < 128:
        raise RequestError(f"--max-context {options.max_context}: give at least 128 tokens")
    return read_texts(options.texts or [str(book_file())])


def _subject(options: Namespace, texts: dict[str, str]) -> EvalContext:
    from triforce.eval import EvalContext, plan, tokenize
    from triforce.llm import LLM

    draft = draft_named(options)
    with loading(options):
        llm = LLM(options.model, draft, device=options.device, dtype=options.dtype, kv_dtype=options.kv_dtype)
    numbers = plan(llm.target.config.context, options.max_context)
    return EvalContext(llm, tokenize(llm, texts), numbers, options.quiet)


def _write(options: Namespace, everything: dict[str, Any]) -> None:
    if options.json:
        write_text(options.json, json.dumps(everything, indent=2) + "\n")


def _beside(
    options: Namespace, texts: dict[str, str], model: str, plan: EvalConfig, results: dict[str, Any]
) -> dict[str, Any]:
    """Measure KV that is not rounded by what depends on it; show both kinds, and return the results."""
    from triforce.eval import evaluate, kv_dtypes

    if not (names := [name for name in kv_dtypes.MEASURED if name in results]):
        return {}
    subject = _subject(Namespace(**vars(options) | {"kv_dtype": "auto", "draft": NO_DRAFT}), texts)
    subject.plan = plan
    exact = evaluate(subject, names, lambda *_: None)
    about = {"model": Path(model).name, "context": plan.deepest}
    kinds = {subject.llm.target.kv_dtype: exact, "int8": results}
    for table in kv_dtypes.tables([about | {"kv": kind} | found for kind, found in kinds.items()]):
        print(f"\n{table.plain()}")
    return exact


def _show(name: str, result: dict[str, Any]) -> None:
    from triforce.eval import tables

    for table in tables(name, result):
        print(f"\n{table.plain()}")
    print(f"({name}: {result.get('skipped') or '{:.0f} s'.format(result['seconds'])})", flush=True)


def _about(subject: EvalContext) -> dict[str, Any]:
    """Return the model, the software and the texts behind the figures."""
    import torch

    llm = subject.llm
    drafter = subject.llm.draft or subject.llm.eagle_head
    return {
        "triforce": __version__,
        "torch": torch.__version__,
        "model": str(llm.target.path),
        "draft": str(drafter.path) if drafter else None,
        "device": str(subject.target.device),
        "dtype": str(subject.target.dtype).removeprefix("torch."),
        "kv_dtype": llm.target.kv_dtype,
        "threads": torch.get_num_threads(),
        "plan": asdict(subject.plan),
        "texts": [{"name": t.name, "kind": t.kind, "tokens": len(t.ids_N)} for t in subject.texts],
    }
