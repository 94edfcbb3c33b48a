"""Weights from the files of a Hugging Face folder, and the fingerprint that ties saved KV caches to a model.

Weights of the right dtype and layout stay in the mapped files.

Shape suffixes: V vocabulary, C hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from triforce.arrays import HOST_TYPES, DType, dtype_name, float32, rounded
from triforce.backends import dispatch
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
Index = NDArray[np.int64]
Cut = tuple[slice | Index, *tuple[slice, ...]]
Source = tuple[str, Shape, Cut]
"""A tensor's name in the files, its shape there, and the slices to read."""


EXPERT_FIELDS = ("gate_proj_IC", "up_proj_IC", "down_proj_CI")
MLP_BIASES = ("gate_bias_I", "up_bias_I", "down_bias_C")
SUMMED_FIELDS = ("o_proj_CQ", "down_proj_CI", "o_bias_C", "down_bias_C")
"""Fields whose partial products are summed over ranks, unless the ranks are exact."""


class FieldPlace(NamedTuple):
    """Place of a `Layer` field in the files: the tensor, its shape, and the field's part of it."""

    name: str
    tensor_shape: Shape
    shape: Shape
    offset: int = 0
    """Rows or columns of the tensor before the field."""
    axis: int = 0
    """Axis of `offset`: 0 rows, 1 columns."""


def tensor_shapes(config: ModelConfig, rows: int, names: Mapping[str, str] = LLAMA_NAMES) -> dict[str, Shape]:
    """Return the shapes of all tensors in a model's files, by name. Large sizes in a config take no memory.

    rows: rows of the embedding and the head.
    """
    C = config.hidden_size
    layers = [_field_places(config, names, layer) for layer in range(config.layers)]
    end_shapes = {EMBEDDING: (rows, C), NORM: (C,)} | ({} if config.tied else {HEAD: (rows, C)})
    return end_shapes | {place.name: place.tensor_shape for layer in layers for place in layer.values()}


def layer_sources(config: ModelConfig, names: Mapping[str, str], layer: int, ranks: TPGroup) -> dict[str, Source]:
    """Return the source of each of a layer's `Layer` fields, for one rank.

    An expert's fields have its number as suffix, such as `up_proj_IC/3`.
    """
    order = rotation_order(config.architecture, config.head_dim)
    sources = dict[str, Source]()
    for field, (name, tensor_shape, shape, offset, axis) in _field_places(config, names, layer).items():
        cut = _cut(field.partition("/")[0], shape, ranks)
        if order is not None and field[:6] in ("q_proj", "k_proj", "q_bias", "k_bias", "q_norm", "k_norm"):
            heads_H1 = np.arange(0, shape[0], config.head_dim)[:, None]
            cut = ((offset + heads_H1 + order).reshape(-1)[cut[0]], *cut[1:])
        elif tensor_shape != shape:
            parts = [*cut, *[slice(None)] * (axis + 1 - len(cut))]
            parts[axis] = _shift_slice(offset, shape[axis], parts[axis])
            cut = parts[0], *(part for part in parts[1:] if isinstance(part, slice))
        sources[field] = name, tensor_shape, cut
    return sources


def _field_places(config: ModelConfig, names: Mapping[str, str], layer: int) -> dict[str, FieldPlace]:
    """Return each field's place in the files, for one layer."""
    architecture = config.architecture
    places = dict[str, FieldPlace]()
    experts = architecture.experts if layer >= architecture.dense_layers else None
    shapes = _shapes(config, experts)
    if experts:
        for field in EXPERT_FIELDS + (MLP_BIASES if experts.biases else ()):
            shape = shapes.pop(field)
            name = f"model.layers.{layer}.{names[field]}"
            places |= {f"{field}/{n}": FieldPlace(name.format(n), shape, shape) for n in range(experts.count)}
            if experts.shared:
                name = f"model.layers.{layer}.{names[SHARED + field]}"
                places |= _shared_expert_places(field, name, shape, experts)
    elif architecture.experts:
        names = {**names, **{field: names[DENSE + field] for field in EXPERT_FIELDS}}
    for field, shape in shapes.items():
        fused = [fused_field for fused_field in names if names[fused_field] == names[field] and fused_field in shapes]
        offset = sum(shapes[fused_field][0] for fused_field in fused[: fused.index(field)])
        tensor_shape = (sum(shapes[fused_field][0] for fused_field in fused), *shape[1:])
        places[field] = FieldPlace(f"model.layers.{layer}.{names[field]}", tensor_shape, shape, offset)
    return places


