"""Places of a decoder's weights in the files: the name of each tensor, its shape there, and which part is wanted.

Shape suffixes: V vocabulary, C hidden size, I MLP size, D head size, Q = query heads * D, P = KV heads * D.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from triforce.checkpoint.model_families.family import DENSE, LLAMA_NAMES, SHARED
from triforce.distributed.group import TPGroup, span
from triforce.model.architecture import Architecture, Experts
from triforce.model.config import ModelConfig

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
Shape = tuple[int, ...]
Cut = tuple[slice | Tensor, *tuple[slice, ...]]
Source = tuple[str, Shape, Cut]
"""The name of a tensor in the files, its shape there, and which part of it is wanted."""


EXPERT_FIELDS = ("gate_proj_IC", "up_proj_IC", "down_proj_CI")
MLP_BIASES = ("gate_bias_I", "up_bias_I", "down_bias_C")
SUMMED = ("o_proj_CQ", "down_proj_CI", "o_bias_C", "down_bias_C")
"""Fields of products whose parts ranks that are not exact add up."""


class FieldPlace(NamedTuple):
    """Place of a field of `Layer` in the files: a tensor there, its shape, and which part of it is the field's."""

    name: str
    whole: Shape
    shape: Shape
    first: int = 0
    """The field begins behind so many rows, or columns,"""
    axis: int = 0
    """which this tells."""


def tensor_shapes(config: ModelConfig, rows: int, names: Mapping[str, str] = LLAMA_NAMES) -> dict[str, Shape]:
    """Every tensor that the files of such a model hold, by its name there. Sizes of no config take memory."""
    C = config.hidden_size
    layers = [_places(config, names, layer) for layer in range(config.layers)]
    ends = {EMBEDDING: (rows, C), NORM: (C,)} | ({} if config.tied else {HEAD: (rows, C)})
    return ends | {place.name: place.whole for layer in layers for place in layer.values()}


def layer_sources(config: ModelConfig, names: Mapping[str, str], layer: int, ranks: TPGroup) -> dict[str, Source]:
    """Return the source of each field of `Layer` that this model has, for one of several `ranks`.

    Fields of an expert have its number behind them.
    """
    order, found = rotation_order(config.architecture, config.head_dim), dict[str, Source]()
    for field, (name, whole, shape, first, axis) in _places(config, names, layer).items():
        cut = _cut(field.partition("/")[0], shape, ranks)
        if order is not None and field[:6] in ("q_proj", "k_proj", "q_bias", "k_bias", "q_norm", "k_norm"):
            heads_H1 = torch.arange(0, shape[0], config.head_dim)[:, None]
            cut = ((first + heads_H1 + order).flatten()[cut[0]], *cut[1:])
        elif whole != shape:
            parts = [*cut, *[slice(None)] * (axis + 1 - len(cut))]
            parts[axis] = _behind(first, shape[axis], parts[axis])
            cut = parts[0], *(part for part in parts[1:] if isinstance(part, slice))
        found[field] = name, whole, cut
    return found


def _places(config: ModelConfig, names: Mapping[str, str], layer: int) -> dict[str, FieldPlace]:
    """Return where each field of a layer lies."""
    parts, found = config.architecture, dict[str, FieldPlace]()
    experts = parts.experts if layer >= parts.dense_layers else None
    shapes = _shapes(config, experts)
    if experts:
        for field in EXPERT_FIELDS + (MLP_BIASES if experts.biases else ()):
            shape, name = shapes.pop(field), f"model.layers.{layer}.{names[field]}"
            found |= {f"{field}/{n}": FieldPlace(name.format(n), shape, shape) for n in range(experts.count)}
            if experts.shared:
                name = f"model.layers.{layer}.{names[SHARED + field]}"
                found |= _shared(field, name, shape, experts)
    elif parts.experts:
        names = {**names, **{field: names[DENSE + field] for field in EXPERT_FIELDS}}
    for field, shape in shapes.items():
        fused = [other for other in names if names[other] == names[field] and other in shapes]
        first = sum(shapes[other][0] for other in fused[: fused.index(field)])
        whole = (sum(shapes[other][0] for other in fused), *shape[1:])
        found[field] = FieldPlace(f"model.layers.{layer}.{names[field]}", whole, shape, first)
    return found


