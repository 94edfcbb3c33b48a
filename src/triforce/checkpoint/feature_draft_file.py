"""Feature drafts as files: a folder with config.json and safetensors, in the names of EAGLE-3's published checkpoints.

Those of Llama 3.1 and Qwen3 are read as they are. What `feature_draft_writer` adds stands in the field `triforce`:
which target it reads, by its fingerprint, behind which layers, and what it sees. Its head is of the target's rows.

Shape suffixes as in model/feature_draft.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triforce.checkpoint.feature_draft_tensors import read_draft_weights
from triforce.checkpoint.hf_config import read_rope
from triforce.checkpoint.hub import read_json
from triforce.checkpoint.json_fields import MOST_CHANNELS, Fields
from triforce.checkpoint.model_families.llama import LLAMA
from triforce.checkpoint.rope_scaling import Unscaled
from triforce.errors import ModelError, argument
from triforce.model.config import ModelConfig
from triforce.model.feature_draft import FeatureDraftConfig, FeatureDraftWeights
from triforce.model.rope import Rope

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
        rope, weights = self.config.rope, self.weights
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
    found: str | None = Fields(read_json(folder / "config.json"), "config.json").within("triforce").get("target")
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
    about = Fields(raw, "config.json").within("triforce")
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
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    head_dim = fields.whole("head_dim", max(hidden // heads, 1), most=MOST_CHANNELS)
    if head_dim % 2:
        raise fields.refusal("head_dim", ["even numbers"])
    vocab_size = fields.whole("vocab_size")
    _, theta, scaling = read_rope(fields, LLAMA, head_dim, fields.whole("max_position_embeddings", target.context))
    inv_freq_F, scale = scaling.frequencies(theta, head_dim, target.context)
    return FeatureDraftConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size"),
        heads=heads,
        kv_heads=fields.whole("num_key_value_heads", heads),
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6, least=1e-12, most=1.0),
        state_layers=_state_layers(fields, about, target.layers),
        choices=fields.whole("draft_vocab_size", vocab_size, most=vocab_size),
        rope=Rope(inv_freq_F, scale),
        sinks=about.whole("sinks", SINKS, most=MOST_SEEN),
        window=about.whole("window", WINDOW, most=MOST_SEEN),
        fc_norm=fields.flag("fc_norm", False),
        norm_output=fields.flag("norm_output", False),
        norm_before_residual=fields.flag("norm_before_residual", False),
        embedding_residual=about.flag("embedding_residual", False),
    )


def _state_layers(fields: Fields, about: Fields, layers: int) -> tuple[int, ...]:
    """Layers behind which states are read. Published configs count those before, or name the layer that gave one."""
    found, more = about.get("state_layers"), 0
    if found is None:
        found = fields.get("eagle_aux_hidden_state_layer_ids")
    if found is None and (named := fields.within("eagle_config").get("eagle_aux_hidden_state_layer_ids")) is not None:
        found, more = named, 1
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
