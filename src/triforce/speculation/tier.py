"""Tier: a model that verifies the proposals of the tier below. Plain decoding is one tier, TriForce three.

This is Algorithm 1 of Sun et al. 2024 (arXiv 2404.11912). A rejection in the middle tier is followed by a draw from the
residual, which the paper states and its published code lacks.

Shape suffixes: B rows, T tokens fed in one pass, K drafted tokens, J = K + 1, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, Generic, Self, TypeVar

import numpy as np

from triforce.arrays import Array
from triforce.ragged import Bools, Ints, ints
from triforce.speculation.draft import Counters, Draft, SequenceState
from triforce.speculation.protocols import Cache, Grant, Proposer, TokenSampler, grant_all

MAX_HOOKED_TOKENS = 256
"""Prompt tokens of one pass whose logits go to a hook: a bound on the memory of the logits."""
MAX_LAG = 64
"""Most tokens by which a tier may lag and still catch up in one pass of all rows; else it catches up row by row."""
MIN_SUSPENDED_TOKENS = 256
"""A prefill pass of more tokens than this may be suspended between its parts."""

C = TypeVar("C", bound=Cache)

TierModel = Callable[[Ints, Ints, C, Ints], Array]
"""Runs a pass: (ids (B, T), counts_B, cache, columns (B, J)) -> logits (B, J, V) of these columns.

The pass feeds the first `counts_B` tokens of each row, from the cache's lengths on; the rest is padding. The tokens are
cached afterwards."""

Read = Callable[[Ints, Ints, C], Iterator[int]]
"""Feeds a cache all T tokens of ids (1, T) in parts, and yields the number of tokens fed so far.

