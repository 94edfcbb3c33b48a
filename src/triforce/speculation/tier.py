"""A tier, and the tier below it: plain decoding is one tier, classic speculation two, TriForce three.

The algorithm is Algorithm 1 of Sun et al. 2024 (arXiv 2404.11912), with the inner correction that the paper states.

Shape suffixes: B rows, T tokens fed in one pass, K drafted tokens, J = K + 1, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from triforce.ragged import Bools, Ints, columns, ints, rows
from triforce.speculation.counters import Counters
from triforce.speculation.draft import Draft, SequenceState
from triforce.speculation.protocols import Cache, Grant, Proposer, TierModel, TokenSampler, all_of_it

WATCHED = 256
"""Prompt tokens scored in one pass when somebody watches: it bounds the memory of their logits."""

C = TypeVar("C", bound=Cache)

Read = Callable[[C, Tensor], Iterator[int]]
"""Another way to feed a cache many tokens, ids (1, T), which has been told of the pass: yields how far it has come."""

Burst = Callable[["Tier[C]", SequenceState, TokenSampler, Bools, int], Draft | None]
"""Several tokens of each live row at once, for a tier with nothing below it: so many or fewer; None where it cannot."""

PromptLogitsHook = Callable[[int, Tensor], None]
"""Shown the position of the first of some prompt tokens, and the logits (1, T, V) that follow each."""


class Tier(Generic[C]):
    """One model seen through one cache. It extends a text by tokens that follow that pair exactly.

    The tier below only makes this cheaper, by guessing tokens that are then verified in one pass. A tier stops once it
    holds `gamma` tokens: a stopping time, hence harmless to the law. `level` is 0 for the lowest tier; it names the
    tier in the noise and in `Draft.origins_BK`.
    """

    def __init__(
        self,
        name: str,
        model: TierModel[C],
        cache: C,
        gamma: int = 1,
        below: Proposer | None = None,
        *,
        burst: Burst[C] | None = None,
        read: Read[C] | None = None,
    ) -> None:
        self.name, self.model, self.cache = name, model, cache
        self.gamma, self.below = gamma, below
        self.level: int = below.level + 1 if below else 0
        self.counters = Counters(len(cache.lengths_B))
        self.burst, self.read = burst, read
        self.keeps_logits = False
        self.logits_BJV: Tensor | None = None
        """Those of the latest verification, raw, if they are kept."""

    def propose(self, prefix: SequenceState, sampling: TokenSampler, live_B: Bools) -> Draft:
        """At least `gamma` tokens for each live row, each a sample of this tier's law given the text before it."""
        draft = nothing = Draft.empty(len(live_B), sampling.coupling.law_size(sampling.vocab_size))
        going_on = False
        while (live_B := live_B & (draft.counts_B < self.gamma)).any():
            guess = self.below.propose(prefix, sampling, live_B) if self.below else nothing
            started = perf_counter()
            missing = self.gamma - int(draft.counts_B[live_B].max())
            several = self.burst(self, prefix, sampling, live_B, missing) if self.burst and not self.below else None
            step = several or self.verify(prefix, guess, sampling, live_B)
            draft = draft.then(step, live_B)
            prefix = self.settle(prefix, step, live_B)
            if self.below:
                self.below.judged(guess, step.counts_B - 1, live_B)
            passes = int(several.counts_B.max()) if several else 1
            self.counters.passed(live_B, perf_counter() - started, guess.tokens_BK.shape[1] + 1, passes, going_on)
            going_on = self.burst is not None and not self.below
        return draft

    def verify(self, prefix: SequenceState, guess: Draft, sampling: TokenSampler, live_B: Bools) -> Draft:
        """One pass: the guesses that are kept, and one token more."""
        logits_BJV = self.score(prefix, guess, live_B)
        step = sampling.verify(guess, logits_BJV, prefix, live_B, self.level)
        if self.keeps_logits:
            self.logits_BJV = logits_BJV
        return step

    def score(self, prefix: SequenceState, guess: Draft, live_B: Bools) -> Tensor:
        """Raw logits before and after each guess: one pass over what the cache has not seen."""
        ahead, seen_B = prefix.append(guess), self.cache.lengths_B
        unseen_B = (ahead.lengths_B - seen_B) * live_B
        width, guesses = int(unseen_B.max()), guess.tokens_BK.shape[1]
        fed_BT = np.minimum(columns(seen_B, width), ahead.ids_BS.shape[1] - 1)
        ids_BT = ahead.ids_BS[rows(len(seen_B)), fed_BT]
        at_BJ = np.minimum(np.maximum(columns(prefix.lengths_B - 1 - seen_B, guesses + 1), 0), width - 1)
        self.cache.begin(unseen_B, width)
        logits_BJV = self.model(torch.from_numpy(ids_BT), self.cache, torch.from_numpy(at_BJ))
        self.cache.advance(unseen_B)
        return logits_BJV

    def settle(self, prefix: SequenceState, step: Draft, live_B: Bools) -> SequenceState:
        """The text with what was kept behind it; what was refused is forgotten, here and below."""
        kept = prefix.append(Draft(step.tokens_BK, step.laws_BKV, step.origins_BK, step.counts_B * live_B))
        self.rewind(kept)
        return kept

    def judged(self, guess: Draft, kept_B: Ints, live_B: Bools) -> None:
        self.counters.judged(guess.counts_B, kept_B, live_B)

    def rewind(self, prefix: SequenceState) -> None:
        """See at most all but the last token of a text, which stays unseen so that it can be fed."""
        self.cache.rewind(prefix.lengths_B - 1)
        if self.below:
            self.below.rewind(prefix)

    def select(self, rows: Sequence[int]) -> None:
        """Row i is from now on what row `rows[i]` was. The tier below is told apart."""
        self.cache.select(rows)
        self.counters.select(rows)

    def join(self, other: Self) -> None:
        """The rows of another tier, alike but for its rows, follow these. The tier below is told apart."""
        self.cache.join(other.cache)
        self.counters.join(other.counters)

    def aside(self, b: int) -> tuple[Any, ...]:
        """What a row holds, for `bring_back`. The tier below is told apart."""
        return self.cache.aside(b), self.counters.aside(b)

    def bring_back(self, b: int, held: tuple[Any, ...]) -> None:
        """Let a fresh row go on as the one that was put aside. The tier below is told apart."""
        self.cache.bring_back(b, held[0])
        self.counters.bring_back(b, held[1])

    def prefill(
        self,
        prefix: SequenceState,
        b: int,
        length: int,
        watch: PromptLogitsHook | None = None,
        *,
        grant: Grant = all_of_it,
    ) -> Iterator[int]:
        """Catch row b up to `length` tokens seen, yielding how many it has seen after each pass.

        `grant`: how many tokens a pass may have; it is not asked where KV is offloaded, as passes are short there.
        """
        cache = self.cache.row(b)
        while True:
            start, stop = cache.resume(length)
            if start >= stop:
                return
            stop = min(stop, start + WATCHED) if watch else stop
            if not self.read:
                stop = start + grant(self.name, stop - start)
            ids_1T, count_1 = torch.from_numpy(prefix.ids_BS[b : b + 1, start:stop]), ints([stop - start])
            at_1J = torch.arange(stop - start if watch else 0)[None]
            started = perf_counter()
            cache.begin(count_1, stop - start)
            if self.read and not watch and stop - start > WATCHED:
                for seen in self.read(cache, ids_1T):
                    self.counters.prefill_seconds_B[b] += perf_counter() - started
                    yield start + seen
                    started = perf_counter()
            else:
                logits_1JV = self.model(ids_1T, cache, at_1J)
            cache.advance(count_1)
            self.counters.prefill_seconds_B[b] += perf_counter() - started
            if watch:
                watch(start, logits_1JV)
            yield stop

    def catch_up(self, prefix: SequenceState, live_B: Bools) -> None:
        """Let rows that were left out see what was written meanwhile."""
        for b in live_B.nonzero()[0].tolist():
            deque(self.prefill(prefix, b, int(prefix.lengths_B[b]) - 1), maxlen=0)
