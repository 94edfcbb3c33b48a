"""Weights out of the files of a Hugging Face folder, and the fingerprint that ties saved KV caches to a model.

Weights that fit as they are stay in the mapped files.

Shape suffixes: V vocabulary, C hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triforce.checkpoint.model_families import DENSE, LLAMA_NAMES, SHARED
from triforce.checkpoint.weight_files import Archive, require_shape
from triforce.distributed.group import ALONE, TPGroup, span
from triforce.errors import ModelError, argument
from triforce.model.config import Architecture, Experts, ModelConfig
from triforce.model.weights import Layer, Matrix, Mlp, QuantizedWeight, Weights, numbers

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
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
    tensor_shape: Shape
    shape: Shape
    offset: int = 0
    """The field begins behind so many rows, or columns,"""
    axis: int = 0
    """which this tells."""


def tensor_shapes(config: ModelConfig, rows: int, names: Mapping[str, str] = LLAMA_NAMES) -> dict[str, Shape]:
    """Every tensor that the files of such a model hold, by its name there. Sizes of no config take memory."""
    C = config.hidden_size
    layers = [_field_places(config, names, layer) for layer in range(config.layers)]
    ends = {EMBEDDING: (rows, C), NORM: (C,)} | ({} if config.tied else {HEAD: (rows, C)})
    return ends | {place.name: place.tensor_shape for layer in layers for place in layer.values()}


def layer_sources(config: ModelConfig, names: Mapping[str, str], layer: int, ranks: TPGroup) -> dict[str, Source]:
    """Return the source of each field of `Layer` that this model has, for one of several `ranks`.

    Fields of an expert have its number behind them.
    """
    order = rotation_order(config.architecture, config.head_dim)
    sources = dict[str, Source]()
    for field, (name, tensor_shape, shape, offset, axis) in _field_places(config, names, layer).items():
        cut = _cut(field.partition("/")[0], shape, ranks)
        if order is not None and field[:6] in ("q_proj", "k_proj", "q_bias", "k_bias", "q_norm", "k_norm"):
            heads_H1 = torch.arange(0, shape[0], config.head_dim)[:, None]
            cut = ((offset + heads_H1 + order).flatten()[cut[0]], *cut[1:])
        elif tensor_shape != shape:
            parts = [*cut, *[slice(None)] * (axis + 1 - len(cut))]
            parts[axis] = _shift_slice(offset, shape[axis], parts[axis])
            cut = parts[0], *(part for part in parts[1:] if isinstance(part, slice))
        sources[field] = name, tensor_shape, cut
    return sources


def _field_places(config: ModelConfig, names: Mapping[str, str], layer: int) -> dict[str, FieldPlace]:
    """Return where each field of a layer lies."""
    parts = config.architecture
    places = dict[str, FieldPlace]()
    experts = parts.experts if layer >= parts.dense_layers else None
    shapes = _shapes(config, experts)
    if experts:
        for field in EXPERT_FIELDS + (MLP_BIASES if experts.biases else ()):
            shape = shapes.pop(field)
            name = f"model.layers.{layer}.{names[field]}"
            places |= {f"{field}/{n}": FieldPlace(name.format(n), shape, shape) for n in range(experts.count)}
            if experts.shared:
                name = f"model.layers.{layer}.{names[SHARED + field]}"
                places |= _shared_expert_places(field, name, shape, experts)
    elif parts.experts:
        names = {**names, **{field: names[DENSE + field] for field in EXPERT_FIELDS}}
    for field, shape in shapes.items():
        fused = [fused_field for fused_field in names if names[fused_field] == names[field] and fused_field in shapes]
        offset = sum(shapes[fused_field][0] for fused_field in fused[: fused.index(field)])
        tensor_shape = (sum(shapes[fused_field][0] for fused_field in fused), *shape[1:])
        places[field] = FieldPlace(f"model.layers.{layer}.{names[field]}", tensor_shape, shape, offset)
    return places


def _shared_expert_places(field: str, name: str, shape: Shape, experts: Experts) -> dict[str, FieldPlace]:
    """Return the places of a field of shared experts: one MLP holds them all, each has some of its inner numbers."""
    axis, (outputs, inputs), count = int(field == "down_proj_CI"), shape, experts.shared
    tensor_shape = (outputs, count * inputs) if axis else (count * outputs, inputs)
    return {
        f"{field}/{experts.count + n}": FieldPlace(name, tensor_shape, shape, n * shape[axis], axis)
        for n in range(count)
    }


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
    C = config.hidden_size
    D = config.head_dim
    parts = config.architecture
    inner = parts.dense_size if parts.experts and not experts else config.intermediate_size
    Q = config.heads * D
    P = config.kv_heads * D
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


def _shift_slice(offset: int, size: int, part: slice | Tensor) -> slice:
    """Return a part of so many rows or columns, which lie behind `offset` others in their tensor."""
    assert isinstance(part, slice)
    start, stop, _ = part.indices(size)
    return slice(offset + start, offset + stop)


SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # sums of integers do not depend on their order
IN_FLOAT32 = ("router_EC", "router_bias_E", "router_correction_E", "attention_sink_logits_H")
READ_AS_FLOAT32 = ("router_correction_E",)
"""Fields that are read in float32 whatever the type of the weights, as rounded ones would choose other experts."""
SAMPLE = 1024  # elements of each tensor that enter the fingerprint
PART = 1 << 18  # elements whose bits are added up at a time


def read_weights(
    where: Path,
    archives: Mapping[str, Archive],
    config: ModelConfig,
    *,
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
    ranks: TPGroup = ALONE,
    names: Mapping[str, str] = LLAMA_NAMES,
) -> Weights:
    """The weights in `archives`. Embedding and head have `rows` rows; those past `config.vocab_size` are left out.

    `names`: those of a layer's tensors (see `Family`). `config` is the whole model's. One of several `ranks` reads its
    part only (see `backends.tensor_parallel`). Raises ModelError naming the file or the tensor that is corrupt,
    missing, unknown, of another shape, or not finite.
    """
    require_tensors(where, archives, config, rows, names)
    reader = _Reader(where, archives, device, dtype)
    blocks = [layer_sources(config, names, layer, ranks) for layer in range(config.layers)]
    table = (span(config.vocab_size, ranks),)
    embedding_VC = reader.take(EMBEDDING, table)
    exact = replace(reader, dtype=torch.float32)
    parts: list[dict[str, Any]] = [
        {
            field: (exact if field in READ_AS_FLOAT32 else reader).take(
                name, cut, _sharing_experts(field, shape, config)
            )
            for field, (name, shape, cut) in block.items()
        }
        for block in blocks
    ]
    head_VC = reader.take(HEAD, table) if HEAD in reader.archives else embedding_VC
    if config.tied and head_VC is not embedding_VC and not _equal(head_VC, embedding_VC):
        raise ModelError(
            f"config.json: tie_word_embeddings = True, but {HEAD} differs from {EMBEDDING}: set it to false to use both"
        )
    norm_C = reader.take(NORM, (slice(None),))
    offset = config.architecture.norm_offset
    for part in parts:
        part |= {field: _add_norm_offset(offset, norm) for field, norm in part.items() if "norm" in field}
        part |= _zeroed_biases(part, ranks)
    norm_C = _add_norm_offset(offset, norm_C)
    layers = tuple(layer_of(part) for part in parts)
    return Weights(embedding_VC, layers, norm_C, embedding_VC if config.tied else head_VC)


def require_tensors(
    where: Path, archives: Mapping[str, Archive], config: ModelConfig, rows: int, names: Mapping[str, str] = LLAMA_NAMES
) -> None:
    """Raise ModelError unless the tensors of the files are those of a config, by their names and shapes.

    Nothing is made of the config's sizes before, so that they take no more memory than the files have.
    """
    # Old checkpoints also store the rotation frequencies, which follow from the config.
    tensor_names = {name for name in archives if not name.endswith("rotary_emb.inv_freq")}
    experts = config.architecture.experts
    layers = config.layers
    if max(layers, (layers - config.architecture.dense_layers) * (experts.count if experts else 0)) > len(tensor_names):
        expert_clause = f" of {experts.count} experts each" if experts else ""
        raise ModelError(
            f"{where}: the config asks for {layers} layers{expert_clause}, but the weights have {len(tensor_names)} "
            "tensors in all; config.json and the weights must belong together"
        )
    shapes = tensor_shapes(config, rows, names)
    if missing := sorted(shapes.keys() - tensor_names):
        tied = "; if the embedding is the head, set tie_word_embeddings" if missing == [HEAD] else ""
        raise ModelError(f"{where}: the weights lack the tensor {missing[0]} ({len(missing)} missing in all){tied}")
    if unknown := sorted(tensor_names - shapes.keys() - {HEAD}):
        raise ModelError(
            f"{where}: tensor {unknown[0]} is not part of such a model ({len(unknown)} unknown in all); "
            "config.json and the weights must belong together"
        )
    for name, shape in (shapes | ({HEAD: shapes[EMBEDDING]} if HEAD in tensor_names else {})).items():
        require_shape(archives, name, shape)


def read_embedding(
    where: Path, archives: Mapping[str, Archive], config: ModelConfig, *, device: torch.device, dtype: torch.dtype
) -> Matrix:
    """Return the embedding alone, of all tokens, whatever ranks share, of archives that `read_weights` has read."""
    return _Reader(where, archives, device, dtype).take(EMBEDDING, (slice(config.vocab_size),))


def _sharing_experts(field: str, shape: Shape, config: ModelConfig) -> int:
    """Return among how many experts the inputs of a field's tensor are parted; 1 where they are of no expert."""
    return shape[1] // config.intermediate_size if field.startswith("down_proj_CI/") else 1


