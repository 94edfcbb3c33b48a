"""Weights of GGUF types, packed for the Triton kernels: codes of 4 or 8 bits, with the scales of their file.

Q4_0, Q4_1 and Q4_K keep their 4 bits; types of 5 to 8 bits take 8. A tile has 32 outputs and all of their inputs. The
inputs are in groups of 32, and the groups are in eights: eight neighbouring groups, 256 inputs. Matrices that are no
multiple of 32 outputs or of 256 inputs are padded with zeros. Shape suffixes: M outputs, K inputs, B blocks of a file's
row, X bytes of a block, G groups, S eights of groups, C tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor, unflatten
from torch.nn.functional import pad

from triforce.arrays import HOST_TYPES, dtype_name
from triforce.backends.torch.tensor_weights import mapped_weights
from triforce.backends.torch.tensors import tensor_of, torch_dtype
from triforce.errors import ModelError
from triforce.model.weights import NUMBER_TYPES, Layer, Matrix, QuantizedWeight, Weights

OUTPUTS = 32
"""Outputs of a tile."""
INPUTS = 32
"""Inputs of a group."""
EIGHT = 8
"""Groups of an eight."""


class PackedFormat(NamedTuple):
    """Format of a GGUF type as it is packed here."""

    bits: int
    """Bits of a packed code: 4 or 8."""
    offset: int
    """Number that is subtracted from a code before it is multiplied with its scale."""
    scales: str
    """Kind of scales: a name of `Scales` in csrc/low_bit.hpp."""
    codes: Callable[[Tensor], Tensor]
    """Function from blocks (..., X) to codes: uint8 (..., inputs of a block)."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedWeight(QuantizedWeight):
    """Packed matrix.

    `blocks` has the codes, uint8 (C, S, 32, bytes). A group of 4-bit codes takes 16 bytes: its first 16 inputs are the
    lower nibbles. A group of 8-bit codes takes 32 signed bytes. `minima` and `small_scales` refer to the codes where a
    type lacks them.
    """

    outputs: int
    scales: Tensor
    """float16: (C, S, 32, 8) with a scale per group, or (C, S, 32, 1) with a scale per eight."""
    minima: Tensor
    """Minima, in the shape of the scales."""
    small_scales: Tensor
    """int8 (2, C, S, 32, 8): per group, factors of scale and minimum, or factors of the scale for its two halves."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs

    @property
    def format(self) -> PackedFormat:
        return FORMATS[self.kind]

    def __len__(self) -> int:
        return self.outputs


def on_device(weights: Weights, device: torch.device | str) -> Weights:
    """Return the weights on a device, with packed matrices. Raises ModelError where a scale is NaN or infinite."""

    def uploaded(weight: Matrix) -> Matrix:
        if not isinstance(weight, QuantizedWeight):
            return tensor_of(weight, device)
        matrix = _checked(packed(weight, device), weight.kind)
        weight.release()
        return matrix

    def with_biases(layer: Layer) -> Layer:
        """Return a layer with biases of the type of its products."""
        dtype = torch_dtype(dtype_name(layer.o_proj_CQ))
        layer_fields = {f.name: getattr(layer, f.name) for f in fields(layer)}
        biases = [name for name in layer_fields if "_bias_" in name and layer_fields[name] is not None]
        return replace(layer, **{name: layer_fields[name].to(dtype) for name in biases})

    device_weights = mapped_weights(weights, uploaded)
    return replace(device_weights, layers=tuple(map(with_biases, device_weights.layers)))


def _checked(weight: Tensor | PackedWeight, kind: str) -> Tensor | PackedWeight:
    for plane in (weight.scales, weight.minima) if isinstance(weight, PackedWeight) else ():
        if plane.dtype == torch.float16 and not bool(plane.isfinite().all()):
            raise ModelError(f"a matrix of type {kind} has a scale that is NaN or Inf; download the file again")
    return weight


def packed(weight: QuantizedWeight, device: torch.device | str) -> Tensor | PackedWeight:
    """Return a matrix packed onto a device; types of plain numbers become a bfloat16 tensor."""
    if weight.kind in NUMBER_TYPES:
        return tensor_of(weight.blocks.view(HOST_TYPES[NUMBER_TYPES[weight.kind]])).to(device, torch.bfloat16)
    packed_format = FORMATS[weight.kind]
    (M, K) = weight.shape
    blocks_MBX = unflatten(tensor_of(weight.blocks, device), 1, (K // weight.block, -1))
    codes_MGX = unflatten(packed_format.codes(blocks_MBX), -1, (-1, INPUTS)).flatten(1, 2)
    codes_MGX = (
        codes_MGX[..., :16] | codes_MGX[..., 16:] << 4
        if packed_format.bits == 4
        else codes_MGX - packed_format.offset  # modulo 256, so the bits of an int8
    )
    scales_at_end = packed_format.scales == "super_half"
    scales_MB = _as_float16(blocks_MBX[..., -2:] if scales_at_end else blocks_MBX[..., :2])
    minima_MB = _as_float16(blocks_MBX[..., 2:4]) if packed_format.scales.endswith("min") else None
    codes = _tiles(codes_MGX, EIGHT).flatten(3)
    scales, minima = (
        codes if plane_MB is None else _tiles(plane_MB[..., None], 1 if weight.block == 256 else EIGHT).flatten(3)
        for plane_MB in (scales_MB, minima_MB)
    )
    small_MG2 = _small_scales(packed_format.scales, blocks_MBX)
    small_scales = codes
    if small_MG2 is not None:
        small_scales = torch.stack([_tiles(small_MG2[..., i : i + 1], EIGHT) for i in range(2)])
    return PackedWeight(
        kind=weight.kind, blocks=codes, inputs=K, outputs=M, scales=scales, minima=minima, small_scales=small_scales
    )


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


FORMATS = {
    "Q4_0": PackedFormat(4, 8, "half", lambda x: _nibbles(x[..., 2:])),
    "Q4_1": PackedFormat(4, 0, "half_min", lambda x: _nibbles(x[..., 4:])),
    "Q5_0": PackedFormat(8, 16, "half", lambda x: _nibbles(x[..., 6:]) | _fifth_bits(x[..., 2:6])),
    "Q5_1": PackedFormat(8, 0, "half_min", lambda x: _nibbles(x[..., 8:]) | _fifth_bits(x[..., 4:8])),
    "Q8_0": PackedFormat(8, 0, "half", lambda x: x[..., 2:]),
    "Q4_K": PackedFormat(4, 0, "super_min", lambda x: _pairs(x[..., 16:])),
    "Q5_K": PackedFormat(8, 0, "super_min", lambda x: _pairs(x[..., 48:]) | _fifth_bits_of_groups(x[..., 16:48])),
    "Q6_K": PackedFormat(8, 32, "super_half", _q6_codes),
}