def _shared_expert_places(field: str, name: str, shape: Shape, experts: Experts) -> dict[str, FieldPlace]:
    """Return the places of a shared experts' field. One tensor holds them all, split along its inner dimension."""
    axis, (outputs, inputs), count = int(field == "down_proj_CI"), shape, experts.shared
    tensor_shape = (outputs, count * inputs) if axis else (count * outputs, inputs)
    return {
        f"{field}/{experts.count + n}": FieldPlace(name, tensor_shape, shape, n * shape[axis], axis)
        for n in range(count)
    }


def rotation_order(architecture: Architecture, head_dim: int) -> Index | None:
    """Return the files' channel for each channel of a head here, int64 (D); None if the order is the same.

    Here channel i rotates with channel i + D / 2. Channels that are not rotated have the frequency 0; half of them are
    at the end of each half of the head. Scores do not change, as queries and keys are permuted alike.
    """
    rotated = architecture.rotated or head_dim
    if rotated == head_dim and not architecture.interleaved:
        return None
    channels = np.arange(rotated)
    pairs = channels.reshape(-1, 2).T if architecture.interleaved else channels.reshape(2, -1)
    return np.concatenate([pairs, np.arange(rotated, head_dim).reshape(2, -1)], 1).reshape(-1)


def _shapes(config: ModelConfig, experts: Experts | None) -> dict[str, Shape]:
    """Return the shape of each of a layer's `Layer` fields. experts: None for a dense layer."""
    C = config.hidden_size
    D = config.head_dim
    architecture = config.architecture
    inner_size = architecture.dense_size if architecture.experts and not experts else config.intermediate_size
    Q = config.heads * D
    P = config.kv_heads * D
    q_norm, k_norm = (Q, P) if architecture.qk_norm == "row" else (D, D)
    shapes: dict[str, Shape] = {
        "q_proj_QC": (Q, C), "k_proj_PC": (P, C), "v_proj_PC": (P, C), "o_proj_CQ": (C, Q),
        "gate_proj_IC": (inner_size, C), "up_proj_IC": (inner_size, C), "down_proj_CI": (C, inner_size),
    }  # fmt: skip
    has_biases = experts.biases if experts else architecture.mlp_bias
    if has_biases:
        shapes |= dict(zip(MLP_BIASES, ((inner_size,), (inner_size,), (C,)), strict=True))
    if experts:
        shapes |= {"router_EC": (experts.count, C)}
        if experts.corrected:
            shapes |= {"router_correction_E": (experts.count,)}
        if experts.biases:
            shapes |= {"router_bias_E": (experts.count,)}
    if architecture.input_norms:
        shapes |= {"input_norm_C": (C,), "post_norm_C": (C,)}
    if architecture.output_norms:
        shapes |= {"attn_out_norm_C": (C,), "mlp_out_norm_C": (C,)}
    if architecture.attention_sink_logits:
        shapes |= {"attention_sink_logits_H": (config.heads,)}
    if architecture.o_bias:
        shapes |= {"o_bias_C": (C,)}
    if architecture.qkv_bias:
        shapes |= {"q_bias_Q": (Q,), "k_bias_P": (P,), "v_bias_P": (P,)}
    if architecture.qk_norm:
        shapes |= {"q_norm_D": (q_norm,), "k_norm_D": (k_norm,)}
    return shapes


def _cut(field: str, shape: Shape, ranks: TPGroup) -> Cut:
    """Return a rank's slices of a tensor: all of a norm or router, and some outputs or inputs of a projection.

    Biases of sums over ranks are read completely, too, but only rank 0 adds them.
    """
    if "norm" in field or "router" in field:
        return (slice(None),)
    if field in SUMMED_FIELDS and not ranks.exact:
        return slice(None), *(span(size, ranks) for size in shape[1:])
    return (span(shape[0], ranks),)


