"""Quality under eviction: StreamingLLM and H2O beside lossless decoding, on needles and passages to copy.

python -m benchmarks.quality --json benchmarks/results/quality.json
"""

from __future__ import annotations

import re
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import study
from benchmarks.acceptance.h2o import HeavyHitters, added, attended
from triforce.arrays import Array
from triforce.backends.decoder import Decoder
from triforce.bench.prompts import (
    CUE,
    NEEDLES,
    PromptCache,
    Sources,
    copied_from,
    generate_batch,
    numbers,
    prompts,
    variant_of,
)
from triforce.cli.bench import parts, setup
from triforce.cli.bench.setup import show
from triforce.cli.options import described, draft, json_file, model, placement, quiet, several
from triforce.cli.progress import Prefill
from triforce.engine.tier_builder import ModelSet, SpeculativeConfig, TierBuilder
from triforce.errors import RequestError
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import Budget, RetrievalConfig, RetrievalView
from triforce.kvcache.selection import Policy, Recent
from triforce.llm import LLM
from triforce.ragged import common_prefix, ints
from triforce.tables import Table, percent, tokens

Row = dict[str, Any]
PLAIN = "plain decoding"

EVICTIONS: dict[str, Callable[[Array], Policy]] = {
    "StreamingLLM": lambda mass_LGU: Recent(),
    "H2O": HeavyHitters,
}
"""Policies, given the attention that the prompt drew."""


class EvictingDecoder:
    """Decodes prompts that begin alike with an evicting cache; their common prefix is read once.

    Prompts are read exactly; from the last token on, each token sees `budget` tokens of what came before, and what it
    writes is built upon. So this is kind to StreamingLLM and H2O: they usually read the prompt that way, too.
    tokens: new ones at most.
    """

    def __init__(self, decoder: Decoder, prompts: Sequence[list[int]], tokens: int) -> None:
        self.decoder, self.tokens = decoder, tokens
        self.shared = shared(prompts)
        longest = max(map(len, prompts)) + tokens
        self.full = TierBuilder(ModelSet(decoder), SpeculativeConfig(), [longest]).full_view()
        self.mass_LGU = attended(decoder, self.full, ints(prompts[0][: self.shared])[None])

    @torch.no_grad()
    def continued(self, prompt: list[int], eviction: str, budget: int) -> list[int]:
        """Return the greedy continuation of one of the prompts; `budget` in tokens."""
        self.full.rewind(ints([self.shared]))
        mass_LGU = added(self.mass_LGU, attended(self.decoder, self.full, ints(prompt[:-1])[None]))
        setting, made, one = RetrievalConfig(Budget(budget), searched_layers=frozenset()), prompt[-1:], ints([1])
        view = RetrievalView(self.full, lambda: EVICTIONS[eviction](mass_LGU), setting)
        self.full.observe(view.unit if view.observes else 0)
        for _ in range(self.tokens):
            logits_1JV = self.decoder(ints(made[-1:])[None], one, view)
            self.full.pool.lengths_B += 1  # there is nothing exact above to wait for
            made.append(int(logits_1JV[0, -1].argmax()))
        return made[1:]


def shared(prompts: Sequence[list[int]]) -> int:
    """Return how many tokens all prompts begin with, short of the last one of the shortest."""
    least = min(map(len, prompts)) - 1
    return min(least, *(common_prefix(prompts[0], prompt) for prompt in prompts))


def add_arguments(parser: ArgumentParser) -> None:
    model(parser)
    draft(parser)
    parts.texts(parser)
    add = parser.add_argument
    add("--contexts", type=several(int), default=[4096, 16_384], metavar="N,...", help="prompt tokens")
    add("--budgets", type=several(int), default=[512, 2048], metavar="N,...", help="tokens that each keeps or sees")
    add("--questions", type=int, default=NEEDLES, metavar="N", help=described("needles and passages asked for, each"))
    add("--tokens", type=int, default=64, metavar="N", help=described("new ones of a passage"))
    quiet(parser)
    placement(parser, context=False)
    json_file(parser)


