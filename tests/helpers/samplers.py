"""The samplers that must decide alike: the one in torch, and the native one where it was built."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from triforce.backends import dispatch
from triforce.backends.token_sampler import NativeSampling, TorchSampling
from triforce.interface.sampling_params import SamplingParams
from triforce.sampling import LogitsProcessor
from triforce.speculation import TokenSampler, Verification

Sampler = Callable[[Sequence[SamplingParams], Sequence[int], int, Verification], TokenSampler]


def torch_sampling(
    params: Sequence[SamplingParams], prompt_lengths: Sequence[int], vocab_size: int, coupling: Verification
) -> TokenSampler:
    return TorchSampling(LogitsProcessor(params, prompt_lengths, vocab_size), coupling, vocab_size)


needs_native = pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")
SAMPLERS = [pytest.param(torch_sampling, id="torch"), pytest.param(NativeSampling, id="native", marks=needs_native)]
each_sampler = pytest.mark.parametrize("sampler", SAMPLERS)