def _add_norm_offset(offset: float, weight: Matrix) -> Tensor:
    """Return the weight of a norm: a sum in float32, as one rounded to fewer bits would lose what the files have."""
    return numbers(weight).float() + offset if offset else numbers(weight)


def _zeroed_biases(part: dict[str, Any], ranks: TPGroup) -> dict[str, Any]:
    """Return zeros for biases of sums that ranks add up, but on rank 0, whose biases count."""
    biases = [field for field in part if "bias" in field and field.partition("/")[0] in SUMMED]
    return {field: torch.zeros_like(part[field]) for field in biases if ranks.rank and not ranks.exact}


def layer_of(parts: Mapping[str, Any]) -> Layer:
    """Put a layer together of its fields, those of experts with their numbers behind them (see `layer_sources`)."""
    experts: dict[int, dict[str, Any]] = {}
    layer_fields: dict[str, Any] = dict.fromkeys(("input_norm_C", "post_norm_C", *EXPERT_FIELDS))
    for name, part in parts.items():
        field, _, number = name.partition("/")
        target_fields = experts.setdefault(int(number), {}) if number else layer_fields
        target_fields[field] = numbers(part).float() if field in IN_FLOAT32 else part
    return Layer(**layer_fields, experts=tuple(Mlp(**experts[number]) for number in sorted(experts)))