def _shared(field: str, name: str, shape: Shape, experts: Experts) -> dict[str, FieldPlace]:
    """Return the places of a field of shared experts: one MLP holds them all, each has some of its inner numbers."""
    axis, (outputs, inputs), count = int(field == "down_proj_CI"), shape, experts.shared
    whole = (outputs, count * inputs) if axis else (count * outputs, inputs)
    return {f"{field}/{experts.count + n}": FieldPlace(name, whole, shape, n * shape[axis], axis) for n in range(count)}


def rotation_order(parts: Architecture, head_dim: int) -> Tensor | None:
    """Return which channel of a head in the files stands at each place here, int64 (D); None where it is the same.

    Here channel i turns with channel i + D / 2. Those that are not rotated have the frequency 0, and are shared out to
    both halves behind those that are. Scores do not change, as queries and keys change alike.
    """
    rotated = parts.rotated or head_dim
    if rotated == head_dim and not parts.interleaved:
        return None
    pairs = torch.arange(rotated).view(-1, 2).T if parts.interleaved else torch.arange(rotated).view(2, -1)
    return torch.cat([pairs, torch.arange(rotated, head_dim).view(2, -1)], 1).flatten()


def _shapes(config: ModelConfig, experts: Experts | None) -> dict[str, Shape]:
    """Return the shape of each field of `Layer` that this model has; of layers with experts, or of those without."""
    C, D, parts = config.hidden_size, config.head_dim, config.architecture
    inner = parts.dense_size if parts.experts and not experts else config.intermediate_size
    Q, P = config.heads * D, config.kv_heads * D
    q_norm, k_norm = (Q, P) if parts.qk_norm == "row" else (D, D)
    shapes: dict[str, Shape] = {
        "q_proj_QC": (Q, C), "k_proj_PC": (P, C), "v_proj_PC": (P, C), "o_proj_CQ": (C, Q),
        "gate_proj_IC": (inner, C), "up_proj_IC": (inner, C), "down_proj_CI": (C, inner),
    }  # fmt: skip
    biased = experts.biases if experts else parts.mlp_bias
    if biased:
        shapes |= dict(zip(MLP_BIASES, ((inner,), (inner,), (C,)), strict=True))
    if experts:
        shapes |= {"router_EC": (experts.count, C)}
        if experts.corrected:
            shapes |= {"router_correction_E": (experts.count,)}
        if experts.biases:
            shapes |= {"router_bias_E": (experts.count,)}
    if parts.input_norms:
        shapes |= {"input_norm_C": (C,), "post_norm_C": (C,)}
    if parts.output_norms:
        shapes |= {"attn_out_norm_C": (C,), "mlp_out_norm_C": (C,)}
    if parts.attention_sink_logits:
        shapes |= {"attention_sink_logits_H": (config.heads,)}
    if parts.o_bias:
        shapes |= {"o_bias_C": (C,)}
    if parts.qkv_bias:
        shapes |= {"q_bias_Q": (Q,), "k_bias_P": (P,), "v_bias_P": (P,)}
    if parts.qk_norm:
        shapes |= {"q_norm_D": (q_norm,), "k_norm_D": (k_norm,)}
    return shapes


def _cut(field: str, shape: Shape, ranks: TPGroup) -> Cut:
    """Return a rank's part of a tensor: norms and routers are whole, projections have some outputs, or some inputs.

    Whole are biases of sums that ranks add up, too: those of rank 0 count.
    """
    if "norm" in field or "router" in field:
        return (slice(None),)
    if field in SUMMED and not ranks.exact:
        return slice(None), *(span(size, ranks) for size in shape[1:])
    return (span(shape[0], ranks),)


def _behind(first: int, size: int, part: slice | Tensor) -> slice:
    """Return a part of so many rows or columns, which lie behind `first` others in their tensor."""
    assert isinstance(part, slice)
    start, stop, _ = part.indices(size)
    return slice(first + start, first + stop)