def _shift_slice(offset: int, size: int, part: slice | Index) -> slice:
    """Return the slice `part` of `size` rows or columns, moved by `offset`."""
    assert isinstance(part, slice)
    start, stop, _ = part.indices(size)
    return slice(offset + start, offset + stop)


SOURCE_DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16", "float64")
_EXPONENT_BITS = {np.uint16: 0x7F80, np.float16: 0x7C00, np.float32: 0x7F80_0000, np.float64: 0x7FF0_0000_0000_0000}
"""Bits of the exponent in a number of each type of host arrays."""
_BITS = {1: np.uint8, 2: np.int16, 4: np.int32}  # integer sums do not depend on their order
IN_FLOAT32 = ("router_EC", "router_bias_E", "router_correction_E", "attention_sink_logits_H")
"""Fields that are float32 in memory."""
READ_AS_FLOAT32 = ("router_correction_E",)
"""Fields that are read in float32 for every dtype of the weights, as rounded values would choose other experts."""
SAMPLE = 1024  # elements of each tensor that enter the fingerprint
PART = 1 << 17
"""Numbers that are converted, checked or summed at once, so that temporary arrays stay in a CPU's cache."""


def read_weights(
    path: Path,
    archives: Mapping[str, Archive],
    config: ModelConfig,
    *,
    rows: int,
    dtype: DType,
    ranks: TPGroup = ALONE,
    names: Mapping[str, str] = LLAMA_NAMES,
) -> Weights:
    """Return the weights in `archives`. A rank of several reads its part only (see `backends.tensor_parallel`).

    rows: rows of embedding and head in the files; rows from `config.vocab_size` on are not read. names: names of a
    layer's tensors (see `Family`). config: the complete model's, for every rank. Raises ModelError naming the file or
    the tensor that is corrupt, missing, unknown, of another shape, or not finite.
    """
    require_tensors(path, archives, config, rows, names)
    reader = _Reader(path, archives, dtype)
    layer_blocks = [layer_sources(config, names, layer, ranks) for layer in range(config.layers)]
    vocab_rows = (span(config.vocab_size, ranks),)
    embedding_VC = reader.take(EMBEDDING, vocab_rows)
    float32_reader = replace(reader, dtype="float32")
    parts: list[dict[str, Any]] = [
        {
            field: (float32_reader if field in READ_AS_FLOAT32 else reader).take(
                name, cut, _sharing_expert_count(field, shape, config)
            )
            for field, (name, shape, cut) in block.items()
        }
        for block in layer_blocks
    ]
    head_VC = reader.take(HEAD, vocab_rows) if HEAD in reader.archives else embedding_VC
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
    path: Path, archives: Mapping[str, Archive], config: ModelConfig, rows: int, names: Mapping[str, str] = LLAMA_NAMES
) -> None:
    """Raise ModelError unless the files' tensors have the names and shapes that the config asks for.

    The number of tensors is checked first, so that a config with huge sizes takes no more memory than the files.
    """
    # Old checkpoints also store rotation frequencies, which follow from the config.
    tensor_names = {name for name in archives if not name.endswith("rotary_emb.inv_freq")}
    experts = config.architecture.experts
    layers = config.layers
    if max(layers, (layers - config.architecture.dense_layers) * (experts.count if experts else 0)) > len(tensor_names):
        expert_clause = f" of {experts.count} experts each" if experts else ""
        raise ModelError(
            f"{path}: the config asks for {layers} layers{expert_clause}, but the weights have {len(tensor_names)} "
            "tensors in all; config.json and the weights must belong together"
        )
    shapes = tensor_shapes(config, rows, names)
    if missing_names := sorted(shapes.keys() - tensor_names):
        advice = "; if the embedding is the head, set tie_word_embeddings" if missing_names == [HEAD] else ""
        raise ModelError(
            f"{path}: the weights lack the tensor {missing_names[0]} ({len(missing_names)} missing in all){advice}"
        )
    if unknown_names := sorted(tensor_names - shapes.keys() - {HEAD}):
        raise ModelError(
            f"{path}: tensor {unknown_names[0]} is not part of such a model ({len(unknown_names)} unknown in all); "
            "config.json and the weights must belong together"
        )
    for name, shape in (shapes | ({HEAD: shapes[EMBEDDING]} if HEAD in tensor_names else {})).items():
        require_shape(archives, name, shape)


