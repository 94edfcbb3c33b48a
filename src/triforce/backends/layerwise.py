"""Passes layer by layer, for any model that has layers and any KV memory.

Shape suffixes as in kernel_api.py.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from triforce.arrays import Array, namespace, on_device_of
from triforce.backends.kernel_api import ForwardBatch, ForwardOutput, KVBackend, LayerAttention, ModelBackend
from triforce.ragged import Ints


def forward_layerwise(
    model: ModelBackend, ids_BT: Ints, kv: KVBackend, batch: ForwardBatch, at_BJ: Ints | None
) -> ForwardOutput:
    """Run `ModelBackend.forward` for any model that has layers and any KV memory."""
    return run_steps(layer_steps(model, ids_BT, kv, batch, at_BJ))


def layer_steps(
    model: ModelBackend, ids_BT: Ints, kv: KVBackend, batch: ForwardBatch, at_BJ: Ints | None
) -> Generator[int, None, ForwardOutput]:
    """Run a pass as `forward_layerwise` does; yield the progress after each layer, as `Decoder.read` does."""
    attention = kv.layer_attention(batch, ids_BT.shape[1])
    return (yield from _layers(model, ids_BT, at_BJ, attention, batch.observe, batch.return_mass, batch.state_layers))


def run_steps(steps: Generator[int, None, ForwardOutput]) -> ForwardOutput:
    """Run all steps of a pass, and return its output."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            output: ForwardOutput = end.value
            return output


def forward_layers(
    model: ModelBackend,
    ids_BT: Array,
    at_BJ: Array | None,
    attention: LayerAttention,
    observe: bool,
    return_mass: bool,
    state_layers: Sequence[int] = (),
) -> ForwardOutput:
    """Return logits of columns `at_BJ` (None: all, J = T), queries if `observe`, their mass if `return_mass`.

    Returns the residual stream after the first n layers, for each n of `state_layers`, too. Ids and columns may be on
    the model's device.
    """
    return run_steps(_layers(model, ids_BT, at_BJ, attention, observe, return_mass, state_layers))


def _layers(
    model: ModelBackend,
    ids_BT: Array,
    at_BJ: Array | None,
    attention: LayerAttention,
    observe: bool,
    return_mass: bool,
    state_layers: Sequence[int],
) -> Generator[int, None, ForwardOutput]:
    B, T = ids_BT.shape
    queries = list[Array]()
    masses = list[Array]()
    states_by_layer = dict[int, Array]()
    x_NC = model.embed(ids_BT.reshape(-1))
    C = x_NC.shape[1]
    xp = namespace(x_NC)
    scored = at_BJ is None or at_BJ.shape[1] > 0
    experts_by_layer = list[int]()
    for index, block in enumerate(model.blocks):
        q, k, v = (x.reshape(B, T, *x.shape[1:]) for x in block.qkv(x_NC))
        rotated_BTHD, attn_out_BTHD, mass_BGU = attention(index, q, k, v)
        queries.append(rotated_BTHD)
        masses.append(mass_BGU)
        if scored or index + 1 < len(model.blocks):
            experts_by_layer.append(block.finish(x_NC, attn_out_BTHD.reshape(B * T, -1)))
        if index + 1 in state_layers:
            states_by_layer[index + 1] = xp.asarray(x_NC.reshape(B, T, C), copy=True)
        yield B * T * (index + 1) // len(model.blocks)
    if at_BJ is not None:
        T = at_BJ.shape[1]
        at_BJ = on_device_of(at_BJ, x_NC) if isinstance(at_BJ, np.ndarray) else at_BJ
        first_rows_B1 = xp.arange(0, B * ids_BT.shape[1], ids_BT.shape[1], device=x_NC.device)[:, None]
        x_NC = x_NC[(first_rows_B1 + at_BJ).reshape(-1)]
    logits_NV = model.head(x_NC)
    queries_LBTHD = _stacked(queries) if observe else None
    mass_LBGU = _stacked(masses) if return_mass else None
    states_SBTC = _stacked([states_by_layer[layer] for layer in state_layers]) if state_layers else None
    logits_BJV = logits_NV.reshape(B, T, logits_NV.shape[1])
    mean = sum(experts_by_layer) / max(1, sum(count > 0 for count in experts_by_layer))
    return ForwardOutput(logits_BJV, queries_LBTHD, mass_LBGU, states_SBTC, mean)


def _stacked(parts: list[Array]) -> Array:
    return namespace(parts[0]).stack(parts)
