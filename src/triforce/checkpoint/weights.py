"""Weights out of the files of a Hugging Face folder, and the fingerprint that ties saved KV caches to a model.

Weights that fit as they are stay in the mapped files.

Shape suffixes: V vocabulary, C hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triforce.checkpoint.model_families.family import LLAMA_NAMES
from triforce.checkpoint.tensor_sources import (
    EMBEDDING,
    EXPERT_FIELDS,
    HEAD,
    NORM,
    SUMMED,
    Cut,
    Shape,
    layer_sources,
    tensor_shapes,
)
from triforce.checkpoint.weight_files import Archive, require_shape
from triforce.distributed.group import ALONE, TPGroup, span
from triforce.errors import ModelError, argument
from triforce.model.architecture import Architecture, Experts
from triforce.model.config import ModelConfig
from triforce.model.weights import Layer, Matrix, Mlp, QuantizedWeight, Weights, numbers

SOURCES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # sums of integers do not depend on their order
IN_FLOAT32 = ("router_EC", "router_bias_E", "router_correction_E", "attention_sink_logits_H")
UNROUNDED = ("router_correction_E",)
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
            field: (exact if field in UNROUNDED else reader).take(name, cut, _parts(field, shape, config))
            for field, (name, shape, cut) in block.items()
        }
        for block in blocks
    ]
    head_VC = reader.take(HEAD, table) if HEAD in reader.archives else embedding_VC
    if config.tied and head_VC is not embedding_VC and not _equal(head_VC, embedding_VC):
        raise ModelError(
            f"config.json: tie_word_embeddings = True, but {HEAD} differs from {EMBEDDING}: set it to false to use both"
        )
    norm_C, offset = reader.take(NORM, (slice(None),)), config.architecture.norm_offset
    for part in parts:
        part |= {field: _counted_from(offset, norm) for field, norm in part.items() if "norm" in field}
        part |= _left_to_others(part, ranks)
    norm_C = _counted_from(offset, norm_C)
    layers = tuple(layer_of(part) for part in parts)
    return Weights(embedding_VC, layers, norm_C, embedding_VC if config.tied else head_VC)


def require_tensors(
    where: Path, archives: Mapping[str, Archive], config: ModelConfig, rows: int, names: Mapping[str, str] = LLAMA_NAMES
) -> None:
    """Raise ModelError unless the tensors of the files are those of a config, by their names and shapes.

    Nothing is made of the config's sizes before, so that they take no more memory than the files have.
    """
    # Old checkpoints also store the rotation frequencies, which follow from the config.
    found = {name for name in archives if not name.endswith("rotary_emb.inv_freq")}
    experts, layers = config.architecture.experts, config.layers
    if max(layers, (layers - config.architecture.dense_layers) * (experts.count if experts else 0)) > len(found):
        each = f" of {experts.count} experts each" if experts else ""
        raise ModelError(
            f"{where}: the config asks for {layers} layers{each}, but the weights have {len(found)} tensors in all; "
            "config.json and the weights must belong together"
        )
    shapes = tensor_shapes(config, rows, names)
    if missing := sorted(shapes.keys() - found):
        tied = "; if the embedding is the head, set tie_word_embeddings" if missing == [HEAD] else ""
        raise ModelError(f"{where}: the weights lack the tensor {missing[0]} ({len(missing)} missing in all){tied}")
    if unknown := sorted(found - shapes.keys() - {HEAD}):
        raise ModelError(
            f"{where}: tensor {unknown[0]} is not part of such a model ({len(unknown)} unknown in all); "
            "config.json and the weights must belong together"
        )
    for name, shape in (shapes | ({HEAD: shapes[EMBEDDING]} if HEAD in found else {})).items():
        require_shape(archives, name, shape)


def read_embedding(
    where: Path, archives: Mapping[str, Archive], config: ModelConfig, *, device: torch.device, dtype: torch.dtype
) -> Matrix:
    """Return the embedding alone, of all tokens, whatever ranks share, of archives that `read_weights` has read."""
    return _Reader(where, archives, device, dtype).take(EMBEDDING, (slice(config.vocab_size),))


def _parts(field: str, shape: Shape, config: ModelConfig) -> int:
    """Return among how many experts the inputs of a field's tensor are parted; 1 where they are of no expert."""
    return shape[1] // config.intermediate_size if field.startswith("down_proj_CI/") else 1


def _counted_from(offset: float, weight: Matrix) -> Tensor:
    """Return the weight of a norm: a sum in float32, as one rounded to fewer bits would lose what the files have."""
    return numbers(weight).float() + offset if offset else numbers(weight)


def _left_to_others(part: dict[str, Any], ranks: TPGroup) -> dict[str, Any]:
    """Return zeros for biases of sums that ranks add up, but on rank 0, whose biases count."""
    biases = [field for field in part if "bias" in field and field.partition("/")[0] in SUMMED]
    return {field: torch.zeros_like(part[field]) for field in biases if ranks.rank and not ranks.exact}