def measure(options: Namespace) -> None:
    """Print a table at the end. Raises RequestError for numbers that nothing can be measured with."""
    if not 1 <= options.questions <= NEEDLES:
        raise RequestError(f"--questions {options.questions}: give 1 to {NEEDLES}")
    if min(*options.contexts, *options.budgets, options.tokens) < 1:
        raise RequestError("--contexts, --budgets and --tokens must be at least 1")
    llm = setup.load(options)
    made = rows(llm, setup.sources(llm, options.texts), options)
    found = list(tqdm(made, desc="quality", disable=options.quiet or None, leave=False))
    study.write(options, {"model": options.model or "the shipped pair", "rows": found})
    show(tables(found))


def rows(llm: LLM, sources: Sources, options: Namespace) -> Iterator[Row]:
    """Yield a row for each task, context, budget and decoder. Raises RequestError for texts that are too short."""
    for context in options.contexts:
        for task in ("needle", "copy"):
            asked = prompts(sources, task, context, options.questions)
            with tempfile.TemporaryDirectory() as folder:
                kept = PromptCache(llm, Path(folder), partial(Prefill, options.quiet))
                yield from _task(llm, sources, options, task, asked, kept)


def _task(
    llm: LLM, sources: Sources, options: Namespace, task: str, asked: list[list[int]], kept: PromptCache
) -> Iterator[Row]:
    earlier, _ = kept.load(task, asked[0])
    greedy = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    forgetful = EvictingDecoder(llm.target.decoder, asked, options.tokens)

    def lossless(mode: str, budget: int) -> list[list[int]]:
        how = variant_of(llm, retrieval=replace(llm.speculation.retrieval, budget=Budget(budget)))
        return [generate_batch(how, [prompt], greedy, mode, earlier).outputs[0].token_ids for prompt in asked]

    plain = lossless("ar", options.budgets[0])
    about = {"task": task, "context": len(asked[0]), "questions": len(asked)}
    yield about | {"budget": None, "decoder": PLAIN} | _judged(sources, task, plain, plain, len(asked[0]))
    for budget in options.budgets:
        made = {llm.mode: lossless(llm.mode, budget)}
        made |= {name: [forgetful.continued(prompt, name, budget) for prompt in asked] for name in EVICTIONS}
        for decoder, texts in made.items():
            yield about | {"budget": budget, "decoder": decoder} | _judged(sources, task, texts, plain, len(asked[0]))


def _judged(sources: Sources, task: str, texts: list[list[int]], plain: list[list[int]], length: int) -> Row:
    """`right`: of needles the share found, of passages the share of tokens before the first wrong one.

    `as_plain`: the share of tokens before the first that plain decoding would not have drawn.
    """
    if task == "needle":
        found = [re.findall(r"^\s*(\d+)", sources.tokenizer.decode(text)) for text in texts]
        right = [float(digits == [str(number)]) for digits, number in zip(found, numbers(), strict=False)]
    else:
        starts = [copied_from(length, len(texts), row) + CUE for row in range(len(texts))]
        right = [alike(text, sources.prose[start:]) for text, start in zip(texts, starts, strict=True)]
    same = [alike(text, other) for text, other in zip(texts, plain, strict=True)]
    identical = sum(text == other for text, other in zip(texts, plain, strict=True))
    return {"right": sum(right) / len(right), "as_plain": sum(same) / len(same), "identical": identical}


def alike(text: Sequence[int], other: Sequence[int]) -> float:
    """Return the share of a text that stands before its first difference from the other."""
    return common_prefix(text, other) / len(text)


def tables(found: Sequence[Row]) -> list[Table]:
    """Return a table, a line for each row."""
    lines = [
        [
            f"{row['task']}, {row['decoder']}", tokens(row["context"]), str(row["budget"] or "all"),
            percent(row["right"]), percent(row["as_plain"]), f"{row['identical']} of {row['questions']}",
        ]
        for row in found
    ]  # fmt: skip
    note = (
        "Greedy decoding. Right: of needles the share found, of copied passages the share of tokens before the first "
        "wrong one. As plain: the share of tokens before the first that plain decoding would not have drawn. "
        "StreamingLLM and H2O decode with what they keep alone, after a prompt that was read exactly; the other modes "
        "have the same budget in their middle tier, and are verified."
    )
    return [
        Table("What eviction costs", note, ["decoder", "context", "budget", "right", "as plain", "identical"], lines)
    ]


main = study.command("quality", __doc__, add_arguments, measure)

if __name__ == "__main__":
    sys.exit(main())
