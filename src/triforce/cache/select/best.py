"""From scores to chunk ids. G KV heads, N chunks."""

from __future__ import annotations

from torch import Tensor

RECENT_SHARE = 8
"""A scoring policy gives one part in so many of the budget to the latest tokens."""


def recent_share(budget: int) -> int:
    """Tokens of a budget that go to the latest ones."""
    return budget // RECENT_SHARE


def best(scores_GN: Tensor, candidates: range, picks: int) -> Tensor:
    """The ids of the `picks` highest scores among `candidates`, ascending, so that memory is read in order."""
    among_GN = scores_GN[:, candidates.start : candidates.stop]
    return among_GN.topk(picks, dim=1).indices.sort(dim=1).values + candidates.start
