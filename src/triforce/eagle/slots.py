"""Slots of the tokens of a pass, as an EAGLE head beside its target writes and reads them."""

from __future__ import annotations

import numpy as np

from triforce.backends.kernel_api import PAGE, ForwardBatch
from triforce.ragged import Ints, ints


def token_slots(batch: ForwardBatch, counts_B: Ints) -> tuple[Ints, Ints]:
    """Return the slots (N) of a pass's tokens, row after row, and the slots (N) of the tokens before them.

    A text's first token has slot 0 before it.
    """
    token_slots_by_row = [ints([])]
    previous_slots_by_row = [ints([])]
    for table, start, count in zip(batch.tables, batch.positions, counts_B.tolist(), strict=True):
        if count:
            first_position = max(start - 1, 0)
            pages_P = ints(table[first_position // PAGE : (start + count - 1) // PAGE + 1])
            positions_N = np.arange(first_position, start + count)
            slots_N = pages_P[positions_N // PAGE - first_position // PAGE] * PAGE + positions_N % PAGE
            token_slots_by_row.append(slots_N[-count:])
            previous_slots_by_row.append(slots_N[:-1] if start else np.append(0, slots_N[:-1]))
    return np.concatenate(token_slots_by_row), np.concatenate(previous_slots_by_row)
