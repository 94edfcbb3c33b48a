"""Quality under eviction: needles found and passages copied, beside lossless decoding."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.quality.eviction import EVICTIONS, EvictingDecoder
from triforce.bench.batch_runner import Prompts, together, varied
from triforce.bench.prompts import CUE, NEEDLES, Sources, copied_from, numbers, prompts
from triforce.engine.sequence_group import OnPrefill
from triforce.errors import RequestError
from triforce.eval import Table
from triforce.eval.tables import percent, tokens
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import Budget
from triforce.llm import LLM
from triforce.ragged import common_prefix

Row = dict[str, Any]
PLAIN = "plain decoding"


@dataclass(frozen=True)
class QualityConfig:
    """Prompt tokens; tokens that each decoder keeps; questions of each kind; new tokens of a copy."""

    contexts: Sequence[int]
    budgets: Sequence[int]
    questions: int = NEEDLES
    tokens: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.questions <= NEEDLES:
            raise RequestError(f"--questions {self.questions}: give 1 to {NEEDLES}")
        if min(*self.contexts, *self.budgets, self.tokens) < 1:
            raise RequestError("--contexts, --budgets and --tokens must be at least 1")


def rows(llm: LLM, sources: Sources, plan: QualityConfig, on_prefill: Callable[[], OnPrefill]) -> Iterator[Row]:
    """Yield a row for each task, context, budget and decoder. Raises RequestError for texts that are too short."""
    for context in plan.contexts:
        for task in ("needle", "copy"):
            asked = prompts(sources, task, context, plan.questions)
            with tempfile.TemporaryDirectory() as folder:
                yield from _task(llm, sources, plan, task, asked, Prompts(llm, Path(folder), on_prefill))


def _task(
    llm: LLM, sources: Sources, plan: QualityConfig, task: str, asked: list[list[int]], kept: Prompts
) -> Iterator[Row]:
    earlier, _ = kept.of(task, asked[0])
    greedy = SamplingParams(temperature=0, max_tokens=plan.tokens, ignore_eos=True)
    forgetful = EvictingDecoder(llm.target.decoder, asked, plan.tokens)

    def lossless(mode: str, budget: int) -> list[list[int]]:
        how = varied(llm, retrieval=replace(llm.speculation.retrieval, budget=Budget(budget)))
        return [together(how, [prompt], greedy, mode, earlier).outputs[0].token_ids for prompt in asked]

    plain = lossless("ar", plan.budgets[0])
    about = {"task": task, "context": len(asked[0]), "questions": len(asked)}
    yield about | {"budget": None, "decoder": PLAIN} | _judged(sources, task, plain, plain, len(asked[0]))
    for budget in plan.budgets:
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
