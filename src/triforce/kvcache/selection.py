"""Pages that a retrieval view reads of a row: sinks, the best chunks by a policy, and a window of the latest tokens.

A policy belongs to one row of a retrieval view and may cache summaries of it. Shape suffixes: L layers, B rows,
G KV heads, h query heads of a group, N chunks, C tokens of a chunk, D head size, U units (see `kernel_api.PageTable`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, gcd
from typing import Protocol

import numpy as np

from triforce.arrays import Array, namespace
from triforce.backends import dispatch
from triforce.backends.kernel_api import PAGE
from triforce.kvcache.pool import PagePool
from triforce.kvcache.views.full import FullView

RECENT_DIVISOR = 8
"""A scoring policy gives 1 / `RECENT_DIVISOR` of the budget to the latest tokens."""

EXTRA_UNITS = 8
"""Units that page lists hold beyond the current pass, so that the next passes need not rewrite them."""

Pick = Callable[[range, int], Array]
"""Function of candidate chunks and a count, `picks`. It returns chunk ids by layer and KV head, ascending: int64
(L, G, picks)."""


class Policy(Protocol):
    """Scores chunks of a row. Chunk c holds the row's tokens [c * chunk, (c + 1) * chunk)."""

    observes: bool = False
    """Whether the policy needs the attention mass of verifications."""

    def latest_tokens(self, budget: int) -> int:
        """Return the tokens of `budget` that are left for the latest tokens of the text, which are not scored."""
        return budget // RECENT_DIVISOR

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Array:
        """Return int64 ids (L, G, picks) of the best committed chunks of `candidates`, ascending.

        full, row: the full view and its row, which has observed a pass.
        """


