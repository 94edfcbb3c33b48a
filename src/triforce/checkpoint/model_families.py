"""Model families by their `model_type` in transformers: defaults, tensor names, and config to `Architecture`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from triforce.checkpoint.json_fields import MOST_LAYERS, Fields
from triforce.checkpoint.rope_scaling import TYPES
from triforce.model.config import Architecture, Experts, LayerKind

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
"""Names of a layer's tensors in the files, by field of `model.weights.Layer`."""
BIAS_FLAGS: dict[str, tuple[object, ...]] = {"attention_bias": (False, True), "mlp_bias": (False, True)}
"""Values that `llama` accepts for a config's bias flags."""
SHARED, DENSE = "shared/", "dense/"
"""Prefixes of an MLP's fields: of shared experts, and of layers with a dense MLP in the place of experts."""


def llama(config: Fields) -> Architecture:
    """Return Llama's architecture with the config's biases. `attention_bias` covers the output projection, too."""
    attention = config.flag("attention_bias", False)
    mlp = config.flag("mlp_bias", False)
    return Architecture(qkv_bias=attention, o_bias=attention, mlp_bias=mlp)


def listed_layers(config: Fields) -> list[bool]:
    """Return which layers have a window, by `layer_types`. Raises ModelError."""
    layers = config.integer("num_hidden_layers", maximum=MOST_LAYERS)
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in LAYER_TYPES for kind in kinds):
        raise config.refusal("layer_types", [f"lists of {layers} of {' and '.join(LAYER_TYPES)}"])
    return [kind == LAYER_TYPES[1] for kind in kinds]


def full_layer_every(interval: int, field_name: str = "") -> Callable[[Fields], list[bool]]:
    """Return a function that returns whether each layer of a config has a window: all but every `interval`-th.

    A config's `layer_types` takes precedence. field_name: config field that may hold another interval.
    """

    def windowed_layers(config: Fields) -> list[bool]:
        if config.get("layer_types") is not None:
            return listed_layers(config)
        layer_interval = config.integer(field_name, interval) if field_name else interval
        return [
            (layer + 1) % layer_interval != 0
            for layer in range(config.integer("num_hidden_layers", maximum=MOST_LAYERS))
        ]

    return windowed_layers


def no_windows(config: Fields) -> list[bool]:
    """Return an empty list: no layer has a window."""
    return []


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of a family's transformers class that matter here."""

    defaults: Mapping[str, Any]
    """Values of fields missing in a config.json. Transformers writes some only if they differ from its defaults."""
    architecture: Callable[[Fields], Architecture] = llama
    """Function from a config to its architecture, without windows and rotated channels. Raises ModelError."""
    windowed_layers: Callable[[Fields], list[bool]] = no_windows
    """Function that returns whether each layer of a config has the config's window. An empty list: no layer."""
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    """Names of a layer's tensors by field. Fields of one name are fused in one tensor, in the order of `LLAMA_NAMES`.

    Names of experts' tensors have `{}` for the expert's number.
    """
    accepted: Mapping[str, tuple[object, ...] | None] = field(default_factory=dict)
    """Accepted values of config fields, where they differ from `hf_config.ACCEPTED`. None: any value."""
    rope_types: tuple[str, ...] = TYPES
    """Accepted types of rope scaling."""
    mlp_width_field: str = "intermediate_size"
    """Config field with the inner size of an MLP, or of an expert in families with experts."""
    theta: float = 10_000.0
    """Rope theta of a config without one."""
    rotated_share: float = 1.0
    """Share of a head's channels that is rotated if a config has no `partial_rotary_factor`."""
    partial_rotation: bool = False
    """Whether a config may set `partial_rotary_factor`."""
    local_theta: float | None = None
    """Unscaled theta of layers with a window if a config has no such theta. None: all layers rotate alike."""
    text_field: str = ""
    """Config field with the text model's config, in models that also read images (see `checkpoint.weight_files`)."""
    stacked_experts: bool = False
    """Whether safetensors stack a layer's experts in one tensor (see `checkpoint.stacked_experts`)."""


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
    """Return True for each layer: all layers have the config's window."""
    return [True] * config.integer("num_hidden_layers", maximum=MOST_LAYERS)


