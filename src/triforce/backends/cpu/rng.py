"""Noise whose uniforms are made in one native call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from triforce.backends.cpu import _native
from triforce.ragged import Ints
from triforce.sampling import Noise


class NativeNoise(Noise):
    """`keys` are its seeds and choices for native code."""

    def __init__(self, seeds: Sequence[int], choices: Sequence[int]) -> None:
        super().__init__(seeds, choices)
        self.keys = _native.Noise(list(seeds), list(choices))

    def uniforms(self, tier: int, n: int, used_B: Ints) -> Tensor:
        out_Bn = torch.empty(len(used_B), n, dtype=torch.float64)
        self.keys.uniforms(self.draws, tier, used_B, out_Bn)
        return out_Bn
