"""Tiny random models of each family, with every feature of a published model, and their logits over paged KV."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.helpers.tiny_checkpoint import tiny_model
from triforce.backends.decoder import Decoder
from triforce.backends.torch.tensors import as_tensor
from triforce.kvcache import FullView, PagePool
from triforce.kvcache.pool import WindowPages
from triforce.ragged import ints

LENGTH = 150
"""Tokens of a text: beyond the original positions of scaled rotations, and beyond several windows."""
WINDOW = 24
SIZES = dict(num_hidden_layers=4, head_dim=16, max_position_embeddings=256)
LONGROPE = dict(
    rope_type="longrope", original_max_position_embeddings=64, rope_theta=10_000.0, partial_rotary_factor=0.75,
    short_factor=[1.0 + i / 10 for i in range(6)], long_factor=[2.0 + i for i in range(6)],
)  # fmt: skip
YARN = dict(type="yarn", factor=4.0, original_max_position_embeddings=64)
EXPERTS = dict(num_experts_per_tok=3, output_router_logits=False)


def by_kind(full: dict[str, Any], local_theta: float) -> dict[str, Any]:
    """Return rotations by kind of layer: unscaled ones for layers with a window, `full` for others."""
    return {"full_attention": full, "sliding_attention": dict(rope_type="default", rope_theta=local_theta)}


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
    "smollm3-biases": ("SmolLM3", dict(attention_bias=True, mlp_bias=True, pad_token_id=None)),
    "granite-3": (
        "Granite",
        dict(
            embedding_multiplier=12.0, logits_scaling=4.0, residual_multiplier=0.22, attention_multiplier=0.0625,
            tie_word_embeddings=True,
        ),
    ),
    "llama-biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "granite-biases": ("Granite", dict(mlp_bias=True, residual_multiplier=0.5, tie_word_embeddings=True)),
    "olmo-2": ("Olmo2", dict(pad_token_id=None, rope_parameters=dict(rope_type="default", rope_theta=5e5))),
    "glm-4": ("Glm4", dict(pad_token_id=None, attention_bias=True, eos_token_id=1)),
    "glm-4-whole": (
        "Glm4", dict(pad_token_id=None, attention_bias=False, eos_token_id=1, partial_rotary_factor=1.0),
    ),
    "glm-4.5": (
        "Glm4Moe",
        dict(
            attention_bias=True, use_qk_norm=True, moe_intermediate_size=40, n_routed_experts=12, n_shared_experts=2,
            num_experts_per_tok=3, n_group=4, topk_group=2, routed_scaling_factor=2.5, pad_token_id=None,
        ),
    ),
    "glm-4.5-air": (
        "Glm4Moe",
        dict(
            attention_bias=True, moe_intermediate_size=40, n_routed_experts=8, num_experts_per_tok=3,
            norm_topk_prob=False, first_k_dense_replace=2, pad_token_id=None,
        ),
    ),
    "mistral-window": ("Mistral", dict(sliding_window=WINDOW)),
    "qwen2-upper-windows": ("Qwen2", dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)),
    "gemma-2": (
        "Gemma2",
        dict(
            query_pre_attn_scalar=24, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, sliding_window=WINDOW,
            attn_implementation="eager",
        ),
    ),
    "gemma-3": (
        "Gemma3Text",
        dict(
            query_pre_attn_scalar=24, sliding_window=WINDOW, sliding_window_pattern=3,
            rope_parameters=by_kind(dict(rope_type="linear", factor=4.0, rope_theta=1e6), 1e4),
        ),
    ),
    "olmo-3": (
        "Olmo3",
        dict(
            pad_token_id=None, eos_token_id=1, sliding_window=WINDOW,
            rope_parameters=by_kind(dict(YARN, rope_type="yarn", rope_theta=5e5), 5e5),
        ),
    ),
    "gpt-oss": (
        "GptOss",
        dict(
            num_local_experts=8, sliding_window=WINDOW, num_experts_per_tok=3,
            rope_parameters=dict(YARN, rope_type="yarn", rope_theta=1.5e5, truncate=False),
        ),
    ),
    "mixtral": ("Mixtral", dict(num_local_experts=8, **EXPERTS)),
    "qwen3-moe": ("Qwen3Moe", dict(num_experts=8, moe_intermediate_size=40, norm_topk_prob=True, **EXPERTS)),
    "qwen3-moe-plain": (
        "Qwen3Moe", dict(num_experts=8, moe_intermediate_size=40, norm_topk_prob=False, rope_scaling=YARN, **EXPERTS),
    ),
}  # fmt: skip


def family_model(name: str, **added: Any) -> Any:
    """Return a random model of transformers."""
    family, changes = FAMILY_MODELS[name]
    model = tiny_model(family, **(SIZES | changes | added))
    for layer in model.model.layers if name == "gpt-oss" else []:
        layer.self_attn.sinks.data = torch.linspace(-1, 4, len(layer.self_attn.sinks))
        layer.mlp.experts.gate_up_proj.data *= 5  # so that the activation reaches its bounds
    for layer in model.model.layers if "glm-4.5" in name else []:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.e_score_correction_bias.normal_(3.0, 0.1)  # real biases are mostly common, too
    return model


def texts(rows: int = 2) -> Tensor:
    return torch.randint(0, 97, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def paged_logits(
    decoder: Decoder, ids_BT: Tensor, pieces: list[list[int]], windows: WindowPages | None = None
) -> Tensor:
    """Return logits (B, T, V) of texts fed in passes: each piece has the number of tokens of each row, perhaps 0."""
    pool = PagePool(decoder.config, len(ids_BT), 64, decoder.dtype, decoder.device, windows=windows)
    for b in range(len(ids_BT)):
        pool.reserve(b, ids_BT.shape[1])
    view = FullView(pool)
    at = [0] * len(ids_BT)
    view.observe(0)
    rows: list[list[Tensor]] = [[] for _ in ids_BT]
    for counts in pieces:
        width = max(counts)
        fed_BT = torch.zeros(len(ids_BT), width, dtype=torch.long)
        for b, count in enumerate(counts):
            fed_BT[b, :count] = ids_BT[b, at[b] : at[b] + count]
        logits_BTV = as_tensor(decoder(fed_BT.numpy(), ints(counts), view))
        for b, count in enumerate(counts):
            rows[b].append(logits_BTV[b, :count])
            at[b] += count
    return torch.stack([torch.cat(row) for row in rows])


RAGGED = [[100, 3], [1, 90], [0, 7], [7, 0], [1, 1], [41, 49]]
"""Passes of a prefill in parts, of few tokens, and of one row alone. Together they feed each row whole."""
