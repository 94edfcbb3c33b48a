"""Tiny random models of each family, with every feature of a published one, and their logits through paged KV."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.helpers.tiny_checkpoint import tiny_model
from triforce.backends.decoder import Decoder
from triforce.kvcache import FullView, PagePool
from triforce.ragged import ints

LENGTH = 150
"""Tokens of a text: past the original positions of scaled rotations, and past several windows."""
WINDOW = 24
SIZES = dict(num_hidden_layers=4, head_dim=16, max_position_embeddings=256)
LONGROPE = dict(
    rope_type="longrope", original_max_position_embeddings=64, rope_theta=10_000.0, partial_rotary_factor=0.75,
    short_factor=[1.0 + i / 10 for i in range(6)], long_factor=[2.0 + i for i in range(6)],
)  # fmt: skip
YARN = dict(type="yarn", factor=4.0, original_max_position_embeddings=64)
EXPERTS = dict(num_experts_per_tok=3, output_router_logits=False)
FAMILY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi-3": ("Phi3", dict(tie_word_embeddings=False, pad_token_id=None, rope_parameters=None)),
    "phi-3-window": ("Phi3", dict(sliding_window=WINDOW, pad_token_id=None)),
    "phi-4-mini": (
        "Phi3",
        dict(
            tie_word_embeddings=True, pad_token_id=None, original_max_position_embeddings=64, rope_parameters=LONGROPE
        ),
    ),
    "smollm3": ("SmolLM3", dict(no_rope_layers=[1, 1, 0, 1], pad_token_id=None)),
    "granite-3": (
        "Granite",
        dict(
            embedding_multiplier=12.0, logits_scaling=4.0, residual_multiplier=0.22, attention_multiplier=0.0625,
            tie_word_embeddings=True,
        ),
    ),
    "olmo-2": ("Olmo2", dict(pad_token_id=None, rope_parameters=dict(rope_type="default", rope_theta=5e5))),
    "glm-4": ("Glm4", dict(pad_token_id=None, attention_bias=True, eos_token_id=1)),
    "glm-4-whole": (
        "Glm4", dict(pad_token_id=None, attention_bias=False, eos_token_id=1, partial_rotary_factor=1.0),
    ),
    "mistral-window": ("Mistral", dict(sliding_window=WINDOW)),
    "qwen2-upper-windows": ("Qwen2", dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)),
    "mixtral": ("Mixtral", dict(num_local_experts=8, **EXPERTS)),
    "qwen3-moe": ("Qwen3Moe", dict(num_experts=8, moe_intermediate_size=40, norm_topk_prob=True, **EXPERTS)),
    "qwen3-moe-plain": (
        "Qwen3Moe", dict(num_experts=8, moe_intermediate_size=40, norm_topk_prob=False, rope_scaling=YARN, **EXPERTS),
    ),
}  # fmt: skip


def family_model(name: str, **more: Any) -> Any:
    """A model of transformers."""
    family, changes = FAMILY_MODELS[name]
    return tiny_model(family, **(SIZES | changes | more))


def texts(rows: int = 2) -> Tensor:
    return torch.randint(0, 97, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def paged_logits(decoder: Decoder, ids_BT: Tensor, pieces: list[list[int]]) -> Tensor:
    """Logits (B, T, V) of texts that are fed in passes: piece by piece so many tokens of each row, perhaps none."""
    pool = PagePool(decoder.config, len(ids_BT), 64, decoder.dtype, decoder.device)
    for b in range(len(ids_BT)):
        pool.reserve(b, ids_BT.shape[1])
    view, at = FullView(pool), [0] * len(ids_BT)
    view.observe(0)
    rows: list[list[Tensor]] = [[] for _ in ids_BT]
    for counts in pieces:
        width = max(counts)
        fed_BT = torch.zeros(len(ids_BT), width, dtype=torch.long)
        for b, count in enumerate(counts):
            fed_BT[b, :count] = ids_BT[b, at[b] : at[b] + count]
        logits_BTV = decoder(fed_BT, ints(counts), view)
        view.advance(ints(counts))
        for b, count in enumerate(counts):
            rows[b].append(logits_BTV[b, :count])
            at[b] += count
    return torch.stack([torch.cat(row) for row in rows])


RAGGED = [[100, 3], [1, 90], [0, 7], [7, 0], [1, 1], [41, 49]]
"""Passes of a prefill in parts, of few tokens, and of one row alone; each row is fed whole."""
