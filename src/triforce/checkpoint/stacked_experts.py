"""Archive of single experts over tensors that stack all experts of a layer: gpt-oss, unpacked or MXFP4.

Gate and up projections share one tensor with interleaved outputs. MXFP4 scales are in a tensor of their own.

Shape suffixes: O outputs, B blocks of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from triforce.arrays import DType, rounded
from triforce.checkpoint.gguf.block_types import E2M1_DOUBLES, mxfp4_scales
from triforce.checkpoint.weight_files import Archive, require_shape
from triforce.errors import ModelError
from triforce.model.weights import Matrix, QuantizedWeight, numbers

Bytes = NDArray[np.uint8]
CENTRE = 16
"""Code of 0 in Q5_0."""


def mxfp4_size(weights: int) -> int:
    """Return the bytes of MXFP4 weights in the kernels' Q5_0 layout: 22 for each block of 32."""
    return weights * 22 // 32


def mxfp4_weight(codes_OB32: Bytes, scales_OB: Bytes, *, packed: bool) -> Matrix:
    """Return a matrix (O, 32 B) from codes and scales, uint8. packed: Q5_0 if it can hold the scales; else bfloat16."""
    q5_0_rows = q5_0(codes_OB32, scales_OB) if packed else None
    if q5_0_rows is not None:
        return QuantizedWeight("Q5_0", q5_0_rows, codes_OB32[0].size)
    return mxfp4_numbers(codes_OB32, scales_OB)


def mxfp4_numbers(codes_OB32: Bytes, scales_OB: Bytes) -> NDArray[np.uint16]:
    """Return the numbers (O, 32 B), bfloat16, which is exact; NaN where a scale is 255."""
    factors_OB = mxfp4_scales(scales_OB)
    factors_OB[scales_OB == 255] = np.nan
    with np.errstate(over="ignore"):  # infinite
        numbers_OB32 = np.array(E2M1_DOUBLES, np.float32)[codes_OB32] * factors_OB[..., None]
    return rounded(numbers_OB32.reshape(len(numbers_OB32), -1), "bfloat16")


def q5_0(codes_OB32: Bytes, scales_OB: Bytes) -> Bytes | None:
    """Return the numbers as Q5_0 rows, uint8 (O, 22 B); None if a scale is no float16.

    A block has its scale, the fifth bits of 32 codes, and their lower four bits: the first half in the lower nibbles.
    """
    q5_codes_OB32 = (np.array(E2M1_DOUBLES) + CENTRE).astype(np.uint8)[codes_OB32]
    is_zero_OB = (q5_codes_OB32 == CENTRE).all(-1)
    factors_OB = mxfp4_scales(np.where(is_zero_OB, np.uint8(128), scales_OB))  # blocks of zeros have any scale
    with np.errstate(over="ignore"):
        scales_OB1 = factors_OB[..., None].astype(np.float16)
    if not np.array_equal(scales_OB1[..., 0].astype(np.float32), factors_OB):
        return None
    nibbles_OB16 = (q5_codes_OB32[..., :16] & 15) | (q5_codes_OB32[..., 16:] & 15) << 4
    fifths_OB4 = np.packbits(q5_codes_OB32 >> 4, axis=-1, bitorder="little")
    rows_OBX = np.concatenate((scales_OB1.view(np.uint8), fifths_OB4, nibbles_OB16), -1)
    return rows_OBX.reshape(len(rows_OBX), -1)


EXPERTS = ".mlp.experts."
BLOCKS = "_blocks"
SCALES = "_scales"
BIAS = "_bias"
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Projections with interleaved outputs in each stacked tensor."""


class Place(NamedTuple):
    """Place of one expert's projection in a stacked tensor."""

    tensor: str
    """Name of the tensor; of MXFP4 without `BLOCKS`."""
    expert: int
    outputs: slice
    shape: tuple[int, ...]
    """Shape of the projection, (outputs, inputs), or of its bias, (outputs)."""
    mxfp4: bool = False


