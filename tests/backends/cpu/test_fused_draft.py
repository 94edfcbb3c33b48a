"""Draft tokens of one call have the bits of single passes and draws, probabilities and noise too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.drafting import PROMPTS, Drafting, same
from tests.helpers.random_model import V, random_model
from tests.helpers.samplers import needs_native, noise_for, torch_sampling
from triforce.backends.cpu.native_sampler import NativeSampling
from triforce.backends.torch.tensors import tensor_of
from triforce.errors import ModelError
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import StreamingView
from triforce.speculation import Rejection, Seeded

pytestmark = needs_native
PARAMS = [
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.2, top_k=20, repetition_penalty=1.3, frequency_penalty=0.2, logit_bias={3: 2.0}),
]


def drafting(coupling: type[Seeded | Rejection], several: bool) -> Drafting:
    config, model = random_model(torch.Generator().manual_seed(1), "bfloat16")
    view = StreamingView(config, 3, sinks=16, window=33, slack=64, dtype="bfloat16")
    return Drafting((config, model), view, coupling, (NativeSampling, PARAMS), several)


ROUNDS = [([i % 4 != 0, i % 5 != 1, True], [i % 6, (i + 3) % 6, 5 - i % 3]) for i in range(40)]


@pytest.mark.parametrize("coupling", [Seeded, Rejection])
def test_fused_draft_equals_single_passes_and_draws(coupling: type[Seeded | Rejection]) -> None:
    single = drafting(coupling, several=False)
    fused = drafting(coupling, several=True)
    for live, accepted in ROUNDS:
        assert same(single.propose(live, accepted), fused.propose(live, accepted))
    assert np.array_equal(single.noise.draws, fused.noise.draws)
    assert np.array_equal(single.tier.counters.passes_B, fused.tier.counters.passes_B)
    assert np.array_equal(single.tier.cache.lengths_B, fused.tier.cache.lengths_B)
    assert np.array_equal(single.prefix.ids_BS[:, :90], fused.prefix.ids_BS[:, :90])


def test_fused_draft_with_stale_page_lists_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamingView, "steps", lambda self, counts_B, max_steps: max_steps)
    single = drafting(Rejection, several=False)
    fused = drafting(Rejection, several=True)
    assert not all(
        same(single.propose(*round_arguments), fused.propose(*round_arguments)) for round_arguments in ROUNDS
    )


def test_torch_sampler_is_asked_per_token() -> None:
    scene = drafting(Seeded, several=True)
    scene.sampling = torch_sampling(PARAMS, PROMPTS, V, Seeded(noise_for(torch_sampling, [7, 8, 9], [0, 1, 0])))
    decoder = scene.tier.model
    scene.tier.model = lambda *arguments: tensor_of(decoder(*arguments))
    live_B = np.array([True, True, True])
    assert scene.tier.fused_draft is not None
    assert scene.tier.fused_draft(scene.tier, scene.prefix, scene.sampling, live_B, 5) is None
    assert scene.propose([True] * 3, [5] * 3).counts_B.tolist() == [5, 5, 5]


def test_token_without_probability_mass_raises() -> None:
    scene = drafting(Seeded, several=True)
    view = scene.tier.cache
    nan_row = np.full((2, 1, 16), np.nan, np.float32)
    view.kv.write(0, np.array([view.pages * 16 + 16]), nan_row, nan_row)  # the first sink of row 1
    with pytest.raises(ModelError, match=r"logits are NaN \(row 1"):
        scene.propose([True] * 3, [5] * 3)
