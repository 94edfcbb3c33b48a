"""Weights of GGUF types, packed for the Triton kernels: codes of 4 or 8 bits, with the scales of their file.

Q4_0, Q4_1 and Q4_K keep their 4 bits; types of 5 to 8 bits take 8. Tiles have 32 outputs side by side, and all of their
groups of 32 inputs in eights: smaller matrices are padded with zeros. Shape suffixes: M outputs, K inputs, B blocks of
a file's row, X bytes of a block, G groups, S eights of groups, C tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, unflatten
from torch.nn.functional import pad

from triforce.errors import ModelError
from triforce.model.weights import PLAIN, Layer, Matrix, QuantizedWeight, Weights

OUTPUTS = 32
"""Outputs of a tile."""
INPUTS = 32
"""Inputs of a group."""
EIGHT = 8
"""Neighbouring groups of an eight."""


class Parts(NamedTuple):
    """Format of a type: bits as packed here, the offset that codes subtract, and `Scales` of csrc/low_bit.hpp."""

    bits: int
    offset: int
    scales: str
    codes: Callable[[Tensor], Tensor]
    """Function from blocks (..., X) to codes: uint8 (..., inputs of a block)."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedWeight(QuantizedWeight):
    """Packed matrix. Its blocks are codes, uint8 (C, S, 32, bytes): each group has 16 bytes, the first half of its
    inputs in the lower nibbles, or 32 signed bytes. Planes that the type does not have refer to the codes.
    """

    outputs: int
    scales: Tensor
    """float16 (C, S, 32, 8), of each group, or (C, S, 32, 1), of each eight"""
    minima: Tensor
    """Minima, in the shape of the scales."""
    small: Tensor
    """int8 (2, C, S, 32, 8): multiples of scale and minimum, or of the scales of both halves of a group."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs

    @property
    def parts(self) -> Parts:
        return PARTS[self.kind]

    def __len__(self) -> int:
        return self.outputs


def on_device(weights: Weights) -> Weights:
    """Pack the matrices of a model onto the device of its norms. Raises ModelError where a scale is NaN or infinite."""
    device = weights.norm_C.device
    packed_by_id = dict[int, Matrix]()

    def pack_once(weight: Matrix) -> Matrix:
        if not isinstance(weight, QuantizedWeight) or isinstance(weight, PackedWeight):
            return weight
        if id(weight) not in packed_by_id:  # a tied head stays tied
            packed_by_id[id(weight)] = _checked(packed(weight, device), weight.kind)
            weight.release()
        return packed_by_id[id(weight)]

    def layer_of(layer: Layer) -> Layer:
        layer_fields = {f.name: getattr(layer, f.name) for f in fields(layer)}
        packed_fields: dict[str, Any] = {
            name: pack_once(matrix) for name, matrix in layer_fields.items() if "_proj_" in name
        }
        dtype = layer.o_proj_CQ.dtype
        biases = [name for name in layer_fields if "_bias_" in name and layer_fields[name] is not None]
        return replace(layer, **packed_fields | {name: layer_fields[name].to(dtype) for name in biases})

    return replace(
        weights,
        embedding_VC=pack_once(weights.embedding_VC),
        layers=tuple(map(layer_of, weights.layers)),
        head_VC=pack_once(weights.head_VC),
    )


def _checked(weight: Tensor | PackedWeight, kind: str) -> Tensor | PackedWeight:
    for plane in (weight.scales, weight.minima) if isinstance(weight, PackedWeight) else ():
        if plane.dtype == torch.float16 and not bool(plane.isfinite().all()):
            raise ModelError(f"a matrix of type {kind} has a scale that is NaN or Inf; download the file again")
    return weight


def packed(weight: QuantizedWeight, device: torch.device) -> Tensor | PackedWeight:
    """Return a matrix packed onto a device; types of plain numbers become a bfloat16 tensor."""
    if weight.kind in PLAIN:
        return weight.blocks.view(PLAIN[weight.kind]).view(weight.shape).to(device, weight.dtype)
    parts = PARTS[weight.kind]
    (M, K) = weight.shape
    blocks_MBX = unflatten(weight.blocks.to(device), 1, (K // weight.block, -1))
    codes_MGX = unflatten(parts.codes(blocks_MBX), -1, (-1, INPUTS)).flatten(1, 2)
    codes_MGX = (
        codes_MGX[..., :16] | codes_MGX[..., 16:] << 4
        if parts.bits == 4
        else codes_MGX - parts.offset  # modulo 256, so the bits of an int8
    )
    scales_at_end = parts.scales == "super_half"
    scales_MB = _as_float16(blocks_MBX[..., -2:] if scales_at_end else blocks_MBX[..., :2])
    minima_MB = _as_float16(blocks_MBX[..., 2:4]) if parts.scales.endswith("min") else None
    codes = _tiles(codes_MGX, EIGHT).flatten(3)
    scales, minima = (
        codes if plane_MB is None else _tiles(plane_MB[..., None], 1 if weight.block == 256 else EIGHT).flatten(3)
        for plane_MB in (scales_MB, minima_MB)
    )
    small_MG2 = _small_scales(parts.scales, blocks_MBX)
    small = codes if small_MG2 is None else torch.stack([_tiles(small_MG2[..., i : i + 1], EIGHT) for i in range(2)])
    return PackedWeight(kind=weight.kind, blocks=codes, inputs=K, outputs=M, scales=scales, minima=minima, small=small)


def _as_float16(pairs_X: Tensor) -> Tensor:
    return pairs_X.contiguous().view(torch.float16).squeeze(-1)


def _tiles(plane_MGX: Tensor, groups: int) -> Tensor:
    """Return a plane with `groups` groups in an eight as (C, S, 32, groups, X), padded with zeros."""
    M, G = plane_MGX.shape[:2]
    padded = pad(plane_MGX, (0, 0, 0, -G % groups, 0, -M % OUTPUTS))
    return unflatten(unflatten(padded, 1, (-1, groups)), 0, (-1, OUTPUTS)).transpose(1, 2).contiguous()


def _small_scales(scales: str, blocks_MBX: Tensor) -> Tensor | None:
    """Return the small scales of groups, int8 (M, G, 2); None where blocks have none."""
    if scales == "super_half":
        return unflatten(blocks_MBX[..., 192:208].contiguous().view(torch.int8), -1, (8, 2)).flatten(1, 2)
    if scales != "super_min":
        return None
    low, middle, high = (
        blocks_MBX[..., at : at + 4] for at in (4, 8, 12)
    )  # the upper two bits of the last four scales are the top bits of the other bytes
    scales_MG = torch.cat([low & 63, (high & 15) | low >> 6 << 4], -1)
    minima_MG = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], -1)
    return torch.stack([scales_MG, minima_MG], -1).flatten(1, 2).view(torch.int8)


def _nibbles(bytes_X: Tensor) -> Tensor:
    """Return the lower nibbles followed by the upper nibbles: (..., 2 * X)."""
    return torch.cat([bytes_X & 15, bytes_X >> 4], -1)


def _fifth_bits(bytes_4: Tensor) -> Tensor:
    """Return the fifth bits of 32 inputs, shifted above the lower four: (..., 32)."""
    return ((bytes_4[..., None] >> _shifts(8, bytes_4)) & 1).flatten(-2) << 4


def _pairs(bytes_X: Tensor) -> Tensor:
    """Return the codes of pairs of groups, lower nibbles of 32 bytes, then upper nibbles: (..., 256)."""
    return _nibbles(unflatten(bytes_X, -1, (4, 32))).flatten(-2)


def _fifth_bits_of_groups(bytes_32: Tensor) -> Tensor:
    """Return the fifth bits, bit g of 32 bytes for group g, shifted above the lower four: (..., 256)."""
    return ((bytes_32[..., None, :] >> _shifts(8, bytes_32)[:, None]) & 1).flatten(-2) << 4


def _q6_codes(bytes_X: Tensor) -> Tensor:
    """Return 6-bit codes (..., 256), in two halves of 128 inputs.

    The lower four bits lie in the lower, then the upper nibbles of 64 bytes; the upper two bits of four quarters share
    32 bytes.
    """
    lower = unflatten(_nibbles(unflatten(bytes_X[..., :128], -1, (2, 64))), -1, (4, 32))
    upper = (unflatten(bytes_X[..., 128:192], -1, (2, 1, 32)) >> (2 * _shifts(4, bytes_X))[:, None]) & 3
    return (lower | upper << 4).flatten(-3)


def _shifts(end: int, reference: Tensor) -> Tensor:
    return torch.arange(end, dtype=torch.uint8, device=reference.device)


PARTS = {
    "Q4_0": Parts(4, 8, "half", lambda x: _nibbles(x[..., 2:])),
    "Q4_1": Parts(4, 0, "half_min", lambda x: _nibbles(x[..., 4:])),
    "Q5_0": Parts(8, 16, "half", lambda x: _nibbles(x[..., 6:]) | _fifth_bits(x[..., 2:6])),
    "Q5_1": Parts(8, 0, "half_min", lambda x: _nibbles(x[..., 8:]) | _fifth_bits(x[..., 4:8])),
    "Q8_0": Parts(8, 0, "half", lambda x: x[..., 2:]),
    "Q4_K": Parts(4, 0, "super_min", lambda x: _pairs(x[..., 16:])),
    "Q5_K": Parts(8, 0, "super_min", lambda x: _pairs(x[..., 48:]) | _fifth_bits_of_groups(x[..., 16:48])),
    "Q6_K": Parts(8, 32, "super_half", _q6_codes),
}
