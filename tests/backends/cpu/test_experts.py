"""Mixtures of every router, native and on the torch path, against a loop over rows in float64.

Shape suffixes: N rows, C hidden size, I inner size, E experts that a router chooses from.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from triforce.backends import dispatch
from triforce.backends.torch.model import TorchLayer, mix
from triforce.distributed.group import ALONE
from triforce.model.config import Architecture, Experts
from triforce.model.weights import Layer, Mlp

if dispatch.native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
from triforce.backends.cpu import model as native

N, C, INNER, E = 40, 48, 32, 12
ROUTERS = {
    "softmax": Experts(E, 4, renormalised=False),
    "softmax of the chosen": Experts(E, 4, renormalised=True),
    "corrected softmax": Experts(E, 3, renormalised=True, corrected=True, shared=2),
    "corrected softmax in groups": Experts(E, 3, False, corrected=True, groups=3, chosen_groups=2, scale=16.0),
    "sigmoid": Experts(E, 4, renormalised=False, function="sigmoid"),
    "sigmoid of the chosen": Experts(E, 4, renormalised=True, function="sigmoid", scale=2.5, shared=1),
    "corrected sigmoid": Experts(E, 4, renormalised=True, function="sigmoid", corrected=True),
    "corrected sigmoid in groups": Experts(
        E, 3, True, function="sigmoid", corrected=True, groups=4, chosen_groups=2, scale=2.5, shared=1
    ),
    "sigmoid in groups": Experts(E, 2, False, function="sigmoid", groups=6, chosen_groups=1),
}


def layer_of(experts: Experts, seed: int = 0) -> Layer:
    """Return a layer of random experts. Its other weights are zeros."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw) * shape[-1] ** -0.5

    zeros_CC = torch.zeros(C, C)
    return Layer(
        None, zeros_CC, zeros_CC, zeros_CC, zeros_CC, None, None, None, None, router_EC=4 * normal(E, C),
        router_correction_E=normal(E) * E**0.5 * 0.3 if experts.corrected else None,
        experts=tuple(Mlp(normal(INNER, C), normal(INNER, C), normal(C, INNER)) for _ in range(experts.total)),
    )  # fmt: skip


def rows(count: int = N) -> Tensor:
    return torch.randn(N, C, generator=torch.Generator().manual_seed(5))[:count]


def by_the_book(layer: Layer, experts: Experts, x_C: Tensor) -> Tensor:
    """Return what the experts of one row give, in float64."""
    assert layer.router_EC is not None
    logits_E = layer.router_EC.double() @ x_C
    scores = (logits_E.softmax(0) if experts.function == "softmax" else 1 / (1 + (-logits_E).exp())).tolist()
    corrected_scores = list(scores)
    if layer.router_correction_E is not None:
        corrected_scores = [
            score + float(correction) for score, correction in zip(scores, layer.router_correction_E, strict=True)
        ]
    size = E // experts.groups
    groups = [range(begin, begin + size) for begin in range(0, E, size)]
    if experts.groups > 1:
        groups.sort(key=lambda group: -sum(sorted(corrected_scores[e] for e in group)[-2:]))
    able = [e for group in groups[: experts.chosen_groups] for e in group]
    chosen = sorted(able, key=lambda e: -corrected_scores[e])[: experts.chosen]
    score_sum = sum(scores[e] for e in chosen) if experts.renormalised else 1.0
    weights = {e: experts.scale * scores[e] / score_sum for e in chosen} | dict.fromkeys(range(E, experts.total), 1.0)
    sum_C = torch.zeros(C, dtype=torch.float64)
    for e, weight in weights.items():
        gate_I, up_I = (part.double() @ x_C for part in (layer.experts[e].gate_proj_IC, layer.experts[e].up_proj_IC))  # type: ignore[union-attr]
        sum_C += weight * (layer.experts[e].down_proj_CI.double() @ (gate_I * gate_I.sigmoid() * up_I))  # type: ignore[union-attr]
    return sum_C


def config(experts: Experts) -> Any:
    return SimpleNamespace(norm_eps=1e-5, architecture=Architecture(experts=experts))


def native_output(layer: Layer, experts: Experts, x_NC: Tensor) -> tuple[Tensor, int]:
    """Return the sum of the experts (N, C), and the number of experts that were touched."""
    native_experts = native.experts(config(experts), layer, bits=0)
    gated = torch.empty(len(x_NC) * experts.active, native_experts.stride)
    sum_NC = torch.empty(len(x_NC), C)
    choices = native_experts.gate(x_NC.contiguous(), gated)
    native_experts.down(choices, gated, sum_NC)
    return sum_NC, choices.touched


@pytest.mark.parametrize("name", ROUTERS)
def test_mixture_equals_the_book(name: str) -> None:
    experts, layer = ROUTERS[name], layer_of(ROUTERS[name])
    exact_NC = torch.stack([by_the_book(layer, experts, x_C.double()) for x_C in rows()])
    plain = TorchLayer(config(experts), layer)
    read = partial(ALONE.inputs, width=INNER)
    theirs_NC, touched = mix(rows(), layer, experts, plain._gate, plain._down, read)
    found_NC, also_touched = native_output(layer, experts, rows())
    assert touched == also_touched <= experts.total
    for each_NC in (theirs_NC, found_NC):
        torch.testing.assert_close(each_NC.double(), exact_NC, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ROUTERS)
def test_mixture_of_a_row_has_bits_of_its_own(name: str) -> None:
    experts = ROUTERS[name]
    layer = layer_of(ROUTERS[name])
    whole_NC, _ = native_output(layer, experts, rows())
    for row_slice in (slice(0, 1), slice(3, 8), slice(17, 40)):
        assert torch.equal(native_output(layer, experts, rows()[row_slice])[0], whole_NC[row_slice])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(groups=5), "groups must be of the same number of experts"),
        (dict(groups=12), "of at least two"),
        (dict(groups=3, chosen_groups=4), "chosen_groups must lie in"),
        (dict(groups=3, chosen_groups=1, chosen=5), "chosen must lie in"),
        (dict(chosen=0), "chosen must lie in"),
    ],
)
def test_choices_that_cannot_be_raise(changes: dict[str, int], message: str) -> None:
    experts = Experts(E, 4, True, function="sigmoid")
    with pytest.raises(ValueError, match=message):
        native.experts(config(replace(experts, **changes)), layer_of(experts), bits=0)


def test_experts_that_do_not_fit_the_router_raise() -> None:
    experts = ROUTERS["softmax"]
    layer = layer_of(experts)
    with pytest.raises(ValueError, match="as many experts as the router has outputs, or more"):
        native.experts(config(experts), replace(layer, experts=layer.experts[:-1]), bits=0)


@pytest.mark.parametrize(("size", "dtype"), [(2 * C, torch.float32), (C, torch.bfloat16)])
def test_layer_refuses_experts_that_are_not_its_own(size: int, dtype: torch.dtype) -> None:
    """Experts of another size, or of another type of weights, are refused."""
    experts = ROUTERS["softmax"]
    zeros_C = torch.zeros(16, size, dtype=dtype)
    parts = native.experts(config(experts), layer_of(experts), bits=0)
    with pytest.raises(ValueError, match="experts must be whole, of the layer's type and size"):
        native._native.DecoderLayer(
            None, zeros_C, zeros_C, zeros_C, zeros_C.T.contiguous(), None, None, None, None, *[None] * 5,
            experts=parts, head_dim=16, eps=0.0,
        )  # fmt: skip
