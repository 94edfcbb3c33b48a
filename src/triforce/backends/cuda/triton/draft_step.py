"""The step between two passes of a draft: the token that was drawn becomes the input of the next, on the device.

Shape suffixes: B rows, K tokens of the draft, X integers of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from triforce.backends.cuda.graphs import PassInputs

INTEGERS = 6
"""Of each row: the token, its position, 1 where it counts, its key in the row's list, and two of its sampler."""


def go_on(decided_2B1: Tensor, inputs: PassInputs, places_2B: Tensor, drawn_2KB: Tensor, step: int) -> Tensor:
    """Return what the next pass reads of each row, int64 (INTEGERS, B), and note what was drawn, with its peak.

    decided: as `sampler.by_race` gives it. places: lengths of the texts, and 0, or -1 where a row is left out.
    drawn_2KB: int64, of which column `step` is written. Reads its inputs and leaves them as they are.
    """
    _, K, B = drawn_2KB.shape
    next_XB = drawn_2KB.new_empty(INTEGERS, B)
    _go_on[(1,)](
        decided_2B1, inputs.positions_B, inputs.counts_B, inputs.starts[0], places_2B, next_XB, drawn_2KB, B, K, step,
        triton.next_power_of_2(B),
    )  # fmt: skip
    return next_XB


@triton.jit(do_not_specialize=["B", "K", "step"])
def _go_on(decided, positions, counts, starts, places, next_inputs, drawn, B, K, step, ROWS: tl.constexpr):
    """All rows at once: there are few."""
    b = tl.arange(0, ROWS)
    real = b < B
    token = tl.load(decided + b, mask=real, other=0)
    count = tl.load(counts + b, mask=real, other=0)
    tl.store(drawn + step * B + b, token, mask=real)
    tl.store(drawn + (K + step) * B + b, tl.load(decided + B + b, mask=real, other=0), mask=real)
    tl.store(next_inputs + b, token, mask=real)
    tl.store(next_inputs + B + b, tl.load(positions + b, mask=real, other=0) + count, mask=real)
    tl.store(next_inputs + 2 * B + b, tl.minimum(count, 1), mask=real)
    tl.store(next_inputs + 3 * B + b, tl.load(starts + b, mask=real, other=0) + count, mask=real)
    tl.store(next_inputs + 4 * B + b, tl.load(places + b, mask=real, other=0) + 1, mask=real)
    tl.store(next_inputs + 5 * B + b, tl.load(places + B + b, mask=real, other=0), mask=real)
