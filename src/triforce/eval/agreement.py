"""Agreement of draft and target: the target sees everything, the draft what the engine shows it.

Shape suffixes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from triforce.eval.context import EvalContext, Text, grouped
from triforce.eval.scoring import draft_view, full_view, parts, read, skim
from triforce.eval.tables import Table, tokens
from triforce.eval.time_budget import ReadingForecast
from triforce.interface.sampling_params import SamplingParams
from triforce.sampling import LogitsProcessor

TEMPERATURES = (0.0, 0.6, 1.0)
AT_ONCE = 128

WARPING = 5e-7
"""Seconds, about, of the probabilities of one position for each token of the vocabulary."""


def measure(subject: EvalContext) -> dict[str, Any]:
    """Return the mean probability that a drafted token is kept, by coupling, temperature and kind of text."""
    if subject.llm.eagle_head:
        return {"skipped": "the card of a draft that reads hidden states has its figures, in its config.json"}
    if subject.llm.draft is None:
        return {"skipped": "there is no draft; name one with --draft"}
    plan = subject.plan
    after = min(4096, plan.span // 2)
    windows = subject.windows(least=after + plan.judged)
    if not windows:
        return {"skipped": f"no text has {after + plan.judged:,} tokens"}
    shares = [(window.kind, _share(subject, window, after)) for window in subject.steps(windows)]
    return {
        "from": after,
        "tokens": plan.judged,
        "kinds": {kind: _mean(found) for kind, found in grouped(shares).items()},
    }


def _mean(shares: list[Tensor]) -> dict[str, Any]:
    by_temperature = zip(TEMPERATURES, torch.stack(shares).mean(0).tolist(), strict=True)
    return {"windows": len(shares)} | {
        f"{temperature:g}": {"rejection": kept, "seeded": same} for temperature, (kept, same) in by_temperature
    }


def _share(subject: EvalContext, window: Text, after: int) -> Tensor:
    """Means over the judged tokens of a window: (temperatures, couplings)."""
    vocab_size = subject.target.config.vocab_size
    device = subject.target.device
    warps = [LogitsProcessor([SamplingParams(temperature=t)], [0], vocab_size, device) for t in TEMPERATURES]
    no_ids_11 = torch.zeros(1, 1, dtype=torch.long, device=device)
    sums = torch.zeros(len(TEMPERATURES), 2, dtype=torch.float64)
    for both in _logits(subject, window, after):
        for n, warp in enumerate(warps):
            p_TV, q_TV = (warp(logits_TV[None], no_ids_11, no_ids_11[0])[0] for logits_TV in both)
            sums[n] += torch.stack([overlap(p_TV, q_TV).sum(), same_pick(p_TV, q_TV).sum()]).cpu()
    return sums / subject.plan.judged


def _logits(subject: EvalContext, window: Text, after: int) -> Iterator[tuple[Tensor, Tensor]]:
    assert subject.llm.draft is not None
    stop = after + subject.plan.judged
    target = subject.target
    draft = subject.llm.draft.decoder
    exact = full_view(target, stop)
    cheap = draft_view(draft)
    skim(target, exact, window.ids_N[:after])
    skim(draft, cheap, window.ids_N[:after])
    for part_T in parts(window.ids_N[after:stop], AT_ONCE):
        yield torch.cat([*read(target, exact, part_T)]), torch.cat([*read(draft, cheap, part_T)])


def overlap(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    """Return the probability that rejection keeps a token drawn from q (Leviathan et al. 2023): sum min(p, q), (T)."""
    return torch.minimum(p_TV, q_TV).sum(-1)


def same_pick(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    """Return the probability that exponential races of rates p and q with the same noise have one winner, (T).

    Token i wins both if E_j >= E_i max(p_j / p_i, q_j / q_i) for each j, hence with probability
    1 / sum_j max(p_j / p_i, q_j / q_i) (Daliri, Musco and Suresh 2024). In descending order of p / q the maximum is the
    first ratio up to i, and the second one after it: two running sums instead of all pairs.
    """
    ratio_TV = torch.where(p_TV > 0, p_TV / q_TV, 0.0)
    order_TV = ratio_TV.argsort(-1, descending=True)
    p_TV = p_TV.gather(-1, order_TV)
    q_TV = q_TV.gather(-1, order_TV)
    before_TV = p_TV.cumsum(-1)
    after_TV = q_TV.flip(-1).cumsum(-1).flip(-1) - q_TV
    shares_TV = p_TV * q_TV / (before_TV * q_TV + after_TV * p_TV)
    return torch.where(p_TV * q_TV > 0, shares_TV, 0.0).sum(-1)


def seconds(subject: EvalContext, forecast: ReadingForecast) -> float:
    plan = subject.plan
    warping = WARPING * subject.target.config.vocab_size
    stop = min(4096, plan.span // 2) + plan.judged
    windows = subject.windows(least=stop) if forecast.draft else []
    return len(windows) * (forecast.target.reading(stop) + forecast.drafts(stop) + plan.judged * warping)


def tables(result: dict[str, Any]) -> list[Table]:
    rows = [
        [f"{kind}, {coupling}", *(f"{found[f'{t:g}'][coupling]:.3f}" for t in TEMPERATURES)]
        for kind, found in result["kinds"].items()
        for coupling in ("rejection", "seeded")
    ]
    windows = sum(found["windows"] for found in result["kinds"].values())
    note = (
        "Chance that the target keeps a drafted token: the sum of min(p, q) under rejection; under the seeded coupling "
        "that both draw the same token from the same noise, computed exactly. "
        f"{result['tokens']:,} tokens after the first {tokens(result['from'])} of {windows} windows; no top-p."
    )
    return [Table("Agreement of draft and target", note, ["", *(f"T = {t:g}" for t in TEMPERATURES)], rows)]