def upper_layers(config: Fields) -> list[bool]:
    """Return which layers of a Qwen2 or Qwen3 have a window; an empty list if `use_sliding_window` is false."""
    layers = config.integer("num_hidden_layers", maximum=MOST_LAYERS)
    if not config.flag("use_sliding_window"):
        return []
    if config.get("layer_types") is None:
        first_windowed = config.integer("max_window_layers", minimum=0)
        return [layer >= first_windowed for layer in range(layers)]
    return listed_layers(config)


LLAMA = Family(_LLAMA, accepted=BIAS_FLAGS)
MISTRAL = Family(_MISTRAL, windowed_layers=every_layer)
QWEN2 = Family(_QWEN2, lambda config: Architecture(qkv_bias=True), upper_layers)
QWEN3 = Family(_QWEN2 | {"head_dim": 128}, lambda config: Architecture(qk_norm="head"), upper_layers)


def _experts(config: Fields, renormalised: bool) -> Experts:
    old_count = config.get("num_experts")  # an old name of num_local_experts
    experts = config.integer("num_local_experts", config.integer("num_experts") if old_count else None, maximum=4096)
    return Experts(experts, config.integer("num_experts_per_tok", maximum=experts), renormalised)


def mixtral(config: Fields) -> Architecture:
    """Return Mixtral's architecture: the weights of a token's experts sum to 1."""
    return Architecture(experts=_experts(config, True))


def qwen3_moe(config: Fields) -> Architecture:
    """Return Qwen3-MoE's architecture."""
    return Architecture(qk_norm="head", experts=_experts(config, config.flag("norm_topk_prob")))


