"""Tier: a model that verifies the proposals of the tier below. Plain decoding is one tier, TriForce three.

This is Algorithm 1 of Sun et al. 2024 (arXiv 2404.11912), with the inner correction that the paper states.

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

from triforce.ragged import Bools, Ints, ints
from triforce.speculation.draft import Counters, Draft, SequenceState
from triforce.speculation.protocols import Cache, Grant, Proposer, TokenSampler, grant_all

SCORED = 256
"""Prompt tokens of one pass where a hook gets their logits: it bounds the memory of these."""

C = TypeVar("C", bound=Cache)

TierModel = Callable[[Tensor, Ints, C, Tensor], Tensor]
"""Returns logits (B, J, V) of columns (B, J) of a pass, from its ids (B, T) on the host and what the cache has seen.

The pass feeds the first `counts_B` tokens of each row, the rest is padding, at the cache's lengths and after. From then
on the cache has seen them."""

Read = Callable[[Tensor, Ints, C], Iterator[int]]
"""Another way to feed a cache many tokens, ids (1, T), all T of them: yields how far it has come.

At its end the cache has seen them."""

FusedDraft = Callable[["Tier[C]", SequenceState, TokenSampler, Bools, int], Draft | None]
"""Drafts so many tokens of each live row at once, or fewer, for a tier with nothing below it. None where it cannot."""

PromptLogitsHook = Callable[[int, Tensor], None]
"""Gets the position of the first of some prompt tokens, and the logits (1, T, V) that follow each."""


class Tier(Generic[C]):
    """One model with one cache. It extends texts by tokens that are samples of the two together.

    The tier below only makes this cheaper: its draft tokens are verified in one pass. A tier stops once it has `gamma`
    tokens: a stopping time, which leaves their distribution as it is. level: 0 for the lowest tier; it names the tier
    in the noise and in `Draft.origins_BK`. fused_draft: a faster way to draft, if there is one. read: a way to
    prefill that may be left between parts of a pass. whole_prompt: it reads a prompt in one pass, which is not granted.
    """

    def __init__(
        self,
        name: str,
        model: TierModel[C],
        cache: C,
        gamma: int = 1,
        below: Proposer | None = None,
        *,
        fused_draft: FusedDraft[C] | None = None,
        read: Read[C] | None = None,
        whole_prompt: bool = False,
    ) -> None:
        self.name = name
        self.model = model
        self.cache = cache
        self.gamma = gamma
        self.below = below
        self.level: int = below.level + 1 if below else 0
        self.counters = Counters(len(cache.lengths_B))
        self.fused_draft = fused_draft
        self.read = read
        self.whole_prompt = whole_prompt
        self.keeps_logits = False
        self.logits_BJV: Tensor | None = None
        """Raw logits of the latest verification, if they are kept."""

    def propose(self, prefix: SequenceState, sampling: TokenSampler, live_B: Bools) -> Draft:
        """Propose at least `gamma` tokens for each live row, each a sample of this tier given the text before it."""
        draft = nothing = Draft.empty(len(live_B), sampling.probs_size)
        fused_draft = None if self.below else self.fused_draft
        continued = False
        while (live_B := live_B & (draft.counts_B < self.gamma)).any():
            guess = self.below.propose(prefix, sampling, live_B) if self.below else nothing
            started = perf_counter()
            missing = self.gamma - int(draft.counts_B[live_B].max())
            several = fused_draft(self, prefix, sampling, live_B, missing) if fused_draft else None
            step = several or self.verify(prefix, guess, sampling, live_B)
            draft = draft.then(step, live_B)
            prefix = self.commit(prefix, step, live_B)
            if self.below:
                self.below.record_verdict(guess, step.counts_B - 1, live_B)
            passes = int(several.counts_B.max()) if several else 1
            width = guess.tokens_BK.shape[1] + 1
            self.counters.record_passes(live_B, perf_counter() - started, width, passes, continued)
            continued = fused_draft is not None
        return draft

    def verify(self, prefix: SequenceState, guess: Draft, sampling: TokenSampler, live_B: Bools) -> Draft:
        """Make one pass. Returns the draft tokens that are accepted, and one more."""
        logits_BJV = self.score(prefix, guess, live_B)
        step = sampling.verify(guess, logits_BJV, prefix, live_B, self.level)
        if self.keeps_logits:
            self.logits_BJV = logits_BJV
        return step

    def score(self, prefix: SequenceState, guess: Draft, live_B: Bools) -> Tensor:
        """Make one pass over what the cache has not seen. Returns raw logits (B, J, V); column j follows j tokens."""
        ahead = prefix.append(guess)
        seen_B = self.cache.lengths_B
        unseen_B = (ahead.lengths_B - seen_B) * live_B
        width = int(unseen_B.max())
        guesses = guess.tokens_BK.shape[1]
        fed_BT = np.minimum(seen_B[:, None] + np.arange(width), ahead.ids_BS.shape[1] - 1)
        ids_BT = ahead.ids_BS[np.arange(len(seen_B))[:, None], fed_BT]
        last_seen_B1 = (prefix.lengths_B - 1 - seen_B)[:, None]
        at_BJ = np.minimum(np.maximum(last_seen_B1 + np.arange(guesses + 1), 0), width - 1)
        return self.model(torch.from_numpy(ids_BT), unseen_B, self.cache, torch.from_numpy(at_BJ))

    def commit(self, prefix: SequenceState, step: Draft, live_B: Bools) -> SequenceState:
        """Return the texts with the accepted tokens behind them. Rejected ones are forgotten, here and below."""
        longer = prefix.append(Draft(step.tokens_BK, step.probs_BKV, step.origins_BK, step.counts_B * live_B))
        self.rewind(longer)
        return longer

    def record_verdict(self, guess: Draft, accepted_B: Ints, live_B: Bools) -> None:
        """Record that the tier above accepted the first `accepted_B` tokens of a proposal."""
        self.counters.record_verdict(guess.counts_B, accepted_B, live_B)

    def rewind(self, prefix: SequenceState) -> None:
        """Forget all from the last token of each text on, which stays unseen so that it can be fed.

        This is where a refused token's state is dropped, in all tiers below: each cache lowers its lengths, and later
        passes write over what is behind them. n-grams alone are taken out of their index.
        """
        self.cache.rewind(prefix.lengths_B - 1)
        if self.below:
            self.below.rewind(prefix)

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row `rows[i]` was. The tier below has its own call."""
        self.cache.select(rows)
        self.counters.select(rows)

    def join(self, other: Self) -> None:
        """Append the rows of another tier of the same kind. The tier below has its own call."""
        self.cache.join(other.cache)
        self.counters.join(other.counters)

    def swap_out(self, b: int) -> tuple[Any, ...]:
        """Return what a row holds, for `swap_in`. The tier below has its own call."""
        return self.cache.swap_out(b), self.counters.swap_out(b)

    def swap_in(self, b: int, held: tuple[Any, ...]) -> None:
        """Let a fresh row go on as the one that was swapped out. The tier below has its own call."""
        self.cache.swap_in(b, held[0])
        self.counters.swap_in(b, held[1])

    def prefill(
        self,
        prefix: SequenceState,
        b: int,
        length: int,
        hook: PromptLogitsHook | None = None,
        *,
        grant: Grant = grant_all,
    ) -> Iterator[int]:
        """Feed row b until it has seen `length` tokens. Yields how many it has seen after each pass, or part of one.

        hook: gets the logits of the prompt. grant: how many tokens a pass may have; it is not asked where all of a
        prompt is read in one pass.
        """
        cache = self.cache.row(b)
        while True:
            start, stop = cache.resume(length)
            if start >= stop:
                return
            stop = min(stop, start + SCORED) if hook else stop
            if not self.whole_prompt:
                stop = start + grant(self.name, stop - start)
            ids_1T = torch.from_numpy(prefix.ids_BS[b : b + 1, start:stop])
            count_1 = ints([stop - start])
            at_1J = torch.arange(stop - start if hook else 0)[None]
            started = perf_counter()
            if self.read and not hook and stop - start > SCORED:
                for seen in self.read(ids_1T, count_1, cache):
                    if start + seen < stop:  # the rest of the pass follows its last part at once
                        self.counters.prefill_seconds_B[b] += perf_counter() - started
                        yield start + seen
                        started = perf_counter()
            else:
                logits_1JV = self.model(ids_1T, count_1, cache, at_1J)
            self.counters.prefill_seconds_B[b] += perf_counter() - started
            if hook:
                hook(start, logits_1JV)
            yield stop

    def catch_up(self, prefix: SequenceState, live_B: Bools) -> None:
        """Let live rows that were left out see what was written meanwhile."""
        for b in live_B.nonzero()[0].tolist():
            deque(self.prefill(prefix, b, int(prefix.lengths_B[b]) - 1), maxlen=0)
