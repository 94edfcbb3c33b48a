"""Select nothing but sinks and the latest tokens: StreamingLLM (Xiao et al. 2024) over the target's own pages."""

from __future__ import annotations

import torch
from torch import Tensor

from triforce.backends.kernel_api import PAGE
from triforce.kvcache.views.full import FullView


class Recent:
    observes = False

    def latest(self, budget: int) -> int:
        return budget - PAGE

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        config = full.pool.config
        return torch.zeros(config.layers, config.kv_heads, 0, dtype=torch.long, device=full.pool.device)
