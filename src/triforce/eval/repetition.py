"""Repetition in sampled continuations."""

from __future__ import annotations

import random
from statistics import median
from typing import Any

from triforce.engine import MAX_ROWS
from triforce.eval.context import EvalContext, Text
from triforce.eval.time_budget import ReadingForecast
from triforce.interface.repeated_grams import GRAM, repeated_share
from triforce.interface.sampling_params import SamplingParams
from triforce.tables import Table, percent


def measure(subject: EvalContext) -> dict[str, Any]:
    """Return shares of repeated 8-grams in continuations at T = 0.6 and top-p 0.9, and in the texts themselves."""
    config = subject.config
    length = min(256, config.new_tokens)
    starts = _starts(subject, length + config.new_tokens)
    if not starts:
        return {"skipped": f"no text has {length + config.new_tokens:,} tokens"}
    texts = [text.ids_N[start : start + length + config.new_tokens].tolist() for text, start in starts]
    params = [
        SamplingParams(temperature=0.6, top_p=0.9, max_tokens=config.new_tokens, ignore_eos=True, seed=config.seed + n)
        for n in range(len(texts))
    ]
    outputs = subject.llm.generate([text[:length] for text in texts], params, mode="ar")
    shares = [repeated_share(output.outputs[0].token_ids) for output in outputs]
    text_shares = [repeated_share(text[length:]) for text in texts]
    return {"tokens": config.new_tokens, "shares": shares, "median": median(shares), "texts": median(text_shares)}


def _starts(subject: EvalContext, length: int) -> list[tuple[Text, int]]:
    """Return random start positions, from each text of at least `length` tokens in turn."""
    rng = random.Random(subject.config.seed)
    texts = [text for text in subject.texts if len(text.ids_N) >= length]
    turns = [texts[n % len(texts)] for n in range(subject.config.prompts)] if texts else []
    return [(text, rng.randint(0, len(text.ids_N) - length)) for text in turns]


def seconds(subject: EvalContext, forecast: ReadingForecast) -> float:
    config = subject.config
    pace = forecast.target
    step = max(pace.single_token_seconds, min(config.prompts, MAX_ROWS) * pace.token_seconds)
    batches = -(-config.prompts // MAX_ROWS)
    return config.prompts * pace.reading_seconds(min(256, config.new_tokens)) + batches * config.new_tokens * step


def tables(result: dict[str, Any]) -> list[Table]:
    shares = sorted(result["shares"])
    row = [f"{len(shares)}", f"{result['tokens']}", *map(percent, (result["median"], shares[-1], result["texts"]))]
    note = f"Share of {GRAM}-grams that came before in the same continuation, sampled at T = 0.6 with top-p 0.9."
    header = ["continuations", "tokens each", "median", "worst", "median of the texts themselves"]
    return [Table("Repetition", note, header, [row])]
