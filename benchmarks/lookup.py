"""Acceptance of n-gram lookup: by the length of a match, instead of the draft model and above it.

    python -m benchmarks.lookup

First the target's own texts, sampled after prompts from a book and from code: at each position the probability that the
target gives to what followed the longest end of the text that occurred before, and the share of the draft's guesses
that it would keep there (sum min(p, q)). Then the guesses that the retrieval tier keeps in a pass, by mode.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

import torch

from benchmarks import study
from benchmarks.acceptance.teacher_forcing import TeacherForcing
from benchmarks.acceptance.workloads import Span
from triforce import LLM, SamplingParams
from triforce.cli.options import coupling, described
from triforce.engine.speculative_config import SpeculativeConfig
from triforce.engine.tier_builder import TierBuilder
from triforce.eval.agreement import overlap
from triforce.eval.context import tokenizer_of
from triforce.interface.outputs import RequestOutput
from triforce.ragged import ints
from triforce.sampling import LogitsProcessor
from triforce.speculation.ngram import NgramIndex

PACKAGE = Path(str(resources.files("triforce")))
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
MODES = ("triforce", "ngram", "draft-ngram")


def main(arguments: Sequence[str] | None = None) -> int:
    return study.run("ngram", __doc__, add_arguments, measure, arguments)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--context", type=int, default=4096, metavar="N", help=described("tokens of a prompt"))
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help=described("new tokens"))
    coupling(parser)


def measure(options: Namespace) -> int:
    """Print both tables."""
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
    return 0


def prompts(llm: LLM, context: int) -> Iterator[list[int]]:
    """Yield two places of the sample book, and the package's own source."""
    encode = tokenizer_of(llm).encode
    book = encode((PACKAGE / "assets" / "dracula.txt").read_text(encoding="utf-8"))
    code = encode("\n".join(file.read_text(encoding="utf-8") for file in sorted(PACKAGE.rglob("*.py"))))
    for ids, start in ((book, 0), (book, 60_000), (code, 20_000)):
        yield ids[start : start + context]


def kept_and_passes(output: RequestOutput) -> tuple[int, int]:
    """Return guesses kept of the tiers below the retrieval tier, and passes of that."""
    *below, middle, _ = output.tiers
    return sum(tier.accepted for tier in below), middle.passes


@torch.no_grad()
def by_length(
    llm: LLM, prompt: list[int], new: list[int], params: SamplingParams
) -> Iterator[tuple[int, float, float]]:
    """Yield for each new token with a match before it: its length, rounded down; worth of lookup and of the draft."""
    ids, rows = ints([*prompt, *new]), TierBuilder(llm.models, SpeculativeConfig(), [len(prompt) + len(new)])
    reader = TeacherForcing(ids[None], LogitsProcessor([params], [len(prompt)], llm.target.config.vocab_size))
    span, laws = Span(len(prompt), len(ids), True), []
    assert llm.models.draft is not None, "the shipped pair has one"
    tiers = ((llm.models.target, rows.exact(rows.full())), (llm.models.draft, rows.lowest()))
    for model, tier in tiers:
        reader.prefill(tier, span.start - 1)
        laws.append(
            torch.cat([reader(model, tier.cache, Span(at, at + 1, True)) for at in range(span.start, span.stop)])
        )
    shared, grams = overlap(*laws).tolist(), NgramIndex(1)
    for at in range(span.start, span.stop):
        grams.read(ids[:at])
        length, after = grams.match(ids[:at])
        if length:
            p = float(laws[0][at - span.start, ids[after]])
            yield max(low for low in LENGTHS if low <= length), p, shared[at - span.start]


if __name__ == "__main__":
    sys.exit(main())
