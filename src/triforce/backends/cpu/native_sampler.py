"""Native sampling: noise, and one native call from the logits of a pass to a verified draft.

Shape suffixes: B rows, K drafted tokens, J = K + 1, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from triforce.arrays import Array
from triforce.backends.cpu import _native
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import Bools, Ints, columns
from triforce.sampling import check_bias, non_finite_logits
from triforce.speculation import BlockRejection, Draft, Rejection, Seeded, SequenceState

TIERS = 8
"""Tiers that have uniforms of their own."""


class NativeNoise:
    """Noise of a batch (see `NoiseSource`), made by native code; `keys` are its seeds and choices there."""

    def __init__(self, seeds: Sequence[int], choices: Sequence[int]) -> None:
        self.draws: Ints = np.zeros((TIERS, len(seeds)), np.int64)
        self.keys = _native.Noise(list(seeds), list(choices))

    def exponentials(self, positions_BJ: Array, vocab_size: int) -> Array:
        raise NotImplementedError("native code makes exponentials itself, from `keys`")

    def uniforms(self, tier: int, n: int, used_B: Ints) -> Array:
        out_Bn = np.empty((len(used_B), n))
        self.keys.uniforms(self.draws, tier, used_B, out_Bn)
        return out_Bn


class NativeSampling:
    """Sampler in one native call. Logits are float32 or float64. Results of rows that are not live are undefined."""

    def __init__(
        self,
        params: Sequence[SamplingParams],
        prompt_lengths: Sequence[int],
        vocab_size: int,
        coupling: Seeded | Rejection,
    ) -> None:
        check_bias(params, vocab_size)
        self.coupling = coupling
        self.vocab_size = vocab_size
        self.probs_size = coupling.probs_size(vocab_size)
        self._keys = getattr(coupling.noise, "keys", None)
        self.rows = rows = _native.Sampler(vocab_size)
        for p, prompt_length in zip(params, prompt_lengths, strict=True):
            rows.add(
                temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p,
                repetition_penalty=p.repetition_penalty, presence_penalty=p.presence_penalty,
                frequency_penalty=p.frequency_penalty, logit_bias=list((p.logit_bias or {}).items()),
                prompt_length=prompt_length,
            )  # fmt: skip
        self._verify: Callable[..., tuple[int, int, float] | None] = rows.verify_seeded
        if isinstance(coupling, Rejection):
            self._verify = rows.verify_by_block if isinstance(coupling, BlockRejection) else rows.verify_by_rejection

    def verify(self, draft: Draft, logits_BJV: Array, prefix: SequenceState, live_B: Bools, tier: int) -> Draft:
        B, J, _ = logits_BJV.shape
        tokens_BJ, origins_BJ = (np.empty((B, J), dtype=np.int64) for _ in range(2))
        probs_BJV = np.empty((B, J, self.probs_size))
        counts_B = np.empty(B, dtype=np.int64)
        arrays = _native.DraftArrays(
            tokens=np.ascontiguousarray(draft.tokens_BK), probs=np.ascontiguousarray(draft.probs_BKV),
            origins=np.ascontiguousarray(draft.origins_BK), counts=draft.counts_B,
        )  # fmt: skip
        out = _native.DraftArrays(tokens=tokens_BJ, probs=probs_BJV, origins=origins_BJ, counts=counts_B)
        invalid = self._verify(
            logits=np.ascontiguousarray(logits_BJV), ids=prefix.ids_BS, lengths=prefix.lengths_B, live=live_B,
            draft=arrays, out=out, tier=tier, noise=self._noise(draft, prefix.lengths_B, live_B, J, tier),
        )  # fmt: skip
        if invalid:
            raise non_finite_logits(*invalid)
        longest = int(counts_B.max()) if self.probs_size else J
        if longest < J:  # columns beyond have no written probabilities
            tokens_BJ = tokens_BJ[:, :longest]
            origins_BJ = origins_BJ[:, :longest]
            probs_BJV = probs_BJV[:, :longest]
        return Draft(tokens_BJ, probs_BJV, origins_BJ, counts_B)

    def draws(self, tier: int, count: int, live_B: Bools) -> tuple[Any, Any, Array] | None:
        """Return what native code needs to draw `count` tokens of each live row: sampler, noise, and an output array.

        The output array is for probabilities, float64 (count, B, V). None where native code cannot make the noise.
        """
        probs_KBV = np.empty((count, len(live_B), self.probs_size))
        if isinstance(self.coupling, Rejection):
            uniforms_BK = self.coupling.noise.uniforms(tier, count, count * live_B)
            return self.rows, np.ascontiguousarray(uniforms_BK.T), probs_KBV
        return (self.rows, self._keys, probs_KBV) if self._keys else None

    def _noise(self, draft: Draft, lengths_B: Ints, live_B: Bools, width: int, tier: int) -> object:
        """Return the uniforms of `rejection`; for `seeded` the keys of native noise, else all exponentials."""
        if isinstance(self.coupling, Rejection):
            return self.coupling.noise.uniforms(tier, width, (draft.counts_B + 1) * live_B)
        return self._keys or self.coupling.noise.exponentials(columns(lengths_B, width), self.vocab_size)