def read_embedding(path: Path, archives: Mapping[str, Archive], config: ModelConfig, *, dtype: DType) -> Matrix:
    """Return the embedding (V, C) alone, of all tokens on every rank. `read_weights` has checked the archives."""
    return _Reader(path, archives, dtype).take(EMBEDDING, (slice(config.vocab_size),))


def _sharing_expert_count(field: str, shape: Shape, config: ModelConfig) -> int:
    """Return the number of experts that share the inputs of a field's tensor; 1 for fields of no expert."""
    return shape[1] // config.intermediate_size if field.startswith("down_proj_CI/") else 1


def _add_norm_offset(offset: float, weight: Matrix) -> NDArray[Any]:
    """Return a norm's weight plus `offset`, in its shape. The sum is float32, as fewer bits lose digits of the file."""
    norm: NDArray[Any] = numbers(weight)
    return float32(norm) + np.float32(offset) if offset else norm


def _zeroed_biases(part: dict[str, Any], ranks: TPGroup) -> dict[str, Any]:
    """Return zeros for biases of sums over ranks. On rank 0 and on exact ranks the result is empty."""
    biases = [field for field in part if "bias" in field and field.partition("/")[0] in SUMMED_FIELDS]
    return {field: np.zeros_like(part[field]) for field in biases if ranks.rank and not ranks.exact}


def layer_of(parts: Mapping[str, Any]) -> Layer:
    """Return a layer built from its fields. Fields of an expert have its number as suffix (see `layer_sources`)."""
    experts: dict[int, dict[str, Any]] = {}
    layer_fields: dict[str, Any] = dict.fromkeys(("input_norm_C", "post_norm_C", *EXPERT_FIELDS))
    for name, part in parts.items():
        field, _, number = name.partition("/")
        target_fields = experts.setdefault(int(number), {}) if number else layer_fields
        target_fields[field] = float32(numbers(part)) if field in IN_FLOAT32 else part
    return Layer(**layer_fields, experts=tuple(Mlp(**experts[number]) for number in sorted(experts)))


def _equal(head_VC: Matrix, embedding_VC: Matrix) -> bool:
    if isinstance(head_VC, QuantizedWeight) or isinstance(embedding_VC, QuantizedWeight):
        return False
    return all(
        np.array_equal(float32(head_VC[rows]), float32(embedding_VC[rows])) for rows in _parts_of_rows(embedding_VC)
    )


def all_finite(numbers: NDArray[Any]) -> bool:
    """Return whether no number of a host array is NaN or infinite. Such numbers have all bits of the exponent set."""
    exponent_bits = _EXPONENT_BITS[numbers.dtype.type]
    bits = numbers.view(f"u{numbers.itemsize}")
    return all((bits[rows] & exponent_bits).max(initial=0) < exponent_bits for rows in _parts_of_rows(bits))


