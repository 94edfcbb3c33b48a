"""What happened to a tier's proposals, counted per row. B rows, N kept at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Counters:
    """Tokens a tier proposed, those the tier above kept (in all, and how often 0, 1, ... at once); passes; seconds."""

    def __init__(self, rows: int) -> None:
        self.proposed_B = torch.zeros(rows, dtype=torch.long)
        self.accepted_B = torch.zeros(rows, dtype=torch.long)
        self.kept_BN = torch.zeros(rows, 1, dtype=torch.long)
        self.passes_B = torch.zeros(rows, dtype=torch.long)
        self.seconds = self.prefill_seconds = 0.0

    def passed(self, live_B: Tensor, seconds: float) -> None:
        """The tier made one pass for its live rows."""
        self.passes_B += live_B.cpu()
        self.seconds += seconds

    def judged(self, offered_B: Tensor, kept_B: Tensor, live_B: Tensor) -> None:
        """The tier above kept the first `kept_B` of `offered_B` proposed tokens."""
        live_B = live_B.cpu().long()
        kept_B = kept_B.cpu() * live_B
        self.proposed_B += offered_B.cpu() * live_B
        self.accepted_B += kept_B
        if (more := int(kept_B.max()) + 1 - self.kept_BN.shape[1]) > 0:
            self.kept_BN = F.pad(self.kept_BN, (0, more))
        self.kept_BN.scatter_add_(1, kept_B[:, None], live_B[:, None])
