"""Models of random weights in the shapes that speed is measured on: they cost what a real one costs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from triforce.backends.decoder import Decoder
from triforce.checkpoint.families import model_config, read_config
from triforce.checkpoint.weights import tensor_shapes
from triforce.model.config import ModelConfig
from triforce.model.rope import Rope
from triforce.model.weights import Layer, Weights


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Llama; `tied`: its head is its embedding."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 64
    tied: bool = True


SHAPES = {
    "30m": ModelShape(512, 1408, 8, 8, 8, 8192),
    "30m-draft": ModelShape(128, 344, 2, 2, 2, 8192),
    "thin32": ModelShape(256, 688, 32, 4, 4, 8192),
    "thin80": ModelShape(256, 688, 80, 4, 4, 8192),
    "llama-3.2-1b": ModelShape(2048, 8192, 16, 32, 8, 128_256),
    "llama-2-7b-128k": ModelShape(4096, 11_008, 32, 32, 32, 32_000, 128, tied=False),
    "llama-2-13b-128k": ModelShape(5120, 13_824, 40, 40, 40, 32_000, 128, tied=False),
    "llama-3.1-8b": ModelShape(4096, 14_336, 32, 32, 8, 128_256, 128, tied=False),
    "llama-68m": ModelShape(768, 3072, 2, 12, 12, 32_000, tied=False),
    "llama-68m-128256": ModelShape(768, 3072, 2, 12, 12, 128_256, tied=False),
}
"""`thin32` and `thin80` are as deep as models of 8 and 70 billion weights, and load at once.

`30m` has the paper's kind of attention, a KV head for each query head: 16 KiB of KV per token in bfloat16.
"""


def decoder(
    name: str,
    context: int,
    dtype: torch.dtype = torch.bfloat16,
    bits: int = 0,
    device: torch.device | str = "cpu",
) -> Decoder:
    """A model of one of the `SHAPES`, for so many positions, made where it is to compute."""
    shape = SHAPES[name]
    C, D = shape.hidden, shape.head_dim
    Q, P = shape.heads * D, shape.kv_heads * D
    rope = Rope(500_000.0 ** -(torch.arange(0, D, 2) / D), 1.0)
    config = ModelConfig(
        shape.vocab, C, shape.intermediate, shape.layers, shape.heads, shape.kv_heads, D, 1e-5,
        qkv_bias=False, qk_norm=False, tied=shape.tied, context=context, rope=rope,
    )  # fmt: skip
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to(device)

    def matrix(outputs: int, inputs: int) -> Tensor:
        """The same noise again and again: what a product costs does not depend on it."""
        whole: Tensor = (noise * inputs**-0.5).to(dtype).repeat(-(-outputs * inputs // len(noise)))
        return whole[: outputs * inputs].view(outputs, inputs)

    def layer() -> Layer:
        ones, I = torch.ones(C, dtype=dtype, device=device), shape.intermediate  # noqa: E741
        return Layer(
            ones, matrix(Q, C), matrix(P, C), matrix(P, C), matrix(C, Q), ones, matrix(I, C), matrix(I, C), matrix(C, I)
        )

    embedding_VC, layers = matrix(shape.vocab, C), tuple(layer() for _ in range(shape.layers))
    head_VC = embedding_VC if shape.tied else matrix(shape.vocab, C)
    return Decoder(config, Weights(embedding_VC, layers, torch.ones(C, dtype=dtype, device=device), head_VC), bits)


def write(name: str, folder: Path, context: int) -> None:
    """Write one of the `SHAPES` as a model folder, bfloat16, without a tokenizer; it loads like a user's model."""
    from safetensors.torch import save_file

    shape = SHAPES[name]
    about = {
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
    (folder / "config.json").write_text(json.dumps(about))
    config = model_config(read_config(folder), vocab_size=shape.vocab, context=None, device=torch.device("cpu"))
    dice = torch.Generator().manual_seed(0)
    tensors = {
        tensor: torch.randn(size, generator=dice) * size[-1] ** -0.5 if len(size) > 1 else torch.ones(size)
        for tensor, size in tensor_shapes(config, shape.vocab).items()
    }
    save_file({tensor: values.bfloat16() for tensor, values in tensors.items()}, folder / "model.safetensors")
