"""Pages that a retrieval view reads of a row: sinks, the best chunks by a policy, and a window of the latest tokens.

Shape suffixes: L layers, G KV heads, C chunks, U units (see `backends.PageTable`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, gcd

import torch
from torch import Tensor

from triforce.backends.kernel_api import PAGE

Pick = Callable[[range, int], Tensor]
"""Of some chunks the ids of so many, ascending, each layer's and KV head's own: int64 (L, G, picks)."""


@dataclass(frozen=True, slots=True)
class SelectedPages:
    """Units (L, G, U), int32, that hold `tokens` tokens, all before token `end`, selected after so many `passes`."""

    units: Tensor
    tokens: int
    end: int
    passes: int


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
