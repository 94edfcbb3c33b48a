"""Models of random weights in the shapes of real ones, for speed: their passes cost as much as a real model's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from triforce.arrays import DType, rounded, to_host
from triforce.backends.decoder import Decoder
from triforce.checkpoint.hf_config import checked, model_config, read_config
from triforce.checkpoint.model_families import FAMILIES
from triforce.checkpoint.rope_scaling import wavelengths
from triforce.checkpoint.weights import Shape, layer_of, layer_sources, tensor_shapes
from triforce.distributed.group import ALONE
from triforce.model.config import ModelConfig
from triforce.model.rope import Rope
from triforce.model.weights import Layer, Matrix, QuantizedWeight, Weights


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama. tied: the head is the embedding. mix: types of its matrices, by llama.cpp's name (Q4_K_M)."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 64
    tied: bool = True
    mix: str | None = None


SHAPES = {
    "tiny": ModelShape(256, 512, 2, 4, 2, 320, 64, tied=False),
    "tiny-draft": ModelShape(64, 96, 1, 2, 2, 320, 32),
    "30m": ModelShape(512, 1408, 8, 8, 8, 8192),
    "30m-draft": ModelShape(128, 344, 2, 2, 2, 8192),
    "thin32": ModelShape(256, 688, 32, 4, 4, 8192),
    "thin80": ModelShape(256, 688, 80, 4, 4, 8192),
    "llama-3.2-1b": ModelShape(2048, 8192, 16, 32, 8, 128_256),
    "llama-3.2-1b-draft": ModelShape(384, 1024, 1, 6, 6, 128_256),
    "llama-3.2-3b": ModelShape(3072, 8192, 28, 24, 8, 128_256, 128),
    "llama-3.2-3b-draft": ModelShape(896, 2432, 1, 14, 14, 128_256),
    "llama-2-7b-128k": ModelShape(4096, 11_008, 32, 32, 32, 32_000, 128, tied=False),
    "llama-2-13b-128k": ModelShape(5120, 13_824, 40, 40, 40, 32_000, 128, tied=False),
    "llama-3.1-8b": ModelShape(4096, 14_336, 32, 32, 8, 128_256, 128, tied=False),
    "llama-3.1-8b-q4_k_m": ModelShape(4096, 14_336, 32, 32, 8, 128_256, 128, tied=False, mix="Q4_K_M"),
    "qwen3-4b-q4_k_m": ModelShape(2560, 9728, 36, 32, 8, 151_936, 128, mix="Q4_K_M"),
    "llama-3.1-8b-q4_k_m-draft": ModelShape(768, 2048, 1, 12, 12, 128_256),
    "qwen3-4b-q4_k_m-draft": ModelShape(320, 896, 1, 5, 5, 151_936),
    "qwen3-30b-a3b-draft": ModelShape(128, 344, 1, 2, 2, 151_936),
    "qwen3-30b-a3b-uniform-draft": ModelShape(128, 344, 1, 2, 2, 151_936),
    "gpt-oss-20b-draft": ModelShape(256, 688, 1, 4, 4, 201_088),
    "gemma-3-4b-draft": ModelShape(192, 512, 1, 3, 3, 262_208),
    "llama-68m": ModelShape(768, 3072, 2, 12, 12, 32_000, tied=False),
    "llama-68m-128256": ModelShape(768, 3072, 2, 12, 12, 128_256, tied=False),
}
"""Shapes by name. `thin32` and `thin80` have the depth of models of 8 and 70 billion weights, and load at once.