class StackedExperts:
    """Archive of each expert's projections and biases. mxfp4_packed: MXFP4 stays packed, for bfloat16 kernels."""

    packed = False

    def __init__(self, archives: Mapping[str, Archive], layers: int, experts: int, *, mxfp4_packed: bool) -> None:
        """Raises ModelError for a tensor with another number of experts, or blocks without scales."""
        self._archives = archives
        self._experts = experts
        self._mxfp4_packed = mxfp4_packed
        stems = [f"model.layers.{layer}{EXPERTS}{part}" for layer in range(layers) for part in PARTS]
        stacked_names = (f"{stem}{suffix}" for stem in stems for suffix in ("", BIAS, BLOCKS, SCALES))
        self.tensors = dict.fromkeys(name for name in stacked_names if name in archives)
        self._places: dict[str, Place] = {}
        for name in self.tensors:
            if not name.endswith(SCALES):
                self._places |= self._places_in(name)

    def names(self) -> list[str]:
        """Return names of tensors as if each expert had its own."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a projection or a bias."""
        return self._places[name].shape

    def dtype(self, name: str) -> DType:
        """Return the type of a projection or a bias; of MXFP4, that of its numbers and of its products' inputs."""
        place = self._places[name]
        return "bfloat16" if place.mxfp4 else self._archives[place.tensor].dtype(place.tensor)

    def view(self, name: str) -> Matrix:
        """Return a projection (outputs, inputs) or a bias."""
        place = self._places[name]
        if not place.mxfp4:
            expert = numbers(self._archives[place.tensor].view(place.tensor))[place.expert]
            return expert.T[place.outputs]
        blocks, scales = (
            numbers(self._archives[tensor_name].view(tensor_name))[place.expert][place.outputs]
            for tensor_name in (f"{place.tensor}{BLOCKS}", f"{place.tensor}{SCALES}")
        )
        nibbles = np.stack((blocks & 15, blocks >> 4), -1)  # the lower nibble comes first
        codes_OB32 = nibbles.reshape(*blocks.shape[:-1], 32)
        return mxfp4_weight(codes_OB32, scales, packed=self._mxfp4_packed)

    transient_view = view

    def _places_in(self, name: str) -> dict[str, Place]:
        """Return the places of all experts' projections in a tensor, by name."""
        prefix, _, stem = name.rpartition(".")
        mxfp4 = stem.endswith(BLOCKS)
        bias = stem.endswith(BIAS)
        tensor = name.removesuffix(BLOCKS)
        part = stem.removesuffix(BLOCKS).removesuffix(BIAS)
        shape = self._archives[name].shape(name)
        projections = PARTS[part]
        suffix = "bias" if bias else "weight"
        if len(shape) != (4 if mxfp4 else 2 if bias else 3) or shape[0] != self._experts:
            raise ModelError(f"tensor {name} has shape {list(shape)}, but the config asks for {self._experts} experts")
        if mxfp4:
            self._require_scales(tensor, shape)
        outputs, inputs = (shape[1], shape[2] * shape[3] * 2) if mxfp4 else (shape[-1], shape[-2])
        places: dict[str, Place] = {}
        for projection_index, projection in enumerate(projections):
            output_slice = slice(projection_index, None, len(projections))
            size = len(range(outputs)[output_slice])
            place = Place(tensor, 0, output_slice, (size,) if bias else (size, inputs), mxfp4)
            for expert in range(self._experts):
                places[f"{prefix}.{expert}.{projection}.{suffix}"] = place._replace(expert=expert)
        return places

    def _require_scales(self, tensor: str, shape: tuple[int, ...]) -> None:
        """Raise ModelError unless each block of a tensor has 16 bytes and a scale."""
        blocks = f"{tensor}{BLOCKS}"
        scales = f"{tensor}{SCALES}"
        if scales not in self._archives:
            raise ModelError(f"the weights lack the tensor {scales}; copy the whole folder again")
        require_shape(self._archives, scales, shape[:3])
        require_shape(self._archives, blocks, (*shape[:3], 16))
        for name in (blocks, scales):
            if (dtype := self._archives[name].dtype(name)) != "uint8":
                raise ModelError(f"tensor {name} is {dtype}, and MXFP4 is uint8; copy the whole folder again")


def unstack_experts(archives: Mapping[str, Archive], layers: int, experts: int, *, packed: bool) -> dict[str, Archive]:
    """Return archives by tensor name, as if each expert had its own tensors. packed: MXFP4 stays packed.

    Raises ModelError.
    """
    stacked = StackedExperts(archives, layers, experts, mxfp4_packed=packed)
    other_archives = {name: archive for name, archive in archives.items() if name not in stacked.tensors}
    return other_archives | dict.fromkeys(stacked.names(), stacked)
