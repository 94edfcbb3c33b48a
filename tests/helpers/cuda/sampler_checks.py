"""Checks that the Triton sampler equals the one in torch, which mutants must fail.

Shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.cuda.scene import DEVICE
from tests.helpers.laws.cases import EXACT
from tests.helpers.laws.one_verification import Given, deviation, fused, warped
from tests.helpers.random_tensors import normal
from tests.helpers.sampler_scenes import CUTS, EQUAL, Scene, agree, laws, same_law, scene
from tests.helpers.samplers import torch_sampling
from triforce.backends.cuda.sampler import TritonSampling
from triforce.backends.cuda.triton import sampler
from triforce.backends.torch.noise import Noise
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import Bools, ints
from triforce.speculation import Draft, Rejection, Seeded, SequenceState

COUPLINGS = [Seeded, Rejection]
"""Couplings of the Triton sampler. `BlockRejection` needs the probabilities of all columns and is torch's."""


@contextmanager
def looked_at_by(part: int | None, block: int | None = None) -> Iterator[None]:
    """Let one program read each `part` tokens of a column, or a single one all of them, on a GPU and interpreted.

    `block`: tokens that the single program reads at a time.
    """
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("", "_INTERPRETED"):
            patch.setattr(sampler, f"SINGLE_PROGRAM{kind}", 0 if part else 2**31)
            patch.setattr(sampler, f"PART{kind}", part)
            patch.setattr(sampler, f"BLOCK{kind}", block or getattr(sampler, f"BLOCK{kind}"))
        yield


class OnDevice:
    """The Triton sampler with inputs and outputs on a CPU."""

    def __init__(
        self, params: Sequence[SamplingParams], lengths: Sequence[int], vocab_size: int, coupling: Any
    ) -> None:
        coupling.noise = moved(coupling.noise)
        self.coupling = coupling
        self.vocab_size = vocab_size
        self._sampling = TritonSampling(params, lengths, vocab_size, coupling, DEVICE)

    def verify(self, draft: Draft, logits_BJV: Tensor, prefix: SequenceState, live_B: Bools, tier: int) -> Draft:
        verified = self._sampling.verify(draft, logits_BJV.to(DEVICE), prefix, live_B, tier)
        return replace(verified, probs_BKV=verified.probs_BKV.cpu())


def moved(noise: Noise | Given) -> Noise | Given:
    """Return the same noise on the kernels' device. Given uniforms move there on use."""
    if DEVICE.type == "cpu" or not isinstance(noise, Noise):
        return noise
    device_noise = Noise(noise.seeds_B.view(torch.uint64).tolist(), noise.choices_B.tolist(), DEVICE)
    device_noise.draws.copy_(noise.draws)
    return device_noise


def decides_as_torch_does(vocab_size: int, seeds: range, coupling: type) -> None:
    for seed in seeds:
        agree(scene(seed, vocab_size, rows=3, draft_tokens=2), OnDevice, coupling)


def same_laws(logits_BV: Tensor, params: list[SamplingParams]) -> None:
    same_law(*(laws(sampler, logits_BV, params) for sampler in (OnDevice, torch_sampling)))


def lowest_ids_stay(temperatures: list[float]) -> None:
    params = [SamplingParams(temperature=t, **cut) for t in temperatures for cut in CUTS]  # type: ignore[arg-type]
    same_laws(EQUAL.expand(len(params), -1), params)


def many_equals() -> None:
    """Check many equal logits across blocks. The last row has fewer tokens than top-k."""
    logits_BV = normal(6, 600).round()
    logits_BV[5, torch.arange(600) % 9 > 0] = -math.inf
    params = [
        SamplingParams(top_k=300),
        SamplingParams(top_p=0.6),
        SamplingParams(0.8, top_k=450, top_p=0.9, min_p=0.001),
        SamplingParams(min_p=0.2),
        SamplingParams(0.0, top_k=3, top_p=0.5),
        SamplingParams(1.5, top_k=300),
    ]
    same_laws(logits_BV, params)


def nuclei() -> None:
    """Check nuclei of few tokens or most, a far outlier in float64, and many light tokens that count in sum."""
    logits_BV = torch.tensor([0.0, 0.05, 1.0, 8.0]).double()[:, None] * normal(4, 600, seed=1)
    logits_BV[1, 3] = -1e300
    for top_p in (0.1, 0.9, 0.999, 1 - 1e-12):
        same_laws(logits_BV, [SamplingParams(top_p=top_p)] * 4)
    light_BV = torch.full((1, 600), math.log(0.99 * 0.51 / 1200))
    light_BV[0, :2] = torch.tensor([1.0, 0.8]).log()
    same_laws(light_BV, [SamplingParams(top_p=0.49)])


def exact_masses() -> None:
    """Check equal tokens whose sum is exactly the mass, or would be without rounding."""
    for size, masses in ((8, (0.125, 0.5, 0.875)), (10, (0.3, 0.7, 0.8))):
        same_laws(torch.zeros(len(masses), size), [SamplingParams(top_p=mass) for mass in masses])


def largest_in_one_part() -> None:
    """Check top-k tokens that stand together, beside equals of the smallest, or one in each part."""
    falling_V = -torch.arange(256.0)
    logits_BV = torch.stack((falling_V, -(-falling_V / 2).floor(), falling_V.view(64, 4).T.flatten()))
    for k in (2, 3, 64, 65):
        same_laws(logits_BV, [SamplingParams(0.5, top_k=k)] * 3)


def noise_far_away(vocab_size: int) -> None:
    """Check noise at far positions. Without cuts each token has a chance, so any wrong bit of noise would show."""
    lengths_B = ints([1, 2**31 - 1, 2**31, 2**32 - 2])
    prefix = SequenceState(np.zeros((4, 1), dtype=np.int64), lengths_B)
    live_B = np.ones(4, dtype=np.bool_)
    logits_BJV = normal(4, 1, vocab_size) / 3
    scene = Scene([SamplingParams()] * 4, [0] * 4, prefix, live_B, logits_BJV, Draft.empty(4, 0))
    agree(scene, OnDevice, Seeded)


def law_is_exact(vocab_size: int = 2, counts: tuple[int, ...] = (1,)) -> None:
    """Check the exact law of one verification's tokens, integrated as in tests/laws."""
    p, q = (warped(seed, SamplingParams(), vocab_size, 0.5) for seed in (1, 2))
    assert deviation(p, q, counts, partial(fused, OnDevice)) < EXACT
