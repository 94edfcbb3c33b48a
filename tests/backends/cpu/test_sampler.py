"""The native sampler against the sampler in torch: same probabilities, same picks, same accepted tokens, same errors.

Shape suffixes: B rows, S text capacity, K draft tokens, J = K + 1, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.paged_kv import native
from tests.helpers.sampler_scenes import (
    CAPACITY,
    COUPLINGS,
    CUTS,
    EQUAL,
    TEMPERATURES,
    Scene,
    agree,
    laws,
    noise_of,
    same_law,
    scene,
    verdict,
)
from tests.helpers.samplers import native_sampling, torch_sampling
from triforce.backends import dispatch
from triforce.backends.token_sampler import make_noise, sampling
from triforce.backends.torch.tensors import tensor_of
from triforce.backends.torch.torch_sampler import TorchSampling
from triforce.errors import ModelError, RequestError
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import ints
from triforce.speculation import Draft, Seeded, SequenceState

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
from triforce.backends.cpu.native_sampler import NativeSampling

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def restore_level_and_threads() -> Iterator[None]:
    level, threads = native.level(), native.threads()
    yield
    native.use(level)
    native.set_threads(threads)


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize(("vocab_size", "times"), [(6, 100), (37, 100), (700, 20), (9001, 4)])
def test_native_sampler_decides_as_torch(vocab_size: int, times: int, coupling: type) -> None:
    for seed in range(times):
        agree(scene(seed, vocab_size), native_sampling, coupling)


@pytest.mark.slow
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize(("vocab_size", "times"), [(6, 1000), (37, 1000), (700, 200), (9001, 20)])
def test_native_sampler_decides_as_torch_long(vocab_size: int, times: int, coupling: type) -> None:
    for seed in range(1000, 1000 + times):
        agree(scene(seed, vocab_size), native_sampling, coupling)


@pytest.mark.parametrize("level", native.levels())
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_native_sampler_bits_independent_of_level_threads_batch(coupling: type, level: str) -> None:
    for seed in range(40):
        batch_scene = scene(seed, (37, 700, 3000)[seed % 3], rows=6)
        native.use(native.levels()[-1])
        native.set_threads(1)
        expected = verdict(batch_scene, native_sampling, coupling)
        native.use(level)
        native.set_threads(3)
        together = verdict(batch_scene, native_sampling, coupling)
        for b in batch_scene.live_B.nonzero()[0].tolist():
            count = int(expected.counts_B[b])
            single_verdict = verdict(batch_scene.pick(b), native_sampling, coupling, [b])
            for got, row in ((together, b), (single_verdict, 0)):
                assert int(got.counts_B[row]) == count
                assert got.tokens_BK[row, :count].tolist() == expected.tokens_BK[b, :count].tolist()
                assert torch.equal(got.probs_BKV[row, :count], expected.probs_BKV[b, :count])


def probabilities(logits: Tensor, **params: object) -> list[Tensor]:
    """Return the probabilities of one row by both samplers."""
    settings = SamplingParams(**params)  # type: ignore[arg-type]
    return [laws(sampler, logits[None], [settings])[0] for sampler in (torch_sampling, native_sampling)]


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_native_sampler_ties_keep_lowest_ids(cut: dict[str, object], temperature: float) -> None:
    expected, got = probabilities(EQUAL, temperature=temperature, **cut)
    same_law(got, expected)


@pytest.mark.parametrize("bias", [{4: 2.0}, {0: 1.0}, {1: -1.0}])
def test_native_greedy_ties_take_lowest_id(bias: dict[int, float]) -> None:
    for params in ({}, {"logit_bias": bias}):
        expected, got = probabilities(EQUAL, temperature=0.0, **params)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.7, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("spread", [0.0, 0.05, 1.0, 8.0])
@pytest.mark.parametrize("step", [None, 0.25])
def test_native_sampler_random_nucleus_equals_torch(top_p: float, spread: float, step: float | None) -> None:
    """The nucleus has few tokens or most, all different or in groups of equals."""
    logits = torch.randn(20_000, generator=torch.Generator().manual_seed(3)) * spread
    expected, got = probabilities(logits if step is None else (logits / step).round() * step, top_p=top_p)
    same_law(got, expected)


def test_native_sampler_smallest_probabilities_equal_torch() -> None:
    """Probabilities go down to subnormal ones and to 0."""
    expected, got = probabilities(-torch.arange(0, 800, 0.37))
    small = expected > 0
    assert torch.equal(got > 0, small) and 0 < expected[small].min() < 1e-320
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-323)


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_native_sampler_accepts_float64_logits(coupling: type) -> None:
    for seed in range(20):
        batch_scene = scene(seed, 50)
        agree(replace(batch_scene, logits_BJV=batch_scene.logits_BJV.double() / 3), native_sampling, coupling)


@pytest.mark.parametrize("vocab_size", [1, 2, 513, 4099])
def test_native_noise_equals_torch_at_many_positions(vocab_size: int) -> None:
    """Without cuts each token has a chance, so that a wrong bit of any token's noise would show."""
    rows = 250
    params = [SamplingParams()] * 250
    lengths_B = np.random.default_rng(1).integers(2**32 - 1, size=rows)
    batch_scene = Scene(
        params,
        [0] * rows,
        SequenceState(np.zeros((rows, 1), dtype=np.int64), lengths_B),
        np.ones(rows, dtype=np.bool_),
        torch.randn(rows, 1, vocab_size, generator=torch.Generator().manual_seed(2)) / 3,
        Draft.empty(rows, 0),
    )
    expected, got = (verdict(batch_scene, sampler, Seeded) for sampler in (torch_sampling, native_sampling))
    assert (expected.tokens_BK == got.tokens_BK).all()


