"""From a Hugging Face config to ModelConfig. What is not supported is refused by the name of its field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triforce.checkpoint.files import read_json
from triforce.config import ModelConfig
from triforce.errors import ModelError
from triforce.rope import Rope

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
ACCEPTED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),  # it would put a bias on o_proj too
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "quantization_config": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
}

# transformers is imported late (seconds), and its configs have no static type worth the name.
HFConfig = Any


def read_config(folder: Path) -> HFConfig:
    """The checked Hugging Face config of a folder. Raises ModelError naming the field that is not supported."""
    raw = read_json(folder / "config.json")
    _require_family(raw.get("model_type"), "auto_map" in raw)
    _require_accepted(raw)
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # its validators raise ValueError, KeyError, TypeError and types of their own
        raise ModelError(f"{folder / 'config.json'} is not valid: {error}") from error
    _require_family(config.model_type, has_code=False)
    _require_rope(config.rope_parameters)
    _require_heads(config)
    return config


def model_config(hf: HFConfig, *, vocab_size: int, context: int | None, device: torch.device) -> ModelConfig:
    """What decoder and caches need of a checked `hf`.

    `context` (tokens; None: the config's own positions) also freezes dynamic and longrope frequencies, which change
    with length in transformers: no cache of rotated keys can follow that. Raises ModelError if it is too large.
    """
    context = _context(hf, context)
    inv_freq_F, scale = frequencies(hf, context)
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        layers=hf.num_hidden_layers,
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=_head_dim(hf),
        norm_eps=hf.rms_norm_eps,
        qkv_bias=hf.model_type == "qwen2",
        qk_norm=hf.model_type == "qwen3",
        tied=hf.tie_word_embeddings,
        context=context,
        rope=Rope(inv_freq_F.to(device), scale),
    )


def frequencies(hf: HFConfig, context: int) -> tuple[Tensor, float]:
    """Rotation frequencies float32 (D / 2,) and the factor on cos and sin, from transformers' own tables."""
    kind = hf.rope_parameters["rope_type"]
    D = _head_dim(hf)
    if kind == "default":
        return 1.0 / hf.rope_parameters["rope_theta"] ** (torch.arange(0, D, 2, dtype=torch.float32) / D), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    try:
        inv_freq_F, scale = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"), seq_len=context)
    except Exception as error:  # wrong types and lengths inside the dictionary surface as anything
        raise ModelError(f"config.json: rope_parameters = {hf.rope_parameters} cannot be used: {error}") from error
    return inv_freq_F.float(), float(scale)


def _head_dim(hf: HFConfig) -> int:
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def _context(hf: HFConfig, context: int | None) -> int:
    context = hf.max_position_embeddings if context is None else context
    positions = _positions(hf)
    if not 0 < context <= positions:
        raise ModelError(f"context = {context}, but this model has {positions} positions: use --context {positions}")
    window = getattr(hf, "sliding_window", None)
    slides = "sliding_attention" in (getattr(hf, "layer_types", None) or ["sliding_attention"])
    if window is not None and slides and context > window:
        raise ModelError(
            f"config.json: sliding_window = {window} is not supported beyond the window, and context = {context}: "
            f"use --context {window}"
        )
    return int(context)


def _positions(hf: HFConfig) -> int:
    """How far the model can see. Some configs give max_position_embeddings as it was before the stretch."""
    rope = hf.rope_parameters
    positions = int(hf.max_position_embeddings)
    match rope["rope_type"]:
        case "linear" | "dynamic":
            return int(positions * rope["factor"])
        case "yarn":
            return max(positions, int(rope["original_max_position_embeddings"] * (rope["factor"] or 1)))
        case _:
            return positions


def _require_family(model_type: object, has_code: bool) -> None:
    if model_type not in FAMILIES:
        code = "; the code that its auto_map names is never run" if has_code else ""
        raise _refusal("model_type", model_type, FAMILIES, code)


def _require_accepted(values: Mapping[str, Any], where: str = "") -> None:
    for field, accepted in ACCEPTED.items():
        if values.get(field) not in (None, *accepted):
            raise _refusal(where + field, values[field], accepted)


def _require_rope(rope: Mapping[str, Any]) -> None:
    if rope.get("rope_type") not in ROPE_TYPES:
        raise _refusal("rope_parameters.rope_type", rope.get("rope_type"), ROPE_TYPES)
    _require_accepted(rope, "rope_parameters.")


def _require_heads(hf: HFConfig) -> None:
    if hf.num_attention_heads % hf.num_key_value_heads:
        raise _refusal("num_key_value_heads", hf.num_key_value_heads, [f"divisors of {hf.num_attention_heads}"])
    if _head_dim(hf) % 2:
        raise _refusal("head_dim", _head_dim(hf), ["even numbers"])


def _refusal(field: str, value: object, accepted: Iterable[object], more: str = "") -> ModelError:
    choices = ", ".join(map(str, accepted)) or "none"
    return ModelError(f"config.json: {field} = {value!r} is not supported (supported: {choices}){more}")
