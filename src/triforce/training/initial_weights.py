"""Weights of a draft before its training.

Shape suffixes as in model/feature_draft.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triforce.checkpoint.tensor_sources import NORM
from triforce.engine.model_loader import Checkpoint
from triforce.model.feature_draft import FeatureDraftConfig, shapes
from triforce.model.weights import numbers


def initial_weights(target: Checkpoint, config: FeatureDraftConfig, seed: int) -> dict[str, Tensor]:
    """Return float32 tensors by field: it repeats the latest of the states it reads, under the target's own last norm.

    What the layer adds begins at zero, so that its depth costs nothing.
    """
    dice = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes(config).items():
        if "norm" in name:
            found[name] = torch.ones(shape)
        elif name in ("o_proj_CQ", "down_proj_CI"):
            found[name] = torch.zeros(shape)
        else:
            found[name] = torch.randn(shape, generator=dice) * shape[-1] ** -0.5
    C = config.hidden_size
    found["fc_CX"] *= 0.1
    found["fc_CX"][:, -C:] += torch.eye(C)
    found["norm_C"] = numbers(target.files.archives(packed=False)[NORM].view(NORM)).float().clone()
    return found
