"""Tokens that a draft gives in one call are those of passes and draws one by one, bit for bit, laws and noise too."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from tests.helpers.random_model import V, random_model
from tests.helpers.samplers import needs_native
from triforce.backends.token_sampler import NativeSampling, TorchSampling, make_noise
from triforce.engine.tier_builder import fused_draft
from triforce.errors import ModelError
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import StreamingView
from triforce.ragged import Ints
from triforce.sampling import LogitsProcessor
from triforce.speculation import Draft, Rejection, Seeded, SequenceState, Tier, TokenSampler, Verification

pytestmark = needs_native
PROMPTS = [5, 90, 31]
PARAMS = [
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.2, top_k=20, repetition_penalty=1.3, frequency_penalty=0.2, logit_bias={3: 2.0}),
]


class Drafting:
    """A draft of random weights behind three texts, with and without fused drafts."""

    def __init__(self, coupling: type[Seeded | Rejection], several: bool, gamma: int = 5) -> None:
        draw = torch.Generator().manual_seed(1)
        config, model = random_model(draw, torch.bfloat16)
        view = StreamingView(config, 3, sinks=16, window=33, slack=64, dtype=torch.bfloat16)

        def decoder(ids_BT: torch.Tensor, counts_B: Ints, cache: StreamingView, at_BJ: torch.Tensor) -> torch.Tensor:
            batch = cache.begin(counts_B, ids_BT.shape[1])
            return model.forward(ids_BT, cache.kv, batch, at_BJ).logits_BJV

        self.tier = Tier("draft", decoder, view, gamma, fused_draft=partial(fused_draft, model) if several else None)
        ids_BS = torch.randint(V, (3, 400), generator=draw).numpy()
        self.prefix = SequenceState(ids_BS, np.array(PROMPTS))
        self.noise = make_noise([7, 8, 9], [0, 1, 0])
        self.sampling: TokenSampler = NativeSampling(PARAMS, PROMPTS, V, coupling(self.noise))
        for b in range(3):
            for _ in self.tier.prefill(self.prefix, b, PROMPTS[b] - 1):
                pass

    def propose(self, live: list[bool], kept: list[int]) -> Draft:
        """Some rows get a draft, of which so many tokens stay."""
        live_B = np.array(live)
        draft = self.tier.propose(self.prefix, self.sampling, live_B)
        counts_B = np.minimum(kept, draft.counts_B)
        self.prefix = self.prefix.append(Draft(draft.tokens_BK, draft.probs_BKV, draft.origins_BK, counts_B))
        self.tier.rewind(self.prefix)
        return draft


ROUNDS = [([i % 4 != 0, i % 5 != 1, True], [i % 6, (i + 3) % 6, 5 - i % 3]) for i in range(40)]


def same(one: Draft, other: Draft) -> bool:
    if not np.array_equal(one.counts_B, other.counts_B):
        return False
    real_BK = np.arange(one.tokens_BK.shape[1]) < one.counts_B[:, None]
    pairs = (one.tokens_BK, other.tokens_BK), (one.origins_BK, other.origins_BK)
    laws = (torch.equal(a[:n], b[:n]) for a, b, n in zip(one.probs_BKV, other.probs_BKV, one.counts_B, strict=True))
    return all(np.array_equal(a[real_BK], b[real_BK]) for a, b in pairs) and all(laws)


@pytest.mark.parametrize("coupling", [Seeded, Rejection])
def test_fused_draft_equals_single_passes_and_draws(coupling: type[Seeded | Rejection]) -> None:
    one, many = Drafting(coupling, several=False), Drafting(coupling, several=True)
    for live, kept in ROUNDS:
        assert same(one.propose(live, kept), many.propose(live, kept))
    assert torch.equal(one.noise.draws, many.noise.draws)
    assert np.array_equal(one.tier.counters.passes_B, many.tier.counters.passes_B)
    assert np.array_equal(one.tier.cache.lengths_B, many.tier.cache.lengths_B)
    assert np.array_equal(one.prefix.ids_BS[:, :90], many.prefix.ids_BS[:, :90])


def test_fused_draft_with_stale_page_lists_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamingView, "steps", lambda self, counts_B, most: most)
    one, many = Drafting(Rejection, several=False), Drafting(Rejection, several=True)
    assert not all(same(one.propose(*each), many.propose(*each)) for each in ROUNDS)


def test_torch_sampler_is_asked_per_token() -> None:
    drafting = Drafting(Seeded, several=True)
    coupling: Verification = Seeded(drafting.noise)
    drafting.sampling = TorchSampling(LogitsProcessor(PARAMS, PROMPTS, V), coupling, V)
    live_B = np.array([True, True, True])
    assert drafting.tier.fused_draft is not None
    assert drafting.tier.fused_draft(drafting.tier, drafting.prefix, drafting.sampling, live_B, 5) is None
    assert drafting.propose([True] * 3, [5] * 3).counts_B.tolist() == [5, 5, 5]


def test_token_without_probability_mass_raises() -> None:
    drafting = Drafting(Seeded, several=True)
    view, one = drafting.tier.cache, torch.full((2, 1, 16), float("nan"))
    view.kv.write(0, torch.tensor([view.pages * 16 + 16]), one, one)  # the first sink of row 1
    with pytest.raises(ModelError, match=r"logits are NaN \(row 1"):
        drafting.propose([True] * 3, [5] * 3)
