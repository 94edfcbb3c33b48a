"""The arguments of studies that read given texts: nothing is generated."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import replace

from benchmarks.acceptance.sweeps import QUICK, SweepConfig
from triforce.cli.bench.parts import texts
from triforce.cli.options import described, draft, json_file, model, placement
from triforce.errors import RequestError

SWEPT = {"full_layer_counts": "full_layers", "retrieval_budget": "budget"} | {
    name: name for name in ("context", "positions", "budgets", "chunks", "speculative_tokens", "temperature", "top_p")
}
"""Fields of `SweepConfig` by argument."""


def add_walk(parser: ArgumentParser) -> None:
    """Add what to read, and with which models."""
    model(parser)
    draft(parser)
    texts(parser)
    add = parser.add_argument
    add("--context", type=int, metavar="N", help="tokens of the prompts (default: 32000; --quick: 4096)")
    add("--positions", type=int, metavar="N", help="that are measured after each (default: 259; --quick: 126)")
    text = "tokens that retrieval sees while something else is varied (default: 2048; --quick: 512)"
    add("--retrieval-budget", type=int, metavar="N", help=text)
    text = described("a verification scores one position more")
    add("--speculative-tokens", type=int, default=6, metavar="N", help=text)
    add("--temperature", type=float, default=0.6, metavar="X", help=described("0 is greedy"))
    add("--top-p", type=float, default=0.9, metavar="X", help=described("1: off"))
    add("--quick", action="store_true", help="short prompts and few settings: a minute")
    placement(parser, context=False)
    json_file(parser)


def sweep(options: Namespace) -> SweepConfig:
    """Return the settings that the arguments ask for, the rest as usual or as in a quick look.

    Raises RequestError for a number below 1.
    """
    start = QUICK if options.quick else SweepConfig()
    given = {field: value for name, field in SWEPT.items() if (value := getattr(options, name, None)) is not None}
    made = replace(start, **given)
    if min(made.context, made.positions, made.budget, *made.budgets, *made.chunks) < 1 or made.speculative_tokens < 1:
        raise RequestError("contexts, positions, budgets, chunks and gammas must be at least 1")
    return made