`tiny` is for trial runs. Drafts have about 4 % of their target's bytes. `30m` has the paper's kind of attention, a KV
head for each query head: 16 KiB of KV per token in bfloat16.
"""


RANDOM_NUMBERS = (1 << 20) + 7
"""Random numbers that matrices repeat. No two rows of a head are equal, so no two of its logits are."""
RANDOM_BLOCKS = 65_521
"""Random blocks that quantized matrices repeat. The count is prime, so few rows of a head are equal."""
LOGIT_DEVIATION = 3.0
"""Standard deviation of the logits of a head of numbers. Logits of random codes have about the same (2.7 for Q6_K). The
distributions are then as narrow as those of texts, on which a sampler's cost depends: at temperature 0.6, 41 of 128,256
tokens hold .9, and the entropy is 3 nats. With a deviation of 1, 44,874 tokens do."""


def decoder(
    name: str,
    context: int,
    dtype: DType = "bfloat16",
    bits: int = 0,
    device: str = "cpu",
) -> Decoder:
    """Return a decoder of one of the `SHAPES` for `context` positions."""
    return Decoder(*parts(name, context, dtype), device, bits)


def config_of(name: str, context: int, kv_int8: bool = False, layers: int | None = None) -> ModelConfig:
    """Return the config of one of the `SHAPES`. layers: number of layers; None: all."""
    shape = SHAPES[name]
    D = shape.head_dim
    rope = Rope(1.0 / wavelengths(500_000.0, D), 1.0)
    return ModelConfig(
        shape.vocab, shape.hidden, shape.intermediate, layers or shape.layers, shape.heads, shape.kv_heads, D, 1e-5,
        tied=shape.tied, context=context, rope=rope, kv_int8=kv_int8,
    )  # fmt: skip


def parts(
    name: str, context: int, dtype: DType = "bfloat16", kv_int8: bool = False, layers: int | None = None
) -> tuple[ModelConfig, Weights]:
    """Return the config and the weights of one of the `SHAPES`, as `config_of` does.

    Matrices of equal size share one array.
    """
    config = config_of(name, context, kv_int8, layers)
    shape = replace(SHAPES[name], layers=config.layers)
    C, D, I = shape.hidden, shape.head_dim, shape.intermediate  # noqa: E741
    Q = shape.heads * D
    P = shape.kv_heads * D
    noise = torch.randn(RANDOM_NUMBERS, generator=torch.Generator().manual_seed(0)).numpy()
    ones_C = rounded(np.ones(C, np.float32), dtype)

    @cache
    def matrix(outputs: int, inputs: int, kind: str | None) -> Matrix:
        """Repeat the same noise, each row from another offset. A product's cost does not depend on its numbers."""
        if kind:
            return random_codes(kind, outputs, inputs)
        return np.resize(rounded(noise * np.float32(inputs**-0.5), dtype), (outputs, inputs))

    def layer(i: int) -> Layer:
        matrix_kind, value_kind = kinds(shape, i)
        q, k, v, o = (
            matrix(*size)
            for size in ((Q, C, matrix_kind), (P, C, matrix_kind), (P, C, value_kind), (C, Q, matrix_kind))
        )
        gate = matrix(I, C, matrix_kind)
        down = matrix(C, I, value_kind)
        return Layer(ones_C, q, k, v, o, ones_C, gate, gate, down)

    embedding_kind, head_kind = kinds(shape, 0)
    head_VC = matrix(shape.vocab, C, head_kind)
    embedding_VC = head_VC if shape.tied else matrix(shape.vocab, C, embedding_kind)
    norm_C = ones_C if head_kind else rounded(np.full(C, LOGIT_DEVIATION, np.float32), dtype)
    return config, Weights(embedding_VC, tuple(map(layer, range(shape.layers))), norm_C, head_VC)


def kinds(shape: ModelShape, layer: int) -> tuple[str | None, str | None]:
    """Return the types of a layer: of most of its matrices, and of its value and MLP down projections.

    llama.cpp's recipe gives these two more bits in the first and the last eighth of the layers, and in every third
    layer between.
    """
    if shape.mix is None:
        return None, None
    eighth = shape.layers // 8
    has_more_bits = layer < eighth or layer >= 7 * shape.layers // 8 or (layer - eighth) % 3 == 2
    return "Q4_K", "Q6_K" if has_more_bits else "Q4_K"


CODE_BLOCKS = {"Q4_K": (256, 144, (0, 2)), "Q6_K": (256, 210, (208,)), "Q4_0": (32, 18, (0,)), "Q5_0": (32, 22, (0,))}
"""Types of codes: numbers of a block, its bytes, and the byte offsets of its two-byte scales."""


