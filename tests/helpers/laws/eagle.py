"""EAGLE heads for tiny targets. They can propose some tokens only."""

from __future__ import annotations

import numpy as np
import torch

from tests.helpers.laws.tiny import GROUPS, HEADS, LAYERS, MODELS, C, V, decoder
from triforce.arrays import to_host
from triforce.backends.decoder import Decoder
from triforce.eagle.eagle_draft import EagleHead
from triforce.eagle.head import EagleHeadConfig, EagleHeadWeights, shapes
from triforce.engine.tier_builder import ModelSet

TOKENS = np.array([0, 2, 3, 5])


def eagle_head(target: Decoder, sinks: int = 4) -> EagleHead:
    """Return a random head that mostly repeats its input state."""
    generator = torch.Generator().manual_seed(7)
    config = EagleHeadConfig(
        V, C, 48, HEADS, GROUPS, target.config.head_dim, 1e-5, state_layers=(1,), draft_vocab_size=len(TOKENS),
        rope=target.config.rope, sinks=sinks, window=24, fc_norm=True, norm_output=True, norm_before_residual=True,
    )  # fmt: skip
    weights = {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in shapes(config).items()
    }
    weights["fc_CX"] += torch.eye(C)
    arrays = {name: to_host(weight) for name, weight in weights.items()}
    head_MC = to_host(target.head_rows(TOKENS))
    return EagleHead(config, EagleHeadWeights(**arrays, tokens_M=TOKENS, head_MC=head_MC), target)


def native_eagle_head() -> ModelSet:
    """Return models with a head size and a type that native kernels take: one-call passes, bursts, 8-bit weights."""
    target = decoder(LAYERS, 0.0, D=16, dtype="bfloat16")
    return ModelSet(target, eagle_head=eagle_head(target, sinks=16))


EAGLE_MODELS = ModelSet(MODELS.target, eagle_head=eagle_head(MODELS.target))
