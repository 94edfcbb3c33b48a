"""Tiny models in GGUF files, and Hugging Face folders of the numbers that their weights stand for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize, quantize

from tests.helpers.gguf_blocks import random_blocks
from tests.helpers.gguf_files import LLAMA, OUTSIDE_LAYERS, byte_level_values, tensors_of, write_gguf
from tests.helpers.tiny_checkpoint import save, tiny_model, tiny_tokenizer
from triforce.checkpoint.gguf.weights import FAMILIES, PERMUTED

SIZES = dict(
    vocab_size=300,
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=16,
    max_position_embeddings=640,
    rms_norm_eps=1e-6,
)
"""Sizes of a model whose rows are whole blocks of any type."""
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
K_SIZES = {"Q4_K": 5e-4, "Q5_K": 3e-4, "Q6_K": 1e-4}
"""Scales of random blocks that give weights the size of those of tiny models."""
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q5_K", "output": "Q6_K"}
"""Other types in a file of type Q4_K_M, nearly as llama.cpp chooses them."""


class Written(NamedTuple):
    gguf: Path
    folder: Path
    """Of float32 numbers."""


def write_model(
    folder: Path, kind: str, part_kinds: Mapping[str, str] | None = None, family: str = "llama", **sizes: Any
) -> Written:
    """Write a model whose matrices have a type, but for parts that `part_kinds` names, such as attn_v or ffn_norm."""
    model = tiny_model(CLASSES[family], **(SIZES | sizes))
    names = {theirs: ours for theirs, ours in OUTSIDE_LAYERS.items()}
    for i in range(model.config.num_hidden_layers):
        names |= {f"blk.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in FAMILIES[family].items()}
    tensors = {}
    numbers = model.state_dict()
    for seed, (name, array) in enumerate(tensors_of(model, family).items()):
        part = name.split(".")[-2]
        default_kind = kind if array.ndim == 2 else "F32"
        tensors[name] = packed(
            array, default_kind if name.endswith(".bias") else (part_kinds or {}).get(part, default_kind), seed
        )
        plain = torch.from_numpy(numbers_of(*tensors[name]).reshape(array.shape))
        numbers[names[name]].copy_(unwoven(plain) if family == "llama" and part in PERMUTED else plain)
    folder.mkdir(parents=True, exist_ok=True)
    values = {key.replace("llama.", f"{family}."): value for key, value in metadata(model.config).items()}
    file = write_gguf(folder / "model.gguf", values | {"general.architecture": family}, tensors)
    tiny_tokenizer().save_pretrained(folder / "hf")
    return Written(file, save(model, folder / "hf"))


def metadata(config: Any) -> dict[str, Any]:
    sizes = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "vocab_size": config.vocab_size, "rope.dimension_count": config.head_dim,
    }  # fmt: skip
    return LLAMA | byte_level_values() | {f"llama.{key}": value for key, value in sizes.items()}


def packed(array: Any, kind: str, seed: int) -> tuple[GGMLQuantizationType, Any]:
    """Round a tensor to a type. K types have no rounding here: they get random blocks of the same shape."""
    if size := K_SIZES.get(kind):
        return GGMLQuantizationType[kind], random_blocks(kind, *array.shape, seed=seed, size=size).blocks.numpy()
    return GGMLQuantizationType[kind], quantize(array, GGMLQuantizationType[kind])


def numbers_of(kind: GGMLQuantizationType, array: Any) -> Any:
    return dequantize(array, kind).astype(np.float32)


def unwoven(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of queries or keys with the halves of each head separated."""
    D = SIZES["head_dim"]
    return rows.view(-1, int(D) // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
