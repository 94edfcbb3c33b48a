"""The target seen through a few pages of its own pool: sinks, those picked by relevance, and the recent ones.

The paper's retrieval cache (Sun et al. 2024, section 4.1), as an index per layer and KV head instead of a copy.
Shape suffixes: B rows, T tokens fed in one pass, H query heads, G KV heads, N tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from triforce.cache.full import Full
from triforce.cache.paged import Pass
from triforce.cache.pool import PAGE, pages_for
from triforce.cache.select import Policy
from triforce.errors import RequestError
from triforce.kernels import attend, gather_slots


@dataclass(frozen=True, slots=True)
class Budget:
    """KV tokens a lower tier of the target may read per head: a number of them, or a share of the context."""

    tokens: int = 0
    share: float = 0.0

    @staticmethod
    def parse(text: str | int) -> Budget:
        """`2048` or `3%`. Raises RequestError."""
        try:
            if isinstance(text, str) and text.endswith("%"):
                budget = Budget(share=float(text[:-1]) / 100)
            else:
                budget = Budget(tokens=int(text))
        except ValueError:
            budget = Budget()
        if not (budget.tokens >= 2 * PAGE or 0 < budget.share <= 1):
            raise RequestError(f"budget {text!r}: give at least {2 * PAGE} tokens, such as 2048, or a share such as 3%")
        return budget

    def of(self, context: int) -> int:
        """Tokens for a context of so many, rounded up to whole pages."""
        return PAGE * max(2, pages_for(self.tokens or ceil(self.share * context)))


@dataclass(frozen=True, slots=True)
class Setting:
    """How a retrieval view selects. `refresh`: verifications between selections; 0 is once, None is after a refusal."""

    budget: Budget = Budget(2048)
    chunk: int = PAGE
    refresh: int | None = 1
    full_layers: int = 0

    @staticmethod
    def parse(budget: str | int, chunk: int, refresh: str | int, full_layers: int) -> Setting:
        """From what users write; `refresh` is a number or `auto`. Raises RequestError."""
        if not (refresh == "auto" or str(refresh).isdecimal()):
            raise RequestError(f"refresh {refresh!r}: give a number of verifications, 0 for once, or auto")
        if chunk < 1 or full_layers < 0:
            raise RequestError(f"chunk is {chunk} and full_layers {full_layers}; give at least 1 and 0")
        return Setting(Budget.parse(budget), chunk, None if refresh == "auto" else int(refresh), full_layers)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a row looks at besides its recent tokens: slots per layer, (G, N), of tokens before `recent`."""

    slots: list[Tensor]
    recent: int
    passes: int


