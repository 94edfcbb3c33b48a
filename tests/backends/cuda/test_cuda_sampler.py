"""The fused sampler in Triton against the sampler in torch: same probabilities, picks, accepted tokens and errors.

Shape suffixes: B rows, J columns, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.helpers.cuda.sampler_checks import (
    COUPLINGS,
    OnDevice,
    decides_as_torch_does,
    exact_masses,
    largest_in_one_part,
    law_is_exact,
    looked_at_by,
    lowest_ids_stay,
    many_equals,
    noise_far_away,
    nuclei,
)
from tests.helpers.cuda.scene import DEVICE
from tests.helpers.sampler_scenes import TEMPERATURES, agree, laws, scene, verdict
from tests.helpers.samplers import torch_sampling
from triforce.backends import dispatch
from triforce.backends.cuda.sampler import TritonSampling
from triforce.backends.token_sampler import make_noise, sampling
from triforce.backends.torch.torch_sampler import TorchSampling
from triforce.errors import ModelError, RequestError
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import ints
from triforce.speculation import BlockRejection, Rejection, Seeded

torch.set_num_threads(1)


@pytest.fixture(params=[None, 128], ids=["one program", "parts"], autouse=True)
def part(request: pytest.FixtureRequest) -> Iterator[int | None]:
    """Yield the tokens per program for both kernels, or None for one program per column."""
    with looked_at_by(request.param):
        yield request.param


each_coupling = pytest.mark.parametrize("coupling", COUPLINGS)


@each_coupling
@pytest.mark.parametrize(
    ("vocab_size", "seeds"),
    [(7, range(3)), (97, range(3, 6)), pytest.param(600, range(6, 8), marks=pytest.mark.slow)],
)
def test_triton_sampler_decides_as_torch(vocab_size: int, seeds: range, coupling: type) -> None:
    decides_as_torch_does(vocab_size, seeds, coupling)


@pytest.mark.slow
@each_coupling
@pytest.mark.parametrize(("vocab_size", "times"), [(6, 100), (97, 100), (700, 50), (3001, 5)])
def test_triton_sampler_random_rows_equal_torch(vocab_size: int, times: int, coupling: type) -> None:
    decides_as_torch_does(vocab_size, range(10, 10 + times), coupling)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # of scores at a tiny temperature, which numpy reports
def test_triton_sampler_ties_keep_lowest_ids() -> None:
    lowest_ids_stay(TEMPERATURES[::2])


def test_triton_sampler_many_ties_equal_torch() -> None:
    many_equals()


@pytest.mark.slow
def test_triton_sampler_random_nucleus_equals_torch() -> None:
    nuclei()


def test_triton_sampler_exact_masses_equal_torch(part: int | None) -> None:
    with looked_at_by(part and 4):
        exact_masses()


def test_triton_sampler_largest_in_one_part_equal_torch() -> None:
    largest_in_one_part()


def test_triton_sampler_smallest_probabilities_equal_torch() -> None:
    """Probabilities go down to subnormal ones and to 0."""
    logits_BV = -torch.arange(0, 800, 1.37)[None]
    expected, got = (laws(sampler, logits_BV, [SamplingParams()]) for sampler in (torch_sampling, OnDevice))
    small = expected > 0
    assert torch.equal(got > 0, small) and 0 < expected[small].min() < 1e-310
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-322)


@each_coupling
def test_triton_sampler_accepts_strided_tensors(coupling: type) -> None:
    """Logits come from a graph's padded pass, and drafts are cut from longer ones; bfloat16 too."""
    batch_scene = scene(4, 30)
    padded = torch.full((5, 7, 30), math.nan).bfloat16()
    padded[:4, :4] = batch_scene.logits_BJV
    longer = torch.full((4, 5, 30), math.nan).double()
    longer[:, :3] = batch_scene.draft.probs_BKV
    draft = replace(batch_scene.draft, probs_BKV=longer[:, :3])
    agree(replace(batch_scene, logits_BJV=padded[:4, :4], draft=draft), OnDevice, coupling)


@pytest.mark.parametrize("vocab_size", [1, 513])
def test_triton_noise_at_far_positions_equals_torch(vocab_size: int) -> None:
    noise_far_away(vocab_size)


@pytest.mark.parametrize(("bad", "fault"), [(math.nan, "NaN"), (math.inf, r"\+inf"), (-math.inf, "all -inf")])
def test_triton_sampler_bad_logits_raise(bad: float, fault: str) -> None:
    """Bad logits in padding and in finished rows raise too: the model is broken then."""
    batch_scene = scene(1, 300)
    batch_scene.draft.counts_B[:] = 0
    batch_scene.live_B[:] = [True, True, False, True]
    batch_scene.logits_BJV[2, 3, slice(None) if bad == -math.inf else 270] = bad
    batch_scene.logits_BJV[3, 0, 5] = math.nan
    for coupling in COUPLINGS:
        with pytest.raises(ModelError, match=rf"{fault} \(row 2, column 3\)"):
            verdict(batch_scene, OnDevice, coupling)


def test_triton_sampler_bias_outside_vocabulary_raises() -> None:
    with pytest.raises(RequestError, match="token 8, but the vocabulary ends at 7"):
        TritonSampling([SamplingParams(logit_bias={8: 1.0})], [0], 8, Seeded(make_noise([0], [0], str(DEVICE))), DEVICE)


def test_triton_uniforms_equal_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "native", None)
    drawn = {}
    for kernels in ("torch", "triton"):
        monkeypatch.setattr(dispatch, "requested", kernels)
        rows = make_noise([2**63, 2**63 + 977, 2**63 + 1954], [0, 1, 2], str(DEVICE))
        rows.draws += 2**32 - 3  # both words of the counter
        draw_requests = ((0, 3, [0, 2, 3]), (7, 1, [1, 0, 1]), (0, 9, [9, 9, 0]), (0, 0, [0, 0, 0]), (0, 4, [1, 2, 3]))
        drawn[kernels] = [rows.uniforms(tier, n, ints(used)) for tier, n, used in draw_requests] + [rows.draws]
    assert all(map(torch.equal, drawn["torch"], drawn["triton"]))


def test_triton_sampler_choice_follows_backend(by_name: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(coupling: type) -> type:
        return type(sampling([SamplingParams()], [0], 8, coupling(make_noise([0], [0], str(DEVICE))), str(DEVICE)))

    assert taken(Seeded) is taken(Rejection) is TritonSampling
    assert taken(BlockRejection) is TorchSampling  # row by row
    monkeypatch.setattr(dispatch, "requested", "torch")
    assert taken(Seeded) is TorchSampling


def test_triton_verification_law_is_exact(part: int | None) -> None:
    with looked_at_by(part and 1):
        law_is_exact()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_triton_verification_law_of_wide_proposals_is_exact(part: int | None) -> None:
    with looked_at_by(part and 2):
        law_is_exact(3, (0, 1, 2))