def converted(numbers: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Return a contiguous array of the numbers in a type; a view where type and layout fit.

    Numbers beyond the type are infinite.
    """
    if dtype_name(numbers) == dtype:
        return np.ascontiguousarray(numbers)
    result = np.empty(numbers.shape, HOST_TYPES[dtype])
    with np.errstate(over="ignore"):
        for rows in _parts_of_rows(numbers):
            result[rows] = rounded(numbers[rows], dtype)
    return result


def _parts_of_rows(array: NDArray[Any]) -> Iterator[slice]:
    """Yield slices of an array's rows, of about `PART` numbers each."""
    step = max(1, PART * len(array) // max(array.size, 1))
    for start in range(0, len(array), step):
        yield slice(start, start + step)


NOT_IN_FINGERPRINT = (
    "rope", "architecture", "context", "ranks", "kv_int8", "hadamard", "int8_inputs", "attention_sink_logits_LH",
    "count", "chosen", "renormalised", "biases",
)  # fmt: skip
"""Fields that enter the fingerprint in another way or change no result. Names from `count` on are of `Experts`."""


def fingerprint_facts(config: ModelConfig) -> list[tuple[str, object]]:
    """Return the config's fields that enter a fingerprint: fields of the architecture only if they differ from Llama's.

    A fingerprint thus stays the same when later versions add fields for other models.
    """
    defaults = {field.name: field.default for part in (ModelConfig, Architecture, Experts) for field in fields(part)}
    parts: list[ModelConfig | Architecture | Experts] = [config, config.architecture]
    parts += [config.architecture.experts] if config.architecture.experts else []
    facts = [(config_field.name, getattr(part, config_field.name)) for part in parts for config_field in fields(part)]
    return [(name, value) for name, value in facts if name not in NOT_IN_FINGERPRINT and value != defaults[name]]


def fingerprint(config: ModelConfig, weights: Weights) -> str:
    """Return a digest of shapes, rotation, dtype, a sample and the bit sum of each weight, types of KV and inputs."""
    digest = hashlib.sha256()
    # The context bounds the visible tokens, and changes results only through the rotation.
    types = ", int8 KV" * config.kv_int8 + ", rotated heads" * config.rotates_heads
    types += ", int8 inputs" * config.int8_inputs
    rope = config.rope
    digest.update(repr((fingerprint_facts(config), rope.scale, f"torch.{weights.dtype}")).encode())
    for weight in (rope.inv_freq_RF, *weights.tensors()):
        array: NDArray[Any] = weight.blocks if isinstance(weight, QuantizedWeight) else weight
        digest.update(repr(array.shape).encode())
        sample_size = min(array.size, SAMPLE)
        sample_places = np.arange(sample_size) * (array.size - 1) // max(sample_size - 1, 1)
        numbers_N = array.reshape(-1)
        digest.update(float32(numbers_N[sample_places]).tobytes())
        digest.update(str(bit_sum(numbers_N)).encode())
        if isinstance(weight, QuantizedWeight):
            digest.update(weight.kind.encode())
            weight.release()
    return digest.hexdigest() + types


def bit_sum(numbers_N: NDArray[Any]) -> int:
    """Return the sum of the integers with the numbers' bits, signed if they have several bytes."""
    size = numbers_N.itemsize
    if dispatch.native is not None:
        return int(dispatch.native.bit_sum(numbers_N.view(np.uint8), size))
    # In parts, as one sum would first take four times the array's memory.
    bits_N = numbers_N.view(_BITS[size])
    return sum(int(bits_N[part].sum(dtype=np.int64)) for part in _parts_of_rows(bits_N))


def weights_fingerprint(fingerprint: str) -> str:
    """Return a fingerprint without the types of KV and inputs."""
    return fingerprint.partition(",")[0]


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reader of checked arrays of a type from archives."""

    path: Path
    archives: Mapping[str, Archive]
    dtype: DType

    def take(self, name: str, cut: Cut, sharing_experts: int = 1) -> Matrix:
        """Return the slices `cut` of a tensor. Raises ModelError.

        sharing_experts: number of experts that share the tensor's inputs.
        """
        archive = self.archives[name]
        if (source_dtype := archive.dtype(name)) not in SOURCE_DTYPES:
            raise ModelError(f"tensor {name} is {source_dtype}, which is not supported; use unquantized weights")
        dtype = source_dtype if archive.packed else self.dtype
        matrix = archive.view(name) if dtype == source_dtype else archive.transient_view(name)
        if isinstance(matrix, QuantizedWeight):
            if (expert_inputs := matrix.inputs // sharing_experts) % matrix.block:
                raise ModelError(
                    f"tensor {name} is {matrix.kind}, in blocks of {matrix.block} inputs, but each of the "
                    f"{sharing_experts} shared experts in it has {expert_inputs}; use a file that has it in a type "
                    f"with smaller blocks, such as {'BF16' if expert_inputs % 32 else 'Q8_0 or Q4_0'}, or a folder of "
                    "safetensors"
                )
            return matrix.part(*cut)
        array = converted(matrix[cut], dtype)
        if not all_finite(array):
            raise self._not_finite(name, dtype)
        return array

    def _not_finite(self, name: str, dtype: DType) -> ModelError:
        """Return the error for a damaged tensor, or for numbers beyond the range of `dtype`."""
        if all_finite(numbers(self.archives[name].transient_view(name))):
            return ModelError(f"{self.path}: tensor {name} has numbers beyond {dtype}; change {argument('dtype')}")
        return ModelError(f"{self.path} is damaged: tensor {name} holds NaN or Inf; download it again")
