"""Pages that a retrieval view reads of a row: sinks, the best chunks by a policy, and a window of the latest tokens.

A policy belongs to one row of a retrieval view and may remember summaries of it. Shape suffixes: L layers, B rows,
G KV heads, h query heads of a group, N chunks, C tokens of a chunk, D head size, U units (see `kernel_api.PageTable`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, gcd
from typing import Protocol

import torch
from torch import Tensor

from triforce.backends import dispatch
from triforce.backends.kernel_api import PAGE
from triforce.backends.kv_rows import numbers
from triforce.kvcache.pool import PagePool
from triforce.kvcache.views.full import FullView

RECENT_SHARE = 8
"""A scoring policy gives one part in so many of the budget to the latest tokens."""

AHEAD = 8
"""Units written to page lists beyond those asked for: the next passes will ask for them."""

Pick = Callable[[range, int], Tensor]
"""Of some chunks the ids of so many, ascending, each layer's and KV head's own: int64 (L, G, picks)."""


class Policy(Protocol):
    """Chunk c of a row holds its tokens [c * chunk, (c + 1) * chunk)."""

    observes: bool = False
    """Whether it needs the attention mass of verifications."""

    def latest(self, budget: int) -> int:
        """Count the tokens of `budget` that go to the latest ones, whatever they are."""
        return budget // RECENT_SHARE

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        """Ids of the best committed chunks among `candidates`, ascending, by layer and KV head: int64 (L, G, picks)."""


class Observed(Policy):
    """The attention that the last verification itself gave each chunk: free (as in SparseSpec and Vegas, 2026)."""

    observes = True

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        observation = full.observations[row]
        assert observation.mass_LGU is not None, "the exact view was not asked to observe"
        if observation.grain == chunk:
            return best(observation.mass_LGU, candidates, picks)
        mass_LGU = observation.mass_LGU[..., : candidates.stop * chunk // observation.grain]
        return best(mass_LGU.reshape(*mass_LGU.shape[:2], candidates.stop, -1).sum(3), candidates, picks)


class MeanKey(Policy):
    """The product of the last query with each chunk's mean key, added over a group (Sun et al. 2024, section 4.1)."""

    def __init__(self) -> None:
        self.means = Summaries(lambda keys_GNCD: keys_GNCD.mean(2))

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        means_LGND = self.means.of(full, row, chunk, candidates.stop)
        query_LGD = last_query(full, row).sum(2)
        return best(torch.einsum("lgnd,lgd->lgn", means_LGND, query_LGD), candidates, picks)


class Quest(Policy):
    """An upper bound of the product of the last query with any key of a chunk (Quest, Tang et al. 2024)."""

    def __init__(self) -> None:
        self.bounds = Summaries(lambda keys_GNCD: torch.stack([keys_GNCD.amin(2), keys_GNCD.amax(2)], 2))

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        least_LGND, most_LGND = self.bounds.of(full, row, chunk, candidates.stop).unbind(3)
        query_LGhD = last_query(full, row)
        high_LGhN = torch.einsum("lghd,lgnd->lghn", query_LGhD.clamp_min(0), most_LGND)
        low_LGhN = torch.einsum("lghd,lgnd->lghn", query_LGhD.clamp_max(0), least_LGND)
        return best((high_LGhN + low_LGhN).sum(2), candidates, picks)


class Recent(Policy):
    """Sinks and the latest tokens, and nothing else: StreamingLLM (Xiao et al. 2024) over the target's own pages."""

    def latest(self, budget: int) -> int:
        return budget - PAGE

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        config = full.pool.config
        return torch.zeros(config.layers, config.kv_heads, 0, dtype=torch.long, device=full.pool.device)


POLICIES: dict[str, Callable[[], Policy]] = {"observed": Observed, "mean_key": MeanKey, "quest": Quest}
"""The selections a user may ask for. `Recent` is the `streaming` mode's."""


class Summaries:
    """Results of `summarise`, (G, N, C, D) to (G, N, ...), by layer: of one row's full chunks, extended as it grows."""

    def __init__(self, summarise: Callable[[Tensor], Tensor]) -> None:
        self.summarise = summarise
        self._known: Tensor | None = None

    def of(self, full: FullView, row: int, chunk: int, chunks: int) -> Tensor:
        """Summaries of the first `chunks` chunks, all of which must be full and committed: (L, G, N, ...)."""
        known = self._known
        layers = full.pool.config.layers
        have = known.shape[2] if known is not None else 0
        if have < chunks:
            keys = (_keys(full.pool, layer, row, range(have * chunk, chunks * chunk)) for layer in range(layers))
            new = torch.stack([self.summarise(torch.unflatten(k_GND, 1, (-1, chunk))) for k_GND in keys])
            known = self._known = new if known is None else torch.cat([known, new], 2)
        assert known is not None
        return known[:, :, :chunks]


