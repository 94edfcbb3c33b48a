"""The folder of an EAGLE head: its config and tensors, held to each other before weights are read, and written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from triforce.checkpoint.hf_config import read_rope
from triforce.checkpoint.hub import read_json
from triforce.checkpoint.json_fields import MOST_CHANNELS, Fields
from triforce.checkpoint.model_families import LLAMA
from triforce.checkpoint.rope_scaling import Unscaled
from triforce.checkpoint.weight_files import Archive, open_archives, require_shape
from triforce.checkpoint.weights import SOURCE_DTYPES
from triforce.eagle.head import FeatureDraftConfig, FeatureDraftWeights, shapes
from triforce.errors import ModelError, RequestError, argument
from triforce.model.config import ModelConfig
from triforce.model.rope import Rope
from triforce.model.weights import numbers
from triforce.whole_file import whole_file

LAYER = "midlayer."
NAMES = {
    "fc_CX": "fc.weight",
    "embedding_norm_C": f"{LAYER}input_layernorm.weight",
    "hidden_norm_C": f"{LAYER}hidden_norm.weight",
    "q_proj_QE": f"{LAYER}self_attn.q_proj.weight",
    "k_proj_PE": f"{LAYER}self_attn.k_proj.weight",
    "v_proj_PE": f"{LAYER}self_attn.v_proj.weight",
    "o_proj_CQ": f"{LAYER}self_attn.o_proj.weight",
    "post_norm_C": f"{LAYER}post_attention_layernorm.weight",
    "gate_proj_IC": f"{LAYER}mlp.gate_proj.weight",
    "up_proj_IC": f"{LAYER}mlp.up_proj.weight",
    "down_proj_CI": f"{LAYER}mlp.down_proj.weight",
    "norm_C": "norm.weight",
    "embedding_proj_CC": f"{LAYER}embedding_proj.weight",
}
"""The last one is of our own drafts."""
FC_NORM = "fc_norm.{}.weight"
HEAD = "lm_head.weight"
OFFSETS = "d2t"
CHOSEN = "t2d"
TABLES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
IGNORED = ("embed_tokens.weight",)
"""Published beside the rest at times; it is the target's."""


def read_draft_weights(folder: Path, config: FeatureDraftConfig) -> FeatureDraftWeights:
    """Read the weights of a draft, float32. Raises ModelError naming the tensor that is missing, unknown or wrong."""
    archives = open_archives(folder)
    wanted = shapes(config)
    norms = wanted.pop("fc_norm_SC", None)
    found = {field: _take(folder, archives, NAMES[field], shape) for field, shape in wanted.items()}
    if norms:
        each = [_take(folder, archives, FC_NORM.format(i), norms[1:]) for i in range(norms[0])]
        found["fc_norm_SC"] = torch.stack(each)
    extra = [HEAD] if HEAD in archives else []
    if extra:
        found["head_MC"] = _take(folder, archives, HEAD, (config.choices, config.hidden_size))
    names = {*(NAMES[field] for field in wanted), *extra, OFFSETS, CHOSEN, *IGNORED}
    names |= {FC_NORM.format(i) for i in range(norms[0] if norms else 0)}
    if unknown := sorted(set(archives) - names):
        raise ModelError(f"{folder}: tensor {unknown[0]} is not part of such a draft ({len(unknown)} unknown in all)")
    return FeatureDraftWeights(**found, tokens_M=_tokens(folder, archives, config))


