"""A folder's config.json as ModelConfig, and its generation_config.json. Errors name the field at fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from triforce.checkpoint.hub import read_json
from triforce.checkpoint.json_fields import MOST_CHANNELS, MOST_LAYERS, Fields
from triforce.checkpoint.model_families import FAMILIES, LAYER_TYPES, Family
from triforce.checkpoint.rope_scaling import Floats, Scaling, Unscaled, read_scaling
from triforce.errors import ModelError, RequestError, argument, as_keyword, require_integer
from triforce.interface.sampling_params import MODEL_DEFAULTS, SamplingParams
from triforce.model.config import LLAMA, Architecture, ModelConfig
from triforce.model.rope import Rope

ACCEPTED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),  # only families with this field in `accepted` read it
    "mlp_bias": (False,),
    "quantization_config": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
}
GENERATION = "generation_config.json"


@dataclass(frozen=True, slots=True)
class HFConfig:
    """Checked fields of a config.json that are used here, under their own names."""

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
    """Tokens in the window of layers with a window; None if all layers see all tokens."""
    rope_theta: float
    scaling: Scaling
    architecture: Architecture = LLAMA
    local_theta: float | None = None
    """Unscaled theta of layers with a window; None if they use `rope_theta`."""
    mxfp4: bool = False
    """Whether experts have 4-bit MXFP4 weights."""
    extra_layers: int = 0
    """Multi-token prediction layers behind the model's layers. They are not computed here."""

    @property
    def positions(self) -> int:
        """Return the context limit in tokens. With a `local_theta`, max_position_embeddings is already scaled."""
        if self.local_theta is not None:
            return self.max_position_embeddings
        return self.scaling.reach(self.max_position_embeddings)

    def extra_layer_prefixes(self, layers: str = "model.layers.") -> tuple[str, ...]:
        """Return the name prefixes of the tensors of `extra_layers`. layers: prefix of a layer's names in the files."""
        return tuple(f"{layers}{self.num_hidden_layers + n}." for n in range(self.extra_layers))


def read_config(folder: Path) -> HFConfig:
    """Read and check a folder's config.json. Raises ModelError naming the wrong or unsupported field."""
    return checked(read_json(folder / "config.json"))


