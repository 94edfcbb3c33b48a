"""The target seen through a few pages of its own pool: sinks, those picked by relevance, and the recent ones.

The paper's retrieval cache (Sun et al. 2024, section 4.1), as an index per layer and KV head instead of a copy.
Shape suffixes: B rows, T tokens fed in one pass, J scored columns, L layers, G KV heads, C chunks, U units (see
`backends.PageTable`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil, gcd
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from triforce.backends.dispatch import PAGE, ForwardBatch, ModelBackend, PageTable, Search
from triforce.kvcache.retrieval_config import RetrievalConfig
from triforce.kvcache.selection import Policy
from triforce.kvcache.swap import places
from triforce.kvcache.views.full import FullView
from triforce.kvcache.views.page_lists import PageLists
from triforce.ragged import Ints

FOUND = 4
"""A search may find this part of the context: new tokens of a pass share it, and each looks for something else."""
GLANCE = 16
"""A search of so many keys costs about what one costs that is read: their sketches are small, but all are looked at."""


@dataclass(frozen=True, slots=True)
class SelectedPages:
    """What a row looks at besides its recent tokens: units (L, G, U), int32, of so many tokens before `recent`."""

    units: Tensor
    tokens: int
    recent: int
    passes: int


class SwappedSelection(NamedTuple):
    """A row of a retrieval view."""

    policy: Policy
    choice: SelectedPages | None
    ahead: int
    committed: int
    refused: bool


class RetrievalView:
    """A lower view of the rows of a `FullView` view. It writes only slots at or beyond the committed length.

    Its own length never falls behind the committed one: the verification has written those slots, exactly. Everything
    is visible while the budget covers the context.
    """

    def __init__(self, full: FullView, policy: Callable[[], Policy], setting: RetrievalConfig) -> None:
        self.full, self.setting = full, setting
        self.policies = [policy() for _ in full.rows]
        self.unit = gcd(setting.chunk, PAGE)
        full.grain, full.budget = (self.unit, setting.budget) if self.policies[0].observes else (0, None)
        self.ahead_B = np.zeros_like(full.lengths_B)
        self.choices: list[SelectedPages | None] = [None] * len(full.rows)
        self._committed_B = np.zeros_like(self.ahead_B)
        self._refused_B = np.zeros_like(self.ahead_B, dtype=np.bool_)
        self._pass: ForwardBatch | None = None
        self._index = self._blank()
        self.recent = [0] * len(full.rows)
        self.full_layers = setting.searched_layers or frozenset()
        self.searched_layers: frozenset[int] = frozenset()
        """Those in which each token looks for what it needs anew; all of it, where the memory does not search."""
        self.trying = False
        """Whether these are only tried: such passes may never come again."""
        self.times: dict[int, float] = {}
        """How many times its budget it reads of contexts of so many bits, from the next selection on; else once."""

    @property
    def lengths_B(self) -> Ints:
        return np.maximum(self.ahead_B, self.full.lengths_B)

    def begin(self, counts_B: Ints, width: int) -> None:
        starts, counts = self.lengths_B.tolist(), counts_B.tolist()
        self._committed_B = self.full.lengths_B.copy()
        for b, (committed, count) in enumerate(zip(self._committed_B.tolist(), counts, strict=True)):
            choice = self.choices[b]
            if choice and committed < choice.recent:  # the text was cut: some of what was chosen is gone
                self.choices[b] = None
            if count and self._due(b):
                self.choices[b] = self._choose(b, committed)
            self.recent[b] = self._recent_from(b, committed)
        rows = self.full.rows
        tables = self.full.pool.tables[rows.start : rows.stop]
        self._pass = ForwardBatch(starts, self._views(starts, counts), tables=tables, passing=self.trying)

    def forward(self, model: ModelBackend, ids_BT: Tensor, at_BJ: Tensor | None) -> Tensor:
        assert self._pass is not None, "begin() comes before forward()"
        return self.full.pool.memory.forward(model, ids_BT, at_BJ, self._pass).logits_BJV

    def advance(self, counts_B: Ints) -> None:
        self.ahead_B = self.lengths_B + counts_B

    def rewind(self, lengths_B: Ints) -> None:
        verified_B = self.full.lengths_B > self._committed_B  # else the refusal was this tier's own
        self._refused_B |= verified_B & (lengths_B <= self.ahead_B)
        self.ahead_B = np.minimum(self.ahead_B, lengths_B)

    def budget(self, context: int) -> int:
        """Tokens that it reads of so many."""
        return self.setting.budget.of(context, self.times.get(context.bit_length(), 1.0))

    def keys(self, context: int, searched: int | None = None, budget: int | None = None) -> int:
        """What a token costs to see of so many tokens, in keys, in the mean of the layers, if so many are searched."""
        pool, some = self.full.pool, min(budget or self.budget(context), context)
        whole, searched = len(self.full_layers), len(self.searched_layers) if searched is None else searched
        if not pool.memory.searches:
            whole, searched = whole + searched, 0
        layers = pool.config.layers
        found = max(some, context // FOUND) + context // GLANCE
        return (whole * context + searched * found + (layers - whole - searched) * some) // layers

    def resume(self, length: int) -> tuple[int, int]:
        """The exact view has seen to it."""
        return length, length

    def row(self, b: int) -> RetrievalView:
        """Not a copy: there is nothing to feed through one row."""
        return self

    def fork(self, source: int, row: int) -> None:
        """What the row looks at is chosen afresh, from what the exact view saw."""

    def select(self, rows: Sequence[int]) -> None:
        self.policies = [self.policies[b] for b in rows]
        self.choices = [self.choices[b] for b in rows]
        self.recent = [self.recent[b] for b in rows]
        self.ahead_B = self.ahead_B[list(rows)]
        self._committed_B = self._committed_B[list(rows)]
        self._refused_B = self._refused_B[list(rows)]
        self._index = self._blank()

    def join(self, other: RetrievalView) -> None:
        self.policies += other.policies
        self.choices += other.choices
        self.recent += other.recent
        self.ahead_B = np.concatenate((self.ahead_B, other.ahead_B))
        self._committed_B = np.concatenate((self._committed_B, other._committed_B))
        self._refused_B = np.concatenate((self._refused_B, other._refused_B))
        self._index = self._blank()

    def aside(self, b: int) -> SwappedSelection:
        """What a row has chosen, for `bring_back`. Its choice is kept by places, as its pages will be others."""
        choice = self.choices[b]
        if choice:
            choice = replace(choice, units=places(choice.units, self.row_units(b)))
        counts = int(self.ahead_B[b]), int(self._committed_B[b]), bool(self._refused_B[b])
        return SwappedSelection(self.policies[b], choice, *counts)

    def bring_back(self, b: int, chosen: SwappedSelection) -> None:
        """Let a fresh row go on as the one that was put aside."""
        self.policies[b], choice = chosen.policy, chosen.choice
        self.choices[b] = choice and replace(choice, units=self.row_units(b)[choice.units])
        self.ahead_B[b], self._committed_B[b], self._refused_B[b] = chosen.ahead, chosen.committed, chosen.refused

    def missed(self, b: int) -> list[float] | None:
        """By layer, the share of the latest verification's attention that fell outside of what row b had in sight.

        In the mean of the KV heads. None where it saw everything, or nobody asked where attention went.
        """
        choice, mass_LGU = self.choices[b], self.full.sights[self.full.rows[b]].mass_LGU
        if choice is None or mass_LGU is None:
            return None
        chosen_LG = mass_LGU.gather(2, places(choice.units, self.row_units(b))).sum(2)
        seen_LG = chosen_LG + mass_LGU[..., self.recent[b] // self.unit :].sum(2)
        missed_L: list[float] = (1 - seen_LG / mass_LGU.sum(2)).mean(1).tolist()
        return missed_L

    def _blank(self) -> PageLists:
        """Lists of no rows' yet; the next pass writes them all."""
        config = self.full.pool.config
        return PageLists(config.layers, len(self.choices), config.kv_heads, self.full.pool.device)

    def _due(self, b: int) -> bool:
        choice, refresh, sight = self.choices[b], self.setting.refresh, self.full.sights[self.full.rows[b]]
        if self.policies[b].observes and sight.mass_LGU is None:
            return False  # nobody had asked: so it was with a row whose batch decoded plainly before it came here
        news = sight.passes - (choice.passes if choice else 0)
        if choice is None:
            return news > 0
        if refresh is None:
            return news > 0 and bool(self._refused_B[b])
        return 0 < refresh <= news

    def _choose(self, b: int, committed: int) -> SelectedPages | None:
        """The best chunks of sight, within the budget, between the sinks and the recent tokens."""
        chunk, row = self.setting.chunk, self.full.rows[b]
        budget = self.budget(committed)
        if committed <= budget:
            return None
        recent = (committed - self.policies[b].recent(budget)) // chunk
        if recent == 0:  # no chunk is full yet
            return None
        sinks = min(ceil(PAGE / chunk), recent)
        picks = max(0, min(budget // chunk - sinks - (ceil(committed / chunk) - recent), recent - sinks))
        parts = chunk // self.unit
        units_CU = self.row_units(b)[: recent * parts].view(recent, parts)
        chosen_LGC = self.policies[b].pick(self.full, row, chunk, range(sinks, recent), picks)
        sinks_LGC = torch.arange(sinks, device=chosen_LGC.device).expand(*chosen_LGC.shape[:2], -1)
        units_LGU = units_CU[torch.cat([sinks_LGC, chosen_LGC], 2)].flatten(2)
        self._refused_B[b] = False
        tokens = (sinks + picks) * chunk
        return SelectedPages(units_LGU, tokens, recent * chunk, self.full.sights[row].passes)

    def _recent_from(self, b: int, committed: int) -> int:
        """The first recent token in sight: between selections the window slides, so that the budget holds."""
        choice = self.choices[b]
        if choice is None:
            return 0
        left = max(self.budget(committed) - choice.tokens, PAGE)
        return max(choice.recent, -(-(committed - left) // self.unit) * self.unit)

    def row_units(self, b: int) -> Tensor:
        """All pages of a row, as units (U)."""
        row, pool = self.full.rows[b], self.full.pool
        return pool.units(range(row, row + 1), self.unit)[0, : len(pool.tables[row]) * (PAGE // self.unit)]

    def _views(self, starts: list[int], counts: list[int]) -> list[tuple[int, PageTable]]:
        """What the layers see in a pass: some everything, the others what was chosen and the recent tokens."""
        layers, unit, committed = self.full.pool.config.layers, self.unit, self._committed_B.tolist()
        everything = PageTable(self.full.pool.units(self.full.rows, unit), starts, counts, unit, coarse=committed)
        if not any(self.choices):
            return [(layers, everything)]
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            choice = self.choices[b]
            units = range(self.recent[b] // unit, -(-(start + count) // unit))
            self._index.show(b, choice.units if choice else None, self.row_units(b), units)
        dropped = [recent - c.tokens if c else 0 for recent, c in zip(self.recent, self.choices, strict=True)]
        firsts, coarse = ([n - drop for n, drop in zip(each, dropped, strict=True)] for each in (starts, committed))
        searched = replace(everything, search=self._search())
        views: list[tuple[int, PageTable]] = []
        for kind, group in groupby(range(layers), self._sees):
            some = list(group)
            units_LBGU = self._index.units_LBGU[some[0] : some[-1] + 1]
            chosen = PageTable(units_LBGU, firsts, counts, unit, coarse=coarse)
            views.append((len(some), {"all": everything, "found": searched, "chosen": chosen}[kind]))
        return views

    def _sees(self, layer: int) -> str:
        return "all" if layer in self.full_layers else "found" if layer in self.searched_layers else "chosen"

    def _search(self) -> Search:
        """Between the sinks and the recent tokens, of rows that do not see everything."""
        unit, sinks = self.unit, PAGE // self.unit
        rows = [
            (sinks, recent // unit, max(choice.tokens, recent // FOUND) // unit - sinks) if choice else (0, 0, 0)
            for recent, choice in zip(self.recent, self.choices, strict=True)
        ]
        return Search(*map(list, zip(*rows, strict=True)))