MIXTRAL = Family(
    {
        **MISTRAL.defaults, "num_experts_per_tok": 2, "num_local_experts": 8, "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    mixtral,
    every_layer,
    LLAMA_NAMES | {
        "router_EC": "block_sparse_moe.gate.weight", "gate_proj_IC": "block_sparse_moe.experts.{}.w1.weight",
        "up_proj_IC": "block_sparse_moe.experts.{}.w3.weight", "down_proj_CI": "block_sparse_moe.experts.{}.w2.weight",
    },
    accepted={"num_local_experts": None},
    theta=1_000_000.0,
)  # fmt: skip
QWEN3_MOE = Family(
    {
        **QWEN3.defaults, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
        "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128,
        "norm_topk_prob": False, "head_dim": None,
    },
    qwen3_moe,
    lambda config: every_layer(config) if config.flag("use_sliding_window") else [],
    LLAMA_NAMES | {"router_EC": "mlp.gate.weight"} | {
        f"{field}_proj_{suffix}": f"mlp.experts.{{}}.{field}_proj.weight"
        for field, suffix in {"gate": "IC", "up": "IC", "down": "CI"}.items()
    },
    # `Architecture` can describe dense layers only if they come first.
    accepted={"num_experts": None, "num_local_experts": None, "decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
    mlp_width_field="moe_intermediate_size",
)  # fmt: skip


_GEMMA2: dict[str, Any] = {
    "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
}  # fmt: skip
_GEMMA_NAMES = LLAMA_NAMES | {
    "attn_out_norm_C": "post_attention_layernorm.weight", "post_norm_C": "pre_feedforward_layernorm.weight",
    "mlp_out_norm_C": "post_feedforward_layernorm.weight",
}  # fmt: skip
_GEMMA_ACCEPTED: dict[str, tuple[object, ...] | None] = {
    "hidden_act": None,  # in old configs, beside hidden_activation, which is used
    "hidden_activation": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (False,),
}


def gemma(config: Fields, qk_norm: str = "") -> Architecture:
    """Return Gemma's architecture: `query_pre_attn_scalar`, and not the head size, scales queries."""
    head_ratio = config.integer("head_dim") / config.number("query_pre_attn_scalar")
    score_cap, logit_cap = (
        0.0 if config.get(name) is None else config.number(name, minimum=1e-3)
        for name in ("attn_logit_softcapping", "final_logit_softcapping")
    )
    return Architecture(
        qk_norm=qk_norm, output_norms=True, norm_offset=1.0, activation="gelu", query_scale=head_ratio**0.5,
        embedding_scale=config.integer("hidden_size") ** 0.5, score_cap=score_cap, logit_cap=logit_cap,
    )  # fmt: skip


GEMMA2 = Family(_GEMMA2, gemma, full_layer_every(2), _GEMMA_NAMES, _GEMMA_ACCEPTED)
GEMMA3 = Family(
    _GEMMA2 | {
        "vocab_size": 262_208, "max_position_embeddings": 131_072, "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    },
    lambda config: gemma(config, "head"),
    full_layer_every(6, "sliding_window_pattern"),
    _GEMMA_NAMES,
    _GEMMA_ACCEPTED,
    theta=1_000_000.0,
    local_theta=10_000.0,
)  # fmt: skip


QKV = "self_attn.qkv_proj.weight"
GATE_UP = "mlp.gate_up_proj.weight"

PHI3 = Family(
    {
        "vocab_size": 32_064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    windowed_layers=every_layer,
    names=LLAMA_NAMES | {
        "q_proj_QC": QKV, "k_proj_PC": QKV, "v_proj_PC": QKV, "gate_proj_IC": GATE_UP, "up_proj_IC": GATE_UP,
    },
    rope_types=("default", "longrope"),
    partial_rotation=True,
)  # fmt: skip


def glm4(config: Fields) -> Architecture:
    """Return GLM-4's architecture."""
    return Architecture(qkv_bias=config.flag("attention_bias"), output_norms=True, interleaved=True)


GLM4 = Family(
    {
        "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 13_696, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1.5625e-07, "tie_word_embeddings": False, "attention_bias": True,
    },
    glm4,
    names=LLAMA_NAMES | {
        "attn_out_norm_C": "post_self_attn_layernorm.weight", "mlp_out_norm_C": "post_mlp_layernorm.weight",
        "gate_proj_IC": GATE_UP, "up_proj_IC": GATE_UP,
    },
    accepted={"attention_bias": (False, True)},  # biases of q, k and v, not of o_proj
    rope_types=("default", "linear", "yarn"),
    rotated_share=0.5,
    partial_rotation=True,
)  # fmt: skip


def _glm4_experts(config: Fields) -> Experts:
    count = config.integer("n_routed_experts", maximum=4096)
    groups = config.integer("n_group", maximum=2048)
    if count % groups or (groups > 1 and count < 2 * groups):
        raise config.refusal("n_group", [f"divisors of {count} up to half of it"])
    chosen_groups = config.integer("topk_group", maximum=groups)
    return Experts(
        count, config.integer("num_experts_per_tok", maximum=count // groups * chosen_groups),
        config.flag("norm_topk_prob"),
        function="sigmoid", corrected=True, scale=config.number("routed_scaling_factor", minimum=1e-6), groups=groups,
        chosen_groups=chosen_groups, shared=config.integer("n_shared_experts", maximum=64),
    )  # fmt: skip


def glm4_moe(config: Fields) -> Architecture:
    """Return GLM-4.5's architecture. Raises ModelError."""
    layers = config.integer("num_hidden_layers", maximum=MOST_LAYERS)
    return Architecture(
        qkv_bias=config.flag("attention_bias"), qk_norm="head" if config.flag("use_qk_norm") else "",
        experts=_glm4_experts(config),
        dense_layers=config.integer("first_k_dense_replace", minimum=0, maximum=layers - 1),
        dense_size=config.integer("intermediate_size"),
    )  # fmt: skip


GLM4_MOE = Family(
    {
        "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 10_944, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "attention_bias": False, "use_qk_norm": False, "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
    },
    glm4_moe,
    names=LLAMA_NAMES | {
        "router_EC": "mlp.gate.weight", "router_correction_E": "mlp.gate.e_score_correction_bias",
    } | {
        f"{kind}{field}_proj_{shape}": f"mlp.{within}{field}_proj.weight"
        for kind, within in {"": "experts.{}.", SHARED: "shared_experts.", DENSE: ""}.items()
        for field, shape in {"gate": "IC", "up": "IC", "down": "CI"}.items()
    },
    accepted={"attention_bias": (False, True)},  # biases of q, k and v, not of o_proj
    mlp_width_field="moe_intermediate_size",
    rotated_share=0.5,
    partial_rotation=True,
)  # fmt: skip


def gpt_oss(config: Fields) -> Architecture:
    """Return gpt-oss's architecture."""
    config.nested("quantization_config").require("quant_method", ("mxfp4",))
    experts = config.integer("num_local_experts", maximum=4096)
    return Architecture(
        qkv_bias=True, o_bias=True, activation="clamped", attention_sink_logits=True,
        experts=Experts(
            experts, config.integer("num_experts_per_tok", maximum=experts), renormalised=True, biases=True,
        ),
    )  # fmt: skip


GPT_OSS = Family(
    {
        "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "sliding_window": 128, "num_local_experts": 128,
        "num_experts_per_tok": 4, "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    gpt_oss,
    full_layer_every(2),
    LLAMA_NAMES | {
        "attention_sink_logits_H": "self_attn.sinks", "router_EC": "mlp.router.weight",
        "router_bias_E": "mlp.router.bias",
    } | {
        f"{part}_{kind}_{shape}": f"mlp.experts.{{}}.{part}_proj.{name}"
        for part, shapes in {"gate": ("IC", "I"), "up": ("IC", "I"), "down": ("CI", "C")}.items()
        for kind, name, shape in zip(("proj", "bias"), ("weight", "bias"), shapes, strict=True)
    },
    accepted={
        "attention_bias": (True,), "num_local_experts": None, "num_experts": None, "quantization_config": None,
        "swiglu_limit": (7.0,), "swiglu_alpha": (1.702,),
    },
    theta=150_000.0,
    stacked_experts=True,
)  # fmt: skip


def granite(config: Fields) -> Architecture:
    """Return Granite's architecture: `attention_multiplier` takes the place of 1 / sqrt(D)."""
    heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", config.integer("hidden_size") // heads)
    factors = {
        name: config.number(name, minimum=1e-6)
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


def olmo2(config: Fields) -> Architecture:
    """Return the architecture of OLMo 2 and 3, which is the same for all configs."""
    return Architecture(qk_norm="row", input_norms=False, output_norms=True)


_OLMO2_NAMES = LLAMA_NAMES | {
    "attn_out_norm_C": "post_attention_layernorm.weight",
    "mlp_out_norm_C": "post_feedforward_layernorm.weight",
}
OLMO2 = Family(
    {**LLAMA.defaults, "vocab_size": 50_304, "rms_norm_eps": 1e-5},
    olmo2,
    names=_OLMO2_NAMES,
)
OLMO3 = Family(
    {**OLMO2.defaults, "sliding_window": 4096},
    olmo2,
    full_layer_every(4),
    _OLMO2_NAMES,
    theta=500_000.0,
    local_theta=500_000.0,
)


def smollm3(config: Fields) -> Architecture:
    """Return SmolLM3's architecture. Raises ModelError."""
    layers = config.integer("num_hidden_layers", maximum=MOST_LAYERS)
    listed_rotations = config.get("no_rope_layers")
    interval = config.integer("no_rope_layer_interval")
    layer_rotations = (
        [(layer + 1) % interval != 0 for layer in range(layers)] if listed_rotations is None else listed_rotations
    )
    if (
        not isinstance(layer_rotations, list)
        or len(layer_rotations) != layers
        or not all(rotates_layer in (0, 1) for rotates_layer in layer_rotations)
    ):
        raise config.refusal("no_rope_layers", [f"lists of {layers} of 0 and 1"])
    return replace(
        llama(config), kinds=tuple(LayerKind(rope=0 if rotates_layer else 1) for rotates_layer in layer_rotations)
    )


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


FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "phi3": PHI3,
    "smollm3": SMOLLM3,
    "granite": GRANITE,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gemma3": replace(GEMMA3, text_field="text_config"),
    "glm4": GLM4,
    "glm4_moe": GLM4_MOE,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "gpt_oss": GPT_OSS,
}
