"""The lists of a retrieval view, kept from pass to pass: rewritten where a row's choice or window has moved.

Shape suffixes: L layers, B rows, G KV heads, U units (see `backends.PageTable`).
"""

from __future__ import annotations

import torch
from torch import Tensor

AHEAD = 8
"""Units written beyond those asked for: the next passes will ask for them."""


class PageLists:
    """Row b of `units_LBGU`: the units chosen for it, per layer and KV head, and behind them its recent ones."""

    def __init__(self, layers: int, rows: int, heads: int, device: torch.device) -> None:
        self.units_LBGU = torch.zeros(layers, rows, heads, 0, dtype=torch.int32, device=device)
        self._chosen: list[Tensor | None] = [None] * rows
        self._recent = [range(0)] * rows

    def show(self, b: int, chosen_LGU: Tensor | None, row_U: Tensor, recent: range) -> None:
        """Row b, all of whose tokens are the units `row_U`, sees what was chosen for it and its units `recent`."""
        known, same = self._recent[b], self._chosen[b] is chosen_LGU
        if same and recent.start == known.start and recent.stop <= known.stop:
            return
        recent = range(recent.start, min(recent.stop + AHEAD, len(row_U)))
        chosen = chosen_LGU.shape[2] if chosen_LGU is not None else 0
        self._make_room(chosen + len(recent))
        if chosen_LGU is not None and not same:
            self.units_LBGU[:, b, :, :chosen] = chosen_LGU
        self.units_LBGU[:, b, :, chosen : chosen + len(recent)] = row_U[recent.start : recent.stop]
        self._chosen[b], self._recent[b] = chosen_LGU, recent

    def _make_room(self, units: int) -> None:
        more = units - self.units_LBGU.shape[3]
        if more > 0:
            self.units_LBGU = torch.nn.functional.pad(self.units_LBGU, (0, more + AHEAD))
