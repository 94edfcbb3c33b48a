"""Selection policies: which chunks of the context a retrieval view reads; one policy, one file.

A policy belongs to one row of a retrieval view and may remember summaries of it. Shape suffixes: L layers, G KV heads,
N chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from triforce.kvcache.selection.attention_mass import Observed
from triforce.kvcache.selection.mean_key import MeanKey
from triforce.kvcache.selection.quest import Quest
from triforce.kvcache.selection.recent import Recent
from triforce.kvcache.views.full import FullView


class Policy(Protocol):
    """Chunk c of a row holds its tokens [c * chunk, (c + 1) * chunk)."""

    @property
    def observes(self) -> bool:
        """Whether it needs the attention mass of verifications."""

    def latest(self, budget: int) -> int:
        """Count the tokens of `budget` that go to the latest ones, whatever they are."""

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        """The ids of the `picks` best committed chunks among `candidates`, ascending, each layer's and KV head's own.

        int64 (L, G, picks).
        """


POLICIES: dict[str, Callable[[], Policy]] = {"observed": Observed, "mean_key": MeanKey, "quest": Quest}
"""The selections a user may ask for. `Recent` is the `streaming` mode's."""

__all__ = ["POLICIES", "MeanKey", "Observed", "Policy", "Quest", "Recent"]
