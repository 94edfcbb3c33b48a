"""Seconds of passes by tier, length and width: worlds of the planner's simulator (tests/data/pass_seconds.json).

    python -m benchmarks.pass_seconds --contexts 300 2048 8192 31000
    python -m benchmarks.pass_seconds --model build/smollm2 --contexts 300 2048 7000

Medians in milliseconds, sampling included, at the level of the kernels that TRIFORCE_KERNELS names. Nothing else should
run meanwhile.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks import study
from benchmarks.acceptance_traces import LIVE, batch_of, drafted
from triforce import LLM, SamplingParams
from triforce.backends import dispatch
from triforce.cli.options import described
from triforce.engine.tier_builder import unlink_tiers

FILE = "tests/data/pass_seconds.json"
WIDTHS = (1, 2, 3, 4, 5, 7, 9, 13, 17)
NARROW = 9  # tokens that lower tiers feed or draft at most
TURNS, SECONDS = 25, 25.0  # of a length, at most

Row = dict[str, Any]


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", help="another model than the shipped pair, without a draft")
    parser.add_argument("--contexts", type=int, nargs="+", default=[300, 2048], metavar="N", help=described("tokens"))
    parser.add_argument("--rows", default=FILE, metavar="FILE", help=described("where rows are added"))


def measure(options: Namespace) -> None:
    """Add a row for each length to the file, in the place of one of its model, length and level."""
    llm = LLM(options.model, None if options.model else "auto", retrieval_budget="auto", searched_layers="none")
    model = Path(options.model).name if options.model else "pair"
    level = dispatch.native.level() if dispatch.native else "torch"
    for length in options.contexts:
        add(Path(options.rows), {"model": model, "length": length, "level": level, "ms": milliseconds(llm, length)})


def milliseconds(llm: LLM, length: int) -> dict[str, dict[int, float]]:
    """Return the median milliseconds of a pass by tier and width, or of a fused draft by its tokens."""
    generator = np.random.default_rng(1)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = generator.integers(10, llm.target.config.vocab_size, count).tolist()
        return drawn

    batch = batch_of(llm, tokens(length), SamplingParams(0.6, top_p=0.9, seed=1, max_tokens=64, ignore_eos=True))
    tiers = {tier.name: tier for tier in unlink_tiers(batch.top) if tier.name != "ngram"}
    took: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    ends = perf_counter() + SECONDS
    with torch.no_grad():
        for turn in range(TURNS):
            for width, (name, tier) in ((width, entry) for width in WIDTHS for entry in tiers.items()):
                if name == "full" or width < NARROW + 1:
                    draft = drafted(tokens(width - 1))
                    tier.gamma = width
                    began = perf_counter()
                    if name == "draft":
                        tier.propose(batch.prefix, batch.sampling, LIVE)
                    else:
                        tier.verify(batch.prefix, draft, batch.sampling, LIVE)  # type: ignore[attr-defined]
                    if turn:  # the first turn warms up
                        took[name][width].append(1000 * (perf_counter() - began))
                    tier.rewind(batch.prefix)
            if turn and perf_counter() > ends:
                break
    return {
        name: {width: round(median(samples), 4) for width, samples in width_seconds.items()}
        for name, width_seconds in took.items()
    }


def add(file: Path, row: Row) -> None:
    """Add a row to a file, in the place of one of its model, length and level."""
    rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    rows = [old_row for old_row in rows if any(old_row[key] != row[key] for key in ("model", "length", "level"))]
    rows.append(row)
    file.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
    print(json.dumps(row), flush=True)


main = study.command("pass_seconds", __doc__, add_arguments, measure)

if __name__ == "__main__":
    sys.exit(main())
