"""Step between two passes of a draft: the drawn token becomes the input of the next pass, on the device.

Shape suffixes: B rows, K tokens of the draft, X integers of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from triforce.backends.cuda.graphs import PassInputs

INTEGERS = 6
"""Integers of each row: token, position, count (1, or 0 for a row that is left out), key index, and `places` (2)."""


def advance_draft(decided_2B1: Tensor, inputs: PassInputs, places_2B: Tensor, drawn_2KB: Tensor, step: int) -> Tensor:
    """Return the next pass's inputs of each row, int64 (INTEGERS, B); write the drawn token and its peak.

    decided: as `sampler.by_race` returns it. places: lengths of the texts, and 0, or -1 where a row is left out.
    drawn_2KB: int64; column `step` is written. The other inputs are not changed.
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
    """Advance all rows in one program, as rows are few."""
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
