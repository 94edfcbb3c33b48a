"""Metadata of GGUF files as configs of Hugging Face's models. Errors name the unsupported key.

Keys that are neither read here nor known to change nothing are refused: a model that needs them would give wrong
results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log
from typing import Any

import numpy as np

from triforce.checkpoint.gguf.file import GGUFFile
from triforce.checkpoint.hf_config import HFConfig, read_local_theta, read_window, with_windows
from triforce.checkpoint.json_fields import MOST_CHANNELS, MOST_LAYERS, Fields
from triforce.checkpoint.model_families import FAMILIES, LAYER_TYPES
from triforce.checkpoint.rope_scaling import Floats, Linear, LongRope, Scaling, Unscaled, Yarn, wavelengths
from triforce.errors import ModelError

FACTORS = "rope_freqs.weight"
LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"


@dataclass(frozen=True, slots=True)
class Divided(Scaling):
    """A divisor for each frequency: GGUF's form of Llama 3's scaling (`rope_freqs.weight`)."""

    divisors: tuple[float, ...]

    def frequencies(self, theta: float, D: int, context: int) -> tuple[Floats, float]:
        divisors_F: Floats = np.array(self.divisors, dtype=np.float32)
        inv_freq_F: Floats = 1.0 / wavelengths(theta, D) / divisors_F
        return inv_freq_F, 1.0


def read_gguf_scaling(
    config: Fields, file: GGUFFile, D: int, positions: int, rounds_ramp: bool, absolute_factor: bool = False
) -> Scaling:
    """Return the scaling of positions. A file without a type has linear scaling; a missing factor counts as 1.

    D: rotated channels of a head. rounds_ramp: as in `Yarn`; the family decides. absolute_factor: whether the file's
    attention factor is the factor of cos and sin itself, and not one on top of YaRN's. Raises ModelError.
    """
    if any(name in file.tensors for name in LONG_FACTORS):
        config.require("rope.scaling.type", ("none", "linear", "longrope"))
        for name in ("rope.scaling.factor", "rope.scale_linear"):
            config.require(name, (0, 1))
        if FACTORS in file.tensors:
            raise ModelError(f"{file.path}: {FACTORS} and {LONG_FACTORS[1]} exclude one another; download it again")
        original_positions = config.integer("rope.scaling.original_context_length", positions, minimum=2)
        short_divisors, long_divisors = (list(_divisors(file, name, D)) for name in LONG_FACTORS)
        return LongRope(
            original_positions,
            short_divisors,
            long_divisors,
            config.number("rope.scaling.attn_factor", 1.0, minimum=1e-3),
        )
    config.require("rope.scaling.type", ("none", "linear", "yarn"))
    kind = config.get("rope.scaling.type") or "linear"
    name = "rope.scale_linear" if config.get("rope.scaling.factor") is None else "rope.scaling.factor"
    factor = 1.0 if kind == "none" or config.get(name) == 0 else config.number(name, 1.0)
    if kind != "yarn":
        config.require("rope.scaling.attn_factor", (1,))
    if FACTORS in file.tensors:
        if kind == "yarn" or factor != 1:
            raise config.refusal(name, [f"1 beside the tensor {FACTORS}"])
        return Divided(_divisors(file, FACTORS, D))
    if kind != "yarn":
        return Unscaled() if factor == 1 else Linear(factor)
    original_positions = config.integer("rope.scaling.original_context_length", positions, minimum=2)
    fast_turns = config.number("rope.scaling.yarn_beta_fast", 32.0, minimum=1e-3)
    slow_turns = config.number("rope.scaling.yarn_beta_slow", 1.0, minimum=1e-3)
    yarn_factor = 0.1 * log(factor) + 1.0
    has_factor = config.get("rope.scaling.attn_factor") is not None
    attention_factor = config.number("rope.scaling.attn_factor", 1.0, minimum=1e-3)
    return Yarn(
        factor,
        original_positions,
        fast_turns,
        slow_turns,
        attention_factor if absolute_factor and has_factor else yarn_factor * attention_factor,
        rounds_ramp,
    )


def _divisors(file: GGUFFile, name: str, D: int) -> tuple[float, ...]:
    tensor = file.tensors.get(name)
    if tensor is None or (tensor.type, tensor.shape) != ("F32", (D // 2,)):
        fault = f"is {tensor.type} {list(tensor.shape)}, and not" if tensor else "is missing; it should be"
        raise ModelError(f"{file.path}: tensor {name} {fault} F32 [{D // 2}]; download it again")
    values = file.raw(name).view("<f4")[0]
    if not (np.isfinite(values) & (values > 0)).all():
        raise ModelError(f"{file.path}: tensor {name} has values that are not positive numbers; download it again")
    return tuple(values.tolist())


ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "granite": "granite", "olmo2": "olmo2",
    "smollm3": "smollm3", "qwen3moe": "qwen3_moe", "gemma2": "gemma2", "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss", "phi3": "phi3", "glm4": "glm4", "glm4moe": "glm4_moe",
}  # fmt: skip
"""Family by architecture in a file's metadata."""
VARIANTS = {"llama": ("expert_count", "mixtral"), "olmo2": ("attention.sliding_window", "olmo3")}
"""By architecture: a key that, unless 0 or missing, marks a file of another family, and that family."""
_GEMMA = {
    "attention.sliding_window": "sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "rope.freq_base_swa": "rope_local_base_freq",
}  # fmt: skip
PATTERN = "attention.sliding_window_pattern"
_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
FIELDS: dict[str, dict[str, str]] = {
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gpt_oss": {
        "attention.sliding_window": "sliding_window", **_EXPERTS, "expert_feed_forward_length": "intermediate_size",
    },
    "glm4_moe": {
        "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "n_shared_experts",
        "expert_weights_scale": "routed_scaling_factor", "expert_weights_norm": "norm_topk_prob",
        "expert_group_count": "n_group", "expert_group_used_count": "topk_group", "expert_gating_func": "scoring_func",
        "leading_dense_block_count": "first_k_dense_replace", "nextn_predict_layers": "num_nextn_predict_layers",
    },
    "mixtral": _EXPERTS,
    "olmo3": {"attention.sliding_window": "sliding_window", PATTERN: "layer_types"},
    "phi3": {"attention.sliding_window": "sliding_window"},
    "granite": {
        "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
    },
    "qwen3_moe": {
        "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
}  # fmt: skip
"""Keys of single families, and the config.json fields with the same values."""
CONSTANT_FIELDS: dict[str, dict[str, object]] = {"qwen3_moe": {"norm_topk_prob": True}}
"""Fields with one value in all files of a family."""
LARGEST_GEMMAS = (46, 62)
"""Numbers of layers of the 27B models. They scale queries by hidden size / heads, which files do not state."""
EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
Q_BIAS = "blk.0.attn_q.bias"
O_BIAS = "blk.0.attn_output.bias"
GATE_BIAS = "blk.0.ffn_gate.bias"
Q_NORM = "blk.0.attn_q_norm.weight"
OPTIONAL_O_BIAS = ("llama", "granite")
"""Families whose files may have an attention output bias or lack it, with or without biases of q, k and v."""
SIGMOID = 2
"""Number of a router's sigmoid function in the key `expert_gating_func`."""
TOKENS = "tokenizer.ggml.tokens"

