"""Noise that is made in one launch."""

from __future__ import annotations

from torch import Tensor

from triforce.backends.cuda.triton.rng import exponentials, uniforms
from triforce.ragged import Ints, to_device
from triforce.sampling import Noise


class TritonNoise(Noise):
    def uniforms(self, tier: int, n: int, used_B: Ints) -> Tensor:
        out_Bn = uniforms(self.seeds_B, self.choices_B, self.draws[tier], tier, n)
        self.draws[tier] += to_device(used_B, self.draws.device)
        return out_Bn

    def _exponentials(self, rows_N: Tensor, positions_N: Tensor, vocab_size: int) -> Tensor:
        return exponentials(self.seeds_B[rows_N], self.choices_B[rows_N], positions_N, vocab_size)
