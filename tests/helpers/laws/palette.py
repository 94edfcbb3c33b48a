"""Laws for which a few cells integrate every decision exactly, and logits that the real processor turns into these."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise, permutations

import torch
from torch import Tensor

from triforce.interface.sampling_params import SamplingParams

Weights = tuple[int, ...]
JUNK = 0.02
"""Probability, before the logits processor, of each token that top-k, top-p or min-p must cut."""


def shuffled(*weights: Weights) -> list[Weights]:
    """Return all orders of the weights of each law."""
    return sorted({order for vector in weights for order in permutations(vector)})


def table(laws: Sequence[Weights], order: int, seed: int) -> Tensor:
    """Return random laws of the next token after `order` tokens, (V, ..., V)."""
    size = len(laws[0])
    picks = torch.randint(len(laws), (size**order,), generator=torch.Generator().manual_seed(seed))
    weights = torch.tensor(laws, dtype=torch.float64)[picks]
    return (weights / weights.sum(-1, keepdim=True)).view(*[size] * order, size)


def mixed(table: Tensor, mixed_in: Tensor, seed: int) -> Tensor:
    """Return the laws of `table` in about half of its contexts, and those of `mixed_in` elsewhere."""
    coins = torch.rand(*table.shape[:-1], 1, generator=torch.Generator().manual_seed(seed))
    return torch.where(coins < 0.5, table, mixed_in)


def logits_of(laws: Tensor, params: SamplingParams) -> Tensor:
    """Return logits whose warped law is `laws`, for a temperature, a bias, and cuts that drop tokens of weight JUNK."""
    cuts = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    logits = (torch.where(laws > 0, laws, JUNK) if cuts else laws).log() * (params.temperature or 1)
    for token, bias in (params.logit_bias or {}).items():
        logits[..., token] -= bias
    return logits


def cells_of(verifiers: Sequence[Weights], drafters: Sequence[Weights], block: int = 0) -> list[list[float]]:
    """Return widths of the fewest cells whose borders have all thresholds of `verifiers` judging drafts of `drafters`.

    The first are for the uniform of the draw, then for the first draft token, the second and so on; the last are for
    all others. block: the most draft tokens that the coupling of this name judges; 0 is `rejection`.
    """
    laws = [(_law(p), q) for p in verifiers for q in [*map(_law, drafters), [Fraction(0)] * len(p)]]
    edges: list[set[Fraction]] = [{edge for q in drafters for edge in _sums(_law(q))}]
    reaches = {Fraction(1)}
    for j in range(block + 1):
        residuals = [
            (r, [max(r * a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]) for r in reaches for p, q in laws
        ]
        edges[0] |= {edge for _, law in residuals if sum(law) for edge in _sums(law)}
        edges += [{sum(law) / (sum(law) + 1 - r) for r, law in residuals if sum(law)}] if j else []
        reaches = {
            min(Fraction(1), r * a / b) for r in reaches for p, q in laws for a, b in zip(p, q, strict=True) if b
        }
    return [_widths(borders) for borders in edges + [reaches] * (not block)]


def _widths(borders: set[Fraction]) -> list[float]:
    return [float(high - low) for low, high in pairwise(sorted({*borders, Fraction(0), Fraction(1)}))]


def _law(weights: Weights) -> list[Fraction]:
    return [Fraction(w, sum(weights)) for w in weights]


def _sums(weights: Sequence[Fraction]) -> list[Fraction]:
    return [sum(weights[: i + 1], Fraction(0)) / sum(weights) for i in range(len(weights))]
