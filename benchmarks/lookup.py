"""What looking up the text is worth: by the length of a match, and in the place of the draft model or above it.

    python -m benchmarks.lookup

First the target's own texts, sampled after prompts from a book and from code: at each position the probability that the
target gives to what followed the longest end of the text that occurred before, and the share of the draft's guesses
that it would keep there (sum min(p, q)). Then the guesses that the retrieval tier keeps in a pass, by mode.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import torch

from triforce import LLM, SamplingParams
from triforce.bench.acceptance.walk import TeacherForcing
from triforce.bench.acceptance.workloads import Span
from triforce.engine.config import SpeculativeConfig
from triforce.engine.tier_builder import TierBuilder
from triforce.eval.agreement import overlap
from triforce.interface.outputs import RequestOutput
from triforce.ragged import ints
from triforce.sampling import Warper
from triforce.speculation.ngram_index import NgramIndex

PACKAGE = Path(str(resources.files("triforce")))
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
MODES = ("triforce", "ngram", "draft-ngram")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lookup", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--context", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens")
    parser.add_argument("--coupling", default="seeded")
    options = parser.parse_args(arguments)
    llm = LLM(coupling=options.coupling)
    tried: dict[int, list[tuple[float, float]]] = defaultdict(list)
    passes: dict[tuple[float, str], list[int]] = defaultdict(lambda: [0, 0])
    for prompt in prompts(llm, options.context):
        for temperature in (0.0, 0.6, 1.0):
            params = SamplingParams(temperature, top_p=0.9, seed=7, max_tokens=options.tokens, ignore_eos=True)
            for mode in MODES:
                (output,) = llm.generate([prompt], params, mode=mode)
                counts = passes[temperature, mode]
                counts[:] = (a + b for a, b in zip(counts, kept_and_passes(output), strict=True))
            for length, kept, drafted in by_length(llm, prompt, output.outputs[0].token_ids, params):
                tried[length].append((kept, drafted))
    print("| match | positions | lookup | draft |\n| --- | ---: | ---: | ---: |")
    for length, pairs in sorted(tried.items()):
        kept, drafted = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
        print(f"| from {length} | {len(pairs)} | {kept:.3f} | {drafted:.3f} |")
    print("\n| temperature | mode | guesses kept per pass of the retrieval tier |\n| --- | --- | ---: |")
    for (temperature, mode), (kept_guesses, count) in passes.items():
        print(f"| {temperature} | {mode} | {kept_guesses / count:.3f} |")


def prompts(llm: LLM, context: int) -> Iterator[list[int]]:
    """Two places of the sample book, and triforce's own source."""
    book = llm.tokenizer.encode((PACKAGE / "assets" / "dracula.txt").read_text(encoding="utf-8"))
    code = llm.tokenizer.encode("\n".join(file.read_text(encoding="utf-8") for file in sorted(PACKAGE.rglob("*.py"))))
    for ids, start in ((book, 0), (book, 60_000), (code, 20_000)):
        yield ids[start : start + context]


def kept_and_passes(output: RequestOutput) -> tuple[int, int]:
    """Of the tiers below the retrieval tier the guesses kept, and of that its passes."""
    *below, middle, _ = output.tiers
    return sum(tier.accepted for tier in below), middle.passes


@torch.no_grad()
def by_length(
    llm: LLM, prompt: list[int], new: list[int], params: SamplingParams
) -> Iterator[tuple[int, float, float]]:
    """For each new token with a match before it: its length, rounded down; what lookup and draft are worth there."""
    ids, rows = ints([*prompt, *new]), TierBuilder(llm.models, SpeculativeConfig(), [len(prompt) + len(new)])
    reader = TeacherForcing(ids[None], Warper([params], [len(prompt)], llm.target.config.vocab_size))
    span, laws = Span(len(prompt), len(ids), True), []
    for tier in (rows.exact(rows.full()), rows.lowest()):
        reader.prefill(tier, span.start - 1)
        laws.append(
            torch.cat([reader(tier.model, tier.cache, Span(at, at + 1, True)) for at in range(span.start, span.stop)])
        )
    shared, grams = overlap(*laws).tolist(), NgramIndex(1)
    for at in range(span.start, span.stop):
        grams.read(ids[:at])
        length, after = grams.match(ids[:at])
        if length:
            p = float(laws[0][at - span.start, ids[after]])
            yield max(low for low in LENGTHS if low <= length), p, shared[at - span.start]


if __name__ == "__main__":
    main()
