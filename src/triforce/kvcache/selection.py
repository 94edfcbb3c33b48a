"""Pages that a retrieval view reads of a row: sinks, the best chunks by a policy, and a window of the latest tokens.

A policy belongs to one row of a retrieval view and may cache summaries of it. Shape suffixes: L layers, B rows,
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
"""A scoring policy gives 1 / `RECENT_SHARE` of the budget to the latest tokens."""

EXTRA_UNITS = 8
"""Units that page lists hold beyond the current pass, so that the next passes need not rewrite them."""

Pick = Callable[[range, int], Tensor]
"""Function of candidate chunks and a count, `picks`. It returns chunk ids by layer and KV head, ascending: int64
(L, G, picks)."""


class Policy(Protocol):
    """Scores chunks of a row. Chunk c holds the row's tokens [c * chunk, (c + 1) * chunk)."""

    observes: bool = False
    """Whether the policy needs the attention mass of verifications."""

    def latest(self, budget: int) -> int:
        """Return how many tokens of `budget` go to the latest tokens, without a score."""
        return budget // RECENT_SHARE

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        """Return int64 ids (L, G, picks) of the best committed chunks of `candidates`, ascending.

        full, row: the exact view and its row, which has observed a pass.
        """


class Observed(Policy):
    """Scores a chunk by the last verification's own attention mass, at no cost (as in SparseSpec and Vegas, 2026)."""

    observes = True

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        observation = full.observations[row]
        assert observation.mass_LGU is not None, "the exact view was not asked to observe"
        if observation.grain == chunk:
            return best(observation.mass_LGU, candidates, picks)
        mass_LGU = observation.mass_LGU[..., : candidates.stop * chunk // observation.grain]
        return best(mass_LGU.reshape(*mass_LGU.shape[:2], candidates.stop, -1).sum(3), candidates, picks)


class MeanKey(Policy):
    """Scores a chunk by the product of the last query with its mean key, summed over a group's query heads.

    That is the score of Sun et al. 2024, section 4.1.
    """

    def __init__(self) -> None:
        self.means = Summaries(lambda keys_GNCD: keys_GNCD.mean(2))

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        means_LGND = self.means.of(full, row, chunk, candidates.stop)
        query_LGD = last_query(full, row).sum(2)
        return best(torch.einsum("lgnd,lgd->lgn", means_LGND, query_LGD), candidates, picks)


class Quest(Policy):
    """Scores a chunk by an upper bound of the product of the last query with any of its keys (Tang et al. 2024)."""

    def __init__(self) -> None:
        self.bounds = Summaries(lambda keys_GNCD: torch.stack([keys_GNCD.amin(2), keys_GNCD.amax(2)], 2))

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        min_LGND, max_LGND = self.bounds.of(full, row, chunk, candidates.stop).unbind(3)
        query_LGhD = last_query(full, row)
        high_LGhN = torch.einsum("lghd,lgnd->lghn", query_LGhD.clamp_min(0), max_LGND)
        low_LGhN = torch.einsum("lghd,lgnd->lghn", query_LGhD.clamp_max(0), min_LGND)
        return best((high_LGhN + low_LGhN).sum(2), candidates, picks)


class Recent(Policy):
    """Selects sinks and the latest tokens only: StreamingLLM (Xiao et al. 2024) over the target's own pages."""

    def latest(self, budget: int) -> int:
        return budget - PAGE

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Tensor:
        config = full.pool.config
        return torch.zeros(config.layers, config.kv_heads, 0, dtype=torch.long, device=full.pool.device)


POLICIES: dict[str, Callable[[], Policy]] = {"observed": Observed, "mean_key": MeanKey, "quest": Quest}
"""Policies by the name that users give. `Recent` belongs to the `streaming` mode."""


class Summaries:
    """Cached summaries of one row's full chunks, by layer, extended as the row grows.

    summarise: maps keys (G, N, C, D) to summaries (G, N, ...).
    """

    def __init__(self, summarise: Callable[[Tensor], Tensor]) -> None:
        self.summarise = summarise
        self._summaries: Tensor | None = None

    def of(self, full: FullView, row: int, chunk: int, chunks: int) -> Tensor:
        """Return summaries (L, G, N, ...) of the first `chunks` chunks. These must be full and committed."""
        summaries = self._summaries
        layers = full.pool.config.layers
        summarised_chunks = summaries.shape[2] if summaries is not None else 0
        if summarised_chunks < chunks:
            keys = (
                _keys(full.pool, layer, row, range(summarised_chunks * chunk, chunks * chunk))
                for layer in range(layers)
            )
            new = torch.stack([self.summarise(torch.unflatten(k_GND, 1, (-1, chunk))) for k_GND in keys])
            summaries = self._summaries = new if summaries is None else torch.cat([summaries, new], 2)
        assert summaries is not None
        return summaries[:, :, :chunks]


def _keys(pool: PagePool, layer: int, row: int, tokens: range) -> Tensor:
    """Return keys (G, N, D) of a range of a row's tokens, float32.

    They are zeros for a layer with window pages of its own, which selects none.
    """
    if pool.uses_window_pages[layer]:
        return torch.zeros(pool.config.kv_heads, len(tokens), pool.config.head_dim, device=pool.device)
    return numbers(pool.span(layer, row, tokens.start, tokens.stop)[0]).float()


def last_query(full: FullView, row: int) -> Tensor:
    """Return the query of the last committed token, by layer and KV head: float32 (L, G, H / G, D)."""
    config = full.pool.config
    query_LHD = full.observations[row].query(int(full.pool.lengths_B[row]) - 1).float()
    return query_LHD.view(config.layers, config.kv_heads, -1, config.head_dim)


def best(scores_LGN: Tensor, candidates: range, picks: int) -> Tensor:
    """Return ids (L, G, picks) of the highest scores of `candidates`, ascending, so that memory is read in order."""
    return dispatch.best(scores_LGN.flatten(0, 1), candidates, picks).view(*scores_LGN.shape[:2], picks)


@dataclass(frozen=True, slots=True)
class SelectedPages:
    """Selection of one row: units (L, G, U), int32, that hold `tokens` tokens, all of them before token `end`.

    passes: observed passes of the row before the selection.
    """

    units: Tensor
    tokens: int
    end: int
    passes: int


@dataclass(slots=True)
class RowSelection:
    """State of one row of a retrieval view: its selection and its lengths."""

    policy: Policy
    pages: SelectedPages | None = None
    """None: the row reads all tokens."""
    window_start: int = 0
    """First token of the window: the row reads all tokens from there on."""
    fed_tokens: int = 0
    """Tokens that were fed to the row. It is read only where it is above the committed length."""
    committed: int = 0
    """Tokens that were committed when the row's latest pass began."""
    rejected: bool = False
    """Whether a verification has rejected a token since the latest selection."""


def select_pages(
    row_U: Tensor, committed: int, budget: int, latest: int, chunk: int, pick: Pick, passes: int
) -> SelectedPages | None:
    """Select sinks and the best chunks of a row's `committed` tokens, which lie in the units `row_U`.

    budget: tokens to read. latest: tokens of the budget that are left for the window and not selected. Returns None
    where the row is to read all tokens: the budget covers them, or no chunk before the latest tokens is full yet.
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
    """Return the first token of the window behind a selection; 0 where the row reads all tokens.

    Between selections the window moves on by whole units, so that the budget holds while the text grows.
    """
    if selected is None:
        return 0
    window_tokens = max(budget - selected.tokens, PAGE)
    return max(selected.end, -(-(committed - window_tokens) // unit) * unit)


class PageLists:
    """Page lists `units_LBGU`. Row b has its selected units, by layer and KV head, then its window.

    Only rows that changed are rewritten.
    """

    def __init__(self, layers: int, rows: int, heads: int, device: torch.device) -> None:
        self.units_LBGU = torch.zeros(layers, rows, heads, 0, dtype=torch.int32, device=device)
        self._selected: list[Tensor | None] = [None] * rows
        self._window = [range(0)] * rows

    def show(self, b: int, selected_LGU: Tensor | None, row_U: Tensor, window: range) -> None:
        """Write row b: its selected units and the units of `window`. row_U: the units of all of its tokens."""
        written_window = self._window[b]
        selection_written = self._selected[b] is selected_LGU
        if selection_written and window.start == written_window.start and window.stop <= written_window.stop:
            return
        window = range(window.start, min(window.stop + EXTRA_UNITS, len(row_U)))
        selected = selected_LGU.shape[2] if selected_LGU is not None else 0
        missing_units = selected + len(window) - self.units_LBGU.shape[3]
        if missing_units > 0:
            self.units_LBGU = torch.nn.functional.pad(self.units_LBGU, (0, missing_units + EXTRA_UNITS))
        if selected_LGU is not None and not selection_written:
            self.units_LBGU[:, b, :, :selected] = selected_LGU
        self.units_LBGU[:, b, :, selected : selected + len(window)] = row_U[window.start : window.stop]
        self._selected[b] = selected_LGU
        self._window[b] = window
