"""The chance that a verifier keeps a guess, from the two laws alone: no token is drawn. N positions, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def rejection(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """Of a guess drawn from q under rejection sampling: 1 - TV(p, q)."""
    return torch.minimum(p_NV, q_NV).sum(-1)


def seeded(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """That argmin(E / p) and argmin(E / q) are one token, E being the same standard exponentials.

    Token i wins both races if each E_j is at least E_i max(p_j / p_i, q_j / q_i): with probability 1 over the sum of
    these maxima. Sorted by q / p, the maximum is p_j / p_i for the tokens before i, and q_j / q_i from i on.
    """
    order_NV = (q_NV / p_NV).argsort(-1)  # 0 / 0 comes last, and weighs nothing wherever it stands
    p_NV, q_NV = p_NV.gather(-1, order_NV), q_NV.gather(-1, order_NV)
    before_NV = p_NV.cumsum(-1) - p_NV
    from_here_NV = q_NV.flip(-1).cumsum(-1).flip(-1)
    wins_NV = p_NV * q_NV / (before_NV * q_NV + from_here_NV * p_NV)
    return wins_NV.nan_to_num(0.0).sum(-1)
