"""Rows of int8 KV as read by a tier that reads upper nibbles only."""

from __future__ import annotations

from triforce.arrays import Array, namespace

HALF = 8
"""Half a step of the upper nibbles."""


def from_upper(rows_R: Array, added: int = HALF) -> Array:
    """Return rows whose codes have `added` in place of their lower nibbles."""
    codes = rows_R[..., :-2]
    return namespace(rows_R).concat([(codes >> 4 << 4) + added, rows_R[..., -2:]], axis=-1)
