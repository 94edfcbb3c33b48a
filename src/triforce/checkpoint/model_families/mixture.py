"""Mixtral and Qwen3-MoE: Mistral and Qwen3 with experts in the place of each MLP."""

from __future__ import annotations

from triforce.checkpoint.json_fields import Fields
from triforce.checkpoint.model_families.family import LLAMA_NAMES, Family
from triforce.checkpoint.model_families.llama import MISTRAL, QWEN3, every_layer
from triforce.model.architecture import Architecture, Experts


def _experts(config: Fields, renormalised: bool) -> Experts:
    usual = config.get("num_experts")  # a name of old for the other one
    experts = config.whole("num_local_experts", config.whole("num_experts") if usual else None, most=4096)
    return Experts(experts, config.whole("num_experts_per_tok", most=experts), renormalised)


def mixtral(config: Fields) -> Architecture:
    """Return the arithmetic of a config: the weights of a token's experts add up to 1."""
    return Architecture(experts=_experts(config, True))


def qwen3_moe(config: Fields) -> Architecture:
    """Return the arithmetic of a config."""
    return Architecture(qk_norm="head", experts=_experts(config, config.flag("norm_topk_prob")))


MIXTRAL = Family(
    {
        **MISTRAL.defaults, "num_experts_per_tok": 2, "num_local_experts": 8, "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    mixtral,
    every_layer,
    LLAMA_NAMES | {
        "router_EC": "block_sparse_moe.gate.weight", "gate_proj_IC": "block_sparse_moe.experts.{}.w1.weight",
        "up_proj_IC": "block_sparse_moe.experts.{}.w3.weight", "down_proj_CI": "block_sparse_moe.experts.{}.w2.weight",
    },
    accepted={"num_local_experts": None},
    theta=1_000_000.0,
)  # fmt: skip
QWEN3_MOE = Family(
    {
        **QWEN3.defaults, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
        "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128,
        "norm_topk_prob": False, "head_dim": None,
    },
    qwen3_moe,
    lambda config: every_layer(config) if config.flag("use_sliding_window") else [],
    LLAMA_NAMES | {"router_EC": "mlp.gate.weight"} | {
        f"{field}_proj_{suffix}": f"mlp.experts.{{}}.{field}_proj.weight"
        for field, suffix in {"gate": "IC", "up": "IC", "down": "CI"}.items()
    },
    # Of layers with an MLP in the place of experts, the first ones alone could be described.
    accepted={"num_experts": None, "num_local_experts": None, "decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
    inner="moe_intermediate_size",
)  # fmt: skip
