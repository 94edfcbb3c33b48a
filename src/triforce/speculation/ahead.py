"""What the lowest tier does while a pass of the exact one waits for KV: it drafts on behind the guess being verified.

It does what it will be asked for next if the whole guess is kept: it guesses the token that the exact tier would draw,
and drafts behind it. If the text becomes just that, the draft is there already; otherwise it is forgotten.

Why it is exact: the draft that is handed over is the one that would be made now, of the same text with the same noise,
as it is handed over to that text only. Where it is forgotten, its noise is drawn again, and nothing has read what was
made of it. So every text is the one without drafting ahead, under all couplings, whatever clocks, batch mates and disks
do. Shape suffixes: B rows, S text capacity, J columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from triforce.errors import TriforceError
from triforce.shapes import Bools, Ints
from triforce.speculation.contract import Proposer, Sampling
from triforce.speculation.count import Counters
from triforce.speculation.draft import Draft, Prefix
from triforce.speculation.lookup import FAR
from triforce.speculation.tier import Tier

PATIENCE = 1
"""In a row nothing is drafted ahead once of its guesses so many more were refused than were kept whole: it costs some
time of processors that pass and reads could use."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """A draft of `gamma` tokens behind texts that may come, and what the tier had seen when it was made."""

    text: Prefix
    draft: Draft
    gamma: int
    seen_B: Ints

    def handed(self, tier: Tier[Any], prefix: Prefix, sampling: Sampling, live_B: Bools) -> Draft:
        """The draft in rows whose text has come; there the tier has seen and drawn what it would have."""
        came_B = live_B & self._came(prefix) if tier.gamma == self.gamma else np.zeros_like(live_B)
        draft = Draft.empty(len(live_B), sampling.coupling.law_size(sampling.vocab_size)).then(self.draft, came_B)
        sampling.coupling.skip(tier.level, draft.counts_B)
        tier.cache.advance((self.seen_B - tier.cache.lengths_B) * came_B)
        return draft

    def _came(self, prefix: Prefix) -> Bools:
        lengths_B = self.text.lengths_B
        same = [
            np.array_equal(came_S[:length], thought_S[:length])
            for came_S, thought_S, length in zip(prefix.ids_BS, self.text.ids_BS, lengths_B.tolist(), strict=True)
        ]
        came_B: Bools = np.array(same) & (prefix.lengths_B == lengths_B)
        return came_B


class Beside:
    """What a tier does while it scores a guess (`Tier.meanwhile`). `streams`: whether there is time for it.

    `apart`: the kind of cache that has nothing in common with the tier's own; only one that has it may go on.
    """

    def __init__(self, streams: Callable[[], bool], apart: type) -> None:
        self._streams, self._apart, self._thread = streams, apart, ThreadPoolExecutor(1, "drafting-ahead")

    @contextmanager
    def __call__(
        self, top: Tier[Any], prefix: Prefix, guess: Draft, sampling: Sampling, live_B: Bools
    ) -> Iterator[None]:
        """The pass goes in the body; what goes wrong there waits for the draft, too."""
        lowest, live_B = lowest_of(top), live_B & self._worth_it(top)
        if not isinstance(lowest, Tier) or not isinstance(lowest.cache, self._apart) or not live_B.any():
            yield
            return
        text = Prefix(prefix.ids_BS.copy(), prefix.lengths_B).append(guess)  # the pass writes to the original
        work = self._thread.submit(draft_on, lowest, top.level, text, sampling, live_B)
        try:
            yield
        finally:
            wait([work])
        lowest.ahead = work.result()

    def _worth_it(self, top: Tier[Any]) -> Bools:
        if top.below is None or not self._streams():
            return np.zeros(len(top.counters.passes_B), dtype=np.bool_)
        counters = top.below.counters
        worth_B: Bools = 2 * counters.refused_B - counters.kept_BN.sum(1) <= PATIENCE
        return worth_B


def draft_on(tier: Tier[Any], level: int, text: Prefix, sampling: Sampling, live_B: Bools) -> Ahead | None:
    """Draft behind a text and the token that tier `level` is to draw next, which is guessed with the noise it will use.

    None where nothing was drafted: what goes wrong here does so again where it matters. What the tier had seen it sees
    again afterwards, and it feeds the same tokens in the same passes as it would, as bits may depend on them.
    """
    live_B = live_B & (text.lengths_B - tier.cache.lengths_B <= FAR)
    if not live_B.any():
        return None
    nothing = Draft.empty(len(live_B), sampling.coupling.law_size(sampling.vocab_size))
    counters, tier.counters = tier.counters, Counters(len(live_B))
    seen_B = tier.cache.lengths_B.copy()
    try:
        with sampling.coupling.rehearsal():
            logits_BJV = tier.score(text, nothing, live_B)
            tier.counters.passed(live_B, 0.0)
            text = tier.settle(text, sampling.verify(nothing, logits_BJV, text, live_B, level), live_B)
            tier.cache.rewind(seen_B)
            draft = tier.propose(text, sampling, live_B)
            return Ahead(text, draft, tier.gamma, tier.cache.lengths_B.copy())
    except TriforceError:
        return None
    finally:
        tier.cache.rewind(seen_B)
        counters.passes_B += tier.counters.passes_B
        tier.counters = counters


def lowest_of(tier: Proposer) -> Proposer:
    """What stands below all others."""
    while tier.below:
        tier = tier.below
    return tier
