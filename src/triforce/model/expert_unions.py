"""Unions of experts: the distinct experts of a layer that a pass's tokens read, estimated from routed tokens.

Shape suffix: S candidate spreads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from triforce.model.config import Experts

SAMPLED_TOKENS = 8
"""A pass counts the distinct experts of its first `SAMPLED_TOKENS` tokens. csrc/experts.hpp has the same number."""
SPREADS_S = np.linspace(1.0, 0.0, 51)
DECAY = 0.98
"""Factor by which each pass lowers the weight of all earlier passes, because texts differ."""


def experts_touched(experts: Experts, tokens: Any) -> Any:
    """Return the expected number of distinct experts that `tokens` independent tokens read in a layer.

    The router is taken to choose all experts equally often.
    """
    return experts.shared + experts.count * (1 - (1 - experts.chosen / experts.count) ** tokens)


class ExpertUnions:
    """Unions of the experts of neighbouring tokens, whose choices are correlated.

    `width` tokens read as many experts as width ** `spread` independent ones: new experts become rarer, as new words do
    in a text (Heaps 1978). One exponent thus predicts widths that no pass has had.
    """

    def __init__(self, experts: Experts) -> None:
        self.experts = experts
        self._errors_S = np.zeros(len(SPREADS_S))

    @property
    def spread(self) -> float:
        """Exponent that fits the observations best; 1, that of independent choices, before any observation."""
        return float(SPREADS_S[self._errors_S.argmin()])

    def multiple(self, width: Any, rows: Any = 1) -> Any:
        """Return the experts that a pass of `rows` rows of `width` tokens reads, as a multiple of one token's."""
        return experts_touched(self.experts, rows * width**self.spread) / self.experts.active

    def observe(self, width: int, distinct_experts: float) -> None:
        """Record that `width` tokens of a text have read `distinct_experts` experts per layer, a mean over layers."""
        if width > 1:
            expected_S = experts_touched(self.experts, width**SPREADS_S)
            self._errors_S = DECAY * self._errors_S + np.log(distinct_experts / expected_S) ** 2
