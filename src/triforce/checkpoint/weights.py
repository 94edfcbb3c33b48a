"""Weights out of the files of a Hugging Face folder, and the fingerprint that ties saved KV caches to a model.

Weights that fit as they are stay in the mapped files.

Shape suffixes: V vocabulary, C hidden size, I MLP size, D head size, Q = query heads * D, P = KV heads * D.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triforce.checkpoint.weight_files import Archive
from triforce.distributed.group import ALONE, TPGroup, span
from triforce.errors import ModelError
from triforce.model.config import ModelConfig
from triforce.model.weights import Layer, Matrix, QuantizedWeight, Weights, numbers

Shape = tuple[int, ...]
Cut = tuple[slice, ...]
Source = tuple[str, Shape, Cut]
"""The name of a tensor in the files, its shape there, and which part of it is wanted."""
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
SOURCES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # sums of integers do not depend on their order
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
) -> Weights:
    """The weights in `archives`. Embedding and head have `rows` rows; those past `config.vocab_size` are left out.

    `config` is the whole model's. One of several `ranks` reads its part only (see `kernels.sharded_model`). Raises
    ModelError naming the file or the tensor that is corrupt, missing, unknown, of another shape, or not finite.
    """
    reader = _Reader(archives, device, dtype)
    blocks = [_block(config, f"model.layers.{i}.", ranks) for i in range(config.layers)]
    ends = {EMBEDDING, NORM} | (set() if config.tied else {HEAD})
    reader.require_names(where, ends | {name for block in blocks for name, *_ in block.values()}, HEAD)
    table = (rows, config.hidden_size), (span(config.vocab_size, ranks),)
    embedding_VC = reader.take(EMBEDDING, *table)
    parts: list[dict[str, Any]] = [{field: reader.take(*source) for field, source in block.items()} for block in blocks]
    head_VC = reader.take(HEAD, *table) if HEAD in reader.archives else embedding_VC
    if config.tied and head_VC is not embedding_VC and not _equal(head_VC, embedding_VC):
        raise ModelError(
            f"config.json: tie_word_embeddings = True, but {HEAD} differs from {EMBEDDING}: set it to false to use both"
        )
    norm_C, layers = numbers(reader.take(NORM, (config.hidden_size,), ())), tuple(Layer(**each) for each in parts)
    return Weights(embedding_VC, layers, norm_C, embedding_VC if config.tied else head_VC)


def _equal(one: Matrix, other: Matrix) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)


def tensor_shapes(config: ModelConfig, rows: int) -> dict[str, Shape]:
    """Every tensor that the files of such a model hold, by its name there."""
    C = config.hidden_size
    layers = [_block(config, f"model.layers.{i}.", ALONE) for i in range(config.layers)]
    ends = {EMBEDDING: (rows, C), NORM: (C,)} | ({} if config.tied else {HEAD: (rows, C)})
    return ends | {name: shape for layer in layers for name, shape, _ in layer.values()}


def _block(config: ModelConfig, prefix: str, ranks: TPGroup) -> dict[str, Source]:
    """Return the source of each field of Layer that this family has."""
    C, inner, D = config.hidden_size, config.intermediate_size, config.head_dim
    Q, P = config.heads * D, config.kv_heads * D

    def outputs(size: int) -> Cut:
        return (span(size, ranks),)

    def last(inputs: int) -> Cut:
        """Cut the inputs of a projection that adds to the residual stream."""
        return outputs(C) if ranks.exact else (slice(None), span(inputs, ranks))

    sources: dict[str, Source] = {
        "input_norm_C": ("input_layernorm.weight", (C,), ()),
        "q_proj_QC": ("self_attn.q_proj.weight", (Q, C), outputs(Q)),
        "k_proj_PC": ("self_attn.k_proj.weight", (P, C), outputs(P)),
        "v_proj_PC": ("self_attn.v_proj.weight", (P, C), outputs(P)),
        "o_proj_CQ": ("self_attn.o_proj.weight", (C, Q), last(Q)),
        "post_norm_C": ("post_attention_layernorm.weight", (C,), ()),
        "gate_proj_IC": ("mlp.gate_proj.weight", (inner, C), outputs(inner)),
        "up_proj_IC": ("mlp.up_proj.weight", (inner, C), outputs(inner)),
        "down_proj_CI": ("mlp.down_proj.weight", (C, inner), last(inner)),
    }
    if config.qkv_bias:
        sizes = {"q": ("Q", Q), "k": ("P", P), "v": ("P", P)}
        sources |= {f"{x}_bias_{s}": (f"self_attn.{x}_proj.bias", (n,), outputs(n)) for x, (s, n) in sizes.items()}
    if config.qk_norm:
        sources |= {f"{x}_norm_D": (f"self_attn.{x}_norm.weight", (D,), ()) for x in "qk"}
    return {field: (prefix + name, shape, cut) for field, (name, shape, cut) in sources.items()}


def fingerprint(config: ModelConfig, weights: Weights) -> str:
    """Digest of shapes, rotation, dtypes, and of each weight a sample and the sum of its bits."""
    digest = hashlib.sha256()
    # The context bounds what a model may see, and changes what it computes only through the rotation.
    names = [f.name for f in fields(ModelConfig) if f.name not in ("rope", "context", "ranks", "kv_int8")]
    rope, dtype = config.rope, f"{weights.embedding_VC.dtype}{', int8 KV' * config.kv_int8}"
    digest.update(repr(([getattr(config, name) for name in names], rope.scale, dtype)).encode())
    for weight in (rope.inv_freq_F, *weights.tensors()):
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
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Reader:
    """Checked tensors out of the archives, on a device, in a dtype."""

    archives: Mapping[str, Archive]
    device: torch.device
    dtype: torch.dtype

    def require_names(self, folder: Path, needed: set[str], optional: str) -> None:
        # Old checkpoints also store the rotation frequencies, which follow from the config.
        found = {name for name in self.archives if not name.endswith("rotary_emb.inv_freq")}
        if missing := sorted(needed - found):
            tied = "; if the embedding is the head, set tie_word_embeddings" if missing == [HEAD] else ""
            raise ModelError(
                f"{folder}: the weights lack the tensor {missing[0]} ({len(missing)} missing in all){tied}"
            )
        if unknown := sorted(found - needed - {optional}):
            raise ModelError(
                f"{folder}: tensor {unknown[0]} is not part of such a model ({len(unknown)} unknown in all); "
                "config.json and the weights must belong together"
            )

    def take(self, name: str, shape: Shape, cut: Cut) -> Matrix:
        """Return a part of a tensor, which has `shape` in its file. Raises ModelError."""
        archive = self.archives[name]
        tensor = archive.view(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name} has shape {list(tensor.shape)}, but the config asks for {list(shape)}")
        if isinstance(tensor, QuantizedWeight):
            return tensor.part(*cut)
        if tensor.dtype not in SOURCES:
            raise ModelError(f"tensor {name} is {tensor.dtype}, which is not supported; use unquantized weights")
        dtype = tensor.dtype if archive.packed else self.dtype
        fits = tensor.dtype == dtype and self.device.type == "cpu"
        tensor = tensor[cut] if fits else numbers(archive.glance(name))[cut].to(self.device, dtype)
        # The extremes tell NaN and Inf in one read, without a temporary and without the overflow that a sum may have.
        if not all(extreme.isfinite() for extreme in torch.aminmax(tensor)):
            raise ModelError(f"tensor {name} holds NaN or Inf in {dtype}; download it again or change --dtype")
        return tensor.contiguous()
