"""The samplers that must decide alike: the one in torch, and the native one where it was built.

All of them take tensors and return tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from triforce.arrays import Array, to_host
from triforce.backends import dispatch
from triforce.backends.torch.noise import Noise
from triforce.backends.torch.tensors import as_tensor
from triforce.backends.torch.torch_sampler import torch_sampling
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import Bools, Ints
from triforce.speculation import Draft, SequenceState, TokenSampler, Verification
from triforce.speculation.verification import NoiseSource

Sampler = Callable[[Sequence[SamplingParams], Sequence[int], int, Verification], TokenSampler]


class OnArrays:
    """A source of noise in host arrays, made from one of tensors."""

    def __init__(self, on_tensors: NoiseSource) -> None:
        self.on_tensors = on_tensors

    def exponentials(self, positions_BJ: Array, vocab_size: int) -> Array:
        return np.ascontiguousarray(to_host(self.on_tensors.exponentials(as_tensor(positions_BJ), vocab_size)))

    def uniforms(self, tier: int, n: int, used_B: Ints) -> Array:
        return np.ascontiguousarray(to_host(self.on_tensors.uniforms(tier, n, used_B)))


@dataclass(frozen=True, slots=True)
class OnTensors:
    """A sampler of host arrays that takes tensors and returns tensors."""

    on_arrays: TokenSampler

    @property
    def coupling(self) -> Verification:
        return self.on_arrays.coupling

    @property
    def vocab_size(self) -> int:
        return self.on_arrays.vocab_size

    @property
    def probs_size(self) -> int:
        return self.on_arrays.probs_size

    def verify(self, draft: Draft, logits_BJV: Array, prefix: SequenceState, live_B: Bools, tier: int) -> Draft:
        draft = replace(draft, probs_BKV=to_host(draft.probs_BKV))
        verified = self.on_arrays.verify(draft, to_host(logits_BJV), prefix, live_B, tier)
        return replace(verified, probs_BKV=as_tensor(verified.probs_BKV))


def native_sampling(
    params: Sequence[SamplingParams], prompt_lengths: Sequence[int], vocab_size: int, coupling: Verification
) -> TokenSampler:
    """Return the native sampler of rows; the import fails where it was not built. Noise may be of either kind."""
    from triforce.backends.cpu.native_sampler import NativeNoise, NativeSampling

    if not isinstance(coupling.noise, NativeNoise):
        coupling = type(coupling)(OnArrays(coupling.noise))
    return OnTensors(NativeSampling(params, prompt_lengths, vocab_size, coupling))


def noise_for(sampler: Sampler, seeds: Sequence[int], choices: Sequence[int]) -> NoiseSource:
    """Return noise that a sampler takes: native noise for the native sampler, else noise in torch."""
    if sampler is not native_sampling:
        return Noise(seeds, choices)
    from triforce.backends.cpu.native_sampler import NativeNoise

    return NativeNoise(seeds, choices)


needs_native = pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")
SAMPLERS = [pytest.param(torch_sampling, id="torch"), pytest.param(native_sampling, id="native", marks=needs_native)]
each_sampler = pytest.mark.parametrize("sampler", SAMPLERS)
