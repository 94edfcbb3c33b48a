"""Statistics of one row of a batch: what each tier did for it, and where its decoding stands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from triforce.engine.sequence import TokenSequence
from triforce.interface.outputs import DecodingSnapshot
from triforce.interface.stats import TierStats
from triforce.kvcache import RetrievalView
from triforce.speculation import Proposer, Tier


def tier_stats(tiers: Sequence[Proposer], b: int, sequence: TokenSequence, length: int) -> list[TierStats]:
    """Return statistics of each tier in row b, from the lowest to the full one. length: of the text, in tokens."""
    stats = []
    for tier in tiers:
        c = tier.counters
        histogram = np.trim_zeros(c.accepted_BN[b], "b").tolist() if int(c.proposed_B[b]) else []
        counts = int(c.proposed_B[b]), int(c.accepted_B[b]), int(c.passes_B[b])
        seconds = float(c.seconds_B[b]), float(c.prefill_seconds_B[b])
        view = tier.cache if isinstance(tier, Tier) else None
        visible_tokens = view.keys(length) if isinstance(view, RetrievalView) else None
        stats.append(TierStats(tier.name, *counts, *seconds, histogram, visible_tokens))
    stats[-1].proposed = stats[-1].accepted = len(sequence.tokens)  # what the full tier proposes is the text
    return stats


def snapshot(
    tiers: Sequence[Proposer], b: int, sequence: TokenSequence, stats: list[TierStats], committed: int
) -> DecodingSnapshot:
    """Return the state of the decoding of row b, with `committed` tokens in the full view.

    A retrieval view that made no pass since the sequence's last snapshot saw nothing.
    """
    passes = [tier.passes for tier in sequence.trace.tiers] if sequence.trace else [0] * len(stats)
    views = [
        tier.cache
        for tier, now, before in zip(tiers, stats, passes, strict=True)
        if isinstance(tier, Tier) and isinstance(tier.cache, RetrievalView) and now.passes != before
    ]
    return DecodingSnapshot(committed, sequence.decode_seconds, views[-1].coverage(b) if views else [], stats)
