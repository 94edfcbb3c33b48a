"""A pass of a decoder, layer by layer, whatever its attention. Shape suffixes as in kernel_api.py."""

from __future__ import annotations

import torch
from torch import Tensor

from triforce.backends.kernel_api import ForwardBatch, ForwardOutput, KVBackend, LayerAttention, LayeredModel


def forward(
    model: LayeredModel, ids_BT: Tensor, kv: KVBackend, batch: ForwardBatch, at_BJ: Tensor | None
) -> ForwardOutput:
    """Do what `ModelBackend.forward` says, for any model that has layers and any KV memory."""
    attention = kv.layer_attention(batch, ids_BT.shape[1])
    return forward_layers(model, ids_BT, at_BJ, attention, batch.observe, batch.return_mass)


def forward_layers(
    model: LayeredModel,
    ids_BT: Tensor,
    at_BJ: Tensor | None,
    attention: LayerAttention,
    observe: bool = False,
    return_mass: bool = False,
) -> ForwardOutput:
    """Logits of columns `at_BJ` (None: all of them, J = T); the queries if `observe`, their mass if `return_mass`."""
    (B, T), queries, masses = ids_BT.shape, list[Tensor](), list[Tensor]()
    x_NC, scored = model.embed(ids_BT.flatten()), at_BJ is None or at_BJ.shape[1] > 0
    for index, block in enumerate(model.blocks):
        q, k, v = (x.view(B, T, *x.shape[1:]) for x in block.qkv(x_NC))
        rotated_BTHD, attn_out_BTHD, mass_BGU = attention(index, q, k, v)
        queries.append(rotated_BTHD)
        masses.append(mass_BGU)
        if scored or index + 1 < len(model.blocks):
            block.finish(x_NC, attn_out_BTHD.flatten(0, 1).flatten(1))
    if at_BJ is not None:
        T = at_BJ.shape[1]
        at_BJ1 = at_BJ[..., None].to(x_NC.device)
        x_NC = x_NC.view(B, -1, x_NC.shape[1]).take_along_dim(at_BJ1, dim=1).flatten(0, 1)
    logits_NV = model.head(x_NC)
    queries_LBTHD = torch.stack(queries) if observe else None
    mass_LBGU = torch.stack(masses) if return_mass else None
    return ForwardOutput(logits_NV.view(B, T, logits_NV.shape[1]), queries_LBTHD, mass_LBGU)
