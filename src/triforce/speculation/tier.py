"""A tier, and the tier below it: plain decoding is one tier, classic speculation two, TriForce three.

The algorithm is Algorithm 1 of Sun et al. 2024 (arXiv 2404.11912), with the inner correction that the paper states.

Shape suffixes: B rows, T tokens fed in one pass, K drafted tokens, J = K + 1, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from triforce.shapes import Bools, Ints, columns, ints, rows
from triforce.speculation.count import Counters
from triforce.speculation.coupling import Coupling
from triforce.speculation.draft import Draft, Prefix

if TYPE_CHECKING:
    from triforce.speculation.ahead import Ahead

WATCHED = 256
"""Prompt tokens scored in one pass when somebody watches: it bounds the memory of their logits."""


class Cache(Protocol):
    """What a tier's model remembers; see triforce.cache."""

    @property
    def lengths_B(self) -> Ints:
        """Tokens seen, per row."""

    def begin(self, counts_B: Ints, width: int) -> None:
        """The next pass feeds `counts_B` tokens (at most `width`, the rest is padding) at `lengths_B` and after."""

    def advance(self, counts_B: Ints) -> None:
        """The tokens of the pass count as seen."""

    def rewind(self, lengths_B: Ints) -> None:
        """See at most `lengths_B` tokens."""

    def resume(self, length: int) -> tuple[int, int]:
        """For one row: the next tokens [start, stop) to feed on the way to having seen `length` tokens.

        Tokens before `start` count as seen from then on. Nothing is left to feed when start == stop.
        """

    def row(self, b: int) -> Self:
        """Row b alone, on the same storage."""

    def fork(self, source: int, row: int) -> None:
        """Let a fresh row see what another row has seen."""

    def aside(self, b: int) -> Any:
        """What a row holds, for `bring_back` of another view of the same memory."""

    def bring_back(self, b: int, held: Any) -> None:
        """Let a fresh row go on as the one that was put aside."""

    def select(self, rows: Sequence[int]) -> None:
        """Row i is from now on what row `rows[i]` was; the others, and what they hold, are given back."""

    def join(self, other: Self) -> None:
        """The rows of another view of the same memory follow these; it is not to be used any more."""


C = TypeVar("C", bound=Cache)
Read = Callable[[C, Tensor], Iterator[int]]
"""Another way to feed a cache many tokens, ids (1, T), which has been told of the pass: yields how far it has come."""
Seen = TypeVar("Seen", bound=Cache, contravariant=True)


class Model(Protocol[Seen]):
    """Scores columns `at_BJ` of the tokens fed, given what the cache has seen."""

    def __call__(self, ids_BT: Tensor, cache: Seen, at_BJ: Tensor) -> Tensor: ...


class Proposer(Protocol):
    """Whatever can guess how a text goes on, and say by which law."""

    counters: Counters
    gamma: int
    level: int

    @property
    def name(self) -> str: ...

    @property
    def below(self) -> Proposer | None: ...

    def propose(self, prefix: Prefix, sampling: Sampling, live_B: Bools) -> Draft: ...

    def judged(self, guess: Draft, kept_B: Ints, live_B: Bools) -> None:
        """The tier above kept the first `kept_B` tokens of what was proposed."""

    def rewind(self, prefix: Prefix) -> None: ...

    def prefill(self, prefix: Prefix, b: int, length: int) -> Iterator[int]: ...

    def aside(self, b: int) -> tuple[Any, ...]: ...

    def bring_back(self, b: int, held: tuple[Any, ...]) -> None: ...

    def select(self, rows: Sequence[int]) -> None: ...

    def join(self, other: Self) -> None: ...


class Sampling(Protocol):
    """How the rows of a batch want their tokens."""

    @property
    def coupling(self) -> Coupling: ...

    @property
    def vocab_size(self) -> int: ...

    def verify(self, guess: Draft, logits_BJV: Tensor, prefix: Prefix, live_B: Bools, tier: int) -> Draft:
        """The guesses kept and one token more, as samples of the law of these logits. Column j follows j guesses."""


Record = Callable[[Tensor, Draft], None]
"""Shown the raw logits (B, J, V) of a verification and its outcome."""

Meanwhile = Callable[["Tier[Any]", Prefix, Draft, Sampling, Bools], AbstractContextManager[None]]
"""Around a pass of a tier that scores a guess behind a prefix."""

Watch = Callable[[int, Tensor], None]
"""Shown the position of the first of some prompt tokens, and the logits (1, T, V) that follow each."""


