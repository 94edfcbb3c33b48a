"""Repetition in sampled continuations."""

from __future__ import annotations

import random
from statistics import median
from typing import Any

from triforce.engine import MOST_ROWS
from triforce.eval.context import EvalContext, Text
from triforce.eval.tables import Table, percent
from triforce.eval.time_budget import ReadingForecast
from triforce.interface.repeated_grams import GRAM, repeated
from triforce.interface.sampling_params import SamplingParams


def measure(subject: EvalContext) -> dict[str, Any]:
    """Return shares of repeated 8-grams in continuations at T = 0.6 and top-p 0.9, and in the texts themselves."""
    plan = subject.plan
    length = min(256, plan.new_tokens)
    starts = _starts(subject, length + plan.new_tokens)
    if not starts:
        return {"skipped": f"no text has {length + plan.new_tokens:,} tokens"}
    texts = [text.ids_N[start : start + length + plan.new_tokens].tolist() for text, start in starts]
    params = [
        SamplingParams(temperature=0.6, top_p=0.9, max_tokens=plan.new_tokens, ignore_eos=True, seed=plan.seed + n)
        for n in range(len(texts))
    ]
    outputs = subject.llm.generate([text[:length] for text in texts], params, mode="ar")
    shares = [repeated(output.outputs[0].token_ids) for output in outputs]
    text_shares = [repeated(text[length:]) for text in texts]
    return {"tokens": plan.new_tokens, "shares": shares, "median": median(shares), "texts": median(text_shares)}


def _starts(subject: EvalContext, length: int) -> list[tuple[Text, int]]:
    """Return random start positions, from each text of at least `length` tokens in turn."""
    rng = random.Random(subject.plan.seed)
    texts = [text for text in subject.texts if len(text.ids_N) >= length]
    turns = [texts[n % len(texts)] for n in range(subject.plan.prompts)] if texts else []
    return [(text, rng.randint(0, len(text.ids_N) - length)) for text in turns]


def seconds(subject: EvalContext, forecast: ReadingForecast) -> float:
    plan = subject.plan
    pace = forecast.target
    step = max(pace.step, min(plan.prompts, MOST_ROWS) * pace.token)
    batches = -(-plan.prompts // MOST_ROWS)
    return plan.prompts * pace.reading_seconds(min(256, plan.new_tokens)) + batches * plan.new_tokens * step


def tables(result: dict[str, Any]) -> list[Table]:
    shares = sorted(result["shares"])
    row = [f"{len(shares)}", f"{result['tokens']}", *map(percent, (result["median"], shares[-1], result["texts"]))]
    note = f"Share of {GRAM}-grams that came before in the same continuation, sampled at T = 0.6 with top-p 0.9."
    header = ["continuations", "tokens each", "median", "worst", "median of the texts themselves"]
    return [Table("Repetition", note, header, [row])]
