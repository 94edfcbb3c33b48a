"""Settings of a retrieval view, its budget and its selection, parsed from what users write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from triforce.backends.kernel_api import PAGE, pages_for
from triforce.errors import RequestError, argument, require_integer


@dataclass(frozen=True, slots=True)
class Budget:
    """KV tokens that a lower tier of the target reads per head at most: a count, or a share of the context.

    adjustable: whether the planner may halve or double the budget (see planner.forecast), as the user set none.
    """

    tokens: int = 0
    share: float = 0.0
    adjustable: bool = False

    @staticmethod
    def parse(text: str | int) -> Budget:
        """Parse `2048`, `3%` or `auto`. Raises RequestError."""
        if text == "auto":
            return DEFAULT_BUDGET
        try:
            if isinstance(text, str) and text.endswith("%"):
                budget = Budget(share=float(text[:-1]) / 100)
            else:
                budget = Budget(tokens=int(text))
        except (ValueError, TypeError):
            budget = Budget()
        if not (budget.tokens >= 2 * PAGE or 0 < budget.share <= 1):
            raise RequestError(
                f"{argument('retrieval_budget')} {text!r}: give auto, at least {2 * PAGE} tokens, such as 2048, or a "
                "share such as 3%"
            )
        return budget

    def of(self, context: int, factor: float = 1.0) -> int:
        """Return the tokens to read of `context` tokens, rounded up to whole pages. factor: multiplies the budget."""
        return PAGE * max(2, pages_for(ceil(factor * (self.tokens or self.share * context))))


DEFAULT_BUDGET = Budget(2048, adjustable=True)


@dataclass(frozen=True, slots=True)
class RetrievalConfig:
    """Settings of a selection.

    chunk: tokens that are selected together. refresh: verifications between selections; 0: select once, None: select
    after a rejection. searched_layers: layers that the user named: they read all tokens, without a search. None: the
    planner chooses layers, and they search all tokens (see planner.searched_layers).
    """

    budget: Budget = Budget(2048)
    chunk: int = PAGE
    refresh: int | None = 1
    searched_layers: frozenset[int] | None = frozenset()

    @staticmethod
    def parse(
        budget: str | int, chunk: int, refresh: str | int, searched_layers: str | Sequence[int]
    ) -> RetrievalConfig:
        """Parse `refresh` (a number or `auto`), `searched_layers` (`auto`, `none`, `0,14-16`). Raises RequestError."""
        if not (refresh == "auto" or str(refresh).isdecimal()):
            advice = "give a number of verifications, 0 for once, or auto"
            raise RequestError(f"{argument('retrieval_refresh')} {refresh!r}: {advice}")
        require_integer("retrieval_chunk", chunk, 1)
        return RetrievalConfig(
            Budget.parse(budget), chunk, None if refresh == "auto" else int(refresh), _layers(searched_layers)
        )


MOST_LAYERS = 1 << 16
"""Bound of a layer's number, above that of any model."""


def _layers(option: str | Sequence[int]) -> frozenset[int] | None:
    if option == "auto":
        return None
    text = ",".join(map(str, option)) if isinstance(option, list | tuple) else str(option)
    try:
        ends = [[int(end) for end in part.split("-")] for part in text.split(",") if text != "none"]
    except ValueError:
        ends = [[]]
    if not all(len(part) in (1, 2) and part[0] <= part[-1] < MOST_LAYERS for part in ends):
        raise RequestError(f"{argument('searched_layers')} {text!r}: give auto, none, or layers such as 0,1 or 0-1")
    return frozenset(layer for part in ends for layer in range(part[0], part[-1] + 1))
