"""Experts of a layer that lie in one tensor, as tensors of their own: those of gpt-oss, numbers or MXFP4.

Gate and up projections lie in one tensor, their outputs in turns. Of MXFP4 another one has the scales.

Shape suffixes as in mxfp4.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from triforce.checkpoint import mxfp4
from triforce.checkpoint.weight_files import Archive
from triforce.errors import ModelError
from triforce.model.weights import Matrix, numbers

EXPERTS = ".mlp.experts."
BLOCKS, SCALES = "_blocks", "_scales"
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Of each tensor the projections whose outputs take turns in it."""


class Place(NamedTuple):
    """Some outputs of one expert in a tensor of all; without the ending of its blocks, where it is MXFP4."""

    tensor: str
    expert: int
    outputs: slice
    mxfp4: bool = False
    bias: bool = False


class StackedExperts:
    """An archive of the projections and biases of each expert. narrow: MXFP4 stays codes, for kernels of bfloat16."""

    packed = False

    def __init__(self, archives: Mapping[str, Archive], *, narrow: bool) -> None:
        self._archives, self._narrow = archives, narrow
        self._places: dict[str, Place] = {}
        for name in archives:
            if EXPERTS in name and not name.endswith(SCALES):
                self._places |= self._within(name)

    def names(self) -> list[str]:
        """Names of tensors as if each expert had its own."""
        return list(self._places)

    def view(self, name: str) -> Matrix:
        """Return a projection (outputs, inputs) or a bias. Raises ModelError where the scales of blocks are missing."""
        place = self._places[name]
        if not place.mxfp4:
            tensor = numbers(self._archives[place.tensor].view(place.tensor))[place.expert]
            return (tensor if place.bias else tensor.T)[place.outputs]
        of = f"{place.tensor}{SCALES}"
        if of not in self._archives:
            raise ModelError(f"the weights lack the tensor {of}; copy the whole folder again")
        blocks, scales = (
            numbers(self._archives[each].view(each))[place.expert][place.outputs]
            for each in (f"{place.tensor}{BLOCKS}", of)
        )
        codes_OB32 = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # the lower nibble comes first
        return mxfp4.weight(codes_OB32, scales, narrow=self._narrow)

    glance = view

    def _within(self, name: str) -> dict[str, Place]:
        """Return the places of what a tensor holds."""
        prefix, _, own = name.rpartition(".")
        mxfp4, bias = own.endswith(BLOCKS), own.endswith("_bias")
        stem, ending = own.removesuffix(BLOCKS).removesuffix("_bias"), "bias" if bias else "weight"
        tensor = name.removesuffix(BLOCKS)
        count, of = len(numbers(self._archives[name].view(name))), PARTS.get(stem, ())
        return {
            f"{prefix}.{expert}.{part}.{ending}": Place(tensor, expert, slice(turn, None, len(of)), mxfp4, bias)
            for turn, part in enumerate(of)
            for expert in range(count)
        }


def unstacked(archives: Mapping[str, Archive], *, narrow: bool) -> dict[str, Archive]:
    """Return archives by the names of tensors, with experts as if each had its own. Raises ModelError."""
    experts = StackedExperts(archives, narrow=narrow)
    others = {name: archive for name, archive in archives.items() if EXPERTS not in name}
    return others | dict.fromkeys(experts.names(), experts)
