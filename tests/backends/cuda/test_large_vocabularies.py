"""The samplers at a vocabulary of today's models, with a GPU's parts and blocks, in the interpreter.

Shape suffixes: B rows, J columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.helpers.cuda.sampler_checks import COUPLINGS, OnDevice, looked_at_by
from tests.helpers.sampler_scenes import Scene, agree, laws, scene
from tests.helpers.samplers import torch_sampling
from triforce.backends.cuda.triton import sampler
from triforce.interface.sampling_params import SamplingParams
from triforce.speculation import Rejection, Seeded

torch.set_num_threads(1)
VOCABULARY = 128_256
PARAMS = [
    SamplingParams(0.0),
    SamplingParams(1.0),
    SamplingParams(0.6, top_p=0.9),
    SamplingParams(0.8, top_k=50, top_p=0.95),
    SamplingParams(1.2, min_p=0.05),
    SamplingParams(0.7, top_p=0.999, repetition_penalty=1.1),
]
each_coupling = pytest.mark.parametrize("coupling", COUPLINGS)


@pytest.fixture
def parts() -> Iterator[None]:
    """Use a GPU's number of tokens per program. The last program has fewer."""
    assert VOCABULARY > sampler.SINGLE_PROGRAM and VOCABULARY % sampler.PART
    with looked_at_by(sampler.PART):
        yield


def large_scene(seed: int, draft_tokens: int, params: list[SamplingParams] = PARAMS) -> Scene:
    """Return a scene with one live row for each of the settings."""
    batch_scene = scene(seed, VOCABULARY, rows=len(params), draft_tokens=draft_tokens)
    batch_scene.live_B[:] = True
    batch_scene.draft.counts_B[:] = draft_tokens
    return replace(batch_scene, params=params)


@pytest.mark.parametrize(
    ("coupling", "params"), [pytest.param(Seeded, PARAMS[2:3], marks=pytest.mark.slow), (Rejection, PARAMS[3:4])]
)
def test_triton_sampler_of_large_vocabulary_decides_as_torch(
    parts: None, coupling: type, params: list[SamplingParams]
) -> None:
    agree(large_scene(3, 1, params), OnDevice, coupling)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@each_coupling
@pytest.mark.parametrize("seed", range(1, 5))
def test_triton_sampler_of_large_vocabularies_decides_as_torch(parts: None, seed: int, coupling: type) -> None:
    """Logits with ties and -inf among them, drafts of several tokens."""
    agree(large_scene(seed, 3), OnDevice, coupling)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@each_coupling
def test_triton_sampler_of_one_program_and_large_vocabulary_decides_as_torch(coupling: type) -> None:
    with looked_at_by(None, sampler.BLOCK):
        agree(large_scene(0, 1), OnDevice, coupling)


@pytest.mark.slow
def test_triton_sampler_borders_of_parts_count(parts: None) -> None:
    """Only the tokens beside the borders have a chance, so that a sampler that loses one of them fails."""
    edges = [0, sampler.PART - 1, sampler.PART, 62 * sampler.PART, VOCABULARY - 1]
    logits_BV = torch.full((3, VOCABULARY), -torch.inf)
    logits_BV[:, edges] = torch.tensor([0.0, 0.5, 0.25, 0.125, 0.75])
    params = [SamplingParams(0.7), SamplingParams(1.0, top_k=4), SamplingParams(1.0, top_p=0.7)]
    got, expected = (laws(sampling, logits_BV, params) for sampling in (OnDevice, torch_sampling))
    assert (got > 0).sum(1).tolist() == [5, 4, 3] == (expected > 0).sum(1).tolist()
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
