"""Sampling of a batch's tokens: logits in, a verified draft out (see speculation.TokenSampler).

`TorchSampling` warps and then verifies, on any device: it is the reference. `NativeSampling` decides the same in one
native call on a CPU: it computes no probabilities after a row's first rejection, and no noise for tokens of probability
0. `backends/cuda/sampler.py` has a sampler for CUDA devices, in a few launches. Both leave out `BlockRejection`, which
needs the probabilities of all columns. `RestrictedSampling` wraps any of them where a row has a constraint.

Shape suffixes: B rows, K drafted tokens, J = K + 1, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triforce.backends import dispatch
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import Bools, Ints, columns, to_device
from triforce.sampling import Constraint, LogitsProcessor, Noise
from triforce.sampling.logits import check, check_bias, non_finite_logits
from triforce.speculation import BlockRejection, Draft, Rejection, Seeded, SequenceState, TokenSampler, Verification


def sampling(
    params: Sequence[SamplingParams],
    prompt_lengths: Sequence[int],
    vocab_size: int,
    coupling: Seeded | Rejection,
    device: torch.device | str = "cpu",
    constraints: Sequence[Constraint | None] = (),
) -> TokenSampler:
    """Return the fastest sampler for rows on this device; the arguments are those of `LogitsProcessor`.

    constraints: one per row, None for an unconstrained row; or an empty sequence.
    """
    unrestricted: TokenSampler
    device = torch.device(device)
    fused = not isinstance(coupling, BlockRejection)
    if fused and dispatch.suits_triton(dispatch.requested, device):
        from triforce.backends.cuda.sampler import TritonSampling

        unrestricted = TritonSampling(params, prompt_lengths, vocab_size, coupling, device)
    elif fused and dispatch.native is not None and device.type == "cpu":
        unrestricted = NativeSampling(params, prompt_lengths, vocab_size, coupling)
    else:
        unrestricted = TorchSampling(LogitsProcessor(params, prompt_lengths, vocab_size, device), coupling, vocab_size)
    return RestrictedSampling(unrestricted, constraints, prompt_lengths) if any(constraints) else unrestricted


def make_noise(seeds: Sequence[int], choices: Sequence[int], device: torch.device | str = "cpu") -> Noise:
    """Return the noise of a batch (see `sampling.Noise`), from the kernels for this device."""
    device = torch.device(device)
    if dispatch.suits_triton(dispatch.requested, device):
        from triforce.backends.cuda.sampler import TritonNoise

        return TritonNoise(seeds, choices, device)
    if dispatch.native is not None and device.type == "cpu":
        return NativeNoise(seeds, choices)
    return Noise(seeds, choices, device)


class NativeNoise(Noise):
    """Noise whose uniforms are made in one native call; `keys` are its seeds and choices for native code."""

    def __init__(self, seeds: Sequence[int], choices: Sequence[int]) -> None:
        super().__init__(seeds, choices)
        assert dispatch.native, "the native kernels were not built"
        self.keys = dispatch.native.Noise(list(seeds), list(choices))

    def uniforms(self, tier: int, n: int, used_B: Ints) -> Tensor:
        out_Bn = torch.empty(len(used_B), n, dtype=torch.float64)
        self.keys.uniforms(self.draws, tier, used_B, out_Bn)
        return out_Bn


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

    def verify(self, guess: Draft, logits_BJV: Tensor, prefix: SequenceState, live_B: Bools, tier: int) -> Draft:
        logits_BJV = logits_BJV.clone()  # the caller still reads the model's logits
        for b, constraint, prompt_length in self._rows:
            if live_B[b]:
                text_T = prefix.ids_BS[b, prompt_length : prefix.lengths_B[b]]
                allowed_JV = constraint.allowed(text_T, guess.tokens_BK[b, : guess.counts_B[b]])
                banned_JV = to_device(~allowed_JV, logits_BJV.device)
                logits_BJV[b, : len(banned_JV)].masked_fill_(banned_JV, -math.inf)
        return self.unrestricted.verify(guess, logits_BJV, prefix, live_B, tier)


@dataclass(frozen=True, slots=True)
class TorchSampling:
    """Reference sampler: processes logits, then verifies, in separate torch operations."""

    processor: LogitsProcessor
    coupling: Verification
    vocab_size: int

    @property
    def probs_size(self) -> int:
        return self.coupling.probs_size(self.vocab_size)

    def verify(self, guess: Draft, logits_BJV: Tensor, prefix: SequenceState, live_B: Bools, tier: int) -> Draft:
        text = torch.from_numpy(prefix.ids_BS), torch.from_numpy(prefix.lengths_B)
        probs_BJV, peaks_BJ = self.processor.unchecked(logits_BJV, *text)
        draft = self.coupling.verify(guess, probs_BJV, prefix.lengths_B, live_B, tier)
        check(peaks_BJ)  # after the draft, for which the host has waited: this check costs no second wait
        return draft


class NativeSampling:
    """Sampler in one native call. Logits are float32 or float64. Results of rows that are not live are undefined."""

    def __init__(
        self,
        params: Sequence[SamplingParams],
        prompt_lengths: Sequence[int],
        vocab_size: int,
        coupling: Seeded | Rejection,
    ) -> None:
        assert dispatch.native, "the native kernels were not built"
        check_bias(params, vocab_size)
        self.coupling = coupling
        self.vocab_size = vocab_size
        self.probs_size = coupling.probs_size(vocab_size)
        self._keys = getattr(coupling.noise, "keys", None)
        self._arrays = dispatch.native.DraftArrays
        self.rows = rows = dispatch.native.Sampler(vocab_size)
        for p, prompt_length in zip(params, prompt_lengths, strict=True):
            rows.add(
                temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p,
                repetition_penalty=p.repetition_penalty, presence_penalty=p.presence_penalty,
                frequency_penalty=p.frequency_penalty, logit_bias=list((p.logit_bias or {}).items()),
                prompt_length=prompt_length,
            )  # fmt: skip
        self._verify = rows.verify_seeded if isinstance(coupling, Seeded) else rows.verify_by_rejection

    def verify(self, guess: Draft, logits_BJV: Tensor, prefix: SequenceState, live_B: Bools, tier: int) -> Draft:
        B, J, _ = logits_BJV.shape
        tokens_BJ, origins_BJ = (np.empty((B, J), dtype=np.int64) for _ in range(2))
        probs_BJV = guess.probs_BKV.new_empty(B, J, self.probs_size)
        counts_B = np.empty(B, dtype=np.int64)
        draft = self._arrays(
            tokens=np.ascontiguousarray(guess.tokens_BK), probs=guess.probs_BKV.contiguous(),
            origins=np.ascontiguousarray(guess.origins_BK), counts=guess.counts_B,
        )  # fmt: skip
        invalid = self._verify(
            logits=logits_BJV.contiguous(), ids=prefix.ids_BS, lengths=prefix.lengths_B, live=live_B, draft=draft,
            out=self._arrays(tokens=tokens_BJ, probs=probs_BJV, origins=origins_BJ, counts=counts_B), tier=tier,
            noise=self._noise(guess, prefix.lengths_B, live_B, J, tier),
        )  # fmt: skip
        if invalid:
            raise non_finite_logits(*invalid)
        longest = int(counts_B.max()) if self.probs_size else J
        if longest < J:  # beyond it no probabilities were written
            tokens_BJ = tokens_BJ[:, :longest]
            origins_BJ = origins_BJ[:, :longest]
            probs_BJV = probs_BJV[:, :longest]
        return Draft(tokens_BJ, probs_BJV, origins_BJ, counts_B)

    def draws(self, tier: int, count: int, live_B: Bools) -> tuple[Any, Any, Tensor] | None:
        """Prepare `count` draws of each live row without a draft: return sampler, noise, and room for probs.

        The room is float64 (count, B, V). None where native code cannot make the noise.
        """
        probs_KBV = torch.empty(count, len(live_B), self.probs_size, dtype=torch.float64)
        if isinstance(self.coupling, Rejection):
            uniforms_BK = self.coupling.noise.uniforms(tier, count, count * live_B)
            return self.rows, uniforms_BK.T.contiguous(), probs_KBV
        return (self.rows, self._keys, probs_KBV) if self._keys else None

    def _noise(self, guess: Draft, lengths_B: Ints, live_B: Bools, width: int, tier: int) -> object:
        """Return the uniforms of `rejection`; for `seeded` the keys of native noise, else all exponentials."""
        if isinstance(self.coupling, Rejection):
            return self.coupling.noise.uniforms(tier, width, (guess.counts_B + 1) * live_B)
        return self._keys or self.coupling.noise.exponentials(
            torch.from_numpy(columns(lengths_B, width)), self.vocab_size
        )
