"""Gemma 2 and 3 (text): norms before and after, GeGLU, windows in most layers, in Gemma 2 caps of scores and logits.

The norms' weights in safetensors count from 1. In Gemma 3 layers with a window have rotations of their own.
"""

from __future__ import annotations

from typing import Any

from triforce.checkpoint.json_fields import Fields
from triforce.checkpoint.model_families.family import LLAMA_NAMES, Family, all_but_each
from triforce.model.architecture import Architecture

_GEMMA2: dict[str, Any] = {
    "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
}  # fmt: skip
_NAMES = LLAMA_NAMES | {
    "attn_out_norm_C": "post_attention_layernorm.weight", "post_norm_C": "pre_feedforward_layernorm.weight",
    "mlp_out_norm_C": "post_feedforward_layernorm.weight",
}  # fmt: skip
_ACCEPTED: dict[str, tuple[object, ...] | None] = {
    "hidden_act": None,  # of old configs, beside the one that counts
    "hidden_activation": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (False,),
}


def gemma(config: Fields, qk_norm: str = "") -> Architecture:
    """Return the arithmetic of a config: queries are scaled by another number than the size of a head."""
    heads = config.whole("head_dim") / config.number("query_pre_attn_scalar")
    score_cap, logit_cap = (
        0.0 if config.get(name) is None else config.number(name, least=1e-3)
        for name in ("attn_logit_softcapping", "final_logit_softcapping")
    )
    return Architecture(
        qk_norm=qk_norm, output_norms=True, norm_offset=1.0, activation="gelu", query_scale=heads**0.5,
        embedding_scale=config.whole("hidden_size") ** 0.5, score_cap=score_cap, logit_cap=logit_cap,
    )  # fmt: skip


GEMMA2 = Family(_GEMMA2, gemma, all_but_each(2), _NAMES, _ACCEPTED)
GEMMA3 = Family(
    _GEMMA2 | {
        "vocab_size": 262_208, "max_position_embeddings": 131_072, "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    },
    lambda config: gemma(config, "head"),
    all_but_each(6, "sliding_window_pattern"),
    _NAMES,
    _ACCEPTED,
    theta=1_000_000.0,
    local_theta=10_000.0,
)  # fmt: skip
