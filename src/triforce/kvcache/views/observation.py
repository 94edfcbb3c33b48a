"""Attention that the full view of a row saw in its last pass.

Shape suffixes: L layers, T tokens fed in that pass, H query heads, G KV heads, U units, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionObservation:
    """Rotated queries, and the attention mass of units of `grain` tokens, if anybody asked for it."""

    start: int = 0
    passes: int = 0
    grain: int = 0
    queries_LTHD: Tensor = field(default_factory=lambda: torch.empty(0))
    mass_LGU: Tensor | None = None

    def query(self, position: int) -> Tensor:
        """The query of the token at `position`, (L, H, D); the nearest one of the pass where it was not fed in it."""
        return self.queries_LTHD[:, min(max(position - self.start, 0), self.queries_LTHD.shape[1] - 1)]
