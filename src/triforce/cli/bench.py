"""`triforce bench`: how fast this machine is with a model, and how close the kernels come to its memory."""

from __future__ import annotations

import json
import os
import platform
import sys
from argparse import Namespace
from importlib import resources
from pathlib import Path
from typing import Any

from triforce.cli.common import KV, Prefill, read_text, require_writable
from triforce.cli.demo import BOOK
from triforce.cli.options import NO_DRAFT
from triforce.errors import RequestError

Row = dict[str, Any]


def run(options: Namespace) -> int:
    """Prints a line for each row as it is measured; --json writes all rows at the end."""
    require_writable(options.json)
    _require_sense(options)
    rows = []
    for row in {"speed": _speed, "kernels": _kernels}[options.bench](options):
        rows.append(row)
        print(_LINES[options.bench](row), flush=True)
    if options.bench == "kernels":
        print(json.dumps({"machine": machine(), "rows": rows}))
    if options.json:
        report = {"machine": machine(), "command": "triforce " + " ".join(sys.argv[1:]), "rows": rows}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _require_sense(options: Namespace) -> None:
    """Raises RequestError for numbers that nothing can be measured with."""
    if min(options.contexts) < 2:
        raise RequestError(f"--contexts {min(options.contexts)}: give prompts of at least 2 tokens")
    if options.bench == "speed" and min(options.repeats, options.tokens) < 1:
        raise RequestError("--repeats and --tokens must be at least 1")
    if options.bench == "speed" and options.synthetic:
        if len(options.synthetic) != 2 or not all(0 <= rate <= 1 for rate in options.synthetic):
            raise RequestError("--synthetic takes two probabilities, OUTER,INNER, such as 0.95,0.6")
        if min(options.contexts) < 256 or not options.budget.isdecimal():
            raise RequestError("--synthetic needs contexts of at least 256 tokens, and a --budget in tokens")


def _speed(options: Namespace) -> Any:
    from triforce.bench import speed, synthetic
    from triforce.ladder import MODES
    from triforce.llm import LLM
    from triforce.prompts import known

    modes = [known("mode", mode, MODES) for mode in options.modes]

    print(f"{'mode':<10} {'context':>8} {'T':>4} prefill/s  tokens/s  speedup  spread  full/token  acceptance")
    if options.synthetic:
        outer, inner = options.synthetic
        gammas, tokens = (options.gamma_1, options.gamma_2), options.tokens
        return synthetic.rows(
            options.contexts, outer, inner, gammas, int(options.budget), tokens, options.repeats, options.lower_tiers
        )
    draft = None if options.draft == NO_DRAFT else options.draft
    names = ("device", "dtype", "gamma_1", "gamma_2", "budget", "full_layers", "lower_tiers", "coupling", *KV)
    llm = LLM(options.model, draft, **{name: getattr(options, name) for name in names})
    ids = _ids(llm, options.texts, max(options.contexts))
    plan = speed.Plan(options.contexts, options.temperatures, modes, options.top_p, options.tokens, options.repeats)
    return speed.rows(llm, ids, plan, Prefill)


def _ids(llm: Any, files: list[str] | None, needed: int) -> list[int]:
    """The tokens of the texts, one after another. Raises RequestError if they are too few."""
    if llm.tokenizer is None:
        raise RequestError("this model has no tokenizer, and the prompt is a text; add tokenizer.json to its folder")
    book = resources.files("triforce") / "data" / BOOK
    texts = [read_text(file) for file in files] if files else [book.read_text(encoding="utf-8")]
    ids: list[int] = [i for text in texts for i in llm.tokenizer.encode(text)]
    if len(ids) < needed:
        raise RequestError(
            f"the texts have {len(ids):,} tokens, {needed:,} are needed; give --texts more or longer ones"
        )
    return ids


def _kernels(options: Namespace) -> Any:
    from triforce.bench import kernels, shapes
    from triforce.prompts import known

    return kernels.rows(options.contexts, [known("shape", name, shapes.SHAPES) for name in options.shapes])


def _speed_line(row: Row) -> str:
    prefill = row["prefill_tokens_per_second"]
    shares = " ".join(f"{name} {share:.2f}" for name, share in row["acceptance"].items() if share is not None)
    return (
        f"{row['mode']:<10} {row['context']:>8,} {row['temperature']:>4} {(prefill and f'{prefill:,.0f}') or '-':>9} "
        f"{row['tokens_per_second']:>9.1f} {row['speedup']:>8.2f} {row['spread']:>7.2f} "
        f"{row['full_passes'] / row['tokens']:>11.2f}  {shares}"
    )


def _kernel_line(row: Row) -> str:
    name = " ".join(str(row[key]) for key in ("kernel", "shape") if key in row)
    where = " ".join(f"{key} {row[key]:,}" for key in ("context", "width", "vocabulary", "temperature") if key in row)
    took = f"{row['seconds'] * 1e6:>10,.1f} us" if "seconds" in row else ""
    speed = f"{row['gb_per_second']:>7.1f} GB/s, {row['fraction']:.0%}" if "gb_per_second" in row else ""
    flops = f", {row['gflop_per_second']:.0f} GFLOP/s" if "gflop_per_second" in row else ""
    return f"{name:<28} {where:<34} {took} {speed}{flops}"


_LINES = {"speed": _speed_line, "kernels": _kernel_line}


def machine() -> str:
    """What the figures were measured on."""
    import torch

    model = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), "")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model or platform.machine()}, {cpus} cores, torch {torch.__version__}"


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
