"""A family: how models of one `model_type` of transformers are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from triforce.checkpoint.json_fields import MOST_LAYERS, Fields
from triforce.checkpoint.rope_scaling import TYPES
from triforce.model.architecture import Architecture

LAYER_TYPES = ("full_attention", "sliding_attention")
LLAMA_NAMES = {
    "input_norm_C": "input_layernorm.weight",
    "q_proj_QC": "self_attn.q_proj.weight",
    "k_proj_PC": "self_attn.k_proj.weight",
    "v_proj_PC": "self_attn.v_proj.weight",
    "o_proj_CQ": "self_attn.o_proj.weight",
    "q_bias_Q": "self_attn.q_proj.bias",
    "k_bias_P": "self_attn.k_proj.bias",
    "v_bias_P": "self_attn.v_proj.bias",
    "q_norm_D": "self_attn.q_norm.weight",
    "k_norm_D": "self_attn.k_norm.weight",
    "post_norm_C": "post_attention_layernorm.weight",
    "gate_proj_IC": "mlp.gate_proj.weight",
    "up_proj_IC": "mlp.up_proj.weight",
    "down_proj_CI": "mlp.down_proj.weight",
    "o_bias_C": "self_attn.o_proj.bias",
    "gate_bias_I": "mlp.gate_proj.bias",
    "up_bias_I": "mlp.up_proj.bias",
    "down_bias_C": "mlp.down_proj.bias",
}
"""Tensors of a layer in the files, by the fields of `model.weights.Layer`."""
BIAS_FLAGS: dict[str, tuple[object, ...]] = {"attention_bias": (False, True), "mlp_bias": (False, True)}
"""What configs of families may say that `llama` reads."""
SHARED, DENSE = "shared/", "dense/"
"""Before a field of an MLP: that of shared experts, and that of layers which have one in the place of experts."""


def llama(config: Fields) -> Architecture:
    """Return Llama's arithmetic, with the biases that a config asks for: those of attention are behind it, too."""
    attention, mlp = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    return Architecture(qkv_bias=attention, o_bias=attention, mlp_bias=mlp)


def listed_layers(config: Fields) -> list[bool]:
    """Return which layers have a window by `layer_types`. Raises ModelError."""
    layers, kinds = config.whole("num_hidden_layers", most=MOST_LAYERS), config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in LAYER_TYPES for kind in kinds):
        raise config.refusal("layer_types", [f"lists of {layers} of {' and '.join(LAYER_TYPES)}"])
    return [kind == LAYER_TYPES[1] for kind in kinds]


def all_but_each(number: int, named: str = "") -> Callable[[Fields], list[bool]]:
    """Return that layers have a window but for each such one, of a config without `layer_types`.

    named: a field that may have another number.
    """

    def slides(config: Fields) -> list[bool]:
        if config.get("layer_types") is not None:
            return listed_layers(config)
        each = config.whole(named, number) if named else number
        return [(layer + 1) % each != 0 for layer in range(config.whole("num_hidden_layers", most=MOST_LAYERS))]

    return slides


def no_windows(config: Fields) -> list[bool]:
    """Return that no layer has a window."""
    return []


@dataclass(frozen=True, slots=True)
class Family:
    """The class of a family in transformers, as far as it counts here."""

    defaults: Mapping[str, Any]
    """Values of fields that a config.json leaves out: transformers writes some only where they differ."""
    architecture: Callable[[Fields], Architecture] = llama
    """The arithmetic of a config, but for windows and for how much of a head is rotated. Raises ModelError."""
    slides: Callable[[Fields], list[bool]] = no_windows
    """Which layers have the window that the config names; none of them where the list is empty."""
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    """Those of the tensors in a layer. Fields of one name lie in one tensor, in the order of `LLAMA_NAMES`.

    Of experts they have `{}` where its number stands.
    """
    accepted: Mapping[str, tuple[object, ...] | None] = field(default_factory=dict)
    """Values that a field of the config may have, where they are not the usual ones; None: any."""
    ropes: tuple[str, ...] = TYPES
    """The types of rotation that it may have."""
    inner: str = "intermediate_size"
    """The field that has the width of an MLP; of an expert, where there are some."""
    theta: float = 10_000.0
    """That of a config without one."""
    rotated: float = 1.0
    """The share of a head's channels that is rotated, of a config that does not say."""
    partial: bool = False
    """Whether a config may say so."""
    local_theta: float | None = None
    """That of layers with a window, which turn unscaled, of a config without one; None: all layers turn alike."""
    text: str = ""
    """The field of a config with the text's, of a model that reads images, too (see `checkpoint.text_part`)."""
    stacked_experts: bool = False
    """Whether safetensors hold all experts of a layer in one tensor, as `checkpoint.stacked_experts` reads them."""
