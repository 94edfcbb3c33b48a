"""A small random model for the native kernels.

Shape suffixes as in backends/kernel_api.py, and I MLP size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triforce.arrays import DType, to_host
from triforce.backends.cpu.model import NativeModel
from triforce.backends.torch.tensor_weights import mapped_weights
from triforce.backends.torch.tensors import torch_dtype
from triforce.model.config import ModelConfig
from triforce.model.rope import Rope
from triforce.model.weights import Layer, Weights

L, V, C, I, H, G, D = 3, 50, 40, 72, 4, 2, 16  # noqa: E741


def random_model(
    draw: torch.Generator, dtype: DType, tied: bool = True, bits: int = 0, hidden: int = C
) -> tuple[ModelConfig, NativeModel]:
    def weight(*size: int) -> Tensor:
        return (torch.randn(size, generator=draw) * size[-1] ** -0.5).to(torch_dtype(dtype))

    def layer() -> Layer:
        return Layer(
            weight(hidden), weight(H * D, hidden), weight(G * D, hidden), weight(G * D, hidden),
            weight(hidden, H * D), weight(hidden), weight(I, hidden), weight(I, hidden), weight(hidden, I),
        )  # fmt: skip

    rope = Rope((100.0 ** -(torch.arange(0, D, 2) / D)).numpy(), 1.0)
    config = ModelConfig(V, hidden, I, L, H, G, D, 1e-5, tied, 4096, rope)
    embedding_VC = weight(V, hidden)
    layers = tuple(layer() for _ in range(L))
    weights = Weights(embedding_VC, layers, weight(hidden), embedding_VC if tied else weight(V, hidden))
    return config, NativeModel(config, mapped_weights(weights, to_host), bits)
