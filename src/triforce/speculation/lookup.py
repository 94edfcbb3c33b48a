"""Guesses copied from the text itself: what followed the last occurrence of its closing n-gram.

The idea is prompt lookup decoding (Saxena 2023). The law of such a guess is a point mass, so both couplings stay exact.
Shape suffixes: B rows, S text capacity, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view

from triforce.shapes import Bools, Ints, ints
from triforce.speculation.count import Counters
from triforce.speculation.draft import Draft, Prefix
from triforce.speculation.tier import Sampling


class Lookup:
    """The lowest tier without a model: up to `gamma` tokens, none where no n-gram of up to `longest` tokens recurs."""

    name = "lookup"
    below = None

    def __init__(self, rows: int, gamma: int = 2, longest: int = 3) -> None:
        self.gamma, self.longest, self.level = gamma, longest, 0
        self.counters = Counters(rows)

    def propose(self, prefix: Prefix, sampling: Sampling, live_B: Bools) -> Draft:
        started = perf_counter()
        lengths, live = prefix.lengths_B.tolist(), live_B.tolist()
        guesses = [
            self._continuation(prefix.ids_BS[b, : lengths[b]]) if live[b] else prefix.ids_BS[b, :0]
            for b in range(len(lengths))
        ]
        counts_B = ints([len(guess) for guess in guesses])
        width = int(counts_B.max())
        tokens_BK = np.stack([np.pad(guess, (0, width - len(guess))) for guess in guesses])
        law_size = sampling.coupling.law_size(sampling.vocab_size)
        laws_BKV = F.one_hot(torch.from_numpy(tokens_BK), sampling.vocab_size)[..., :law_size].double()
        self.counters.passed(live_B, perf_counter() - started)
        return Draft(tokens_BK, laws_BKV, np.full_like(tokens_BK, self.level), counts_B)

    def rewind(self, prefix: Prefix) -> None:
        """Nothing is remembered, so nothing is forgotten."""

    def select(self, rows: Sequence[int]) -> None:
        self.counters.select(rows)

    def join(self, other: Self) -> None:
        self.counters.join(other.counters)

    def _continuation(self, text_S: Ints) -> Ints:
        for n in range(min(self.longest, len(text_S) - 1), 0, -1):
            (starts,) = (sliding_window_view(text_S[:-1], n) == text_S[-n:]).all(1).nonzero()
            if len(starts):
                after = int(starts[-1]) + n
                return text_S[after : after + self.gamma]
        return text_S[:0]