def _keys(pool: PagePool, layer: int, row: int, tokens: range) -> Tensor:
    """Keys (G, N, D) of some tokens of a row, float32; zeros where a layer has pages of its own: it selects none."""
    if pool.apart[layer]:
        return torch.zeros(pool.config.kv_heads, len(tokens), pool.config.head_dim, device=pool.device)
    return numbers(pool.span(layer, row, tokens.start, tokens.stop)[0]).float()


def last_query(full: FullView, row: int) -> Tensor:
    """The query of the last committed token, by layer and KV head: float32 (L, G, H / G, D)."""
    config = full.pool.config
    query_LHD = full.observations[row].query(int(full.pool.lengths_B[row]) - 1).float()
    return query_LHD.view(config.layers, config.kv_heads, -1, config.head_dim)


def best(scores_LGN: Tensor, candidates: range, picks: int) -> Tensor:
    """Return ids (L, G, picks) of the highest scores among `candidates`, ascending: memory is read in order."""
    return dispatch.best(scores_LGN.flatten(0, 1), candidates, picks).view(*scores_LGN.shape[:2], picks)


@dataclass(frozen=True, slots=True)
class SelectedPages:
    """Units (L, G, U), int32, that hold `tokens` tokens, all before token `end`, selected after so many `passes`."""

    units: Tensor
    tokens: int
    end: int
    passes: int


@dataclass(slots=True)
class RowSelection:
    """State of one row: what it reads, and how far it is."""

    policy: Policy
    pages: SelectedPages | None = None
    """None: it reads everything."""
    window_start: int = 0
    """The first of the latest tokens, all of which it reads."""
    ahead: int = 0
    """Tokens that it has seen, if more than are committed."""
    committed: int = 0
    """Tokens that were committed when its latest pass began."""
    refused: bool = False
    """Whether a verification has refused a token since the latest selection."""


def select_pages(
    row_U: Tensor, committed: int, budget: int, latest: int, chunk: int, pick: Pick, passes: int
) -> SelectedPages | None:
    """Sinks and the best chunks of `committed` tokens, which lie in the units `row_U`, within a budget of tokens.

    `latest`: so many tokens of the budget go to the latest ones, which are not selected. Returns None where everything
    is to be read: the budget covers it, or no chunk before the latest tokens is full yet.
    """
    end = (committed - latest) // chunk
    if committed <= budget or end == 0:
        return None
    sinks = min(ceil(PAGE / chunk), end)
    unit = gcd(chunk, PAGE)
    picks = max(0, min(budget // chunk - sinks - (ceil(committed / chunk) - end), end - sinks))
    units_NU = row_U[: end * chunk // unit].view(end, chunk // unit)
    chosen_LGN = pick(range(sinks, end), picks)
    sinks_LGN = torch.arange(sinks, device=chosen_LGN.device).expand(*chosen_LGN.shape[:2], -1)
    units_LGU = units_NU[torch.cat([sinks_LGN, chosen_LGN], 2)].flatten(2)
    return SelectedPages(units_LGU, (sinks + picks) * chunk, end * chunk, passes)


def window_start(selected: SelectedPages | None, committed: int, budget: int, unit: int) -> int:
    """The first token of the window behind what was selected; 0 where everything is read.

    Between selections it moves on by whole units, so that the budget holds while the text grows.
    """
    if selected is None:
        return 0
    left = max(budget - selected.tokens, PAGE)
    return max(selected.end, -(-(committed - left) // unit) * unit)


class PageLists:
    """Row b of `units_LBGU`: units selected for it, by layer and KV head, then its window; rewritten where changed."""

    def __init__(self, layers: int, rows: int, heads: int, device: torch.device) -> None:
        self.units_LBGU = torch.zeros(layers, rows, heads, 0, dtype=torch.int32, device=device)
        self._selected: list[Tensor | None] = [None] * rows
        self._window = [range(0)] * rows

    def show(self, b: int, selected_LGU: Tensor | None, row_U: Tensor, window: range) -> None:
        """Row b, all of whose tokens are the units `row_U`, sees what was selected for it and the units `window`."""
        known = self._window[b]
        same = self._selected[b] is selected_LGU
        if same and window.start == known.start and window.stop <= known.stop:
            return
        window = range(window.start, min(window.stop + AHEAD, len(row_U)))
        selected = selected_LGU.shape[2] if selected_LGU is not None else 0
        more = selected + len(window) - self.units_LBGU.shape[3]
        if more > 0:
            self.units_LBGU = torch.nn.functional.pad(self.units_LBGU, (0, more + AHEAD))
        if selected_LGU is not None and not same:
            self.units_LBGU[:, b, :, :selected] = selected_LGU
        self.units_LBGU[:, b, :, selected : selected + len(window)] = row_U[window.start : window.stop]
        self._selected[b] = selected_LGU
        self._window[b] = window
