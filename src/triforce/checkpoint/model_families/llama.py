"""Llama 2 and 3, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from typing import Any

from triforce.checkpoint.json_fields import MOST_LAYERS, Fields
from triforce.checkpoint.model_families.family import BIAS_FLAGS, Family, listed_layers
from triforce.model.architecture import Architecture

_LLAMA: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
_MISTRAL = _LLAMA | {
    "intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096,
}  # fmt: skip
_QWEN2 = _LLAMA | {
    "vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32, "max_position_embeddings": 32_768,
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip


def every_layer(config: Fields) -> list[bool]:
    """Return that all layers have a window, if the config names one."""
    return [True] * config.whole("num_hidden_layers", most=MOST_LAYERS)


def upper_layers(config: Fields) -> list[bool]:
    """Return which layers of a Qwen2 or Qwen3 have a window, where these are switched on."""
    layers = config.whole("num_hidden_layers", most=MOST_LAYERS)
    if not config.flag("use_sliding_window"):
        return []
    if config.get("layer_types") is None:
        first = config.whole("max_window_layers", least=0)
        return [layer >= first for layer in range(layers)]
    return listed_layers(config)


LLAMA = Family(_LLAMA, accepted=BIAS_FLAGS)
MISTRAL = Family(_MISTRAL, slides=every_layer)
QWEN2 = Family(_QWEN2, lambda config: Architecture(qkv_bias=True), upper_layers)
QWEN3 = Family(_QWEN2 | {"head_dim": 128}, lambda config: Architecture(qk_norm="head"), upper_layers)