class Retrieval:
    """A lower view of the rows of a `Full` view. It writes only slots at or beyond the committed length.

    Its own length never falls behind the committed one: the verification has written those slots, exactly. Everything
    is visible while the budget covers the context.
    """

    def __init__(self, full: Full, policy: Policy, setting: Setting = Setting()) -> None:
        self.full, self.policy, self.setting = full, policy, setting
        full.observes = policy.observes
        self.ahead_B = torch.zeros_like(full.lengths_B)
        self.choices: list[Choice | None] = [None] * len(full.rows)
        self._committed_B = torch.zeros_like(self.ahead_B)
        self._refused_B = torch.zeros_like(self.ahead_B, dtype=torch.bool)
        self._pass: Pass | None = None
        self.recent = [0] * len(full.rows)

    @property
    def lengths_B(self) -> Tensor:
        return torch.maximum(self.ahead_B, self.full.lengths_B)

    def begin(self, counts_B: Tensor, width: int) -> None:
        self._pass = Pass.over(self.full.pool, self.full.rows, self.lengths_B, counts_B, width)
        self._committed_B = self.full.lengths_B.clone()
        for b, (committed, count) in enumerate(zip(self.full.lengths_B.tolist(), self._pass.counts, strict=True)):
            choice = self.choices[b]
            if choice and committed < choice.recent:  # the text was cut: some of what was chosen is gone
                self.choices[b] = None
            if count and self._due(b):
                self.choices[b] = self._choose(b, committed)
            self.recent[b] = self._recent_from(b, committed)

    def attend(self, layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
        this = self._pass
        assert this is not None, "begin() comes before attend()"
        q_BTHD = this.write(self.full.pool, layer, q_BTHD, k_BTGD, v_BTGD)
        mixed_BTHD = torch.zeros_like(q_BTHD)
        for b, (start, count) in enumerate(zip(this.starts, this.counts, strict=True)):
            if count:
                mixed_BTHD[b, :count], _ = attend(
                    q_BTHD[b, :count], *self._visible(layer, b, start + count), weigh=False
                )
        return mixed_BTHD

    def advance(self, counts_B: Tensor) -> None:
        self.ahead_B = self.lengths_B + counts_B

    def rewind(self, lengths_B: Tensor) -> None:
        verified_B = self.full.lengths_B > self._committed_B  # else the refusal was this tier's own
        self._refused_B |= verified_B & (lengths_B <= self.ahead_B)
        self.ahead_B = torch.minimum(self.ahead_B, lengths_B)

    def resume(self, length: int) -> tuple[int, int]:
        """The exact view has seen to it."""
        return length, length

    def row(self, b: int) -> Retrieval:
        """Not a copy: there is nothing to feed through one row."""
        return self

    def fork(self, source: int, row: int) -> None:
        """What the row looks at is chosen afresh, from what the exact view saw."""

    def _due(self, b: int) -> bool:
        choice, refresh = self.choices[b], self.setting.refresh
        news = self.full.sights[self.full.rows[b]].passes - (choice.passes if choice else 0)
        if choice is None:
            return news > 0
        if refresh is None:
            return news > 0 and bool(self._refused_B[b])
        return 0 < refresh <= news

    def _choose(self, b: int, committed: int) -> Choice | None:
        """The best chunks of sight, within the budget, between the sinks and the recent tokens."""
        chunk, row = self.setting.chunk, self.full.rows[b]
        budget = self.setting.budget.of(committed)
        if committed <= budget:
            return None
        recent = (committed - self.policy.recent(budget)) // chunk
        if recent == 0:  # no chunk is full yet
            return None
        sinks = min(ceil(PAGE / chunk), recent)
        picks = max(0, min(budget // chunk - sinks - (ceil(committed / chunk) - recent), recent - sinks))
        slots_S = self.full.pool.slots(row, 0, recent * chunk).view(recent, chunk)
        slots = []
        for layer in range(self.full.pool.config.layers):
            chosen_GC = self.policy.pick(self.full, row, layer, chunk, range(sinks, recent), picks)
            sinks_GC = torch.arange(sinks, device=chosen_GC.device).expand(len(chosen_GC), -1)
            slots.append(slots_S[torch.cat([sinks_GC, chosen_GC], 1)].flatten(1))
        self._refused_B[b] = False
        return Choice(slots, recent * chunk, self.full.sights[row].passes)

    def _recent_from(self, b: int, committed: int) -> int:
        """The first recent token in sight: between selections the window slides, so that the budget holds."""
        choice = self.choices[b]
        if choice is None:
            return 0
        left = self.setting.budget.of(committed) - choice.slots[0].shape[1]
        return max(choice.recent, committed - max(left, PAGE))

    def _visible(self, layer: int, b: int, stop: int) -> tuple[Tensor, Tensor]:
        choice, pool, row = self.choices[b], self.full.pool, self.full.rows[b]
        if choice is None or layer < self.setting.full_layers:
            return pool.span(layer, row, 0, stop)
        recent_N = pool.slots(row, self.recent[b], stop)
        slots_GN = torch.cat([choice.slots[layer], recent_N.expand(pool.config.kv_heads, -1)], 1)
        return gather_slots(pool.keys_LGSD[layer], slots_GN), gather_slots(pool.values_LGSD[layer], slots_GN)