def _equal(head_VC: Matrix, embedding_VC: Matrix) -> bool:
    return isinstance(head_VC, Tensor) and isinstance(embedding_VC, Tensor) and torch.equal(head_VC, embedding_VC)


NOT_IN_FINGERPRINT = (
    "rope", "architecture", "context", "ranks", "kv_int8", "hadamard", "attention_sink_logits_LH", "count", "chosen",
    "renormalised", "biases",
)  # fmt: skip
"""Fields of a config that are told otherwise, or do not change what is computed: the last ones `experts` tells."""


def fingerprint_facts(config: ModelConfig) -> list[tuple[str, object]]:
    """Return the facts of a config that a fingerprint tells, of an arithmetic those in which it is not Llama's.

    So a fingerprint stays what it is when later versions know more of other models.
    """
    defaults = {field.name: field.default for part in (ModelConfig, Architecture, Experts) for field in fields(part)}
    parts: list[ModelConfig | Architecture | Experts] = [config, config.architecture]
    parts += [config.architecture.experts] if config.architecture.experts else []
    facts = [(f.name, getattr(part, f.name)) for part in parts for f in fields(part)]
    return [(name, value) for name, value in facts if name not in NOT_IN_FINGERPRINT and value != defaults[name]]


def fingerprint(config: ModelConfig, weights: Weights) -> str:
    """Digest of shapes, rotation, dtype, and of each weight a sample and the sum of its bits; and the type of KV."""
    digest = hashlib.sha256()
    # The context bounds what a model may see, and changes what it computes only through the rotation.
    kv = ", int8 KV" * config.kv_int8 + ", rotated heads" * config.rotates_heads
    rope = config.rope
    digest.update(repr((fingerprint_facts(config), rope.scale, str(weights.embedding_VC.dtype))).encode())
    for weight in (rope.inv_freq_RF, *weights.tensors()):
        tensor = weight if isinstance(weight, Tensor) else weight.blocks
        digest.update(repr(tuple(tensor.shape)).encode())
        n = tensor.numel()
        k = min(tensor.numel(), SAMPLE)
        sample = tensor.flatten()[torch.arange(k, device=tensor.device) * (n - 1) // max(k - 1, 1)]
        digest.update(sample.float().cpu().numpy().tobytes())
        # By parts, as the sum of a whole would first take four times the tensor's memory.
        parts = torch.split(tensor.view(_BITS[tensor.itemsize]).flatten(), PART)
        digest.update(str(sum([int(part.sum(dtype=torch.int64)) for part in parts])).encode())
        if isinstance(weight, QuantizedWeight):
            digest.update(weight.kind.encode())
            weight.release()
    return digest.hexdigest() + kv


def weights_fingerprint(fingerprint: str) -> str:
    """Return what a fingerprint says of a model, whatever the type of its KV."""
    return fingerprint.partition(",")[0]


@dataclass(frozen=True, slots=True)
class _Reader:
    """Checked tensors out of the archives, on a device, in a dtype."""

    where: Path
    archives: Mapping[str, Archive]
    device: torch.device
    dtype: torch.dtype

    def take(self, name: str, cut: Cut, parts: int = 1) -> Matrix:
        """Return a part of a tensor. Raises ModelError.

        parts: experts that its inputs are parted among.
        """
        archive = self.archives[name]
        tensor = archive.view(name)
        if isinstance(tensor, QuantizedWeight):
            if (expert_inputs := tensor.inputs // parts) % tensor.block:
                raise ModelError(
                    f"tensor {name} is {tensor.kind}, in blocks of {tensor.block} inputs, but each of the {parts} "
                    f"shared experts in it has {expert_inputs}; use a file that has it in a type with smaller blocks, "
                    f"such as {'BF16' if expert_inputs % 32 else 'Q8_0 or Q4_0'}, or a folder of safetensors"
                )
            return tensor.part(*cut)
        if tensor.dtype not in SOURCE_DTYPES:
            raise ModelError(f"tensor {name} is {tensor.dtype}, which is not supported; use unquantized weights")
        dtype = tensor.dtype if archive.packed else self.dtype
        fits = tensor.dtype == dtype and self.device.type == "cpu"
        tensor = tensor[cut] if fits else numbers(archive.transient_view(name))[cut].to(self.device, dtype)
        # The extremes tell NaN and Inf in one read, without a temporary and without the overflow that a sum may have.
        if not all(extreme.isfinite() for extreme in torch.aminmax(tensor)):
            raise self._not_finite(name, dtype)
        return tensor.contiguous()

    def _not_finite(self, name: str, dtype: torch.dtype) -> ModelError:
        """Return the error of a tensor that is damaged, or of numbers that a narrower dtype has no room for."""
        if all(extreme.isfinite() for extreme in torch.aminmax(numbers(self.archives[name].transient_view(name)))):
            return ModelError(f"{self.where}: tensor {name} has numbers beyond {dtype}; change {argument('dtype')}")
        return ModelError(f"{self.where} is damaged: tensor {name} holds NaN or Inf; download it again")
