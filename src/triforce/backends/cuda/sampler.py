"""Sampler for CUDA devices, in a few launches and one copy back, and its noise.

Shape suffixes: B rows, K drafted tokens, J = K + 1, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from triforce.arrays import on_device
from triforce.backends.cuda.triton.rng import exponentials, uniforms
from triforce.backends.cuda.triton.sampler import ACCEPTED, SamplerInputs, by_race, by_rejection
from triforce.backends.current_device import device_context
from triforce.backends.torch.logits_processor import LogitsProcessor, check
from triforce.backends.torch.noise import Noise
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import Bools, Ints, ints
from triforce.speculation import Draft, Rejection, Seeded, SequenceState
from triforce.speculation.verification import accepted_on_host


class DraftDraws(NamedTuple):
    """Inputs of draws without a draft: settings of each row as `_settings` returns them, and its noise.

    offsets_B: number of uniforms of `tier` that each row has used before; None for draws by an exponential race.
    """

    settings_5B: Tensor
    seeds_B: Tensor
    choices_B: Tensor
    offsets_B: Tensor | None
    tier: int


class TritonSampling:
    """Sampler with the probabilities of `LogitsProcessor`, which itself runs only for penalties and biases.

    The host waits once. Results of rows that are not live are undefined.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        prompt_lengths: Sequence[int],
        vocab_size: int,
        coupling: Seeded | Rejection,
        device: torch.device | str = "cpu",
    ) -> None:
        self.coupling = coupling
        self.vocab_size = vocab_size
        self.probs_size = coupling.probs_size(vocab_size)
        self._processor = LogitsProcessor(params, prompt_lengths, vocab_size, device)
        self._settings_5B = _settings(params, vocab_size).to(device)

    def verify(self, draft: Draft, logits_BJV: Tensor, prefix: SequenceState, live_B: Bools, tier: int) -> Draft:
        if self._processor.adjusts:
            text = on_device(prefix.ids_BS, "cpu"), on_device(prefix.lengths_B, "cpu")
            logits_BJV = self._processor.adjusted(logits_BJV, *text)
        lasts_B = np.where(live_B, draft.counts_B, -1)
        places_2B = on_device(np.stack((prefix.lengths_B, lasts_B)), logits_BJV.device)
        inputs = SamplerInputs(logits_BJV, self._settings_5B, places_2B)
        with device_context(str(logits_BJV.device)):
            decided_2BJ, probs_BJV = self._decide(inputs, draft, live_B, tier)
        on_host_2BJ = decided_2BJ.cpu()  # the host waits; the device idles until the next launch
        check(on_host_2BJ[1].view(torch.float64))
        verdicts_BJ = on_host_2BJ[0].numpy()
        accepted_B = _accepted_counts(verdicts_BJ, draft, isinstance(self.coupling, Seeded))
        drawn_B = verdicts_BJ[np.arange(len(accepted_B)), accepted_B]
        return accepted_on_host(draft, np.stack((accepted_B, drawn_B)), probs_BJV, tier)

    def draws(self, tier: int, count: int, live_B: Bools) -> DraftDraws | None:
        """Prepare `count` draws of each live row without a draft; under `rejection` their uniforms are used up.

        None where penalties or biases adjust logits, which depends on tokens drawn before.
        """
        noise = self.coupling.noise
        if self._processor.adjusts or not isinstance(noise, Noise):
            return None
        offsets_B = noise.draws[tier].clone() if isinstance(self.coupling, Rejection) else None
        if offsets_B is not None:
            noise.draws[tier] += on_device(count * live_B, noise.draws.device)
        return DraftDraws(self._settings_5B, noise.seeds_B, noise.choices_B, offsets_B, tier)

    def _decide(self, inputs: SamplerInputs, draft: Draft, live_B: Bools, tier: int) -> tuple[Tensor, Tensor]:
        """Return verdicts and peaks (2, B, J) as `by_race` or `by_rejection` does, and the target's distributions.

        The distributions are (B, J, V); V = 0 under `seeded`, whose drafts carry none.
        """
        device = inputs.logits_BJV.device
        noise = self.coupling.noise
        if isinstance(self.coupling, Seeded):
            assert isinstance(noise, Noise), "the kernels compute exponentials from seeds and choices"
            nothing_BJV = torch.empty(*inputs.logits_BJV.shape[:2], 0, dtype=torch.float64)
            return by_race(inputs, noise.seeds_B, noise.choices_B), nothing_BJV
        uniforms_BJ = noise.uniforms(tier, inputs.logits_BJV.shape[1], (draft.counts_B + 1) * live_B)
        tokens_BK = on_device(np.ascontiguousarray(draft.tokens_BK), device)
        return by_rejection(inputs, tokens_BK, on_device(draft.probs_BKV, device), uniforms_BJ.to(device))


class TritonNoise(Noise):
    """Noise that one launch makes."""

    def uniforms(self, tier: int, n: int, used_B: Ints) -> Tensor:
        with device_context(str(self.seeds_B.device)):
            out_Bn = uniforms(self.seeds_B, self.choices_B, self.draws[tier], tier, n)
        self.draws[tier] += on_device(used_B, self.draws.device)
        return out_Bn

    def _exponentials(self, rows_N: Tensor, positions_N: Tensor, vocab_size: int) -> Tensor:
        with device_context(str(self.seeds_B.device)):
            return exponentials(self.seeds_B[rows_N], self.choices_B[rows_N], positions_N, vocab_size)


def _accepted_counts(verdicts_BJ: Ints, draft: Draft, seeded: bool) -> Ints:
    """Return the number of each row's accepted draft tokens before its first rejection.

    seeded: verdicts are the target's tokens, which equal accepted draft tokens.
    """
    K = verdicts_BJ.shape[1] - 1
    kept_BK = verdicts_BJ[:, :K] == (draft.tokens_BK if seeded else ACCEPTED)
    return ints((kept_BK & (np.arange(K) < draft.counts_B[:, None])).cumprod(1).sum(1))


def _settings(params: Sequence[SamplingParams], vocab_size: int) -> Tensor:
    """Return the settings of each row, float64 (5, B): temperature, top-k or 0, top-p, least score, lightest share.

    Greedy is top-k of 1 at temperature 1. The least score is the logarithm of min-p. The lightest share is a lower
    bound of the shares in a nucleus: all tokens below it together hold less than half of the mass 1 - top-p that the
    nucleus may leave out. The 1e-9 allows for rounded sums.
    """
    rows = [
        (p.temperature, p.top_k if p.top_k < vocab_size else 0, p.top_p, p.min_p) if p.temperature else (1.0, 1, 1.0, 0)
        for p in params
    ]
    temperature_B, top_k_B, top_p_B, min_p_B = torch.tensor(rows, dtype=torch.float64).view(-1, 4).unbind(1)
    light_B = ((1 - top_p_B - 1e-9) / (2 * vocab_size)).clamp_min(0)
    return torch.stack((temperature_B, top_k_B, top_p_B, min_p_B.log(), light_B))