def _take(folder: Path, archives: Mapping[str, Archive], name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in archives:
        raise ModelError(f"{folder}: the weights lack the tensor {name}; copy the whole folder again")
    require_shape(archives, name, shape)
    tensor = numbers(archives[name].transient_view(name))
    if tensor.dtype not in SOURCE_DTYPES:
        raise ModelError(f"tensor {name} is {tensor.dtype}, which is not supported; use weights of 16 or 32 bits")
    if not all(extreme.isfinite() for extreme in torch.aminmax(tensor)):
        raise ModelError(f"tensor {name} holds NaN or Inf; copy {folder} again")
    return tensor.float()


def _tokens(folder: Path, archives: Mapping[str, Archive], config: FeatureDraftConfig) -> Tensor:
    """Return the token of each row of the head, int64 (M): its number and the offset in d2t, which t2d must confirm."""
    if OFFSETS not in archives and config.choices == config.vocab_size:
        return torch.arange(config.choices)
    wrong = ModelError(f"{folder}: the table {OFFSETS} does not name {config.choices} tokens; copy the folder again")
    offsets_M = _table(archives, OFFSETS, config.choices)
    if offsets_M is None:
        raise wrong
    tokens_M = torch.arange(config.choices) + offsets_M.long()
    fits = bool((tokens_M.diff() > 0).all()) and int(tokens_M[0]) >= 0 and int(tokens_M[-1]) < config.vocab_size
    if fits and CHOSEN in archives:
        chosen_V = _table(archives, CHOSEN, config.vocab_size)
        fits = chosen_V is not None and torch.equal(chosen_V.nonzero().flatten(), tokens_M)
    if not fits:
        raise wrong
    return tokens_M


def _table(archives: Mapping[str, Archive], name: str, size: int) -> Tensor | None:
    """Return a table of so many whole numbers; None where there is none, or another one."""
    if name not in archives or archives[name].shape(name) != (size,):
        return None
    table = numbers(archives[name].transient_view(name))
    return table if table.dtype in TABLES else None


FORMAT = 1
THETA = 10_000.0
"""Of the rotations of a new draft: it sees a window, whatever its target's positions."""
SINKS, WINDOW = 16, 496
"""Entries that a new draft sees, or one whose file does not say: those of a streaming draft."""
MOST_SEEN = 1 << 20
"""Entries that a draft is thought to see."""


@dataclass(frozen=True)
class FeatureDraftFile:
    """A draft, and what its folder says of it.

    target: fingerprint of the model whose states it reads, None if it does not say. card: figures that training left.
    """

    config: FeatureDraftConfig
    weights: FeatureDraftWeights
    target: str | None = None
    card: Mapping[str, Any] | None = None

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest: two drafts with the same one make the same entries and guesses of the same states."""
        shape = [getattr(self.config, f.name) for f in fields(FeatureDraftConfig) if f.name != "rope"]
        digest = hashlib.sha256(repr(shape).encode())
        rope = self.config.rope
        weights = self.weights
        tensors = [
            rope.inv_freq_RF,
            torch.tensor(rope.scale),
            weights.tokens_M,
            *(each for _, each in weights.trained()),
        ]
        for tensor in tensors + ([weights.head_MC] if weights.head_MC is not None else []):
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        return digest.hexdigest()


def states_of(layers: int) -> tuple[int, ...]:
    """Behind which layers of a target the residual stream is read by a new draft: early, in the middle, and late.

    The last layer's is not: passes whose logits nobody wants do not finish it.
    """
    return tuple(sorted({min(2, layers - 1), layers // 2, layers - 1} - {0}))


def new_config(target: ModelConfig, choices: int) -> FeatureDraftConfig:
    """Return the shape of a new draft for a target, whose attention and MLP it has. Raises ModelError."""
    if target.layers < 2:
        raise ModelError("a model of one layer has no hidden states between layers, which a feature draft reads")
    inv_freq_F, scale = Unscaled().frequencies(THETA, target.head_dim, target.context)
    return FeatureDraftConfig(
        target.vocab_size, target.hidden_size, target.intermediate_size, target.heads, target.kv_heads,
        target.head_dim, target.norm_eps, states_of(target.layers), choices, Rope(inv_freq_F, scale), SINKS, WINDOW,
        fc_norm=True, norm_output=True, norm_before_residual=True, embedding_residual=True,
    )  # fmt: skip


def is_feature_draft(path: Path) -> bool:
    """Whether a folder says that it holds such a draft."""
    raw = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    return "draft_vocab_size" in raw or "triforce" in raw


def target_named(folder: Path) -> str | None:
    """Return the fingerprint of the target that a draft was trained for; None if it does not say. Raises ModelError."""
    found: str | None = Fields(read_json(folder / "config.json"), "config.json").nested("triforce").get("target")
    return found


def read_feature_draft(
    folder: Path, target: ModelConfig, fingerprint: str, *, finetune: bool = False
) -> FeatureDraftFile:
    """Read a draft for a target, whose fingerprint is given; float32.

    finetune: the target may be another than the file names, of the same shape. Raises ModelError naming what does not
    fit, or the file that is corrupt.
    """
    raw = read_json(folder / "config.json")
    if not is_feature_draft(folder):
        raise ModelError(f"{folder} holds no draft that reads hidden states (EAGLE-3): its config.json has no "
                         f"draft_vocab_size; a model of its own goes on with {argument('draft')}")  # fmt: skip
    about = Fields(raw, "config.json").nested("triforce")
    about.require("format", (FORMAT,))
    config = _config(Fields(raw, "config.json"), about, target)
    _require_fit(folder, config, target)
    if config.choices > target.vocab_size:
        raise ModelError(f"{folder} proposes {config.choices} tokens, but the target has {target.vocab_size}; it is a "
                         "draft for another model")  # fmt: skip
    made_for = about.get("target")
    if made_for not in (None, fingerprint) and not finetune:
        raise ModelError(
            f"{folder} was trained on the hidden states of another model, or of this one in another dtype; make one "
            f"for this model with triforce train-draft, or if this is a finetune of that one, use finetune:{folder}"
        )
    return FeatureDraftFile(config, read_draft_weights(folder, config), made_for, about.get("card"))


def _config(fields: Fields, about: Fields, target: ModelConfig) -> FeatureDraftConfig:
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
    inv_freq_F, scale = scaling.frequencies(theta, head_dim, target.context)
    return FeatureDraftConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6, minimum=1e-12, maximum=1.0),
        state_layers=_state_layers(fields, about, target.layers),
        choices=fields.integer("draft_vocab_size", vocab_size, maximum=vocab_size),
        rope=Rope(inv_freq_F, scale),
        sinks=about.integer("sinks", SINKS, maximum=MOST_SEEN),
        window=about.integer("window", WINDOW, maximum=MOST_SEEN),
        fc_norm=fields.flag("fc_norm", False),
        norm_output=fields.flag("norm_output", False),
        norm_before_residual=fields.flag("norm_before_residual", False),
        embedding_residual=about.flag("embedding_residual", False),
    )


def _state_layers(fields: Fields, about: Fields, layers: int) -> tuple[int, ...]:
    """Layers behind which states are read. Published configs count those before, or name the layer that gave one."""
    found = about.get("state_layers")
    more = 0
    if found is None:
        found = fields.get("eagle_aux_hidden_state_layer_ids")
    if found is None and (named := fields.nested("eagle_config").get("eagle_aux_hidden_state_layer_ids")) is not None:
        found = named
        more = 1
    if found is None:
        found = [2, layers // 2, layers - 3]  # of EAGLE-3's own code
    fits = isinstance(found, list) and 1 <= len(found) <= 3 and all(type(layer) is int for layer in found)
    if not fits or not all(0 < layer + more < layers for layer in found):
        raise ModelError(
            f"config.json: the draft reads states behind layers {found}, which a target of {layers} layers does not "
            "have; it is a draft for another model"
        )
    return tuple(layer + more for layer in found)


def _require_fit(folder: Path, config: FeatureDraftConfig, target: ModelConfig) -> None:
    pairs = {
        "hidden size": (config.hidden_size, target.hidden_size),
        "KV heads": (config.kv_heads, target.kv_heads * target.ranks),
        "head size": (config.head_dim, target.head_dim),
    }
    for what, (own, wanted) in pairs.items():
        if own != wanted:
            raise ModelError(f"{folder} is no draft for this model: its {what} is {own}, and the target's {wanted}")


def with_head(weights: FeatureDraftWeights, head_MC: Tensor) -> FeatureDraftWeights:
    """Return the weights with the rows of the target's head, unless the draft has one of its own."""
    return weights if weights.head_MC is not None else replace(weights, head_MC=head_MC)


def write_feature_draft(folder: Path, draft: FeatureDraftFile) -> None:
    """Write a draft in bfloat16: each file is there whole, or as it was before. Raises OSError."""
    config = draft.config
    weights = draft.weights
    named = dict(weights.trained())
    norms_SC = named.pop("fc_norm_SC", torch.empty(0, 1))
    tensors = {NAMES[field]: tensor for field, tensor in named.items()}
    tensors |= {FC_NORM.format(i): norm_C for i, norm_C in enumerate(norms_SC)}
    stored = {name: tensor.detach().bfloat16().contiguous() for name, tensor in tensors.items()}
    chosen_V = torch.zeros(config.vocab_size, dtype=torch.bool)
    chosen_V[weights.tokens_M] = True
    stored |= {OFFSETS: weights.tokens_M - torch.arange(config.choices), CHOSEN: chosen_V}
    write_whole(folder / "model.safetensors", save(stored))
    about: dict[str, Any] = {"format": FORMAT, "target": draft.target, "state_layers": list(config.state_layers)}
    about |= {"sinks": config.sinks, "window": config.window, "card": draft.card}
    about |= {"embedding_residual": config.embedding_residual}
    values = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "vocab_size": config.vocab_size, "draft_vocab_size": config.choices, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "rms_norm_eps": config.norm_eps,
        "rope_theta": THETA, "fc_norm": config.fc_norm, "norm_output": config.norm_output,
        "norm_before_residual": config.norm_before_residual, "triforce": about,
    }  # fmt: skip
    write_whole(folder / "config.json", (json.dumps(values, indent=2) + "\n").encode())


def write_whole(file: Path, data: bytes | memoryview) -> None:
    """Write a file, whole or not at all. Raises RequestError."""
    try:
        with whole_file(file) as partial, partial.open("wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        raise RequestError(
            f"{file} cannot be written ({error.strerror}); make room: the same command goes on from there"
        ) from error
