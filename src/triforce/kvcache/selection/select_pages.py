"""Pages that a retrieval view reads of a row: sinks, the best chunks by a policy, and a window of the latest tokens.

Shape suffixes: L layers, B rows, G KV heads, C chunks, U units (see `backends.PageTable`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, gcd

import torch
from torch import Tensor

from triforce.backends.kernel_api import PAGE
from triforce.kvcache.selection.policies import Policy

AHEAD = 8
"""Units written to page lists beyond those asked for: the next passes will ask for them."""

Pick = Callable[[range, int], Tensor]
"""Of some chunks the ids of so many, ascending, each layer's and KV head's own: int64 (L, G, picks)."""


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
    sinks, unit = min(ceil(PAGE / chunk), end), gcd(chunk, PAGE)
    picks = max(0, min(budget // chunk - sinks - (ceil(committed / chunk) - end), end - sinks))
    units_CU = row_U[: end * chunk // unit].view(end, chunk // unit)
    chosen_LGC = pick(range(sinks, end), picks)
    sinks_LGC = torch.arange(sinks, device=chosen_LGC.device).expand(*chosen_LGC.shape[:2], -1)
    units_LGU = units_CU[torch.cat([sinks_LGC, chosen_LGC], 2)].flatten(2)
    return SelectedPages(units_LGU, (sinks + picks) * chunk, end * chunk, passes)


def window_start(selected: SelectedPages | None, committed: int, budget: int, unit: int) -> int:
    """The first token of the window behind what was selected.

    Between selections it moves on by whole units, so that the budget holds while the text grows; 0 where everything is
    read.
    """
    if selected is None:
        return 0
    left = max(budget - selected.tokens, PAGE)
    return max(selected.end, -(-(committed - left) // unit) * unit)


class PageLists:
    """Row b of `units_LBGU`: the units selected for it, per layer and KV head, and behind them its window.

    Kept from pass to pass, and rewritten where a row's selection or window has changed.
    """

    def __init__(self, layers: int, rows: int, heads: int, device: torch.device) -> None:
        self.units_LBGU = torch.zeros(layers, rows, heads, 0, dtype=torch.int32, device=device)
        self._selected: list[Tensor | None] = [None] * rows
        self._window = [range(0)] * rows

    def show(self, b: int, selected_LGU: Tensor | None, row_U: Tensor, window: range) -> None:
        """Row b, all of whose tokens are the units `row_U`, sees what was selected for it and the units `window`."""
        known, same = self._window[b], self._selected[b] is selected_LGU
        if same and window.start == known.start and window.stop <= known.stop:
            return
        window = range(window.start, min(window.stop + AHEAD, len(row_U)))
        selected = selected_LGU.shape[2] if selected_LGU is not None else 0
        self._make_room(selected + len(window))
        if selected_LGU is not None and not same:
            self.units_LBGU[:, b, :, :selected] = selected_LGU
        self.units_LBGU[:, b, :, selected : selected + len(window)] = row_U[window.start : window.stop]
        self._selected[b], self._window[b] = selected_LGU, window

    def _make_room(self, units: int) -> None:
        more = units - self.units_LBGU.shape[3]
        if more > 0:
            self.units_LBGU = torch.nn.functional.pad(self.units_LBGU, (0, more + AHEAD))
