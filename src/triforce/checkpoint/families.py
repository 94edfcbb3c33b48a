"""The config.json of a folder as ModelConfig, refused by the name of a field, and its generation_config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triforce.checkpoint.hub import read_json
from triforce.checkpoint.json_fields import Fields
from triforce.checkpoint.rope_scaling import TYPES, Scaling, read_scaling
from triforce.errors import ModelError, RequestError
from triforce.interface.sampling_params import BY_THE_MODEL, SamplingParams
from triforce.model.config import ModelConfig
from triforce.model.rope import Rope

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
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | {"head_dim": 128},
}
"""Values of fields that a config.json leaves out: transformers writes some only where they differ."""

ACCEPTED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),  # it would put a bias on o_proj too
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "quantization_config": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
}
QWEN = ("qwen2", "qwen3")
LAYER_TYPES = ("full_attention", "sliding_attention")
MOST_LAYERS = 10_000
THETA = 10_000.0
GENERATION = "generation_config.json"


@dataclass(frozen=True, slots=True)
class HFConfig:
    """The fields of a config.json that count here, checked, under their own names."""

    model_type: str
    vocab_size: int
    """Rows of the embedding."""
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    sliding_window: int | None
    """Tokens that some layer sees; None if all layers see all."""
    rope_theta: float
    scaling: Scaling

    @property
    def positions(self) -> int:
        """Positions that the model can see, in tokens."""
        return self.scaling.reach(self.max_position_embeddings)


def read_config(folder: Path) -> HFConfig:
    """The checked config.json of a folder. Raises ModelError naming the field that is wrong or not supported."""
    raw = read_json(folder / "config.json")
    family = raw.get("model_type")
    if family not in list(FAMILIES):  # it may be anything, and not hashable
        code = "; the code that its auto_map names is never run" if "auto_map" in raw else ""
        raise Fields(raw, "config.json").refusal("model_type", FAMILIES, code)
    config = Fields(FAMILIES[family] | raw, "config.json")
    for field, accepted in ACCEPTED.items():
        config.require(field, accepted)
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    kv_heads, head_dim = config.whole("num_key_value_heads", heads), config.whole("head_dim", hidden // heads)
    if heads % kv_heads:
        raise config.refusal("num_key_value_heads", [f"divisors of {heads}"])
    if head_dim % 2 or head_dim < 4:
        raise config.refusal("head_dim", ["even numbers from 4"])
    positions = config.whole("max_position_embeddings")
    theta, scaling = read_rope(config, head_dim, positions)
    return HFConfig(
        model_type=family,
        vocab_size=config.whole("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.whole("intermediate_size"),
        num_hidden_layers=config.whole("num_hidden_layers", most=MOST_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", least=1e-12, most=1.0),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        max_position_embeddings=positions,
        sliding_window=_read_window(config, family),
        rope_theta=theta,
        scaling=scaling,
    )


def model_config(hf: HFConfig, *, vocab_size: int, context: int | None, device: torch.device) -> ModelConfig:
    """Return the ModelConfig of `hf`.

    `context` (tokens; None: the config's own positions) also freezes dynamic and longrope frequencies, which change
    with length in transformers: no cache of rotated keys can follow that. Raises ModelError if it is too large.
    """
    context, window = hf.max_position_embeddings if context is None else context, hf.sliding_window
    if not 0 < context <= hf.positions:
        raise ModelError(
            f"context = {context}, but this model has {hf.positions} positions: use --context {hf.positions}"
        )
    if window is not None and context > window:
        raise ModelError(
            f"config.json: sliding_window = {window} is not supported beyond the window, and context = {context}: "
            f"use --context {window}"
        )
    inv_freq_F, scale = frequencies(hf, context)
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        layers=hf.num_hidden_layers,
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=hf.head_dim,
        norm_eps=hf.rms_norm_eps,
        qkv_bias=hf.model_type == "qwen2",
        qk_norm=hf.model_type == "qwen3",
        tied=hf.tie_word_embeddings,
        context=context,
        rope=Rope(inv_freq_F.to(device), scale),
    )


def frequencies(hf: HFConfig, context: int) -> tuple[Tensor, float]:
    """Rotation frequencies float32 (D / 2,) for texts of `context` tokens, and the factor on cos and sin.

    Raises ModelError where the numbers in the config give none.
    """
    inv_freq_F, scale = hf.scaling.frequencies(hf.rope_theta, hf.head_dim, context)
    if not (inv_freq_F.isfinite() & (inv_freq_F > 0)).all():
        raise ModelError(f"config.json: rope_theta = {hf.rope_theta:g} with {hf.scaling} gives no usable frequencies")
    return inv_freq_F, scale


def read_rope(config: Fields, head_dim: int, positions: int) -> tuple[float, Scaling]:
    """Theta and what became of the positions: of an old config in rope_scaling, of a new one in rope_parameters."""
    rope = config.within("rope_scaling" if config.get("rope_scaling") else "rope_parameters")
    rope = rope.under(original_max_position_embeddings=config.get("original_max_position_embeddings"))
    if nested := [name for name in rope if isinstance(rope.get(name), dict)]:
        raise rope.refusal(nested[0], ["one rotation for all layers"])
    rope.require("partial_rotary_factor", ACCEPTED["partial_rotary_factor"])
    name = "type" if rope.get("rope_type") is None else "rope_type"
    rope.require(name, TYPES)
    theta = rope.number("rope_theta", config.number("rope_theta", THETA), least=2.0)
    return theta, read_scaling(rope, rope.get(name), head_dim, positions)


def _read_window(config: Fields, family: str) -> int | None:
    if config.get("sliding_window") is None or (family in QWEN and not config.flag("use_sliding_window")):
        return None
    if family in QWEN and not _slides(config):
        return None
    return config.whole("sliding_window")


def _slides(config: Fields) -> bool:
    """Whether any layer sees a window only. Mistral's layers all do."""
    layers, kinds = config.whole("num_hidden_layers", most=MOST_LAYERS), config.get("layer_types")
    if kinds is None:
        return config.whole("max_window_layers", least=0) < layers
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in LAYER_TYPES for kind in kinds):
        raise config.refusal("layer_types", [f"lists of {layers} of {' and '.join(LAYER_TYPES)}"])
    return "sliding_attention" in kinds


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that the file of a model's folder sets, as vLLM does. Raises ModelError."""
    values = read_json(folder / GENERATION) if (folder / GENERATION).exists() else {}
    found = {name: values[name] for name in BY_THE_MODEL if values.get(name) is not None}
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise ModelError(f"{folder / GENERATION}: {error}; mend it, or leave the field out") from error
    return found
