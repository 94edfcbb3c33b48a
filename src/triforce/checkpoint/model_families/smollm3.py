"""SmolLM3: Llama with some layers that rotate nothing (NoPE, Yang et al. 2025, arXiv 2501.18795)."""

from dataclasses import replace

from triforce.checkpoint.json_fields import MOST_LAYERS, Fields
from triforce.checkpoint.model_families.family import BIAS_FLAGS, Family, llama
from triforce.model.architecture import Architecture, LayerKind


def smollm3(config: Fields) -> Architecture:
    """Return the arithmetic of a config. Raises ModelError."""
    layers, given = config.whole("num_hidden_layers", most=MOST_LAYERS), config.get("no_rope_layers")
    interval = config.whole("no_rope_layer_interval")
    rotates = [(layer + 1) % interval != 0 for layer in range(layers)] if given is None else given
    if not isinstance(rotates, list) or len(rotates) != layers or not all(each in (0, 1) for each in rotates):
        raise config.refusal("no_rope_layers", [f"lists of {layers} of 0 and 1"])
    return replace(llama(config), kinds=tuple(LayerKind(rope=0 if each else 1) for each in rotates))


SMOLLM3 = Family(
    {
        "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True, "no_rope_layer_interval": 4, "use_sliding_window": False,
    },
    smollm3,
    accepted={**BIAS_FLAGS, "use_sliding_window": (False,)},
    theta=2_000_000.0,
)  # fmt: skip