def random_codes(kind: str, outputs: int, inputs: int, gain: float = 1.0) -> QuantizedWeight:
    """Return a matrix (outputs, inputs) of a type in `CODE_BLOCKS`: random codes, and small scales times `gain`."""
    numbers, size, scales = CODE_BLOCKS[kind]
    count = outputs * inputs // numbers
    blocks = torch.randint(
        256, (min(count, RANDOM_BLOCKS), size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    ).numpy()
    scale = np.array([gain * inputs**-0.5 / 512], np.float32).astype(np.float16)
    for scale_start in scales:
        blocks[:, scale_start : scale_start + 2] = scale.view(np.uint8)
    return QuantizedWeight(kind, np.resize(blocks, (outputs, inputs // numbers * size)), inputs)


def write(name: str, folder: Path, context: int) -> None:
    """Write one of the `SHAPES` as a bfloat16 model folder without a tokenizer. It loads like a user's model."""
    from safetensors.torch import save_file

    shape = SHAPES[name]
    config_fields = {
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": context,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": shape.tied,
    }
    (folder / "config.json").write_text(json.dumps(config_fields))
    config = model_config(read_config(folder), vocab_size=shape.vocab, context=None)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        tensor: torch.randn(size, generator=generator) * size[-1] ** -0.5 if len(size) > 1 else torch.ones(size)
        for tensor, size in tensor_shapes(config, shape.vocab).items()
    }
    save_file({tensor: values.bfloat16() for tensor, values in tensors.items()}, folder / "model.safetensors")


EMBEDDING_ROWS = 1024
"""Distinct rows of an embedding. Further tokens repeat them."""
RESIDUAL_GAIN = 1e-6
"""Gain of the layers' contributions to the residual stream."""


@dataclass(frozen=True)
class FamilyShape:
    """A config with as many layers as fit into 20 GiB, and the types of matrices in the files that users run.

    kind: type of experts and MLPs. attention: type of attention's projections; None: bfloat16.
    router_correlation: correlation of a router's logits between two tokens.
    """

    config: Mapping[str, Any]
    kind: str
    attention: str | None
    router_correlation: float = 0.0


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
    "qwen3-30b-a3b": replace(_QWEN3, router_correlation=0.65),
    "gpt-oss-20b": FamilyShape(
        {
            "model_type": "gpt_oss", "num_hidden_layers": 12, "num_local_experts": 32, "num_experts_per_tok": 4,
            "max_position_embeddings": 131_072,
        },
        "Q5_0",  # kernels hold MXFP4 in this type
        None,
        router_correlation=0.65,
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
"""Qwen3 has 16 of its 48 layers here, and gpt-oss 12 of 24. Bytes are those of these layers."""


def decoder_parts(
    name: str, context: int, *, kv_int8: bool = False, layers: int | None = None
) -> tuple[ModelConfig, Weights]:
    """Return the config and the weights of one of the `FAMILY_SHAPES` or `SHAPES`; see `parts`."""
    if name not in FAMILY_SHAPES:
        return parts(name, context, kv_int8=kv_int8, layers=layers)
    shape = FAMILY_SHAPES[name]
    layer_override = {"num_hidden_layers": layers} if layers else {}
    hf = checked({**shape.config, **layer_override})
    family = FAMILIES[shape.config["model_type"]]
    config = model_config(hf, vocab_size=hf.vocab_size, context=context)
    matrix = cache(partial(_matrix, shape))
    layer_weights = tuple(
        layer_of({field: _tensor(field, size, matrix, layer)
                  for field, (_, size, _) in layer_sources(config, family.names, layer, ALONE).items()})
        for layer in range(config.layers)
    )  # fmt: skip
    embedding_VC = _embedding(config, shape.router_correlation)
    norm_C = rounded(np.ones(config.hidden_size, np.float32), "bfloat16")
    head_VC = embedding_VC if config.tied else _matrix(shape, "head", (config.vocab_size, config.hidden_size))
    return replace(config, kv_int8=kv_int8), Weights(embedding_VC, layer_weights, norm_C, head_VC)


def _tensor(field: str, size: Shape, matrix: Callable[[str, Shape], Matrix], layer: int) -> Matrix:
    """Return the weights of a field of `Layer`. Norms, biases and routers are never quantized."""
    name = field.partition("/")[0]
    if name == "router_EC":
        generator = torch.Generator().manual_seed(layer)
        return to_host(torch.randn(size, generator=generator) * size[-1] ** -0.5)
    if len(size) == 1:
        return rounded(np.full(size, float("norm" in name), np.float32), "bfloat16")
    return matrix(name, size)


def _matrix(shape: FamilyShape, name: str, size: Shape) -> Matrix:
    """Return the matrix that all layers share for a field. A product's cost does not depend on its numbers."""
    gain = RESIDUAL_GAIN if name in ("o_proj_CQ", "down_proj_CI") else 1.0
    kind = shape.attention if name[:2] in ("q_", "k_", "v_", "o_", "he") else shape.kind
    if kind:
        return random_codes(kind, size[0], size[1], gain)
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * gain * size[-1] ** -0.5
    return np.resize(to_host(noise.bfloat16()), size)


def _embedding(config: ModelConfig, correlation: float) -> NDArray[np.uint16]:
    """Return embeddings, bfloat16 (V, C), whose rows have this pairwise correlation."""
    generator = torch.Generator().manual_seed(0)
    C = config.hidden_size
    common_C = torch.randn(C, generator=generator)
    noise_NC = torch.randn(EMBEDDING_ROWS, C, generator=generator)
    rows_NC = (correlation**0.5 * common_C + (1 - correlation) ** 0.5 * noise_NC).bfloat16()
    return np.resize(to_host(rows_NC), (config.vocab_size, C))
