"""The fingerprint that ties saved KV caches to a model."""

from __future__ import annotations

import hashlib
from dataclasses import fields

import torch
from torch import Tensor

from triforce.model.config import ModelConfig
from triforce.model.weights import Weights

_BITS = {2: torch.int16, 4: torch.int32}  # sums of integers do not depend on their order

SAMPLE = 1024  # elements of each tensor that enter the fingerprint

PART = 1 << 18  # elements whose bits are added up at a time


def fingerprint(config: ModelConfig, weights: Weights) -> str:
    """Digest of shapes, rotation, dtype, and of each weight a sample and the sum of its bits."""
    digest = hashlib.sha256()
    # The context bounds what a model may see, and changes what it computes only through the rotation.
    names = [f.name for f in fields(ModelConfig) if f.name not in ("rope", "context", "ranks")]
    rope, dtype = config.rope, weights.embedding_VC.dtype
    digest.update(repr(([getattr(config, name) for name in names], rope.scale, str(dtype))).encode())
    for tensor in (rope.inv_freq_F, *weights.tensors()):
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(_sample(tensor).float().cpu().numpy().tobytes())
        digest.update(str(_sum_of_bits(tensor)).encode())
    return digest.hexdigest()


def _sum_of_bits(tensor: Tensor) -> int:
    """By parts, as the sum of a whole would first take four times the tensor's memory."""
    bits = tensor.view(_BITS[tensor.itemsize]).flatten()
    parts = torch.split(bits, PART)
    return sum([int(part.sum(dtype=torch.int64)) for part in parts])


def _sample(tensor: Tensor) -> Tensor:
    n = tensor.numel()
    k = min(n, SAMPLE)
    return tensor.flatten()[torch.arange(k, device=tensor.device) * (n - 1) // max(k - 1, 1)]
