"""Fused draft: several tokens of the draft model in one native call, as Python between them would cost more than it.

Shape suffixes: B rows, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

import numpy as np

from triforce.backends import dispatch
from triforce.backends.kernel_api import ModelBackend
from triforce.backends.token_sampler import NativeSampling
from triforce.kvcache import StreamingView
from triforce.ragged import Bools
from triforce.sampling.logits import non_finite_logits
from triforce.speculation import Draft, SequenceState, Tier, TokenSampler


def burst(
    model: ModelBackend,
    tier: Tier[StreamingView],
    prefix: SequenceState,
    sampling: TokenSampler,
    live_B: Bools,
    count: int,
) -> Draft | None:
    """Draft `count` tokens of each live row, or fewer, for a tier of `model` with nothing below it.

    They are bit for bit those that passes and draws one by one would give. Returns None where these are needed. Raises
    ModelError where logits are not finite.
    """
    view, run = tier.cache, dispatch.bursting(model, tier.cache.kv)
    if not (run and isinstance(sampling, NativeSampling)):
        return None
    unseen_B = (prefix.lengths_B - view.lengths_B) * live_B
    more = view.steps(unseen_B, count - 1)
    draws = sampling.draws(tier.level, more + 1, live_B)
    if draws is None:
        return None
    batch = view.begin(unseen_B + more * live_B, int(unseen_B.max()) + more)
    tokens_BK = np.empty((len(live_B), more + 1), dtype=np.int64)
    unlawful = run(batch, (prefix.ids_BS, prefix.lengths_B, live_B), draws, tokens_BK)
    if unlawful:
        raise non_finite_logits(unlawful[0], 0, unlawful[1])
    view.advance(unseen_B + more * live_B)
    origins_BK = np.full_like(tokens_BK, tier.level)
    return Draft(tokens_BK, draws[2].transpose(0, 1), origins_BK, (more + 1) * live_B)