def test_native_uniforms_equal_torch() -> None:
    ours, theirs = (noise_of([0, 1, 2], sampler) for sampler in (native_sampling, torch_sampling))
    assert type(ours) is not type(theirs)
    ours.draws += 2**32 - 3  # both words of the counter
    theirs.draws += 2**32 - 3
    for tier, n, used in (
        (0, 3, [0, 2, 3]),
        (7, 1, [1, 0, 1]),
        (0, 9, [9, 9, 0]),
        (0, 0, [0, 0, 0]),
        (0, 4, [1, 2, 3]),
    ):
        a, b = (noise.uniforms(tier, n, ints(used)) for noise in (ours, theirs))
        assert torch.equal(tensor_of(a), b) and torch.equal(tensor_of(ours.draws), theirs.draws)


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("bad", "fault"), [(math.nan, "NaN"), (math.inf, r"\+inf"), (-math.inf, "all -inf")])
def test_native_sampler_bad_logits_raise(bad: float, fault: str, temperature: float, coupling: type) -> None:
    """Bad logits in padding raise too: the model is broken then."""
    batch_scene = scene(1, 30)
    batch_scene.params = [SamplingParams(temperature=temperature)] * 4
    batch_scene.draft.counts_B[:] = 0
    batch_scene.logits_BJV[2, 3, slice(None) if bad == -math.inf else 11] = bad
    batch_scene.logits_BJV[3, 0, 5] = math.nan
    for sampler in (torch_sampling, native_sampling):
        with pytest.raises(ModelError, match=rf"{fault} \(row 2, column 3\)"):
            verdict(batch_scene, sampler, coupling)


def test_native_sampler_bias_outside_vocabulary_raises() -> None:
    with pytest.raises(RequestError, match="token 8, but the vocabulary ends at 7"):
        native_sampling([SamplingParams(logit_bias={8: 1.0})], [0], 8, Seeded(noise_of([0], native_sampling)))


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: replace(s, logits_BJV=s.logits_BJV[:, :-1]), "tokens must be int64"),
        (lambda s: replace(s, logits_BJV=s.logits_BJV.bfloat16()), "logits must be float32"),
        (lambda s: replace(s, live_B=s.live_B.astype(np.int64)), "live must be bool"),
        (lambda s: replace(s, prefix=SequenceState(s.prefix.ids_BS, s.prefix.lengths_B[:2])), "lengths must be int64"),
        (lambda s: replace(s, draft=replace(s.draft, counts_B=s.draft.counts_B + 4)), "counts must be from 0 to K"),
        (lambda s: replace(s, draft=replace(s.draft, tokens_BK=s.draft.tokens_BK - 30)), "tokens must be in"),
    ],
)
def test_native_sampler_wrong_arrays_raise(change: object, message: str, coupling: type) -> None:
    batch_scene = scene(2, 30)
    batch_scene.draft.counts_B[:] = 2
    with pytest.raises(ValueError, match=message):
        verdict(change(batch_scene), native_sampling, coupling)  # type: ignore[operator]


def test_native_sampler_finished_row_at_capacity_equals_torch() -> None:
    """A finished row may stand at the end of its storage."""
    batch_scene = scene(4, 30)
    batch_scene.params = [SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2)] * 4
    batch_scene.prefix.lengths_B[:] = CAPACITY - 1
    for coupling in COUPLINGS:
        agree(batch_scene, native_sampling, coupling)


def test_sampler_choice_follows_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(coupling: type) -> type:
        return type(sampling([SamplingParams()], [0], 8, coupling(make_noise([0], [0]))))

    assert [taken(coupling) for coupling in COUPLINGS] == [NativeSampling] * 3
    monkeypatch.setattr(dispatch, "native", None)
    assert [taken(coupling) for coupling in COUPLINGS] == [TorchSampling] * 3
