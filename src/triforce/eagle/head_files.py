"""Folders of EAGLE heads: config and tensors, read, checked against each other, and written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triforce.arrays import DType
from triforce.checkpoint.hf_config import read_rope
from triforce.checkpoint.hub import read_json
from triforce.checkpoint.json_fields import MOST_CHANNELS, Fields
from triforce.checkpoint.model_families import LLAMA
from triforce.checkpoint.rope_scaling import Unscaled
from triforce.checkpoint.safetensors_file import serialized
from triforce.checkpoint.weight_files import Archive, open_archives, require_shape
from triforce.checkpoint.weights import SOURCE_DTYPES, all_finite, converted
from triforce.eagle.head import EagleHeadConfig, EagleHeadWeights, shapes
from triforce.errors import ModelError, RequestError, argument
from triforce.model.config import ModelConfig
from triforce.model.rope import Rope
from triforce.model.weights import numbers
from triforce.whole_file import whole_file

LAYER_PREFIX = "midlayer."
NAMES = {
    "fc_CX": "fc.weight",
    "embedding_norm_C": f"{LAYER_PREFIX}input_layernorm.weight",
    "hidden_norm_C": f"{LAYER_PREFIX}hidden_norm.weight",
    "q_proj_QE": f"{LAYER_PREFIX}self_attn.q_proj.weight",
    "k_proj_PE": f"{LAYER_PREFIX}self_attn.k_proj.weight",
    "v_proj_PE": f"{LAYER_PREFIX}self_attn.v_proj.weight",
    "o_proj_CQ": f"{LAYER_PREFIX}self_attn.o_proj.weight",
    "post_norm_C": f"{LAYER_PREFIX}post_attention_layernorm.weight",
    "gate_proj_IC": f"{LAYER_PREFIX}mlp.gate_proj.weight",
    "up_proj_IC": f"{LAYER_PREFIX}mlp.up_proj.weight",
    "down_proj_CI": f"{LAYER_PREFIX}mlp.down_proj.weight",
    "norm_C": "norm.weight",
    "embedding_proj_CC": f"{LAYER_PREFIX}embedding_proj.weight",
}
"""Names of tensors by field. The last one is in our own heads only."""
FC_NORM = "fc_norm.{}.weight"
HEAD = "lm_head.weight"
TOKEN_OFFSETS = "d2t"
TOKEN_MASK = "t2d"
TABLE_DTYPES: tuple[DType, ...] = ("bool", "uint8", "int8", "int16", "int32", "int64")
IGNORED_TENSORS = ("embed_tokens.weight",)
"""Tensors of some published heads that repeat the target's."""


def read_head_weights(folder: Path, config: EagleHeadConfig) -> EagleHeadWeights:
    """Read the weights of a head, float32. Raises ModelError naming a tensor that is missing, unknown or wrong."""
    archives = open_archives(folder)
    tensor_shapes = shapes(config)
    norms = tensor_shapes.pop("fc_norm_SC", None)
    tensors = {field: _read_tensor(folder, archives, NAMES[field], shape) for field, shape in tensor_shapes.items()}
    if norms:
        fc_norms = [_read_tensor(folder, archives, FC_NORM.format(i), norms[1:]) for i in range(norms[0])]
        tensors["fc_norm_SC"] = np.stack(fc_norms)
    extra = [HEAD] if HEAD in archives else []
    if extra:
        tensors["head_MC"] = _read_tensor(folder, archives, HEAD, (config.draft_vocab_size, config.hidden_size))
    names = {*(NAMES[field] for field in tensor_shapes), *extra, TOKEN_OFFSETS, TOKEN_MASK, *IGNORED_TENSORS}
    names |= {FC_NORM.format(i) for i in range(norms[0] if norms else 0)}
    if unknown := sorted(set(archives) - names):
        raise ModelError(f"{folder}: tensor {unknown[0]} is not part of an EAGLE head ({len(unknown)} unknown in all)")
    return EagleHeadWeights(**tensors, tokens_M=_tokens(folder, archives, config))


