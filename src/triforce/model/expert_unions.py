"""Unions of experts: the distinct experts of a layer that a pass's tokens read, estimated from routed tokens.

Shape suffix: S candidate spreads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from triforce.model.config import Experts

SAMPLED = 8
"""Number of first tokens of a pass whose experts are counted: as in csrc/experts.hpp."""
SPREADS_S = np.linspace(1.0, 0.0, 51)
DECAY = 0.98
"""Factor on the weight of earlier passes at each pass: texts differ, and a pass has all layers."""


def experts_touched(experts: Experts, choices: Any) -> Any:
    """Return the expected experts of a layer that `choices` independent tokens read from a uniform router."""
    return experts.shared + experts.count * (1 - (1 - experts.chosen / experts.count) ** choices)


class ExpertUnions:
    """Unions of the experts of neighbouring tokens, whose choices are correlated.

    `width` tokens read as many experts as width ** `spread` independent ones: new experts become rarer, as new words do
    in a text (Heaps 1978). One exponent so covers widths that never ran.
    """

    def __init__(self, experts: Experts) -> None:
        self.experts = experts
        self._errors_S = np.zeros(len(SPREADS_S))

    @property
    def spread(self) -> float:
        """Exponent that fits the observations best; 1, that of independent choices, before any observation."""
        return float(SPREADS_S[self._errors_S.argmin()])

    def times(self, width: Any, rows: Any = 1) -> Any:
        """Return the experts that a pass of `rows` rows of `width` tokens reads, as a multiple of one token's."""
        return experts_touched(self.experts, rows * width**self.spread) / self.experts.active

    def observe(self, width: int, touched: float) -> None:
        """Record that `width` tokens of a text have read `touched` experts, in the mean of some layers."""
        if width > 1:
            expected_S = experts_touched(self.experts, width**SPREADS_S)
            self._errors_S = DECAY * self._errors_S + np.log(touched / expected_S) ** 2