READ_KEYS = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
})  # fmt: skip
IGNORED_KEYS = frozenset({"rope.scaling.finetuned", "tensor_data_layout"})
"""Keys that change no result."""
ACCEPTED: dict[str, tuple[object, ...]] = {
    "expert_count": (0,), "expert_used_count": (0,), "attention.sliding_window": (0,), "attention.causal": (True,),
    "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,), "use_parallel_residual": (False,),
    "logit_scale": (0, 1), "residual_scale": (0, 1), "embedding_scale": (0, 1), "attention.scale": (0,),
    "attn_logit_softcapping": (0,), "final_logit_softcapping": (0,), "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,), "rope.scaling.yarn_log_multiplier": (0,), "rope.scaling.alpha": (0,),
    "pooling_type": (0,),
}  # fmt: skip
"""Keys that would change results, and their values that do not. Any other key is refused."""


def read_gguf_config(file: GGUFFile) -> HFConfig:
    """Return the checked config of a GGUF file. Raises ModelError naming the wrong or unsupported key."""
    general = _metadata_fields("general", file)
    general.require("type", ("model",))
    architecture = general.get("architecture")
    if architecture not in ARCHITECTURES:
        raise general.refusal("architecture", ARCHITECTURES)
    config = _metadata_fields(architecture, file)
    variant_key, variant = VARIANTS.get(architecture, ("", ""))
    model_type = variant if config.get(variant_key) else ARCHITECTURES[architecture]
    family = FAMILIES[model_type]
    for key in config:
        if key not in READ_KEYS | IGNORED_KEYS | FIELDS.get(model_type, {}).keys():
            config.require(key, ACCEPTED.get(key, ()))
    hidden_size = config.integer("embedding_length")
    heads = config.integer("attention.head_count")
    kv_heads = config.integer("attention.head_count_kv", heads)
    head_dim = config.integer("attention.key_length", hidden_size // heads, maximum=MOST_CHANNELS)
    if heads % kv_heads:
        raise config.refusal("attention.head_count_kv", [f"divisors of {heads}"])
    if head_dim % 2 or head_dim < 4:
        raise config.refusal("attention.key_length", ["even numbers from 4"])
    config.require("attention.value_length", (head_dim,))
    rotated = config.integer("rope.dimension_count", head_dim, maximum=head_dim)
    if rotated % 2 or (rotated != head_dim and not family.partial_rotation):
        raise config.refusal("rope.dimension_count", ["even numbers"] if family.partial_rotation else [head_dim])
    positions = config.integer("context_length")
    theta = config.number("rope.freq_base", 10_000.0, minimum=2.0)
    fields = _fields(file, config, model_type, hidden_size, heads, head_dim)
    architecture_settings = with_windows(fields, family)
    rounds_ramp = fields.nested("rope_parameters").flag("truncate", True)
    if model_type in OPTIONAL_O_BIAS:
        architecture_settings = replace(architecture_settings, o_bias=O_BIAS in file.tensors)
    return HFConfig(
        model_type=model_type,
        vocab_size=_vocabulary(config, file, hidden_size),
        hidden_size=hidden_size,
        intermediate_size=fields.integer(family.mlp_width_field),
        num_hidden_layers=fields.integer("num_hidden_layers", maximum=MOST_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("attention.layer_norm_rms_epsilon", minimum=1e-12, maximum=1.0),
        tie_word_embeddings=HEAD not in file.tensors,
        max_position_embeddings=positions,
        sliding_window=read_window(fields, family),
        rope_theta=theta,
        scaling=read_gguf_scaling(config, file, rotated, positions, rounds_ramp, model_type == "olmo3"),
        architecture=replace(
            architecture_settings, norm_offset=0.0, rotated=rotated if rotated < head_dim else 0
        ),  # norms in files include the offset
        local_theta=read_local_theta(fields, family),
        extra_layers=fields.integer("num_nextn_predict_layers", 0, minimum=0),
    )


def _fields(file: GGUFFile, config: Fields, model_type: str, hidden_size: int, heads: int, head_dim: int) -> Fields:
    """Return the config.json fields of the same model that families read."""
    family_keys = FIELDS.get(model_type, {})
    family = FAMILIES[model_type]
    ignored_values = (0,) if model_type == "phi3" else ()  # 0: no window
    layer_count = config.integer("block_count", maximum=MOST_LAYERS)
    layer_count -= config.integer("nextn_predict_layers", 0, minimum=0, maximum=layer_count - 1)
    fields = {
        "hidden_size": hidden_size, "num_attention_heads": heads, "head_dim": head_dim,
        "num_hidden_layers": layer_count,
        "query_pre_attn_scalar": hidden_size // heads if layer_count in LARGEST_GEMMAS else head_dim,
        **CONSTANT_FIELDS.get(model_type, {}), **_implied_fields(model_type, file, config, layer_count, head_dim),
        **{
            field: config.get(key) for key, field in family_keys.items()
            if key in config and config.get(key) not in ignored_values
        },
        **_layer_types(file.metadata.get(f"olmo2.{PATTERN}")),
    }  # fmt: skip
    if family.mlp_width_field not in fields:
        fields[family.mlp_width_field] = config.integer("feed_forward_length")
    return Fields({**family.defaults, **fields}, str(file.path))


def _implied_fields(
    model_type: str, file: GGUFFile, config: Fields, layer_count: int, head_dim: int
) -> dict[str, object]:
    """Return fields for missing keys where llama.cpp's default differs from config.json's."""
    attention_bias: dict[str, object] = {"attention_bias": Q_BIAS in file.tensors}
    biases = {**attention_bias, "mlp_bias": GATE_BIAS in file.tensors}
    if model_type == "llama":
        return biases
    if model_type == "glm4":
        return attention_bias
    if model_type == "granite":
        config.require("rope.scaling.finetuned", (True,))  # without it, positions are not rotated at all
        return {"attention_multiplier": head_dim**-0.5, **biases}
    if model_type == "gemma3_text" and config.get("attention.sliding_window") is None:
        return {"layer_types": ["full_attention"] * layer_count}
    if model_type == "olmo3":  # layers with a window have the same theta, unscaled
        return {"rope_local_base_freq": config.get("rope.freq_base") or 10_000.0}
    if model_type == "glm4_moe":
        config.require("expert_gating_func", (SIGMOID,))
        return {
            **attention_bias, "use_qk_norm": Q_NORM in file.tensors, "norm_topk_prob": False,
            "first_k_dense_replace": 0, "intermediate_size": config.integer("feed_forward_length"),
        }  # fmt: skip
    return {}


def _layer_types(pattern: Any) -> dict[str, object]:
    """Return the field `layer_types` for a window pattern, one flag or name per layer; no fields without a list."""
    layer_types = pattern.tolist() if isinstance(pattern, np.ndarray) else pattern
    if not isinstance(layer_types, list):
        return {}
    return {
        "layer_types": [
            LAYER_TYPES[layer_type] if type(layer_type) is bool else layer_type for layer_type in layer_types
        ]
    }


def _metadata_fields(name: str, file: GGUFFile) -> Fields:
    """Return the values of keys with the prefix `name`, by the rest of the key."""
    prefix = f"{name}."
    metadata = file.metadata
    return Fields(
        {key.removeprefix(prefix): _single_value(metadata[key]) for key in metadata if key.startswith(prefix)},
        str(file.path),
        prefix,
    )


def _single_value(value: Any) -> Any:
    """Return the single value of a list with equal items, as files may repeat a number for each layer.

    A list with different items becomes a text about it. Other values are returned as they are; long texts are cut for
    messages.
    """
    items = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(items, list):
        return f"{value[:40]}..." if isinstance(value, str) and len(value) > 40 else value
    distinct_items = list(dict.fromkeys(items))
    return distinct_items[0] if len(distinct_items) == 1 else f"a list of {len(distinct_items)} different values"


def _vocabulary(config: Fields, file: GGUFFile, hidden_size: int) -> int:
    tokens = file.metadata.get(TOKENS)
    embedding = file.tensors.get(EMBEDDING)
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{file.path}: {TOKENS} is no list of texts; download another file of this model")
    if embedding is None:
        raise ModelError(f"{file.path} lacks the tensor {EMBEDDING}; download a file with the model's weights")
    if embedding.shape != (len(tokens), hidden_size):
        raise ModelError(
            f"{file.path}: tensor {EMBEDDING} has shape {list(embedding.shape)}, but {TOKENS} and embedding_length ask "
            f"for {[len(tokens), hidden_size]}; download it again"
        )
    config.require("vocab_size", (len(tokens),))
    return len(tokens)