def checked(raw: dict[str, Any]) -> HFConfig:
    """Check the content of a config.json. Raises ModelError naming the wrong or unsupported field."""
    family = raw.get("model_type")
    if family not in list(FAMILIES):  # a value of any type, perhaps not hashable
        code = "; the code that its auto_map names is never run" if "auto_map" in raw else ""
        raise Fields(raw, "config.json").refusal("model_type", FAMILIES, code)
    family_spec = FAMILIES[family]
    text = (
        Fields(raw, "config.json").nested(family_spec.text_field)
        if family_spec.text_field
        else Fields(raw, "config.json")
    )
    config = text.with_defaults(family_spec.defaults)
    for field, accepted in {**ACCEPTED, **family_spec.accepted}.items():
        if accepted is not None:
            config.require(field, accepted)
    hidden_size = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    head_dim = config.integer("head_dim", hidden_size // heads, maximum=MOST_CHANNELS)
    if heads % kv_heads:
        raise config.refusal("num_key_value_heads", [f"divisors of {heads}"])
    if head_dim % 2 or head_dim < 4:
        raise config.refusal("head_dim", ["even numbers from 4"])
    positions = config.integer("max_position_embeddings")
    rotated, theta, scaling = read_rope(config, family_spec, head_dim, positions)
    return HFConfig(
        model_type=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer(family_spec.mlp_width_field),
        num_hidden_layers=config.integer("num_hidden_layers", maximum=MOST_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", minimum=1e-12, maximum=1.0),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        max_position_embeddings=positions,
        sliding_window=read_window(config, family_spec),
        rope_theta=theta,
        scaling=scaling,
        architecture=replace(with_windows(config, family_spec), rotated=rotated if rotated < head_dim else 0),
        local_theta=read_local_theta(config, family_spec),
        mxfp4=config.nested("quantization_config").get("quant_method") == "mxfp4",
        extra_layers=config.integer("num_nextn_predict_layers", 0, minimum=0, maximum=MOST_LAYERS),
    )


def model_config(hf: HFConfig, *, vocab_size: int, context: int | None) -> ModelConfig:
    """Return the ModelConfig of `hf`.

    `context` (tokens; None: max_position_embeddings) also freezes dynamic and longrope frequencies. In transformers
    these change with length, which a cache of rotated keys cannot follow. Raises ModelError if `context` is too large.
    """
    context = hf.max_position_embeddings if context is None else context
    architecture = hf.architecture
    require_integer("context", context, 2)
    if context > hf.positions:
        largest_context = argument("context", hf.positions)
        raise ModelError(
            f"{argument('context', context)} cannot be had: this model has {hf.positions} positions; use "
            f"{largest_context} or less"
        )
    context = int(context)
    if (hf.sliding_window or context) >= context:
        architecture = replace(architecture, kinds=architecture.kinds_without_windows)
    inv_freq_RF, scale = _rotations(hf, architecture, context)
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        layers=hf.num_hidden_layers,
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=hf.head_dim,
        norm_eps=hf.rms_norm_eps,
        tied=hf.tie_word_embeddings,
        context=context,
        rope=Rope(inv_freq_RF, scale),
        architecture=architecture,
        positions=hf.positions,
    )


def _rotations(hf: HFConfig, architecture: Architecture, context: int) -> tuple[Floats, float]:
    """Return the frequencies of all rotations, float32 (R, D / 2), and the factor on cos and sin of rotation 0."""
    inv_freq_F, scale = frequencies(hf, context)
    rotations = 1 + max((kind.rope for kind in architecture.kinds), default=0)
    # Frequency 0: no rotation of the channel, or of the layer.
    inv_freq_RF = np.zeros((rotations, hf.head_dim // 2), np.float32)
    inv_freq_RF[0, : len(inv_freq_F)] = inv_freq_F
    if hf.local_theta is not None and rotations > 1:
        inv_freq_RF[1] = Unscaled().frequencies(hf.local_theta, hf.head_dim, context)[0]
    return inv_freq_RF, scale


def frequencies(hf: HFConfig, context: int) -> tuple[Floats, float]:
    """Return rotation frequencies, float32 (F,), for a context of `context` tokens, and the factor on cos and sin.

    Raises ModelError if the config's numbers give a frequency that is not finite or not positive.
    """
    with np.errstate(all="ignore"):  # such numbers are refused below
        inv_freq_F, scale = hf.scaling.frequencies(hf.rope_theta, hf.architecture.rotated or hf.head_dim, context)
    if not (np.isfinite(inv_freq_F) & (inv_freq_F > 0)).all():
        raise ModelError(f"config.json: rope_theta = {hf.rope_theta:g} with {hf.scaling} gives no usable frequencies")
    return inv_freq_F, scale


def read_rope(config: Fields, family: Family, head_dim: int, positions: int) -> tuple[int, float, Scaling]:
    """Return the number of rotated channels, theta, and the scaling of positions.

    Old configs have the scaling in rope_scaling, new ones have all three in rope_parameters.
    """
    rope = config.nested("rope_scaling" if config.get("rope_scaling") else "rope_parameters")
    if family.local_theta is not None and rope.get(LAYER_TYPES[0]) is not None:
        rope = rope.nested(LAYER_TYPES[0])
    rope = rope.with_values(original_max_position_embeddings=config.get("original_max_position_embeddings"))
    if nested_names := [name for name in rope if isinstance(rope.get(name), dict)]:
        raise rope.refusal(nested_names[0], ["one rotation for all layers"])
    rotated = head_dim
    for fields in (config, rope):
        if not family.partial_rotation:
            fields.require("partial_rotary_factor", (1,))
    if family.partial_rotation:
        default_share = config.number("partial_rotary_factor", family.rotated_share, minimum=0.0, maximum=1.0)
        rotated = int(head_dim * rope.number("partial_rotary_factor", default_share, minimum=0.0, maximum=1.0))
    if rotated % 2 or rotated < 2:
        raise config.refusal("partial_rotary_factor", [f"shares of {head_dim} that are even numbers"])
    name = "type" if rope.get("rope_type") is None else "rope_type"
    rope.require(name, family.rope_types)
    theta = rope.number("rope_theta", config.number("rope_theta", family.theta), minimum=2.0)
    return rotated, theta, read_scaling(rope, rope.get(name), rotated, positions)


def read_local_theta(config: Fields, family: Family) -> float | None:
    """Return theta of layers with a window; None if the family has no such theta.

    New configs have it in rope_parameters.
    """
    if family.local_theta is None:
        return None
    windowed_rope = config.nested("rope_parameters").nested(LAYER_TYPES[1])
    windowed_rope.require("rope_type", ("default",))
    return windowed_rope.number("rope_theta", config.number("rope_local_base_freq", family.local_theta), minimum=2.0)


def read_window(config: Fields, family: Family) -> int | None:
    """Return the window in tokens; None if no layer has a window. Raises ModelError."""
    if not any(family.windowed_layers(config)) or (config.get("sliding_window") is None and family.local_theta is None):
        return None
    return config.integer("sliding_window")


def with_windows(config: Fields, family: Family) -> Architecture:
    """Return the architecture with each layer's window and rotation. Raises ModelError."""
    architecture = family.architecture(config)
    window = read_window(config, family)
    if window is None:
        return architecture
    windowed: dict[str, int] = {"window": window} | ({} if family.local_theta is None else {"rope": 1})
    kinds = (
        replace(architecture.kind(layer), **(windowed if slides else {}))
        for layer, slides in enumerate(family.windowed_layers(config))
    )
    return replace(architecture, kinds=tuple(kinds))


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return the `SamplingParams` fields that generation_config.json sets; vLLM takes them too. Raises ModelError."""
    values = read_json(folder / GENERATION) if (folder / GENERATION).exists() else {}
    return checked_sampling({name: values.get(name) for name in MODEL_DEFAULTS}, folder / GENERATION)


def checked_sampling(values: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the `SamplingParams` fields of `values` that are set. Raises ModelError naming the wrong field."""
    specified_values = {name: value for name, value in values.items() if value is not None}
    try:
        SamplingParams(**specified_values)
    except RequestError as error:
        raise ModelError(f"{file}: {error.message_text(as_keyword)}; mend it, or leave the field out") from error
    return specified_values
