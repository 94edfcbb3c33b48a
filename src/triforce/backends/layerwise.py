"""A pass of a decoder, layer by layer, whatever its attention. Shape suffixes as in kernel_api.py."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from triforce.backends.kernel_api import ModelBackend

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""From a layer and its q (B, T, H, D), k and v (B, T, G, D), not yet rotated, to the mixed values (B, T, H, D)."""


def layer_by_layer(model: ModelBackend, ids_BT: Tensor, at_BJ: Tensor | None, attend: Attend) -> Tensor:
    """Logits of columns `at_BJ` (None: all of them, J = T), float32 (B, J, V)."""
    B, T = ids_BT.shape
    x_NC, scored = model.embed(ids_BT.flatten()), at_BJ is None or at_BJ.shape[1] > 0
    for index, block in enumerate(model.blocks):
        q, k, v = (x.view(B, T, *x.shape[1:]) for x in block.qkv(x_NC))
        mixed_BTHD = attend(index, q, k, v)
        if scored or index + 1 < len(model.blocks):
            block.finish(x_NC, mixed_BTHD.flatten(0, 1).flatten(1))
    if at_BJ is not None:
        T = at_BJ.shape[1]
        x_NC = x_NC.view(B, -1, x_NC.shape[1]).take_along_dim(at_BJ[..., None], dim=1).flatten(0, 1)
    logits_NV = model.head(x_NC)
    return logits_NV.view(B, T, logits_NV.shape[1])