def _read_tensor(folder: Path, archives: Mapping[str, Archive], name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    if name not in archives:
        raise ModelError(f"{folder}: the weights lack the tensor {name}; copy the whole folder again")
    require_shape(archives, name, shape)
    if (dtype := archives[name].dtype(name)) not in SOURCE_DTYPES:
        raise ModelError(f"tensor {name} is {dtype}, which is not supported; use weights of 16 or 32 bits")
    weight = numbers(archives[name].transient_view(name))
    if not all_finite(weight):
        raise ModelError(f"tensor {name} holds NaN or Inf; copy {folder} again")
    return converted(weight, "float32")


def _tokens(folder: Path, archives: Mapping[str, Archive], config: EagleHeadConfig) -> NDArray[np.int64]:
    """Return the token of each row of the output head, int64 (M): the row's number plus its offset in d2t.

    If the folder has a table t2d, it must name the same tokens. Raises ModelError.
    """
    if TOKEN_OFFSETS not in archives and config.draft_vocab_size == config.vocab_size:
        return np.arange(config.draft_vocab_size)
    wrong = ModelError(
        f"{folder}: the table {TOKEN_OFFSETS} does not name {config.draft_vocab_size} tokens; copy the folder again"
    )
    offsets_M = _table(archives, TOKEN_OFFSETS, config.draft_vocab_size)
    if offsets_M is None:
        raise wrong
    tokens_M = np.arange(config.draft_vocab_size) + offsets_M.astype(np.int64)
    fits = bool((np.diff(tokens_M) > 0).all()) and int(tokens_M[0]) >= 0 and int(tokens_M[-1]) < config.vocab_size
    if fits and TOKEN_MASK in archives:
        chosen_V = _table(archives, TOKEN_MASK, config.vocab_size)
        fits = chosen_V is not None and np.array_equal(chosen_V.nonzero()[0], tokens_M)
    if not fits:
        raise wrong
    return tokens_M


def _table(archives: Mapping[str, Archive], name: str, size: int) -> NDArray[Any] | None:
    """Return a table of `size` integers; None where there is none, or one of another shape or dtype."""
    if name not in archives or archives[name].shape(name) != (size,):
        return None
    is_table = archives[name].dtype(name) in TABLE_DTYPES
    return numbers(archives[name].transient_view(name)) if is_table else None


FORMAT = 1
THETA = 10_000.0
"""RoPE base of a new head, which sees a window at any position of its target."""
SINKS = 16
"""Sink entries of a new head, and default for files without the field `sinks`: as many as a streaming draft has."""
WINDOW = 496
"""Window entries of a new head, and default for files without the field `window`: as many as a streaming draft has."""
MAX_VISIBLE_ENTRIES = 1 << 20
"""Largest count of sinks or window entries that is accepted."""


@dataclass(frozen=True)
class EagleHeadFile:
    """An EAGLE head with the facts of its folder.

    target: fingerprint of the model whose states it reads; None if the folder does not say. card: figures of training.
    """

    config: EagleHeadConfig
    weights: EagleHeadWeights
    target: str | None = None
    card: Mapping[str, Any] | None = None

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest. Heads with the same digest compute the same entries and draft tokens from the same states."""
        shape = [getattr(self.config, f.name) for f in fields(EagleHeadConfig) if f.name != "rope"]
        digest = hashlib.sha256(repr(shape).encode())
        rope = self.config.rope
        weights = self.weights
        arrays = [
            rope.inv_freq_RF,
            np.float32(rope.scale),
            weights.tokens_M,
            *(trained for _, trained in weights.trained_tensors()),
        ]
        for array in arrays + ([weights.head_MC] if weights.head_MC is not None else []):
            digest.update(array.tobytes())
        return digest.hexdigest()


def default_state_layers(layers: int) -> tuple[int, ...]:
    """Return the layers of a target after which a new head reads the residual stream: early, in the middle, and late.

    The last layer is none of them: passes without logits do not finish it.
    """
    return tuple(sorted({min(2, layers - 1), layers // 2, layers - 1} - {0}))


def new_config(target: ModelConfig, draft_vocab_size: int) -> EagleHeadConfig:
    """Return the shape of a new head for a target, with the target's attention and MLP sizes. Raises ModelError."""
    if target.layers < 2:
        raise ModelError("a model of one layer has no hidden states between layers, which an EAGLE head reads")
    inv_freq_F, scale = Unscaled().frequencies(THETA, target.head_dim, target.context)
    return EagleHeadConfig(
        target.vocab_size, target.hidden_size, target.intermediate_size, target.heads, target.kv_heads,
        target.head_dim, target.norm_eps, default_state_layers(target.layers), draft_vocab_size,
        Rope(inv_freq_F, scale), SINKS, WINDOW, fc_norm=True, norm_output=True, norm_before_residual=True,
        embedding_residual=True,
    )  # fmt: skip


def is_eagle_head(path: Path) -> bool:
    """Whether a folder's config is that of an EAGLE head."""
    raw = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    return "draft_vocab_size" in raw or "triforce" in raw


def target_fingerprint(folder: Path) -> str | None:
    """Return the fingerprint of the target that a head was trained for; None if the folder does not say.

    Raises ModelError.
    """
    target: str | None = Fields(read_json(folder / "config.json"), "config.json").nested("triforce").get("target")
    return target


def read_eagle_head(folder: Path, target: ModelConfig, fingerprint: str, *, finetune: bool = False) -> EagleHeadFile:
    """Read an EAGLE head for a target, float32. fingerprint: the target's.

    finetune: accept a target of the same shape with another fingerprint than the file's. Raises ModelError naming the
    size that does not fit, or the corrupt file.
    """
    raw = read_json(folder / "config.json")
    if not is_eagle_head(folder):
        raise ModelError(f"{folder} holds no draft that reads hidden states (EAGLE-3): its config.json has no "
                         f"draft_vocab_size. Use it as an ordinary draft model with {argument('draft')}")  # fmt: skip
    own_fields = Fields(raw, "config.json").nested("triforce")
    own_fields.require("format", (FORMAT,))
    config = _config(Fields(raw, "config.json"), own_fields, target)
    _require_fit(folder, config, target)
    if config.draft_vocab_size > target.vocab_size:
        raise ModelError(f"{folder} proposes {config.draft_vocab_size} tokens, but the target has {target.vocab_size}; "
                         "it is a draft for another model")  # fmt: skip
    trained_for = own_fields.get("target")
    if trained_for not in (None, fingerprint) and not finetune:
        raise ModelError(
            f"{folder} was trained on the hidden states of another model, or of this one in another dtype; make one "
            "for this model with triforce train-draft, or if this model is a finetune of that model, use "
            f"finetune:{folder}"
        )
    return EagleHeadFile(config, read_head_weights(folder, config), trained_for, own_fields.get("card"))


def _config(fields: Fields, own_fields: Fields, target: ModelConfig) -> EagleHeadConfig:
    for name, accepted in (("num_hidden_layers", (1,)), ("hidden_act", ("silu",)), ("attention_bias", (False,)),
                           ("mlp_bias", (False,)), ("target_hidden_size", (target.hidden_size,))):  # fmt: skip
        fields.require(name, accepted)
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", max(hidden // heads, 1), maximum=MOST_CHANNELS)
    if head_dim % 2:
        raise fields.refusal("head_dim", ["even numbers"])
    vocab_size = fields.integer("vocab_size")
    _, theta, scaling = read_rope(fields, LLAMA, head_dim, fields.integer("max_position_embeddings", target.context))
    with np.errstate(all="ignore"):
        inv_freq_F, scale = scaling.frequencies(theta, head_dim, target.context)
    return EagleHeadConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6, minimum=1e-12, maximum=1.0),
        state_layers=_state_layers(fields, own_fields, target.layers),
        draft_vocab_size=fields.integer("draft_vocab_size", vocab_size, maximum=vocab_size),
        rope=Rope(inv_freq_F, scale),
        sinks=own_fields.integer("sinks", SINKS, maximum=MAX_VISIBLE_ENTRIES),
        window=own_fields.integer("window", WINDOW, maximum=MAX_VISIBLE_ENTRIES),
        fc_norm=fields.flag("fc_norm", False),
        norm_output=fields.flag("norm_output", False),
        norm_before_residual=fields.flag("norm_before_residual", False),
        embedding_residual=own_fields.flag("embedding_residual", False),
    )


