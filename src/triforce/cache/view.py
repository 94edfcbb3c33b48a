"""What every cache view does, whatever it shows.

Shape suffixes: B rows, T tokens fed in one pass, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from typing import Protocol, Self

from torch import Tensor


class View(Protocol):
    """One model's memory of the texts of a batch. The view attends; the decoder does not know what it shows."""

    @property
    def lengths_B(self) -> Tensor:
        """Tokens seen, per row."""

    def begin(self, counts_B: Tensor, width: int) -> None:
        """The next pass feeds `counts_B` tokens (at most `width`, the rest is padding) at `lengths_B` and after."""

    def attend(self, layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
        """Rotate, remember, and mix: unrotated q, k and v of the fed tokens in, (B, T, H, D) out."""

    def advance(self, counts_B: Tensor) -> None:
        """The tokens of the pass count as seen."""

    def rewind(self, lengths_B: Tensor) -> None:
        """See at most `lengths_B` tokens."""

    def resume(self, length: int) -> tuple[int, int]:
        """For a view of one row: the next tokens [start, stop) to feed on the way to having seen `length` tokens.

        Tokens before `start` count as seen from then on. Nothing is left to feed when start == stop.
        """

    def row(self, b: int) -> Self:
        """Row b alone, on the same storage."""

    def fork(self, source: int, row: int) -> None:
        """Let a fresh row see what another row has seen."""
