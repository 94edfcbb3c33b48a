"""A pass over a prompt in several calls, between which it may be left: the bits are those of a pass of one call.

Shape suffixes as in kernel_api.py; S states of a token, K of them behind the layers of a call.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import torch
from torch import Tensor

from triforce.backends.cpu.kv import NativeKV, rotations
from triforce.backends.cpu.model import NativeModel
from triforce.backends.kernel_api import PAGE, ForwardBatch, ForwardOutput, KVBackend, ModelBackend
from triforce.model.config import ModelConfig

PART = 6e10
"""Operations of a call that makes a part of a prompt's pass, about: .06 to .4 seconds of two cores."""

LEAST_TOKENS = 128
"""Tokens of such a call at least: with fewer, weights that are read again take more time than they save."""


def steps(
    model: ModelBackend, kv: KVBackend, ids_1T: Tensor, batch: ForwardBatch
) -> Generator[int, None, ForwardOutput] | None:
    """Return the parts of a pass over many tokens of one row, none of them scored; None for a model of other kernels.

    With offloaded KV, which is read ahead in a pass of one call, the whole pass is one part.
    """
    if not isinstance(model, NativeModel):
        return None
    return parts(model, kv, ids_1T, batch) if type(kv) is NativeKV else _one_part(model, kv, ids_1T, batch)


def _one_part(
    model: NativeModel, kv: KVBackend, ids_1T: Tensor, batch: ForwardBatch
) -> Generator[int, None, ForwardOutput]:
    yield from ()
    return model.forward(ids_1T, kv, batch, torch.empty(1, 0, dtype=torch.long))


def parts(model: NativeModel, kv: NativeKV, ids_1T: Tensor, batch: ForwardBatch) -> Generator[int, None, ForwardOutput]:
    """Make a pass over many tokens of one row, none of them scored, in calls of at most some `PART` operations.

    A call takes several layers, or some of the tokens through one layer. Each token has the bits that it has in a
    pass of one call. Yields behind each call how many tokens its share of the work is worth.
    """
    (_, T), config = ids_1T.shape, model.config
    x_1TC, states_S1TC = torch.empty(1, T, config.hidden_size), None
    if batch.states:
        states_S1TC = torch.empty(len(batch.states), 1, T, config.hidden_size)
    touched = list[tuple[float, int]]()
    layers, tokens = part_of_pass(config, batch.positions[0], T)
    for layer in range(0, config.layers, layers):
        stop = min(layer + layers, config.layers)
        for first in range(0, T, tokens):
            part = slice(first, min(first + tokens, T))
            experts = _forward_part(model, kv, ids_1T, batch, (layer, stop), part, x_1TC, states_S1TC)
            touched += [(experts, stop - layer)] * (experts > 0 and first == 0)
            yield (layer * T + part.stop * (stop - layer)) // config.layers
    mean = sum(experts * count for experts, count in touched) / max(1, sum(count for _, count in touched))
    return ForwardOutput(torch.empty(1, 0, config.vocab_size), None, None, states_S1TC, mean)


def _forward_part(
    model: NativeModel,
    kv: NativeKV,
    ids_1T: Tensor,
    batch: ForwardBatch,
    layers: tuple[int, int],
    part: slice,
    x_1TC: Tensor,
    states_S1TC: Tensor | None,
) -> float:
    """Take tokens `part` of a row through layers [first, stop), in place. Returns the experts touched, as a pass.

    States behind these layers go to `states_S1TC`.
    """
    first, width = part.start, part.stop - part.start
    here = replace(batch, positions=[batch.positions[0] + first])
    views = [(count, replace(lists, starts=[lists.starts[0] + first])) for count, lists in batch.views]
    kept = [i for i, behind in enumerate(batch.states) if layers[0] < behind <= layers[1]]
    states_K1TC = torch.empty(len(kept), 1, width, model.config.hidden_size) if kept else None
    cos, sin = rotations(model.config.rope, here, width)
    experts = model.decoder.forward(
        memory=kv.native_pages, ids=ids_1T[:, part].contiguous(), positions=here.positions, counts=[width],
        cos=cos, sin=sin, views=[kv.native_view(*view) for view in views], at=torch.empty(1, 0, dtype=torch.long),
        logits=torch.empty(1, 0, model.config.vocab_size), x=x_1TC[:, part], first_layer=layers[0],
        last_layer=layers[1], exact=batch.exact, state_layers=[batch.states[i] for i in kept], states=states_K1TC,
    )  # fmt: skip
    if states_S1TC is not None and states_K1TC is not None:
        states_S1TC[kept, :, part] = states_K1TC
    return experts


def part_of_pass(config: ModelConfig, start: int, width: int) -> tuple[int, int]:
    """Return layers and tokens of one call of a pass over tokens [start, start + width) of a row."""
    weights = config.weights_read / config.layers
    token = 2 * weights + 4 * config.heads * config.head_dim * (start + width)
    if token * width <= 1.5 * PART:
        return max(1, min(config.layers, int(PART / (token * width)))), width
    return 1, max(LEAST_TOKENS, int(PART / token) // PAGE * PAGE)
