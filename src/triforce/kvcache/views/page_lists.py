"""The lists of a retrieval view, kept from pass to pass: rewritten where a row's selection or window has changed.

Shape suffixes: L layers, B rows, G KV heads, U units (see `backends.PageTable`).
"""

from __future__ import annotations

import torch
from torch import Tensor

AHEAD = 8
"""Units written beyond those asked for: the next passes will ask for them."""


class PageLists:
    """Row b of `units_LBGU`: the units selected for it, per layer and KV head, and behind them its window."""

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
