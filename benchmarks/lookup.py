"""Acceptance of n-gram lookup: by the length of a match, instead of the draft model and above it.

    python -m benchmarks.lookup --json benchmarks/results/lookup.json

First the target's own texts, sampled after prompts from a book and from code: at each position the probability that the
target gives to what followed the longest end of the text that occurred before, and the share of the draft's tokens
that it would accept there (sum min(p, q)). Then the draft tokens that the retrieval tier accepts in a pass, by mode.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterator
from statistics import mean

import torch

from benchmarks import study
from benchmarks.acceptance.teacher_forcing import Walk
from benchmarks.acceptance.workloads import Span, Workload
from triforce import LLM, SamplingParams
from triforce.cli.bench.setup import own_texts
from triforce.cli.options import coupling, described, json_file
from triforce.eval.agreement import overlap
from triforce.eval.context import tokenizer_of
from triforce.interface.outputs import RequestOutput
from triforce.ragged import ints
from triforce.speculation.ngram import NgramIndex

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
MODES = ("triforce", "ngram", "draft-ngram")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--context", type=int, default=4096, metavar="N", help=described("tokens of a prompt"))
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help=described("new tokens"))
    coupling(parser)
    json_file(parser)


def measure(options: Namespace) -> None:
    """Print both tables, and write them."""
    llm = LLM(coupling=options.coupling)
    tried: dict[int, list[tuple[float, float]]] = defaultdict(list)
    passes: dict[tuple[float, str], list[tuple[int, int]]] = defaultdict(list)
    for prompt in prompts(llm, options.context):
        for temperature in (0.0, 0.6, 1.0):
            params = SamplingParams(temperature, top_p=0.9, seed=7, max_tokens=options.tokens, ignore_eos=True)
            for mode in MODES:
                (output,) = llm.generate([prompt], params, mode=mode)
                passes[temperature, mode].append(kept_and_passes(output))
            for length, shared_mass, drafted in by_length(llm, prompt, output.outputs[0].token_ids, params):
                tried[length].append((shared_mass, drafted))
    matches = []
    for length, pairs in sorted(tried.items()):
        of_lookup, of_draft = (mean(column) for column in zip(*pairs, strict=True))
        matches.append({"match": length, "positions": len(pairs), "lookup": of_lookup, "draft": of_draft})
    of_modes = [
        {"temperature": temperature, "mode": mode, "kept": sum(a for a, _ in counts) / sum(n for _, n in counts)}
        for (temperature, mode), counts in passes.items()
    ]
    print("| match | positions | lookup | draft |\n| --- | ---: | ---: | ---: |")
    for row in matches:
        print(f"| from {row['match']} | {row['positions']} | {row['lookup']:.3f} | {row['draft']:.3f} |")
    print("\n| temperature | mode | accepted draft tokens per pass of the retrieval tier |\n| --- | --- | ---: |")
    for row in of_modes:
        print(f"| {row['temperature']} | {row['mode']} | {row['kept']:.3f} |")
    study.write(options, {"context": options.context, "matches": matches, "rows": of_modes})


def prompts(llm: LLM, context: int) -> Iterator[list[int]]:
    """Yield two places of the sample book, and the package's own source."""
    book, code = map(tokenizer_of(llm).encode, own_texts().values())
    for ids, start in ((book, 0), (book, 60_000), (code, 20_000)):
        yield ids[start : start + context]


def kept_and_passes(output: RequestOutput) -> tuple[int, int]:
    """Return accepted draft tokens of the tiers below the retrieval tier, and passes of the retrieval tier."""
    *below, middle, _ = output.tiers
    return sum(tier.accepted for tier in below), middle.passes


def by_length(
    llm: LLM, prompt: list[int], new: list[int], params: SamplingParams
) -> Iterator[tuple[int, float, float]]:
    """Yield for each new token with a match before it: its length, rounded down; worth of lookup and of the draft."""
    ids = ints([*prompt, *new])
    spans = [Span(at, at + 1, True) for at in range(len(prompt), len(ids))]
    walk = Walk(llm.models, Workload("", "", ids.tolist(), spans), params)
    exact_NV = torch.cat([walk.read(llm.models.target, walk.full, span) for span in spans])
    shared = overlap(exact_NV, walk.draft()).tolist()
    grams = NgramIndex(1)
    for n, span in enumerate(spans):
        prefix = ids[: span.start]
        grams.read(prefix)
        length, start = grams.match(prefix)
        if length:
            yield max(low for low in LENGTHS if low <= length), float(exact_NV[n, ids[start]]), shared[n]


main = study.command("lookup", __doc__, add_arguments, measure)

if __name__ == "__main__":
    sys.exit(main())
