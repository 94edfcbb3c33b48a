"""ModelProfile: the file of what is learnt of a model's passes on this machine, and what it says before any weight is
read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from triforce.backends import dispatch
from triforce.backends.kv_rows import kv_name
from triforce.checkpoint.model_files import ModelFiles
from triforce.checkpoint.weight_files import stamp
from triforce.engine.speculative_config import SpeculativeConfig
from triforce.interface.break_even_point import BreakEvenPoint
from triforce.model.config import ModelConfig
from triforce.model.expert_unions import ExpertUnions
from triforce.planner.break_even import BreakEven, LearntSpeed, balance_of, break_even_point
from triforce.planner.cost_model import CostModel, costs_path, kernel_level
from triforce.planner.pass_costs import TierWork


@dataclass(frozen=True)
class ModelProfile:
    """Profile of a model with a draft on a device, for some settings, where so many ranks share it.

    drafts: where the draft is; none, or one.
    """

    files: ModelFiles
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    speculation: SpeculativeConfig
    drafts: Sequence[Path] = ()
    ranks: int = 1

    @property
    def path(self) -> Path | None:
        """The file's path: other weights, types or settings have another one."""
        settings, offload = self.speculation, self.speculation.offload
        names = [stamp(each) for each in (self.files.path, *self.drafts)]
        names += [kv_name(self.config, self.dtype), settings.lower_tiers, f"{self.ranks} ranks"]
        return costs_path([*names, *([] if offload.kind == "none" else [repr(offload)])], self.device, self.dtype)

    @property
    def packed(self) -> bool:
        """Whether weights stay as a file packs them."""
        return bool(self.files.weight_bytes) and dispatch.keeps_packed(self.config, self.dtype, self.device)

    @property
    def coded(self) -> bool:
        """Whether products are those of weights of few bits, as they are."""
        return self.packed and not self.files.has_numbers

    @property
    def weight_size(self) -> float:
        """Bytes of one weight in the mean."""
        return self.files.weight_bytes / self.config.whole.parameters if self.packed else self.dtype.itemsize

    def works(self, unions: ExpertUnions | None = None) -> dict[str, TierWork]:
        """Return the work of the target's tiers. unions: what is known of its experts, if it has any."""
        bits, own = self.speculation.lower_bits, self.weight_size
        copied = bits > 0 and (self.files.has_numbers or not self.packed)
        weights = own, bits / 8 if copied else own
        return TierWork.of_target(self.config, weights, self.dtype.itemsize, bits > 0, unions)

    def break_even(self) -> BreakEvenPoint:
        """Return from which context on speculation pays, by the file as it is now, or else by arithmetic."""
        config, budget = self.config, self.speculation.retrieval.budget.of(self.config.context)
        balance, known = balance_of(self.coded, config, self.dtype, self.device)
        number = config.kv_bytes(self.dtype.itemsize) / config.kv_size
        even = BreakEven(config, budget, self.weight_size, number, balance)
        learnt = CostModel(self.path, self.works(), kernel_level(self.device))
        return break_even_point(even, known, LearntSpeed(learnt, budget))
