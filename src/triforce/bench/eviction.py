"""Decoding with a cache that forgets: StreamingLLM and H2O, as they would be used alone, to see what that costs.

The prompt is read exactly; from its last token on, each token sees `budget` tokens of what came before, and what it
writes is built upon. So this is kind to them: they usually read the prompt that way, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from triforce.backends.decoder import Decoder
from triforce.bench.acceptance.heavy import Heavy, added, attended
from triforce.engine.config import SpeculativeConfig
from triforce.engine.tier_builder import ModelSet, TierBuilder
from triforce.kvcache import Budget, RetrievalConfig, RetrievalView
from triforce.kvcache.selection import Policy, Recent
from triforce.ragged import ints

EVICTIONS: dict[str, Callable[[Tensor], Policy]] = {
    "StreamingLLM": lambda mass_LGU: Recent(),
    "H2O": Heavy,
}
"""What is kept, given the attention that the prompt drew."""


class EvictingDecoder:
    """Prompts that begin alike; what they share is read once. `tokens`: new ones at most."""

    def __init__(self, decoder: Decoder, prompts: Sequence[list[int]], tokens: int) -> None:
        self.decoder, self.tokens = decoder, tokens
        self.shared = shared(prompts)
        longest = max(map(len, prompts)) + tokens
        self.full = TierBuilder(ModelSet(decoder), SpeculativeConfig(), [longest]).full()
        self.mass_LGU = attended(decoder, self.full, ints(prompts[0][: self.shared])[None])

    @torch.no_grad()
    def continued(self, prompt: list[int], eviction: str, budget: int) -> list[int]:
        """The greedy continuation of one of the prompts; `budget` in tokens."""
        self.full.rewind(ints([self.shared]))
        mass_LGU = added(self.mass_LGU, attended(self.decoder, self.full, ints(prompt[:-1])[None]))
        setting, made, one = RetrievalConfig(Budget(budget), searched_layers=frozenset()), prompt[-1:], ints([1])
        view = RetrievalView(self.full, lambda: EVICTIONS[eviction](mass_LGU), setting)
        for _ in range(self.tokens):
            view.begin(one, 1)
            logits_1JV = self.decoder(torch.tensor([made[-1:]], device=self.decoder.device), view)
            view.advance(one)
            self.full.advance(one)  # there is nothing exact above to wait for
            made.append(int(logits_1JV[0, -1].argmax()))
        return made[1:]


def shared(prompts: Sequence[list[int]]) -> int:
    """Tokens that all prompts begin with, short of the last one of the shortest."""
    least = min(map(len, prompts)) - 1
    same_N = (np.array([prompt[:least] for prompt in prompts]) == prompts[0][:least]).all(0)
    return int(same_N.argmin()) if not same_N.all() else least
