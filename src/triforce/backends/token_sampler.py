"""Sampling of a batch's tokens: logits in, a verified draft out (see speculation.TokenSampler).

`TorchSampling` is the reference: it processes logits and then verifies, on any device. `NativeSampling` makes the same
decisions in one native call on a CPU. `backends/cuda/sampler.py` samples on a CUDA device in a few launches, but for
`BlockRejection`, which needs the probabilities of all columns. `RestrictedSampling` wraps any sampler where a row has a
constraint.

Shape suffixes: B rows, K drafted tokens, J = K + 1, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from triforce.arrays import Array, is_gpu, namespace, on_device_of
from triforce.backends import dispatch
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import Bools
from triforce.sampling import Constraint
from triforce.speculation import BlockRejection, Draft, Rejection, Seeded, SequenceState, TokenSampler
from triforce.speculation.verification import NoiseSource


def sampling(
    params: Sequence[SamplingParams],
    prompt_lengths: Sequence[int],
    vocab_size: int,
    coupling: Seeded | Rejection,
    device: str = "cpu",
    constraints: Sequence[Constraint | None] = (),
) -> TokenSampler:
    """Return the fastest sampler for rows on this device. Raises RequestError if a bias names an unknown token.

    constraints: one per row, None for an unconstrained row; or an empty sequence.
    """
    unrestricted: TokenSampler
    if not isinstance(coupling, BlockRejection) and dispatch.suits_triton(dispatch.requested, device):
        from triforce.backends.cuda.sampler import TritonSampling

        unrestricted = TritonSampling(params, prompt_lengths, vocab_size, coupling, device)
    elif dispatch.native is not None and not is_gpu(device):
        from triforce.backends.cpu.native_sampler import NativeSampling

        unrestricted = NativeSampling(params, prompt_lengths, vocab_size, coupling)
    else:
        from triforce.backends.torch.torch_sampler import torch_sampling

        unrestricted = torch_sampling(params, prompt_lengths, vocab_size, coupling, device)
    return RestrictedSampling(unrestricted, constraints, prompt_lengths) if any(constraints) else unrestricted


def sampler_array(host: Array, device: str) -> Array:
    """Return a host array as one of equal shape, of the kind that the samplers of a device take."""
    if dispatch.native is not None and not is_gpu(device):
        return host
    from triforce.backends.torch.tensors import tensor_of

    return tensor_of(host, device)


def make_noise(seeds: Sequence[int], choices: Sequence[int], device: str = "cpu") -> NoiseSource:
    """Return the noise of a batch, from the kernels for this device: the same numbers from all kernels.

    seeds: B integers in [0, 2**64). choices: B integers in [0, 2**32), each row's index among the `n` of its request.
    """
    if dispatch.suits_triton(dispatch.requested, device):
        from triforce.backends.cuda.sampler import TritonNoise

        return TritonNoise(seeds, choices, device)
    if dispatch.native is not None and not is_gpu(device):
        from triforce.backends.cpu.native_sampler import NativeNoise

        return NativeNoise(seeds, choices)
    from triforce.backends.torch.noise import Noise

    return Noise(seeds, choices, device)


class RestrictedSampling:
    """Sampler whose logits are -inf where a row's constraint bans a token, at every position of every tier.

    No processing step brings such a token back: penalties and biases are finite, and truncation only removes tokens.
    """

    def __init__(
        self, unrestricted: TokenSampler, constraints: Sequence[Constraint | None], prompt_lengths: Sequence[int]
    ) -> None:
        self.unrestricted = unrestricted
        self.coupling = unrestricted.coupling
        self.vocab_size = unrestricted.vocab_size
        self.probs_size = unrestricted.probs_size
        self._rows = [
            (b, constraint, length)
            for b, (constraint, length) in enumerate(zip(constraints, prompt_lengths, strict=True))
            if constraint is not None
        ]

    def verify(self, draft: Draft, logits_BJV: Array, prefix: SequenceState, live_B: Bools, tier: int) -> Draft:
        logits_BJV = namespace(logits_BJV).asarray(logits_BJV, copy=True)  # the caller still reads the model's logits
        for b, constraint, prompt_length in self._rows:
            if live_B[b]:
                text_T = prefix.ids_BS[b, prompt_length : prefix.lengths_B[b]]
                allowed_JV = constraint.allowed(text_T, draft.tokens_BK[b, : draft.counts_B[b]])
                logits_BJV[b, : len(allowed_JV)][on_device_of(~allowed_JV, logits_BJV)] = -math.inf
        return self.unrestricted.verify(draft, logits_BJV, prefix, live_B, tier)