All T tokens are cached when the iterator ends."""

FusedDraft = Callable[["Tier[C]", SequenceState, TokenSampler, Bools, int], Draft | None]
"""Drafts up to a number of tokens for each live row at once, for a tier with no tier below. Returns None where separate
passes are needed."""

PromptLogitsHook = Callable[[int, Array], None]
"""Takes the position of the first of T prompt tokens, and the logits (1, T, V) after each."""


class Tier(Generic[C]):
    """One model with one cache. It extends texts by tokens sampled from the model given the cache.

    The tier below makes this cheaper: its draft tokens are verified in one pass. A tier stops once it has `gamma`
    tokens. That is a stopping time, so the distribution of the tokens is unchanged. level: 0 for the lowest tier; it
    selects the tier's stream of uniforms, and names the tier in `Draft.origins_BK`. fused_draft: a faster way to draft,
    if there is one. read: a way to prefill that may be suspended between parts of a pass. whole_prompt: the tier reads
    a prompt in one pass, without a grant.
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
        self.logits_BJV: Array | None = None
        """Raw logits of the latest verification, if `keeps_logits`."""

    def propose(self, prefix: SequenceState, sampling: TokenSampler, live_B: Bools) -> Draft:
        """Propose at least `gamma` tokens for each live row, each a sample of this tier given the text before it."""
        proposal = empty_draft = Draft.empty(len(live_B), sampling.probs_size)
        fused_draft = None if self.below else self.fused_draft
        continued = False
        while (live_B := live_B & (proposal.counts_B < self.gamma)).any():
            draft = self.below.propose(prefix, sampling, live_B) if self.below else empty_draft
            started = perf_counter()
            missing_tokens = self.gamma - int(proposal.counts_B[live_B].max())
            fused_step = fused_draft(self, prefix, sampling, live_B, missing_tokens) if fused_draft else None
            step = fused_step or self.verify(prefix, draft, sampling, live_B)
            proposal = proposal.extend(step, live_B)
            prefix = self.commit(prefix, step, live_B)
            if self.below:
                self.below.record_verdict(draft, step.counts_B - 1, live_B)
            passes = int(fused_step.counts_B.max()) if fused_step else 1
            width = draft.tokens_BK.shape[1] + 1
            self.counters.record_passes(live_B, perf_counter() - started, width, passes, continued)
            continued = fused_draft is not None
        return proposal

    def verify(self, prefix: SequenceState, draft: Draft, sampling: TokenSampler, live_B: Bools) -> Draft:
        """Run one pass over the draft tokens. Returns the accepted ones, and one more token."""
        logits_BJV = self.score(prefix, draft, live_B)
        step = sampling.verify(draft, logits_BJV, prefix, live_B, self.level)
        if self.keeps_logits:
            self.logits_BJV = logits_BJV
        return step

    def score(self, prefix: SequenceState, draft: Draft, live_B: Bools) -> Array:
        """Run one pass over all uncached tokens. Returns raw logits (B, J, V); column j follows j draft tokens."""
        extended = prefix.append(draft)
        cached_B = self.cache.lengths_B
        uncached_B = (extended.lengths_B - cached_B) * live_B
        width = int(uncached_B.max())
        place_BT = np.minimum(cached_B[:, None] + np.arange(width), extended.ids_BS.shape[1] - 1)
        ids_BT = extended.ids_BS[np.arange(len(cached_B))[:, None], place_BT]
        last_column_B1 = (prefix.lengths_B - 1 - cached_B)[:, None]
        column_BJ = np.minimum(np.maximum(last_column_B1 + np.arange(draft.tokens_BK.shape[1] + 1), 0), width - 1)
        return self.model(ids_BT, uncached_B, self.cache, column_BJ)

    def commit(self, prefix: SequenceState, step: Draft, live_B: Bools) -> SequenceState:
        """Return the texts with the accepted tokens appended. Rejected tokens are forgotten, in lower tiers too."""
        longer = prefix.append(Draft(step.tokens_BK, step.probs_BKV, step.origins_BK, step.counts_B * live_B))
        self.rewind(longer)
        return longer

    def record_verdict(self, draft: Draft, accepted_B: Ints, live_B: Bools) -> None:
        """Record that the tier above accepted the first `accepted_B` tokens of a proposal."""
        self.counters.record_verdict(draft.counts_B, accepted_B, live_B)

    def rewind(self, prefix: SequenceState) -> None:
        """Forget the last token of each text and all after it. The next pass feeds the last token, for its logits.

        The state of rejected tokens is dropped here, in this tier and all tiers below: each cache lowers its lengths,
        and later passes overwrite the KV beyond them. The index of n-grams is the exception: it deletes its entries.
        """
        self.cache.rewind(prefix.lengths_B - 1)
        if self.below:
            self.below.rewind(prefix)

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row `rows[i]` was. The tier below stays as it is: the caller calls each tier."""
        self.cache.select(rows)
        self.counters.select(rows)

    def join(self, other: Self) -> None:
        """Append the rows of another tier of the same kind. The tier below stays as it is."""
        self.cache.join(other.cache)
        self.counters.join(other.counters)

    def swap_out(self, b: int) -> tuple[Any, ...]:
        """Return the state of row b, for `swap_in`, without that of the tier below."""
        return self.cache.swap_out(b), self.counters.swap_out(b)

    def swap_in(self, b: int, swapped_row: tuple[Any, ...]) -> None:
        """Continue in row b, which is new, with the state of a swapped row. The tier below stays as it is."""
        self.cache.swap_in(b, swapped_row[0])
        self.counters.swap_in(b, swapped_row[1])

    def prefill(
        self,
        prefix: SequenceState,
        b: int,
        length: int,
        hook: PromptLogitsHook | None = None,
        *,
        grant: Grant = grant_all,
    ) -> Iterator[int]:
        """Feed row b until `length` tokens are cached. Yields the number of cached tokens after each pass or part.

        hook: takes the logits of the prompt. grant: tokens that a pass may have; not called where the tier reads a
        whole prompt in one pass.
        """
        cache = self.cache.row(b)
        while True:
            start, stop = cache.resume(length)
            if start >= stop:
                return
            stop = min(stop, start + MAX_HOOKED_TOKENS) if hook else stop
            if not self.whole_prompt:
                stop = start + grant(self.name, stop - start)
            ids_1T = prefix.ids_BS[b : b + 1, start:stop]
            count_1 = ints([stop - start])
            column_1J = np.arange(stop - start if hook else 0)[None]
            started = perf_counter()
            if self.read and not hook and stop - start > MIN_SUSPENDED_TOKENS:
                for fed_tokens in self.read(ids_1T, count_1, cache):
                    if start + fed_tokens < stop:  # the end of the last part is the end of the pass, see below
                        self.counters.prefill_seconds_B[b] += perf_counter() - started
                        yield start + fed_tokens
                        started = perf_counter()
            else:
                logits_1JV = self.model(ids_1T, count_1, cache, column_1J)
            self.counters.prefill_seconds_B[b] += perf_counter() - started
            self.counters.prefill_tokens_B[b] += stop - start
            if hook:
                hook(start, logits_1JV)
            yield stop

    def lagging_rows(self, prefix: SequenceState, live_B: Bools) -> list[int]:
        """Return the live rows that are more than `MAX_LAG` tokens behind their texts."""
        lagging_B = live_B & (prefix.lengths_B - self.cache.lengths_B > MAX_LAG)
        return [int(b) for b in lagging_B.nonzero()[0]]

    def catch_up(self, prefix: SequenceState, live_B: Bools, grant: Grant = grant_all) -> Iterator[int]:
        """Prefill the rows of `lagging_rows` up to their last tokens, after proposals without this tier.

        Yields the number of tokens that each pass fed.
        """
        for b in self.lagging_rows(prefix, live_B):
            fed_tokens = int(self.counters.prefill_tokens_B[b])
            for _ in self.prefill(prefix, b, int(prefix.lengths_B[b]) - 1, grant=grant):
                yield int(self.counters.prefill_tokens_B[b]) - fed_tokens
                fed_tokens = int(self.counters.prefill_tokens_B[b])
