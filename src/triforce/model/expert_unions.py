"""Unions of experts: how many of a layer the tokens of a pass read together, learnt from what was routed.

Shape suffix: S spreads that are considered.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from triforce.model.config import Experts

SAMPLED = 8
"""Tokens of a pass, its first ones, whose experts are counted: as in csrc/experts.hpp."""
SPREADS_S = np.linspace(1.0, 0.0, 51)
DECAY = 0.98
"""What a pass leaves of the weight of earlier ones: texts differ, and a pass has all layers."""


def experts_touched(experts: Experts, choices: Any) -> Any:
    """Return how many experts of a layer so many independent tokens read, of a router to which all are alike."""
    return experts.shared + experts.count * (1 - (1 - experts.chosen / experts.count) ** choices)


class ExpertUnions:
    """Unions of the experts of neighbouring tokens, which routers choose alike.

    `width` tokens read what width ** `spread` independent ones would: new experts come ever more slowly, as new words
    do in a text (Heaps 1978). One number so tells of widths that never ran.
    """

    def __init__(self, experts: Experts) -> None:
        self.experts = experts
        self._errors_S = np.zeros(len(SPREADS_S))

    @property
    def spread(self) -> float:
        """The power that fits best; 1, of a router to which all are alike, where nothing was seen."""
        return float(SPREADS_S[self._errors_S.argmin()])

    def times(self, width: Any, rows: Any = 1) -> Any:
        """Return the experts that a pass of so many tokens of each row reads, in so many times those of one token."""
        return experts_touched(self.experts, rows * width**self.spread) / self.experts.read

    def observe(self, width: int, touched: float) -> None:
        """Note how many experts so many tokens of a text have read, in the mean of some layers."""
        if width > 1:
            expected_S = experts_touched(self.experts, width**SPREADS_S)
            self._errors_S = DECAY * self._errors_S + np.log(touched / expected_S) ** 2
