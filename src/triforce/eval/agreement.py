"""Agreement of draft and target. The target sees the whole context, the draft its view in the engine.

Shape suffixes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from triforce.backends.torch.logits_processor import LogitsProcessor
from triforce.eval.context import EvalContext, Text, group_by_kind
from triforce.eval.scoring import draft_view, full_view, parts, prefill, read
from triforce.eval.time_budget import ReadingForecast
from triforce.interface.sampling_params import SamplingParams
from triforce.tables import Table, tokens

TEMPERATURES = (0.0, 0.6, 1.0)
CHUNK_TOKENS = 128

PROBS_SECONDS = 5e-7
"""Approximate seconds to compute the probabilities of one position, per token of the vocabulary."""


def measure(subject: EvalContext) -> dict[str, Any]:
    """Return the mean probability that a draft token is accepted, by kind of text, temperature and coupling."""
    if subject.llm.eagle_head:
        return {"skipped": "a draft that reads hidden states has its agreement figures in its own config.json"}
    if subject.llm.draft is None:
        return {"skipped": "there is no draft; name one with --draft"}
    config = subject.config
    prefix_tokens = min(4096, config.span // 2)
    windows = subject.windows(min_tokens=prefix_tokens + config.compared_tokens)
    if not windows:
        return {"skipped": f"no text has {prefix_tokens + config.compared_tokens:,} tokens"}
    shares = [
        (window.kind, _window_shares(subject, window, prefix_tokens)) for window in subject.with_progress(windows)
    ]
    return {
        "from": prefix_tokens,
        "tokens": config.compared_tokens,
        "kinds": {kind: _mean(kind_shares) for kind, kind_shares in group_by_kind(shares).items()},
    }


def _mean(shares: list[Tensor]) -> dict[str, Any]:
    by_temperature = zip(TEMPERATURES, torch.stack(shares).mean(0).tolist(), strict=True)
    return {"windows": len(shares)} | {
        f"{temperature:g}": {"rejection": rejection_share, "seeded": seeded_share}
        for temperature, (rejection_share, seeded_share) in by_temperature
    }


def _window_shares(subject: EvalContext, window: Text, prefix_tokens: int) -> Tensor:
    """Return mean acceptance over the compared tokens of a window: float64 (temperatures, couplings)."""
    vocab_size = subject.target.config.vocab_size
    device = subject.target.device
    processors = [LogitsProcessor([SamplingParams(temperature=t)], [0], vocab_size, device) for t in TEMPERATURES]
    no_ids_11 = torch.zeros(1, 1, dtype=torch.long, device=device)
    sums = torch.zeros(len(TEMPERATURES), 2, dtype=torch.float64)
    for logits_pair in _logit_pairs(subject, window, prefix_tokens):
        for n, processor in enumerate(processors):
            p_TV, q_TV = (processor(logits_TV[None], no_ids_11, no_ids_11[0])[0] for logits_TV in logits_pair)
            sums[n] += torch.stack([overlap(p_TV, q_TV).sum(), same_pick(p_TV, q_TV).sum()]).cpu()
    return sums / subject.config.compared_tokens


def _logit_pairs(subject: EvalContext, window: Text, prefix_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    assert subject.llm.draft is not None
    stop = prefix_tokens + subject.config.compared_tokens
    target = subject.target
    draft = subject.llm.draft.decoder
    target_view = full_view(target, stop)
    draft_cache_view = draft_view(draft)
    prefill(target, target_view, window.ids_N[:prefix_tokens])
    prefill(draft, draft_cache_view, window.ids_N[:prefix_tokens])
    for chunk_T in parts(window.ids_N[prefix_tokens:stop], CHUNK_TOKENS):
        yield torch.cat([*read(target, target_view, chunk_T)]), torch.cat([*read(draft, draft_cache_view, chunk_T)])


def overlap(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    """Return the probability that rejection keeps a token drawn from q (Leviathan et al. 2023): sum min(p, q), (T)."""
    return torch.minimum(p_TV, q_TV).sum(-1)


def same_pick(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    """Return the probability that exponential races of rates p and q with the same noise have the same winner, (T).

    Token i wins both if E_j >= E_i max(p_j / p_i, q_j / q_i) for each j, hence with probability
    1 / sum_j max(p_j / p_i, q_j / q_i) (Daliri, Musco and Suresh 2024). With tokens in descending order of p / q, the
    maximum is p_j / p_i for j up to i, and q_j / q_i after i. So two running sums take the place of all pairs.
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
    config = subject.config
    probs_seconds = PROBS_SECONDS * subject.target.config.vocab_size
    stop = min(4096, config.span // 2) + config.compared_tokens
    windows = subject.windows(min_tokens=stop) if forecast.draft else []
    return len(windows) * (
        forecast.target.reading_seconds(stop) + forecast.draft_seconds(stop) + config.compared_tokens * probs_seconds
    )


def tables(result: dict[str, Any]) -> list[Table]:
    rows = [
        [f"{kind}, {coupling}", *(f"{kind_shares[f'{t:g}'][coupling]:.3f}" for t in TEMPERATURES)]
        for kind, kind_shares in result["kinds"].items()
        for coupling in ("rejection", "seeded")
    ]
    windows = sum(kind_shares["windows"] for kind_shares in result["kinds"].values())
    note = (
        "Probability that the target keeps a draft token. Under rejection it is the sum of min(p, q). Under the seeded "
        "coupling it is the probability that both models draw the same token from the same noise, computed exactly. "
        f"{result['tokens']:,} tokens after the first {tokens(result['from'])} of {windows} windows; no top-p."
    )
    return [Table("Agreement of draft and target", note, ["", *(f"T = {t:g}" for t in TEMPERATURES)], rows)]
