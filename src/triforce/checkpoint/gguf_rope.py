"""Rotations of models in GGUF files: what became of their positions, by metadata and tensors of divisors."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import numpy as np
import torch
from torch import Tensor

from triforce.checkpoint.gguf_file import GGUFFile
from triforce.checkpoint.json_fields import Fields
from triforce.checkpoint.rope_scaling import Linear, LongRope, Scaling, Unscaled, Yarn, wavelengths
from triforce.errors import ModelError

FACTORS = "rope_freqs.weight"
LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"


@dataclass(frozen=True, slots=True)
class Divided(Scaling):
    """A divisor for each frequency, as GGUF files store what Llama 3 did to them (`rope_freqs.weight`)."""

    divisors: tuple[float, ...]

    def frequencies(self, theta: float, D: int, context: int) -> tuple[Tensor, float]:
        return 1.0 / wavelengths(theta, D) / torch.tensor(self.divisors, dtype=torch.float32), 1.0


def read_gguf_scaling(
    config: Fields, file: GGUFFile, D: int, positions: int, whole: bool, tempered: bool = False
) -> Scaling:
    """The scaling of positions. A file that names no type has a linear one, by 1 where it has no factor.

    D: channels of a head that are rotated. whole: as in `Yarn`; it is the family's. tempered: whether the factor of a
    file is that of cos and sin, and not one that comes on top. Raises ModelError.
    """
    if any(name in file.tensors for name in LONG_FACTORS):
        config.require("rope.scaling.type", ("none", "linear", "longrope"))
        for name in ("rope.scaling.factor", "rope.scale_linear"):
            config.require(name, (0, 1))
        if FACTORS in file.tensors:
            raise ModelError(f"{file.path}: {FACTORS} and {LONG_FACTORS[1]} exclude one another; download it again")
        original = config.whole("rope.scaling.original_context_length", positions, least=2)
        short, long = (list(_divisors(file, name, D)) for name in LONG_FACTORS)
        return LongRope(original, short, long, config.number("rope.scaling.attn_factor", 1.0, least=1e-3))
    config.require("rope.scaling.type", ("none", "linear", "yarn"))
    kind = config.get("rope.scaling.type") or "linear"
    name = "rope.scale_linear" if config.get("rope.scaling.factor") is None else "rope.scaling.factor"
    factor = 1.0 if kind == "none" or config.get(name) == 0 else config.number(name, 1.0)
    if kind != "yarn":
        config.require("rope.scaling.attn_factor", (1,))
    if FACTORS in file.tensors:
        if kind == "yarn" or factor != 1:
            raise config.refusal(name, [f"1 beside the tensor {FACTORS}"])
        return Divided(_divisors(file, FACTORS, D))
    if kind != "yarn":
        return Unscaled() if factor == 1 else Linear(factor)
    original = config.whole("rope.scaling.original_context_length", positions, least=2)
    fast = config.number("rope.scaling.yarn_beta_fast", 32.0, least=1e-3)
    slow = config.number("rope.scaling.yarn_beta_slow", 1.0, least=1e-3)
    usual, given = 0.1 * log(factor) + 1.0, config.get("rope.scaling.attn_factor") is not None
    temper = config.number("rope.scaling.attn_factor", 1.0, least=1e-3)
    return Yarn(factor, original, fast, slow, temper if tempered and given else usual * temper, whole)


def _divisors(file: GGUFFile, name: str, D: int) -> tuple[float, ...]:
    tensor = file.tensors.get(name)
    if tensor is None or (tensor.type, tensor.shape) != ("F32", (D // 2,)):
        found = f"is {tensor.type} {list(tensor.shape)}, and not" if tensor else "is missing; it should be"
        raise ModelError(f"{file.path}: tensor {name} {found} F32 [{D // 2}]; download it again")
    values = file.raw(name).view("<f4")[0]
    if not (np.isfinite(values) & (values > 0)).all():
        raise ModelError(f"{file.path}: tensor {name} has values that divide nothing; download it again")
    return tuple(values.tolist())
