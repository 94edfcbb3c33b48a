"""Chunk ids by scores. L layers, G KV heads, N chunks."""

from __future__ import annotations

from torch import Tensor

from triforce.backends import dispatch

RECENT_SHARE = 8
"""A scoring policy gives one part in so many of the budget to the latest tokens."""


def recent_share(budget: int) -> int:
    """Tokens of a budget that go to the latest ones."""
    return budget // RECENT_SHARE


def best(scores_LGN: Tensor, candidates: range, picks: int) -> Tensor:
    """Return ids (L, G, picks) of the highest scores among `candidates`, ascending: memory is read in order."""
    return dispatch.best(scores_LGN.flatten(0, 1), candidates, picks).view(*scores_LGN.shape[:2], picks)
