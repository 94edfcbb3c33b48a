"""The tensors of a feature draft's folder, by their names there, held to its config before any is read.

Shape suffixes as in model/feature_draft.py, and V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from triforce.checkpoint.weight_files import Archive, open_archives, require_shape
from triforce.checkpoint.weights import SOURCES
from triforce.errors import ModelError
from triforce.model.feature_draft import FeatureDraftConfig, FeatureDraftWeights, shapes
from triforce.model.weights import numbers

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
FC_NORM, HEAD, OFFSETS, CHOSEN = "fc_norm.{}.weight", "lm_head.weight", "d2t", "t2d"
TABLES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
IGNORED = ("embed_tokens.weight",)
"""Published beside the rest at times; it is the target's."""


def read_draft_weights(folder: Path, config: FeatureDraftConfig) -> FeatureDraftWeights:
    """Read the weights of a draft, float32. Raises ModelError naming the tensor that is missing, unknown or wrong."""
    archives, wanted = open_archives(folder), shapes(config)
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
    tensor = numbers(archives[name].glance(name))
    if tensor.dtype not in SOURCES:
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
    table = numbers(archives[name].glance(name))
    return table if table.dtype in TABLES else None