class Tier(Generic[C]):
    """One model seen through one cache. It extends a text by tokens that follow that pair exactly.

    The tier below only makes this cheaper, by guessing tokens that are then verified in one pass. A tier stops once it
    holds `gamma` tokens: a stopping time, hence harmless to the law. `level` is 0 for the lowest tier; it names the
    tier in the noise and in `Draft.origins_BK`.
    """

    def __init__(self, name: str, model: Model[C], cache: C, gamma: int = 1, below: Proposer | None = None) -> None:
        self.name, self.model, self.cache = name, model, cache
        self.gamma, self.below = gamma, below
        self.level: int = below.level + 1 if below else 0
        self.counters = Counters(len(cache.lengths_B))
        self.record: Record | None = None
        self.read: Read[C] | None = None
        self.meanwhile: Meanwhile | None = None
        self.ahead: Ahead | None = None

    def propose(self, prefix: Prefix, sampling: Sampling, live_B: Bools) -> Draft:
        """At least `gamma` tokens for each live row, each a sample of this tier's law given the text before it."""
        draft = nothing = Draft.empty(len(live_B), sampling.coupling.law_size(sampling.vocab_size))
        if self.ahead:
            draft, self.ahead = self.ahead.handed(self, prefix, sampling, live_B), None
            prefix = prefix.append(draft)
        while (live_B := live_B & (draft.counts_B < self.gamma)).any():
            guess = self.below.propose(prefix, sampling, live_B) if self.below else nothing
            started = perf_counter()
            beside = self.meanwhile(self, prefix, guess, sampling, live_B) if self.meanwhile else nullcontext()
            with beside:
                logits_BJV = self.score(prefix, guess, live_B)
            step = sampling.verify(guess, logits_BJV, prefix, live_B, self.level)
            if self.record:
                self.record(logits_BJV, step)
            draft = draft.then(step, live_B)
            prefix = self.settle(prefix, step, live_B)
            if self.below:
                self.below.judged(guess, step.counts_B - 1, live_B)
            self.counters.passed(live_B, perf_counter() - started, logits_BJV.shape[1])
        return draft

    def score(self, prefix: Prefix, guess: Draft, live_B: Bools) -> Tensor:
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

    def settle(self, prefix: Prefix, step: Draft, live_B: Bools) -> Prefix:
        """The text with what was kept behind it; what was refused is forgotten, here and below."""
        kept = prefix.append(Draft(step.tokens_BK, step.laws_BKV, step.origins_BK, step.counts_B * live_B))
        self.rewind(kept)
        return kept

    def judged(self, guess: Draft, kept_B: Ints, live_B: Bools) -> None:
        self.counters.judged(guess.counts_B, kept_B, live_B)

    def rewind(self, prefix: Prefix) -> None:
        """See at most all but the last token of a text, which stays unseen so that it can be fed."""
        self.cache.rewind(prefix.lengths_B - 1)
        if self.below:
            self.below.rewind(prefix)

    def select(self, rows: Sequence[int]) -> None:
        """Row i is from now on what row `rows[i]` was. The tier below is told apart."""
        self.cache.select(rows)
        self.counters.select(rows)
        self.ahead = None

    def join(self, other: Self) -> None:
        """The rows of another tier, alike but for its rows, follow these. The tier below is told apart."""
        self.cache.join(other.cache)
        self.counters.join(other.counters)
        self.ahead = None

    def aside(self, b: int) -> tuple[Any, ...]:
        """What a row holds, for `bring_back`. The tier below is told apart."""
        return self.cache.aside(b), self.counters.aside(b)

    def bring_back(self, b: int, held: tuple[Any, ...]) -> None:
        """Let a fresh row go on as the one that was put aside. The tier below is told apart."""
        self.cache.bring_back(b, held[0])
        self.counters.bring_back(b, held[1])

    def prefill(self, prefix: Prefix, b: int, length: int, watch: Watch | None = None) -> Iterator[int]:
        """Catch row b up to `length` tokens seen, yielding how many it has seen after each pass."""
        cache = self.cache.row(b)
        while True:
            start, stop = cache.resume(length)
            if start >= stop:
                return
            stop = min(stop, start + WATCHED) if watch else stop
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

    def catch_up(self, prefix: Prefix, live_B: Bools) -> None:
        """Let rows that were left out see what was written meanwhile."""
        for b in live_B.nonzero()[0].tolist():
            deque(self.prefill(prefix, b, int(prefix.lengths_B[b]) - 1), maxlen=0)