def _state_layers(fields: Fields, own_fields: Fields, layers: int) -> tuple[int, ...]:
    """Return the counts of layers after which states are read.

    Published configs have these counts, or with `eagle_config` the index of the layer whose output is the state.
    """
    state_layers = own_fields.get("state_layers")
    offset = 0
    if state_layers is None:
        state_layers = fields.get("eagle_aux_hidden_state_layer_ids")
    if (
        state_layers is None
        and (named := fields.nested("eagle_config").get("eagle_aux_hidden_state_layer_ids")) is not None
    ):
        state_layers = named
        offset = 1
    if state_layers is None:
        state_layers = [2, layers // 2, layers - 3]  # defaults of EAGLE-3's own code
    fits = (
        isinstance(state_layers, list)
        and 1 <= len(state_layers) <= 3
        and all(type(layer) is int for layer in state_layers)
    )
    if not fits or not all(0 < layer + offset < layers for layer in state_layers):
        raise ModelError(
            f"config.json: the draft reads states after layers {state_layers}, which a target of {layers} layers does "
            "not have; it is a draft for another model"
        )
    return tuple(layer + offset for layer in state_layers)


def _require_fit(folder: Path, config: EagleHeadConfig, target: ModelConfig) -> None:
    pairs = {
        "hidden size": (config.hidden_size, target.hidden_size),
        "KV heads": (config.kv_heads, target.kv_heads * target.ranks),
        "head size": (config.head_dim, target.head_dim),
    }
    for dimension, (draft_size, target_size) in pairs.items():
        if draft_size != target_size:
            raise ModelError(
                f"{folder} is no draft for this model ({dimension}: {draft_size} in the draft, {target_size} in the "
                "target)"
            )


def with_head(weights: EagleHeadWeights, head_MC: NDArray[np.float32]) -> EagleHeadWeights:
    """Return the weights with rows of the target's output head, unless they have an output head of their own."""
    return weights if weights.head_MC is not None else replace(weights, head_MC=head_MC)


def write_eagle_head(folder: Path, draft: EagleHeadFile) -> None:
    """Write an EAGLE head in bfloat16. Each file is replaced atomically. Raises OSError."""
    config = draft.config
    weights = draft.weights
    named = dict(weights.trained_tensors())
    norms_SC = named.pop("fc_norm_SC", ())
    arrays = {NAMES[field]: array for field, array in named.items()}
    arrays |= {FC_NORM.format(i): norm_C for i, norm_C in enumerate(norms_SC)}
    stored = {name: converted(array, "bfloat16") for name, array in arrays.items()}
    chosen_V = np.zeros(config.vocab_size, np.bool_)
    chosen_V[weights.tokens_M] = True
    stored |= {TOKEN_OFFSETS: weights.tokens_M - np.arange(config.draft_vocab_size), TOKEN_MASK: chosen_V}
    write_atomically(folder / "model.safetensors", serialized(stored))
    own_fields: dict[str, Any] = {"format": FORMAT, "target": draft.target, "state_layers": list(config.state_layers)}
    own_fields |= {"sinks": config.sinks, "window": config.window, "card": draft.card}
    own_fields |= {"embedding_residual": config.embedding_residual}
    values = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "vocab_size": config.vocab_size, "draft_vocab_size": config.draft_vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "rms_norm_eps": config.norm_eps,
        "rope_theta": THETA, "fc_norm": config.fc_norm, "norm_output": config.norm_output,
        "norm_before_residual": config.norm_before_residual, "triforce": own_fields,
    }  # fmt: skip
    write_atomically(folder / "config.json", (json.dumps(values, indent=2) + "\n").encode())


def write_atomically(file: Path, data: bytes | memoryview) -> None:
    """Write a file, whole or not at all, and sync it to disk. Raises RequestError."""
    try:
        with whole_file(file) as partial, partial.open("wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        raise RequestError(
            f"{file} cannot be written ({error.strerror}); make room, and repeat the command to continue the training"
        ) from error
