"""gpt-oss: experts of clamped SwiGLU, logits of heads beside those of keys, biases, windows in every other layer.

Its files have all experts of a layer in one tensor, or in two of MXFP4 (see `stacked_experts`).
"""

from __future__ import annotations

from triforce.checkpoint.json_fields import Fields
from triforce.checkpoint.model_families.family import LLAMA_NAMES, Family, all_but_each
from triforce.model.architecture import Architecture, Experts


def gpt_oss(config: Fields) -> Architecture:
    """Return the arithmetic of a config."""
    config.within("quantization_config").require("quant_method", ("mxfp4",))
    experts = config.whole("num_local_experts", most=4096)
    return Architecture(
        qkv_bias=True, o_bias=True, activation="clamped", attention_sink_logits=True,
        experts=Experts(experts, config.whole("num_experts_per_tok", most=experts), renormalised=True, biases=True),
    )  # fmt: skip


GPT_OSS = Family(
    {
        "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "sliding_window": 128, "num_local_experts": 128,
        "num_experts_per_tok": 4, "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    gpt_oss,
    all_but_each(2),
    LLAMA_NAMES | {
        "attention_sink_logits_H": "self_attn.sinks", "router_EC": "mlp.router.weight",
        "router_bias_E": "mlp.router.bias",
    } | {
        f"{part}_{kind}_{shape}": f"mlp.experts.{{}}.{part}_proj.{name}"
        for part, shapes in {"gate": ("IC", "I"), "up": ("IC", "I"), "down": ("CI", "C")}.items()
        for kind, name, shape in zip(("proj", "bias"), ("weight", "bias"), shapes, strict=True)
    },
    accepted={
        "attention_bias": (True,), "num_local_experts": None, "num_experts": None, "quantization_config": None,
        "swiglu_limit": (7.0,), "swiglu_alpha": (1.702,),
    },
    theta=150_000.0,
    stacked_experts=True,
)  # fmt: skip
