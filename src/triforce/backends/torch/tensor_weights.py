"""Weights of a model as tensors on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from triforce.backends.torch.tensors import tensor_of
from triforce.model.weights import Layer, Matrix, Mlp, QuantizedWeight, Weights


def torch_weights(weights: Weights, device: torch.device | str) -> Weights:
    """Return the weights with tensors on a device: on the CPU views of the host arrays. Quantized matrices stay."""
    return mapped_weights(
        weights, lambda weight: weight if isinstance(weight, QuantizedWeight) else tensor_of(weight, device)
    )


def mapped_weights(weights: Weights, function: Callable[[Matrix], Matrix]) -> Weights:
    """Return the results of a function of each weight. Weights that share an array share the result, as a tied head."""
    results_by_id = dict[int, Matrix]()

    def result(weight: Matrix) -> Matrix:
        if id(weight) not in results_by_id:
            results_by_id[id(weight)] = function(weight)
        return results_by_id[id(weight)]

    def part(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(part, value))
        if isinstance(value, Layer | Mlp | Weights):
            return replace(value, **{field.name: part(getattr(value, field.name)) for field in fields(value)})
        return None if value is None else result(value)

    mapped: Weights = part(weights)
    return mapped
