"""Mode `auto` beside the fixed modes, text by text, with a profile that is empty and with one that is learnt.

    python -m benchmarks.unseen_texts --texts FOLDER --json benchmarks/results/unseen_texts.json
    python -m benchmarks.unseen_texts smollm2 --texts FOLDER --contexts 2048,7168

It judges the planner, which has constants, so take texts that none of them was chosen by. The texts take turns at the
contexts, each at every temperature. A cell is measured twice: with a profile that is emptied before each turn, and with
one that keeps what the turns before have learnt. Plain decoding is measured once more as a control: what it makes of
itself is chance.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

from benchmarks import study
from triforce.bench import speed
from triforce.bench.prompts import PromptCache, Sources, prompts
from triforce.bench.results_file import ResultsFile
from triforce.bench.speed import AUTO, CONTROL, LOST_SPEEDUP, Cell, speed_tables, verdict
from triforce.cli.bench import parts, setup
from triforce.cli.bench.setup import about, machine, show
from triforce.cli.bench.speed import HEAD, line
from triforce.cli.options import described, draft, json_file, model, placement, quiet, several
from triforce.cli.progress import Prefill
from triforce.errors import RequestError
from triforce.eval import Text
from triforce.llm import LLM
from triforce.planner import CostModel
from triforce.planner.cost_model import kernel_level
from triforce.tables import Table

Row = dict[str, Any]
MODES = ("ar", "retrieval", "triforce", "draft", "draft-ngram", "ngram", CONTROL, AUTO)
PROFILES = ("empty", "learnt")
FIXED = ("model", "modes", "contexts", "temperatures", "tokens", "repeats")
"""Settings that must be the same for a file of rows to be continued."""


def add_arguments(parser: ArgumentParser) -> None:
    model(parser)
    draft(parser)
    parts.texts(parser)
    add, contexts, temperatures = parser.add_argument, [2048, 4096, 8192, 16_384, 32_000], [0.0, 0.6, 1.0]
    add("--contexts", type=several(int), default=contexts, metavar="N,...", help="prompt tokens")
    add("--temperatures", type=several(float), default=temperatures, metavar="X,...", help="0 is greedy")
    add("--tokens", type=int, default=256, metavar="N", help=described("new tokens"))
    add("--repeats", type=int, metavar="N", help="turns with each profile; else 7, or as many as take 30 seconds")
    quiet(parser)
    placement(parser, context=False)
    json_file(parser)


def measure(options: Namespace) -> None:
    """Print a line for each row as it is measured, and a table at the end. Raises TriforceError."""
    if min(*options.contexts, options.tokens, 1 if options.repeats is None else options.repeats) < 1:
        raise RequestError("--contexts, --tokens and --repeats must be at least 1")
    llm = setup.load(options)
    texts = setup.sources(llm, options.texts)
    settings = vars(options) | {"model": llm.target.path.name, "modes": list(MODES)}
    results = ResultsFile(options.json, about(options.command) | {name: settings[name] for name in FIXED}, FIXED)
    print(f"{machine()}\n{HEAD}")
    with tempfile.TemporaryDirectory() as folder:
        kept = PromptCache(llm, Path(folder), partial(Prefill, options.quiet))
        for text, context in zip(texts.texts, cycle(options.contexts), strict=False):
            cells = [Cell(context, 1, t, "code" if text.kind == "code" else "books") for t in options.temperatures]
            left = [cell for cell in cells if label(text, cell, PROFILES[-1]) not in results.cells]
            for rows in cells_of(llm, replace(texts, texts=[text]), left, options, kept):
                results.add(rows)
                print("\n".join(f"{line(row)}  {row['cell']}" for row in rows), flush=True)
    show(tables(results.rows))


def cells_of(
    llm: LLM, texts: Sources, cells: Sequence[Cell], options: Namespace, kept: PromptCache
) -> Iterator[list[Row]]:
    """Yield the rows of each cell of one text, with both profiles. Raises TriforceError."""
    modes = [mode for mode in MODES if mode in (*llm.modes, CONTROL)]
    empty = speed.SpeedConfig(modes, tokens=options.tokens, repeats=options.repeats, prepare=partial(forget, llm))
    for cell in cells:
        (prompt,) = prompts(texts, cell.workload, cell.context, 1)
        earlier, prefill = kept.load("prompt", prompt)
        rows = list[Row]()
        for profile, turns in zip(PROFILES, (empty, replace(empty, prepare=lambda: None)), strict=True):
            found = speed.cell_rows(llm, [prompt], cell, turns, earlier, prefill, float("inf"))
            rows += [row | {"cell": label(texts.texts[0], cell, profile), "profile": profile} for row in found]
        yield rows


def forget(llm: LLM) -> None:
    """Empty the profile of a model."""
    parts = llm.engines.parts
    costs = CostModel(None, parts.costs.passes.works, kernel_level(llm.target.decoder.device))
    llm.engines.parts = replace(parts, costs=costs)


def label(text: Text, cell: Cell, profile: str) -> str:
    """The name of a cell of one text."""
    return f"{text.name} {cell} {profile}"


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return how `auto` compares with plain decoding and with the best fixed mode, with each profile."""
    lines = []
    for profile, mode in product(PROFILES, (AUTO, CONTROL)):
        some = [row for row in rows if row["profile"] == profile]
        found, speedups = verdict(some, mode), [row["speedup"] for row in some if row["mode"] == mode]
        if speedups:
            below, lost = sum(each < LOST_SPEEDUP for each in speedups), len(found["lost"] or ())
            means = f"{found['mean']:.2f}", f"{min(speedups):.2f}", str(below), str(lost), f"{found['of_best']:.2f}"
            lines.append([profile, mode, str(found["cells"]), *means])
    note = (
        f"Of plain decoding: the mean, the least, cells below {LOST_SPEEDUP}, and those that are with 95 % confidence. "
        "Of the best fixed mode: the mean. `ar again` is plain decoding beside itself, so chance."
    )
    header = ["profile", "mode", "cells", "mean", "least", f"below {LOST_SPEEDUP}", "lost", "of the best"]
    return [Table("Mode auto on texts that nothing was chosen by", note, header, lines), speed_tables(rows)[-1]]


main = study.command("unseen_texts", __doc__, add_arguments, measure)

if __name__ == "__main__":
    sys.exit(main())
