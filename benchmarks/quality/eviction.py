"""Decoding with an evicting cache: StreamingLLM and H2O, as they would be used alone.

The prompt is read exactly; from its last token on, each token sees `budget` tokens of what came before, and what it
writes is built upon. So this is kind to them: they usually read the prompt that way, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.acceptance.h2o import HeavyHitters, added, attended
from triforce.backends.decoder import Decoder
from triforce.engine.speculative_config import SpeculativeConfig
from triforce.engine.tier_builder import ModelSet, TierBuilder
from triforce.kvcache import Budget, RetrievalConfig, RetrievalView
from triforce.kvcache.selection import Policy, Recent
from triforce.ragged import common_prefix, ints

EVICTIONS: dict[str, Callable[[Tensor], Policy]] = {
    "StreamingLLM": lambda mass_LGU: Recent(),
    "H2O": HeavyHitters,
}
"""Policies, given the attention that the prompt drew."""


class EvictingDecoder:
    """Decodes prompts that begin alike; their common prefix is read once. `tokens`: new ones at most."""

    def __init__(self, decoder: Decoder, prompts: Sequence[list[int]], tokens: int) -> None:
        self.decoder, self.tokens = decoder, tokens
        self.shared = shared(prompts)
        longest = max(map(len, prompts)) + tokens
        self.full = TierBuilder(ModelSet(decoder), SpeculativeConfig(), [longest]).full()
        self.mass_LGU = attended(decoder, self.full, ints(prompts[0][: self.shared])[None])

    @torch.no_grad()
    def continued(self, prompt: list[int], eviction: str, budget: int) -> list[int]:
        """Return the greedy continuation of one of the prompts; `budget` in tokens."""
        self.full.rewind(ints([self.shared]))
        mass_LGU = added(self.mass_LGU, attended(self.decoder, self.full, ints(prompt[:-1])[None]))
        setting, made, one = RetrievalConfig(Budget(budget), searched_layers=frozenset()), prompt[-1:], ints([1])
        view = RetrievalView(self.full, lambda: EVICTIONS[eviction](mass_LGU), setting)
        self.full.observe(view.unit if view.observes else 0)
        for _ in range(self.tokens):
            logits_1JV = self.decoder(torch.tensor([made[-1:]], device=self.decoder.device), one, view)
            view.advance(one)
            self.full.advance(one)  # there is nothing exact above to wait for
            made.append(int(logits_1JV[0, -1].argmax()))
        return made[1:]


def shared(prompts: Sequence[list[int]]) -> int:
    """Return how many tokens all prompts begin with, short of the last one of the shortest."""
    least = min(map(len, prompts)) - 1
    return min(least, *(common_prefix(prompts[0], prompt) for prompt in prompts))