def layer_of(parts: Mapping[str, Any]) -> Layer:
    """Put a layer together of its fields, those of experts with their numbers behind them (see `layer_sources`)."""
    experts: dict[int, dict[str, Any]] = {}
    own: dict[str, Any] = dict.fromkeys(("input_norm_C", "post_norm_C", *EXPERT_FIELDS))
    for name, part in parts.items():
        field, _, number = name.partition("/")
        of = experts.setdefault(int(number), {}) if number else own
        of[field] = numbers(part).float() if field in IN_FLOAT32 else part
    return Layer(**own, experts=tuple(Mlp(**experts[number]) for number in sorted(experts)))


def _equal(one: Matrix, other: Matrix) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)


UNTOLD = (
    "rope", "architecture", "context", "ranks", "kv_int8", "hadamard", "attention_sink_logits_LH", "count", "chosen",
    "renormalised", "biases",
)  # fmt: skip
"""Fields of a config that are told otherwise, or do not change what is computed: the last ones `experts` tells."""


def told(config: ModelConfig) -> list[tuple[str, object]]:
    """Return the facts of a config that a fingerprint tells, of an arithmetic those in which it is not Llama's.

    So a fingerprint stays what it is when later versions know more of other models.
    """
    usual = {field.name: field.default for part in (ModelConfig, Architecture, Experts) for field in fields(part)}
    parts: list[ModelConfig | Architecture | Experts] = [config, config.architecture]
    parts += [config.architecture.experts] if config.architecture.experts else []
    facts = [(f.name, getattr(part, f.name)) for part in parts for f in fields(part)]
    return [(name, value) for name, value in facts if name not in UNTOLD and value != usual[name]]


def fingerprint(config: ModelConfig, weights: Weights) -> str:
    """Digest of shapes, rotation, dtype, and of each weight a sample and the sum of its bits; and the type of KV."""
    digest = hashlib.sha256()
    # The context bounds what a model may see, and changes what it computes only through the rotation.
    kv = ", int8 KV" * config.kv_int8 + ", rotated heads" * config.rotates_heads
    rope = config.rope
    digest.update(repr((told(config), rope.scale, str(weights.embedding_VC.dtype))).encode())
    for weight in (rope.inv_freq_RF, *weights.tensors()):
        tensor = weight if isinstance(weight, Tensor) else weight.blocks
        digest.update(repr(tuple(tensor.shape)).encode())
        n, k = tensor.numel(), min(tensor.numel(), SAMPLE)
        sample = tensor.flatten()[torch.arange(k, device=tensor.device) * (n - 1) // max(k - 1, 1)]
        digest.update(sample.float().cpu().numpy().tobytes())
        # By parts, as the sum of a whole would first take four times the tensor's memory.
        parts = torch.split(tensor.view(_BITS[tensor.itemsize]).flatten(), PART)
        digest.update(str(sum([int(part.sum(dtype=torch.int64)) for part in parts])).encode())
        if isinstance(weight, QuantizedWeight):
            digest.update(weight.kind.encode())
            weight.release()
    return digest.hexdigest() + kv


def of_weights(fingerprint: str) -> str:
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
            if (each := tensor.inputs // parts) % tensor.block:
                raise ModelError(
                    f"tensor {name} is {tensor.kind}, in blocks of {tensor.block} inputs, but each of the {parts} "
                    f"shared experts in it has {each}; use a file that has it in a type with smaller blocks, such as "
                    f"{'BF16' if each % 32 else 'Q8_0 or Q4_0'}, or a folder of safetensors"
                )
            return tensor.part(*cut)
        if tensor.dtype not in SOURCES:
            raise ModelError(f"tensor {name} is {tensor.dtype}, which is not supported; use unquantized weights")
        dtype = tensor.dtype if archive.packed else self.dtype
        fits = tensor.dtype == dtype and self.device.type == "cpu"
        tensor = tensor[cut] if fits else numbers(archive.glance(name))[cut].to(self.device, dtype)
        # The extremes tell NaN and Inf in one read, without a temporary and without the overflow that a sum may have.
        if not all(extreme.isfinite() for extreme in torch.aminmax(tensor)):
            raise self._not_finite(name, dtype)
        return tensor.contiguous()

    def _not_finite(self, name: str, dtype: torch.dtype) -> ModelError:
        """Return the error of a tensor that is damaged, or of numbers that a narrower dtype has no room for."""
        if all(extreme.isfinite() for extreme in torch.aminmax(numbers(self.archives[name].glance(name)))):
            return ModelError(f"{self.where}: tensor {name} has numbers beyond {dtype}; change {argument('dtype')}")
        return ModelError(f"{self.where} is damaged: tensor {name} holds NaN or Inf; download it again")
