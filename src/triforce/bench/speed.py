"""Plain decoding against the other modes: the same prompt, the same seed, one process, in turns.

Prefill is reported beside decoding, never in it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from triforce.group import OnPrefill
from triforce.llm import LLM
from triforce.request import RequestOutput, SamplingParams

Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What to measure: `tokens` new ones, `repeats` times for each mode, at each context (tokens) and temperature."""

    contexts: Sequence[int]
    temperatures: Sequence[float]
    modes: Sequence[str]
    top_p: float = 0.9
    tokens: int = 256
    repeats: int = 3


def rows(llm: LLM, ids: list[int], plan: Plan, on_prefill: Callable[[], OnPrefill]) -> Iterator[Row]:
    """One row for each mode, temperature and context; each prompt is the start of `ids`, and read once."""
    for context in plan.contexts:
        with tempfile.TemporaryDirectory() as folder:
            saved, prefill = Path(folder) / "prompt.kv", 0.0
            for temperature in plan.temperatures:
                params = SamplingParams(
                    temperature=temperature, top_p=plan.top_p, seed=1, max_tokens=plan.tokens, ignore_eos=True
                )
                if not saved.exists():
                    short = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
                    (first,) = llm.generate(ids[:context], short, mode="ar", save_cache=saved, on_prefill=on_prefill())
                    prefill = (context - 1) / first.prefill_seconds
                yield from _in_turns(llm, ids[:context], params, plan, saved, prefill)


def _in_turns(
    llm: LLM, prompt: list[int], params: SamplingParams, plan: Plan, saved: Path, prefill: float
) -> Iterator[Row]:
    """The modes take turns, so that a drift of the machine meets all of them."""
    runs: dict[str, list[RequestOutput]] = {mode: [] for mode in dict.fromkeys(["ar", *plan.modes])}
    for _ in range(plan.repeats):
        for mode, outputs in runs.items():
            outputs += llm.generate(prompt, params, mode=mode, load_cache=saved)
    for mode in plan.modes:
        yield {
            "mode": mode,
            "context": len(prompt),
            "temperature": params.temperature,
            "coupling": llm.coupling,  # under `rejection` texts differ from plain decoding's, their law does not
            **timing([o.decode_seconds for o in runs[mode]], [o.decode_seconds for o in runs["ar"]], plan.tokens),
            "prefill_tokens_per_second": prefill,
            **_acceptance(runs[mode][0]),
            "repeated_8_grams": repeated(runs[mode][0].outputs[0].token_ids, 8),
            "same_text_as_ar": runs[mode][0].outputs[0].token_ids == runs["ar"][0].outputs[0].token_ids,
        }


def timing(seconds: Sequence[float], plain: Sequence[float], tokens: int) -> Row:
    """Medians; the speedups are taken turn by turn, and `spread` is the range of their middle half."""
    speedups = sorted(a / b for a, b in zip(plain, seconds, strict=True))
    quarter = len(speedups) // 4
    return {
        "tokens": tokens,
        "seconds": median(seconds),
        "tokens_per_second": tokens / median(seconds),
        "speedup": median(speedups),
        "spread": speedups[-1 - quarter] - speedups[quarter],
    }


def repeated(ids: Sequence[int], n: int) -> float:
    """Share of n-grams that have come before: a text that loops is easy to guess, and its speed counts for little."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return (len(grams) - len(set(grams))) / max(len(grams), 1)


def _acceptance(output: RequestOutput) -> Row:
    tiers = output.outputs[0].tiers
    return {"acceptance": {tier.name: tier.acceptance for tier in tiers[:-1]}, "full_passes": tiers[-1].passes}
