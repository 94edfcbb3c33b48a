"""A family: how models of one `model_type` of transformers are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from triforce.checkpoint.json_fields import Fields
from triforce.checkpoint.rope_scaling import TYPES
from triforce.model.architecture import Architecture

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
}
"""Tensors of a layer in the files, by the fields of `model.weights.Layer`."""


def llama(config: Fields) -> Architecture:
    """Return Llama's arithmetic, whatever the config."""
    return Architecture()


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
    """The field that has the width of an MLP, or of an expert."""
    theta: float = 10_000.0
    """That of a config without one."""
    rotated: float = 1.0
    """The share of a head's channels that is rotated, of a config that does not say."""
    partial: bool = False
    """Whether a config may say so."""