class Observed(Policy):
    """Scores a chunk by the last verification's own attention mass, at no cost (as in SparseSpec and Vegas, 2026)."""

    observes = True

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Array:
        observation = full.observations[row]
        assert observation.mass_LGU is not None, "the full view was not asked to observe"
        if observation.grain == chunk:
            return best(observation.mass_LGU, candidates, picks)
        mass_LGU = observation.mass_LGU[..., : candidates.stop * chunk // observation.grain]
        mass_LGNU = mass_LGU.reshape(*mass_LGU.shape[:2], candidates.stop, -1)
        return best(namespace(mass_LGNU).sum(mass_LGNU, axis=3), candidates, picks)


class MeanKey(Policy):
    """Scores a chunk by the product of the last query with its mean key, summed over a group's query heads.

    That is the score of Sun et al. 2024, section 4.1.
    """

    def __init__(self) -> None:
        self.means = Summaries(lambda keys_GNCD: namespace(keys_GNCD).mean(keys_GNCD, axis=2))

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Array:
        means_LGND = self.means.of(full, row, chunk, candidates.stop)
        query_LGhD = last_query(full, row)
        query_LGD = namespace(query_LGhD).sum(query_LGhD, axis=2)
        return best((means_LGND @ query_LGD[..., None])[..., 0], candidates, picks)


class Quest(Policy):
    """Scores a chunk by an upper bound of the product of the last query with any of its keys (Tang et al. 2024)."""

    def __init__(self) -> None:
        self.bounds = Summaries(_bounds)

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Array:
        bounds_LGN2D = self.bounds.of(full, row, chunk, candidates.stop)
        query_LGhD = last_query(full, row)
        xp = namespace(query_LGhD)
        none = xp.zeros_like(query_LGhD)
        high_LGhN = xp.maximum(query_LGhD, none) @ xp.matrix_transpose(bounds_LGN2D[..., 1, :])
        low_LGhN = xp.minimum(query_LGhD, none) @ xp.matrix_transpose(bounds_LGN2D[..., 0, :])
        return best(xp.sum(high_LGhN + low_LGhN, axis=2), candidates, picks)


def _bounds(keys_GNCD: Array) -> Array:
    """Return the least and the largest number of each channel of a chunk's keys: (G, N, 2, D)."""
    xp = namespace(keys_GNCD)
    return xp.stack([xp.min(keys_GNCD, axis=2), xp.max(keys_GNCD, axis=2)], axis=2)


class Recent(Policy):
    """Selects sinks and the latest tokens only: StreamingLLM (Xiao et al. 2024) over the target's own pages."""

    def latest_tokens(self, budget: int) -> int:
        return budget - PAGE

    def pick(self, full: FullView, row: int, chunk: int, candidates: range, picks: int) -> Array:
        config = full.pool.config
        return full.pool.array(np.zeros((config.layers, config.kv_heads, 0), np.int64))


POLICIES: dict[str, Callable[[], Policy]] = {"observed": Observed, "mean_key": MeanKey, "quest": Quest}
"""Policies by the name that users give. `Recent` belongs to the `streaming` mode."""


class Summaries:
    """Cached summaries of one row's full chunks, by layer, extended as the row grows.

    summarise: maps keys (G, N, C, D) to summaries (G, N, ...).
    """

    def __init__(self, summarise: Callable[[Array], Array]) -> None:
        self.summarise = summarise
        self._summaries: Array | None = None

    def of(self, full: FullView, row: int, chunk: int, chunks: int) -> Array:
        """Return summaries (L, G, N, ...) of the first `chunks` chunks. These must be full and committed."""
        summaries = self._summaries
        layers = full.pool.config.layers
        summarised_chunks = summaries.shape[2] if summaries is not None else 0
        if summarised_chunks < chunks:
            keys = (
                _keys(full.pool, layer, row, range(summarised_chunks * chunk, chunks * chunk))
                for layer in range(layers)
            )
            xp = full.pool.xp
            parts = [self.summarise(k_GND.reshape(len(k_GND), -1, chunk, k_GND.shape[2])) for k_GND in keys]
            new = xp.stack(parts)
            summaries = self._summaries = new if summaries is None else xp.concat([summaries, new], axis=2)
        assert summaries is not None
        return summaries[:, :, :chunks]


def _keys(pool: PagePool, layer: int, row: int, tokens: range) -> Array:
    """Return keys (G, N, D) of a range of a row's tokens, float32.

    They are zeros for a layer with window pages of its own, which selects none.
    """
    if pool.uses_window_pages[layer]:
        return pool.array(np.zeros((pool.config.kv_heads, len(tokens), pool.config.head_dim), np.float32))
    return pool.kv.numbers(pool.span(layer, row, tokens.start, tokens.stop)[0])


def last_query(full: FullView, row: int) -> Array:
    """Return the query of the last committed token, by layer and KV head: float32 (L, G, H / G, D)."""
    config = full.pool.config
    query_LHD = full.kv.numbers(full.observations[row].query(int(full.pool.lengths_B[row]) - 1))
    return query_LHD.reshape(config.layers, config.kv_heads, -1, config.head_dim)


def best(scores_LGN: Array, candidates: range, picks: int) -> Array:
    """Return ids (L, G, picks) of the highest scores of `candidates`, ascending, so that memory is read in order."""
    L, G, N = scores_LGN.shape
    return dispatch.top_columns(scores_LGN.reshape(L * G, N), candidates, picks).reshape(L, G, picks)


@dataclass(frozen=True, slots=True)
class SelectedPages:
    """Selection of one row: units (L, G, U), int32, that hold `tokens` tokens, all of them before token `end`.

    passes: observed passes of the row before the selection.
    """

    units: Array
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
    """Tokens that were fed to the row. The field has a meaning only while it is above the committed length."""
    committed: int = 0
    """Tokens that were committed when the row's latest pass began."""
    rejected: bool = False
    """Whether a verification has rejected a token since the latest selection."""


def select_pages(
    row_U: Array, committed: int, budget: int, latest: int, chunk: int, pick: Pick, passes: int
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
    # Of the budget's chunks, sinks and the chunks from `end` on are not picked by score.
    picks = max(0, min(budget // chunk - sinks - (ceil(committed / chunk) - end), end - sinks))
    units_NU = row_U[: end * chunk // unit].reshape(end, chunk // unit)
    chosen_LGN = pick(range(sinks, end), picks)
    L, G, _ = chosen_LGN.shape
    xp = namespace(row_U)
    sinks_LGN = xp.broadcast_to(xp.arange(sinks, device=row_U.device), (L, G, sinks))
    units_LGU = units_NU[xp.concat([sinks_LGN, chosen_LGN], axis=2)].reshape(L, G, -1)
    return SelectedPages(units_LGU, (sinks + picks) * chunk, end * chunk, passes)


def window_start(selected: SelectedPages | None, committed: int, budget: int, unit: int) -> int:
    """Return the first token of the window after a selection; 0 where the row reads all tokens.

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

    def __init__(self, pool: PagePool, rows: int) -> None:
        self.units_LBGU = pool.array(np.zeros((pool.config.layers, rows, pool.config.kv_heads, 0), np.int32))
        self._selected: list[Array | None] = [None] * rows
        self._window = [range(0)] * rows

    def show(self, b: int, selected_LGU: Array | None, row_U: Array, window: range) -> None:
        """Write row b: its selected units and the units of `window`. row_U: the units of all of its tokens."""
        written_window = self._window[b]
        selection_written = self._selected[b] is selected_LGU
        if selection_written and window.start == written_window.start and window.stop <= written_window.stop:
            return
        window = range(window.start, min(window.stop + EXTRA_UNITS, len(row_U)))
        selected = selected_LGU.shape[2] if selected_LGU is not None else 0
        missing_units = selected + len(window) - self.units_LBGU.shape[3]
        if missing_units > 0:
            xp = namespace(self.units_LBGU)
            shape = *self.units_LBGU.shape[:3], missing_units + EXTRA_UNITS
            more_LBGU = xp.zeros(shape, dtype=xp.int32, device=self.units_LBGU.device)
            self.units_LBGU = xp.concat([self.units_LBGU, more_LBGU], axis=3)
        if selected_LGU is not None and not selection_written:
            self.units_LBGU[:, b, :, :selected] = selected_LGU
        self.units_LBGU[:, b, :, selected : selected + len(window)] = row_U[window.start : window.stop]
        self._selected[b] = selected_LGU
        self._window[b] = window
