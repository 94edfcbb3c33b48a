"""Noise: known answers, independence of everything but the key, and the distributions that sampling relies on."""

import pytest
import torch
from scipy import stats
from torch import Tensor

from tests.helpers.samplers import Sampler, each_sampler, noise_for
from triforce.backends.token_sampler import make_noise
from triforce.backends.torch import noise as torch_noise
from triforce.backends.torch.noise import Noise, key_schedule, philox
from triforce.backends.torch.tensors import as_tensor
from triforce.ragged import ints
from triforce.speculation.verification import NoiseSource

KNOWN = [  # philox4x32, 10 rounds, from kat_vectors of Random123 (Salmon et al. 2011)
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def uniforms(noise: NoiseSource, tier: int, n: int, used: list[int]) -> Tensor:
    """Return the next uniforms of any kind of noise as a tensor."""
    return as_tensor(noise.uniforms(tier, n, ints(used)))


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_known_answers_match(counter: str, key: str, answer: str) -> None:
    low, high = words(key)
    c0, c1, c2, c3 = (torch.tensor([word]) for word in words(counter))
    block = philox((c0, c1, c2, c3), key_schedule([high << 32 | low]))
    assert [int(word) for word in block] == words(answer)


@each_sampler
def test_philox_counter_layout_is_fixed(sampler: Sampler) -> None:
    """The layout is written out in plain integers, so that a seed's text can never change unnoticed."""
    seed = 2**64 - 7
    choice = 3
    position = 123_456
    token = 11
    tier = 2
    draw = 4
    keys = key_schedule([seed])

    def block(*counter: int) -> list[int]:
        c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
        return [int(word) for word in philox((c0, c1, c2, c3), keys)]

    noise = Noise([seed], [choice])
    *_, high, low = block(token // 2, position, choice, 0)
    expected = -torch.tensor(((high << 21 | low >> 11) | 1) / 2**53, dtype=torch.float64).log()
    assert torch.isclose(noise.exponentials(torch.tensor([[position]]), 13)[0, 0, token], expected, rtol=1e-15, atol=0)
    high, low, *_ = block(draw, 0, choice, 1 + tier)
    drawn = uniforms(noise_for(sampler, [seed], [choice]), tier, 5, [5])
    assert drawn[0, draw] == (high << 21 | low >> 11) / 2**53


@pytest.mark.parametrize("vocab_size", [1, 2, 37, 1000, 40_001])
def test_exponentials_depend_on_key_only(vocab_size: int) -> None:
    seeds = [5, 2**63 + 1, 5]
    choices = [0, 1, 2]
    positions = torch.tensor([[4, 5, 6, 70], [0, 1, 2, 3], [2**31, 70, 70, 2**32 - 1]])
    together = Noise(seeds, choices).exponentials(positions, vocab_size)
    for b, row in enumerate(positions.tolist()):
        row_noise = Noise([seeds[b]], [choices[b]])
        for j in reversed(range(len(row))):
            row_exponentials = row_noise.exponentials(torch.tensor([[row[j]]]), vocab_size)
            assert torch.equal(row_exponentials[0, 0], together[b, j])


def test_exponentials_independent_of_vocabulary_size() -> None:
    position = torch.tensor([[9]])
    large, small = (Noise([1], [0]).exponentials(position, size) for size in (1001, 300))
    assert torch.allclose(large[..., :300], small, rtol=1e-15, atol=0)


def test_exponentials_are_repeatable() -> None:
    noise = Noise([1, 2], [0, 0])
    for start in (0, 2, 1, 90, 40, 500, 0, 3):
        positions = torch.tensor([[start, start + 1, start + 5], [start + 7, start, start + 33]])
        got = noise.exponentials(positions, 50)
        assert torch.equal(got, Noise([1, 2], [0, 0]).exponentials(positions, 50))
        got.zero_()  # the caller's own copy


@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_exponentials_are_positive_and_finite(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 0 would win every race, even for a token of probability 0."""
    monkeypatch.setattr(torch_noise, "philox", lambda counter, _: [torch.full_like(counter[0], word)] * 4)
    extreme = Noise([1], [0]).exponentials(torch.tensor([[3]]), 6)
    assert bool(((extreme > 0) & extreme.isfinite()).all())
    assert float(uniforms(Noise([1], [0]), 0, 1, [1])) < 1


def test_noise_memory_is_bounded() -> None:
    noise = Noise([1, 2], [0, 0])
    for position in range(0, 400, 5):
        noise.exponentials(torch.tensor([[position], [position + 1]]), 8)
    assert len(noise.cached_exponentials) <= 64


@each_sampler
def test_noise_of_empty_requests_is_empty(sampler: Sampler) -> None:
    assert Noise([1], [0]).exponentials(torch.zeros(1, 0, dtype=torch.int64), 8).shape == (1, 0, 8)
    assert uniforms(noise_for(sampler, [1], [0]), 0, 0, [0]).shape == (1, 0)


@each_sampler
def test_uniforms_depend_on_own_draws_only(sampler: Sampler) -> None:
    together = noise_for(sampler, [8, 9], [0, 1])
    row_noise = noise_for(sampler, [9], [1])
    calls = [(3, [3, 3]), (2, [2, 0]), (1, [0, 1]), (4, [1, 2]), (2, [2, 2])]
    used = torch.cat([uniforms(together, 1, n, used)[1, : used[1]] for n, used in calls])
    assert torch.equal(used, uniforms(row_noise, 1, 8, [8])[0])
    assert together.draws[1].tolist() == [8, 8] and together.draws.sum() == 16


@each_sampler
def test_noise_draws_round_trip(sampler: Sampler) -> None:
    advanced_noise = noise_for(sampler, [8], [0])
    second = noise_for(sampler, [8], [0])
    advanced_noise.uniforms(3, 7, ints([7]))
    second.draws[:] = advanced_noise.draws
    assert torch.equal(uniforms(advanced_noise, 3, 2, [2]), uniforms(second, 3, 2, [2]))


@each_sampler
def test_noise_keys_do_not_collide(sampler: Sampler) -> None:
    """Domains, tiers, choices, seeds and positions give 2**17 numbers, all different."""

    def numbers(seed: int, choice: int) -> Tensor:
        noise = noise_for(sampler, [seed], [choice])
        exponentials = Noise([seed], [choice]).exponentials(torch.arange(16)[None], 256).neg().exp().flatten()
        return torch.cat([exponentials, *(uniforms(noise, tier, 2048, [2048])[0] for tier in range(8))])

    everything = torch.cat([numbers(s, c) for s in (0, 1, 2**32) for c in (0, 1)])
    assert len(everything.unique()) == len(everything)


@each_sampler
def test_noise_marginals_follow_laws(sampler: Sampler) -> None:
    drawn = uniforms(noise_for(sampler, [2024], [0]), 0, 40_000, [40_000])[0].numpy()
    exponentials = Noise([2024], [0]).exponentials(torch.arange(20)[None], 2000).flatten()
    assert stats.kstest(drawn, "uniform").pvalue > 1e-3
    assert stats.kstest(exponentials.numpy(), "expon").pvalue > 1e-3
    even, odd = exponentials.view(-1, 2).unbind(1)
    assert abs(stats.pearsonr(even.numpy(), odd.numpy()).statistic) < 0.03


def test_race_winner_follows_law() -> None:
    """argmax(p / E) ~ p, over 40 000 positions. The G-test detects a total variation of 0.02, that of the control."""
    probs = torch.tensor([0.0, 0.5, 0.2, 0.15, 0.1, 0.04, 0.01], dtype=torch.float64)
    wrong = torch.tensor([0.0, 0.48, 0.22, 0.15, 0.1, 0.04, 0.01], dtype=torch.float64)
    race = probs / Noise([77], [0]).exponentials(torch.arange(40_000)[None], len(probs))[0]
    counts = race.argmax(-1).bincount(minlength=len(probs))
    assert counts[0] == 0

    def g_test(law: Tensor) -> float:
        expected = law[1:] * counts.sum()
        return float(stats.power_divergence(counts[1:].numpy(), expected.numpy(), lambda_="log-likelihood").pvalue)

    assert g_test(probs) > 1e-3 > g_test(wrong)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_noise_equal_on_devices() -> None:
    cpu_noise = Noise([3, 4], [0, 1])
    cuda_noise = make_noise([3, 4], [0, 1], "cuda:0")
    positions = torch.tensor([[5, 6], [70, 7]])
    used = ints([1, 0])
    assert torch.equal(cpu_noise.uniforms(2, 9, used), cuda_noise.uniforms(2, 9, used).cpu())
    on_gpu = cuda_noise.exponentials(positions.cuda(), 999).cpu()
    assert torch.allclose(cpu_noise.exponentials(positions, 999), on_gpu, rtol=1e-14, atol=0)
