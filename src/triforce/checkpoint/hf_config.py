"""The config.json of a folder as ModelConfig, refused by the name of a field, and its generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triforce.checkpoint.hub import read_json
from triforce.checkpoint.json_fields import MOST_CHANNELS, MOST_LAYERS, Fields
from triforce.checkpoint.model_families import FAMILIES, LAYER_TYPES, Family
from triforce.checkpoint.rope_scaling import Scaling, Unscaled, read_scaling
from triforce.errors import ModelError, RequestError, argument, as_keyword, require_integer
from triforce.interface.sampling_params import MODEL_DEFAULTS, SamplingParams
from triforce.model.config import LLAMA, Architecture, ModelConfig
from triforce.model.rope import Rope

ACCEPTED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),  # only families whose `accepted` has it read it
    "mlp_bias": (False,),
    "quantization_config": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
}
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
    architecture: Architecture = LLAMA
    local_theta: float | None = None
    """Theta of layers with a window, if it is another, unscaled."""
    mxfp4: bool = False
    """Whether experts are of four bits."""
    extra_layers: int = 0
    """Layers behind the others, which guess further tokens: they are not computed here."""

    @property
    def positions(self) -> int:
        """Positions that the model can see, in tokens. Where layers differ, those of the config are the scaled ones."""
        if self.local_theta is not None:
            return self.max_position_embeddings
        return self.scaling.reach(self.max_position_embeddings)

    def extra(self, layers: str = "model.layers.") -> tuple[str, ...]:
        """Return what names of tensors of `extra_layers` begin with, in files that call layers so."""
        return tuple(f"{layers}{self.num_hidden_layers + n}." for n in range(self.extra_layers))


def read_config(folder: Path) -> HFConfig:
    """The checked config.json of a folder. Raises ModelError naming the field that is wrong or not supported."""
    return checked(read_json(folder / "config.json"))


def checked(raw: dict[str, Any]) -> HFConfig:
    """Return what a config.json says, checked. Raises ModelError naming the field that is wrong or not supported."""
    family = raw.get("model_type")
    if family not in list(FAMILIES):  # it may be anything, and not hashable
        code = "; the code that its auto_map names is never run" if "auto_map" in raw else ""
        raise Fields(raw, "config.json").refusal("model_type", FAMILIES, code)
    read = FAMILIES[family]
    text = Fields(raw, "config.json").within(read.text) if read.text else Fields(raw, "config.json")
    config = text.over(read.defaults)
    for field, accepted in {**ACCEPTED, **read.accepted}.items():
        if accepted is not None:
            config.require(field, accepted)
    hidden = config.whole("hidden_size")
    heads = config.whole("num_attention_heads")
    kv_heads = config.whole("num_key_value_heads", heads)
    head_dim = config.whole("head_dim", hidden // heads, most=MOST_CHANNELS)
    if heads % kv_heads:
        raise config.refusal("num_key_value_heads", [f"divisors of {heads}"])
    if head_dim % 2 or head_dim < 4:
        raise config.refusal("head_dim", ["even numbers from 4"])
    positions = config.whole("max_position_embeddings")
    rotated, theta, scaling = read_rope(config, read, head_dim, positions)
    return HFConfig(
        model_type=family,
        vocab_size=config.whole("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.whole(read.inner),
        num_hidden_layers=config.whole("num_hidden_layers", most=MOST_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", least=1e-12, most=1.0),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        max_position_embeddings=positions,
        sliding_window=read_window(config, read),
        rope_theta=theta,
        scaling=scaling,
        architecture=replace(with_windows(config, read), rotated=rotated if rotated < head_dim else 0),
        local_theta=read_local_theta(config, read),
        mxfp4=config.within("quantization_config").get("quant_method") == "mxfp4",
        extra_layers=config.whole("num_nextn_predict_layers", 0, least=0, most=MOST_LAYERS),
    )


def model_config(hf: HFConfig, *, vocab_size: int, context: int | None, device: torch.device) -> ModelConfig:
    """Return the ModelConfig of `hf`.

    `context` (tokens; None: the config's own positions) also freezes dynamic and longrope frequencies, which change
    with length in transformers: no cache of rotated keys can follow that. Raises ModelError if it is too large.
    """
    context = hf.max_position_embeddings if context is None else context
    parts = hf.architecture
    require_integer("context", context, 2)
    if context > hf.positions:
        most = argument("context", hf.positions)
        raise ModelError(
            f"{argument('context', context)} cannot be had: this model has {hf.positions} positions; use {most} or less"
        )
    context = int(context)
    if (hf.sliding_window or context) >= context:
        parts = replace(parts, kinds=parts.rotations_only)
    inv_freq_RF, scale = _rotations(hf, parts, context)
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
        rope=Rope(inv_freq_RF.to(device), scale),
        architecture=parts,
        positions=hf.positions,
    )


def _rotations(hf: HFConfig, parts: Architecture, context: int) -> tuple[Tensor, float]:
    """Return the frequencies of all rotations, float32 (R, D / 2), and the factor on cos and sin of the first."""
    inv_freq_F, scale = frequencies(hf, context)
    rotations = 1 + max((kind.rope for kind in parts.kinds), default=0)
    inv_freq_RF = torch.zeros(rotations, hf.head_dim // 2)  # the channels that are not rotated, and other layers
    inv_freq_RF[0, : len(inv_freq_F)] = inv_freq_F
    if hf.local_theta is not None and rotations > 1:
        inv_freq_RF[1] = Unscaled().frequencies(hf.local_theta, hf.head_dim, context)[0]
    return inv_freq_RF, scale


def frequencies(hf: HFConfig, context: int) -> tuple[Tensor, float]:
    """Rotation frequencies float32 (F,) for texts of `context` tokens, and the factor on cos and sin.

    Raises ModelError where the numbers in the config give none.
    """
    inv_freq_F, scale = hf.scaling.frequencies(hf.rope_theta, hf.architecture.rotated or hf.head_dim, context)
    if not (inv_freq_F.isfinite() & (inv_freq_F > 0)).all():
        raise ModelError(f"config.json: rope_theta = {hf.rope_theta:g} with {hf.scaling} gives no usable frequencies")
    return inv_freq_F, scale


def read_rope(config: Fields, family: Family, head_dim: int, positions: int) -> tuple[int, float, Scaling]:
    """Channels that are rotated, theta, and what became of the positions.

    A config of old has the last in rope_scaling, a new one all of it in rope_parameters.
    """
    rope = config.within("rope_scaling" if config.get("rope_scaling") else "rope_parameters")
    if family.local_theta is not None and rope.get(LAYER_TYPES[0]) is not None:
        rope = rope.within(LAYER_TYPES[0])
    rope = rope.under(original_max_position_embeddings=config.get("original_max_position_embeddings"))
    if nested := [name for name in rope if isinstance(rope.get(name), dict)]:
        raise rope.refusal(nested[0], ["one rotation for all layers"])
    rotated = head_dim
    for fields in (config, rope):
        if not family.partial:
            fields.require("partial_rotary_factor", (1,))
    if family.partial:
        usual = config.number("partial_rotary_factor", family.rotated, least=0.0, most=1.0)
        rotated = int(head_dim * rope.number("partial_rotary_factor", usual, least=0.0, most=1.0))
    if rotated % 2 or rotated < 2:
        raise config.refusal("partial_rotary_factor", [f"shares of {head_dim} that are even numbers"])
    name = "type" if rope.get("rope_type") is None else "rope_type"
    rope.require(name, family.ropes)
    theta = rope.number("rope_theta", config.number("rope_theta", family.theta), least=2.0)
    return rotated, theta, read_scaling(rope, rope.get(name), rotated, positions)


def read_local_theta(config: Fields, family: Family) -> float | None:
    """Return theta of layers with a window, where it may be another: of a new config in rope_parameters."""
    if family.local_theta is None:
        return None
    local = config.within("rope_parameters").within(LAYER_TYPES[1])
    local.require("rope_type", ("default",))
    return local.number("rope_theta", config.number("rope_local_base_freq", family.local_theta), least=2.0)


def read_window(config: Fields, family: Family) -> int | None:
    """Return the tokens that layers with a window see; None where there are no such layers. Raises ModelError."""
    if not any(family.slides(config)) or (config.get("sliding_window") is None and family.local_theta is None):
        return None
    return config.whole("sliding_window")


def with_windows(config: Fields, family: Family) -> Architecture:
    """Return the arithmetic of a config, with the windows of its layers and their rotations. Raises ModelError."""
    parts = family.architecture(config)
    window = read_window(config, family)
    if window is None:
        return parts
    windowed: dict[str, int] = {"window": window} | ({} if family.local_theta is None else {"rope": 1})
    kinds = (
        replace(parts.kind(layer), **(windowed if slides else {})) for layer, slides in enumerate(family.slides(config))
    )
    return replace(parts, kinds=tuple(kinds))


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that the file of a model's folder sets, as vLLM does. Raises ModelError."""
    values = read_json(folder / GENERATION) if (folder / GENERATION).exists() else {}
    return checked_sampling({name: values.get(name) for name in MODEL_DEFAULTS}, folder / GENERATION)


def checked_sampling(values: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return those of the fields of `SamplingParams` that a file sets. Raises ModelError naming the wrong one."""
    given = {name: value for name, value in values.items() if value is not None}
    try:
        SamplingParams(**given)
    except RequestError as error:
        raise ModelError(f"{file}: {error.worded(as_keyword)}; mend it, or leave the field out") from error
    return given
