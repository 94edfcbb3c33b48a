"""A draft of random weights for three texts, which proposes tokens one by one or several in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from triforce.arrays import Array, to_host
from triforce.backends.dispatch import fused_draft_with
from triforce.backends.kernel_api import ModelBackend
from triforce.backends.token_sampler import make_noise
from triforce.engine.tier_builder import fused_draft
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import StreamingView
from triforce.model.config import ModelConfig
from triforce.ragged import Ints
from triforce.speculation import Draft, Rejection, Seeded, SequenceState, Tier, TokenSampler

PROMPTS = [5, 90, 31]
MakeSampler = Callable[..., TokenSampler]


class Drafting:
    """A draft tier. `several`: one call proposes several tokens. view: `StreamingView` of three rows."""

    def __init__(
        self,
        model: tuple[ModelConfig, ModelBackend],
        view: StreamingView,
        coupling: type[Seeded | Rejection],
        make: tuple[MakeSampler, Sequence[SamplingParams]],
        several: bool,
        gamma: int = 5,
    ) -> None:
        (config, backend), (sampler, params) = model, make

        def decoder(ids_BT: Ints, counts_B: Ints, cache: StreamingView, at_BJ: Ints) -> Array:
            batch = cache.begin(counts_B, ids_BT.shape[1])
            output = backend.forward(ids_BT, cache.kv, batch, at_BJ)
            cache.record(batch, output)
            return output.logits_BJV

        fused: Any = partial(fused_draft, partial(fused_draft_with, backend, view.kv)) if several else None
        self.tier = Tier("draft", decoder, view, gamma, fused_draft=fused)
        draw = torch.Generator().manual_seed(1)
        ids_BS = torch.randint(config.vocab_size, (3, 400), generator=draw).numpy()
        self.prefix = SequenceState(ids_BS, np.array(PROMPTS))
        self.noise = make_noise([7, 8, 9], [0, 1, 0], view.kv.device)
        self.sampling = sampler(params, PROMPTS, config.vocab_size, coupling(self.noise))
        for b in range(3):
            for _ in self.tier.prefill(self.prefix, b, PROMPTS[b] - 1):
                pass

    def propose(self, live: list[bool], accepted: list[int]) -> Draft:
        """Propose for live rows, accept `accepted` tokens of each, and append one more, as a verification does."""
        live_B = np.array(live)
        draft = self.tier.propose(self.prefix, self.sampling, live_B)
        counts_B = np.minimum(accepted, draft.counts_B)
        none_B1 = np.zeros((len(live), 1), np.int64)
        tokens_BJ = np.concatenate((draft.tokens_BK, none_B1), 1)
        np.put_along_axis(tokens_BJ, counts_B[:, None], 1, 1)
        accepted_draft = Draft(tokens_BJ, draft.probs_BKV, np.zeros_like(tokens_BJ), (counts_B + 1) * live_B)
        self.prefix = self.prefix.append(accepted_draft)
        self.tier.rewind(self.prefix)
        return draft


def same(draft: Draft, compared: Draft) -> bool:
    """Whether two drafts have the same tokens, tiers and laws."""
    if not np.array_equal(draft.counts_B, compared.counts_B):
        return False
    real_BK = np.arange(draft.tokens_BK.shape[1]) < draft.counts_B[:, None]
    pairs = (draft.tokens_BK, compared.tokens_BK), (draft.origins_BK, compared.origins_BK)
    laws_of_both = (to_host(of_draft.probs_BKV) for of_draft in (draft, compared))
    laws = (np.array_equal(a[:n], b[:n]) for a, b, n in zip(*laws_of_both, draft.counts_B, strict=True))
    return all(np.array_equal(a[real_BK], b[real_BK]) for a, b in pairs) and all(laws)
