"""A small random model for the native kernels.

Shape suffixes as in backends/kernel_api.py, and I MLP size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triforce.backends.cpu.model import NativeModel
from triforce.model.config import ModelConfig
from triforce.model.rope import Rope
from triforce.model.weights import Layer, Weights

L, V, C, I, H, G, D = 3, 50, 40, 72, 4, 2, 16  # noqa: E741


def random_model(
    draw: torch.Generator, dtype: torch.dtype, tied: bool = True, bits: int = 0
) -> tuple[ModelConfig, NativeModel]:
    def weight(*size: int) -> Tensor:
        return (torch.randn(size, generator=draw) * size[-1] ** -0.5).to(dtype)

    def layer() -> Layer:
        return Layer(
            weight(C), weight(H * D, C), weight(G * D, C), weight(G * D, C), weight(C, H * D), weight(C), weight(I, C),
            weight(I, C), weight(C, I),
        )  # fmt: skip

    rope = Rope(100.0 ** -(torch.arange(0, D, 2) / D), 1.0)
    config = ModelConfig(V, C, I, L, H, G, D, 1e-5, tied, 4096, rope)
    embedding_VC = weight(V, C)
    layers = tuple(layer() for _ in range(L))
    weights = Weights(embedding_VC, layers, weight(C), embedding_VC if tied else weight(V, C))
    return config, NativeModel(config, weights, bits)
