"""Granite 3 (dense): Llama with four factors."""

from dataclasses import replace

from triforce.checkpoint.json_fields import Fields
from triforce.checkpoint.model_families.family import BIAS_FLAGS, Family, llama
from triforce.checkpoint.model_families.llama import LLAMA
from triforce.model.architecture import Architecture


def granite(config: Fields) -> Architecture:
    """Return the arithmetic of a config: `attention_multiplier` stands in the place of 1 / sqrt(D)."""
    heads = config.whole("num_attention_heads")
    head_dim = config.whole("head_dim", config.whole("hidden_size") // heads)
    factors = {
        name: config.number(name, least=1e-6)
        for name in ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    }
    return replace(
        llama(config),
        query_scale=factors["attention_multiplier"] * head_dim**0.5,
        embedding_scale=factors["embedding_multiplier"],
        residual_scale=factors["residual_multiplier"],
        logit_scale=1 / factors["logits_scaling"],
    )


GRANITE = Family(
    {
        **LLAMA.defaults, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
    granite,
    accepted=BIAS_FLAGS,
)  # fmt: skip
