"""The target seen through a few pages of its own pool: sinks, those picked by relevance, and the recent ones.

The paper's retrieval cache (Sun et al. 2024, section 4.1), as an index per layer and KV head instead of a copy.
Shape suffixes: B rows, T tokens fed in one pass, H query heads, G KV heads, U units
(see `kernels.Lists`), D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from triforce.cache.full import Full
from triforce.cache.paged import Pass
from triforce.cache.pool import pages_for
from triforce.cache.select import Policy
from triforce.errors import RequestError
from triforce.kernels import PAGE, Lists


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
    """What a row looks at besides its recent tokens: units (L, G, U), int32, of so many tokens before `recent`."""

    units: Tensor
    tokens: int
    recent: int
    passes: int


class Retrieval:
    """A lower view of the rows of a `Full` view. It writes only slots at or beyond the committed length.

    Its own length never falls behind the committed one: the verification has written those slots, exactly. Everything
    is visible while the budget covers the context.
    """

    def __init__(self, full: Full, policy: Policy, setting: Setting = Setting()) -> None:
        self.full, self.policy, self.setting = full, policy, setting
        self.unit = gcd(setting.chunk, PAGE)
        full.grain = self.unit if policy.observes else 0
        self.ahead_B = torch.zeros_like(full.lengths_B)
        self.choices: list[Choice | None] = [None] * len(full.rows)
        self._committed_B = torch.zeros_like(self.ahead_B)
        self._refused_B = torch.zeros_like(self.ahead_B, dtype=torch.bool)
        self._pass: Pass | None = None
        self._lists: list[Lists] = []
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
        self._lists = self._all_lists(self._pass)

    def attend(self, layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
        this = self._pass
        assert this is not None, "begin() comes before attend()"
        q_BTHD = this.write(self.full.pool, layer, q_BTHD, k_BTGD, v_BTGD)
        return self.full.pool.memory.attend(layer, q_BTHD, self._lists[layer])[0]

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
        parts = chunk // self.unit
        units_CU = self._row_units(b)[: recent * parts].view(recent, parts)
        units = []
        for layer in range(self.full.pool.config.layers):
            chosen_GC = self.policy.pick(self.full, row, layer, chunk, range(sinks, recent), picks)
            sinks_GC = torch.arange(sinks, device=chosen_GC.device).expand(len(chosen_GC), -1)
            units.append(units_CU[torch.cat([sinks_GC, chosen_GC], 1)].flatten(1))
        self._refused_B[b] = False
        tokens = (sinks + picks) * chunk
        return Choice(torch.stack(units), tokens, recent * chunk, self.full.sights[row].passes)

    def _recent_from(self, b: int, committed: int) -> int:
        """The first recent token in sight: between selections the window slides, so that the budget holds."""
        choice = self.choices[b]
        if choice is None:
            return 0
        left = max(self.setting.budget.of(committed) - choice.tokens, PAGE)
        return max(choice.recent, -(-(committed - left) // self.unit) * self.unit)

    def _row_units(self, b: int) -> Tensor:
        """All tokens of a row, as units (U)."""
        row = self.full.rows[b]
        return self.full.pool.units(range(row, row + 1), self.unit)[0]

    def _all_lists(self, this: Pass) -> list[Lists]:
        """What each layer sees in a pass: what was chosen and the recent tokens, or everything."""
        config, unit = self.full.pool.config, self.unit
        everything = Lists(self.full.pool.units(self.full.rows, unit), this.starts, this.counts, unit)
        if not any(self.choices):
            return [everything] * config.layers
        ends = zip(this.starts, this.counts, strict=True)
        rows = [self._row_list(b, start + count) for b, (start, count) in enumerate(ends)]
        units_LBGU = pad_sequence([units_LGU.permute(2, 0, 1) for units_LGU in rows]).permute(2, 1, 3, 0).contiguous()
        dropped = [recent - c.tokens if c else 0 for recent, c in zip(self.recent, self.choices, strict=True)]
        starts = [start - drop for start, drop in zip(this.starts, dropped, strict=True)]
        some = [Lists(units_BGU, starts, this.counts, unit) for units_BGU in units_LBGU]
        return [everything if layer < self.setting.full_layers else some[layer] for layer in range(config.layers)]

    def _row_list(self, b: int, stop: int) -> Tensor:
        """The units (L, G, U) that a row sees."""
        config, choice = self.full.pool.config, self.choices[b]
        recent_U = self._row_units(b)[self.recent[b] // self.unit : -(-stop // self.unit)]
        recent_LGU = recent_U.expand(config.layers, config.kv_heads, -1)
        return torch.cat([choice.units, recent_LGU], 2) if choice else recent_LGU
