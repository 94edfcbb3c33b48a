"""Models of random weights in the shapes of families: experts, windows, sink logits, by configs as they were published.

The residual stream stays the embedding, as what layers add to it is next to nothing. So it is known what routers see:
the embeddings of all tokens have a part in common, and with it a part of the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from triforce.bench import shapes
from triforce.bench.shapes import random_codes
from triforce.checkpoint.hf_config import checked, model_config
from triforce.checkpoint.model_families import FAMILIES
from triforce.checkpoint.tensor_sources import Shape, layer_sources
from triforce.checkpoint.weights import layer_of
from triforce.distributed.group import ALONE
from triforce.model.config import ModelConfig
from triforce.model.weights import Matrix, Weights

ROWS = 1024
"""Tokens of embeddings of their own, which others repeat."""
QUIET = 1e-6
"""Gain of what layers add to the residual stream."""


@dataclass(frozen=True)
class FamilyShape:
    """A config with as many layers as fit into 20 GiB, and the types of matrices in the files that people run.

    kind: of experts and MLPs; attention: of its projections, None is bfloat16. alike: how alike the logits are that a
    router has for two tokens, as a correlation.
    """

    config: Mapping[str, Any]
    kind: str
    attention: str | None
    alike: float = 0.0


_QWEN3 = FamilyShape(
    {
        "model_type": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False,
        "max_position_embeddings": 262_144,
    },
    "Q4_K",
    "Q4_K",
)  # fmt: skip
FAMILY_SHAPES = {
    "qwen3-30b-a3b-uniform": _QWEN3,
    "qwen3-30b-a3b": replace(_QWEN3, alike=0.65),
    "gpt-oss-20b": FamilyShape(
        {
            "model_type": "gpt_oss", "num_hidden_layers": 12, "num_local_experts": 32, "num_experts_per_tok": 4,
            "max_position_embeddings": 131_072,
        },
        "Q5_0",  # as MXFP4 is held
        None,
        alike=0.65,
    ),
    "gemma-3-4b": FamilyShape(
        {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024,
        },
        "Q4_0",
        "Q4_0",
    ),
}  # fmt: skip
"""Qwen3's has 16 of 48 layers, gpt-oss's 12 of 24: bytes are those of their part."""


def parts(name: str, context: int, *, kv_int8: bool = False, layers: int | None = None) -> tuple[ModelConfig, Weights]:
    """Return what a decoder of one of the `FAMILY_SHAPES` or of the `shapes.SHAPES` is made of, see `shapes.parts`."""
    if name not in FAMILY_SHAPES:
        return shapes.parts(name, context, kv_int8=kv_int8, layers=layers)
    shape = FAMILY_SHAPES[name]
    fewer = {"num_hidden_layers": layers} if layers else {}
    hf, family = checked({**shape.config, **fewer}), FAMILIES[shape.config["model_type"]]
    config = model_config(hf, vocab_size=hf.vocab_size, context=context, device=torch.device("cpu"))
    matrix = cache(partial(_matrix, shape))
    whole = tuple(
        layer_of({field: _tensor(field, size, matrix, layer)
                  for field, (_, size, _) in layer_sources(config, family.names, layer, ALONE).items()})
        for layer in range(config.layers)
    )  # fmt: skip
    embedding_VC, norm_C = _embedding(config, shape.alike), torch.ones(config.hidden_size, dtype=torch.bfloat16)
    head_VC = embedding_VC if config.tied else _matrix(shape, "head", (config.vocab_size, config.hidden_size))
    return replace(config, kv_int8=kv_int8), Weights(embedding_VC, whole, norm_C, head_VC)


def _tensor(field: str, size: Shape, matrix: Callable[[str, Shape], Matrix], layer: int) -> Matrix:
    """Return the weights of a field of `Layer`: norms, biases and routers are numbers."""
    name = field.partition("/")[0]
    if name == "router_EC":
        dice = torch.Generator().manual_seed(layer)
        rows: Tensor = torch.randn(size, generator=dice) * size[-1] ** -0.5
        return rows
    if len(size) == 1:
        return torch.full(size, float("norm" in name), dtype=torch.bfloat16)
    return matrix(name, size)


def _matrix(shape: FamilyShape, name: str, size: Shape) -> Matrix:
    """Return the one matrix of a field: what a product costs does not depend on its numbers."""
    gain = QUIET if name in ("o_proj_CQ", "down_proj_CI") else 1.0
    kind = shape.attention if name[:2] in ("q_", "k_", "v_", "o_", "he") else shape.kind
    if kind:
        return random_codes(kind, size[0], size[1], gain)
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * gain * size[-1] ** -0.5
    numbers: Tensor = noise.bfloat16().repeat(-(-size[0] * size[1] // len(noise)))
    return numbers[: size[0] * size[1]].view(size)


def _embedding(config: ModelConfig, alike: float) -> Tensor:
    """Return embeddings, bfloat16 (V, C), with a part in common."""
    dice, C = torch.Generator().manual_seed(0), config.hidden_size
    common_C, own_NC = torch.randn(C, generator=dice), torch.randn(ROWS, C, generator=dice)
    few_NC: Tensor = (alike**0.5 * common_C + (1 - alike) ** 0.5 * own_NC).bfloat16()
    return few_NC.repeat(-(-config.vocab_size // ROWS), 1)[: config.vocab_size]
