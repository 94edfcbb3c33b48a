"""BreakEvenPoint: the context from which on speculation pays for a model on a machine."""

from __future__ import annotations

from dataclasses import dataclass

from triforce.interface.frozen_fields import fields_frozen


@fields_frozen
@dataclass(frozen=True, slots=True)
class BreakEvenPoint:
    """The context in tokens from which on speculation pays; None where it does not.

    verdict: the same in words, and why not where it does not pay; their subject is speculation. basis: what was taken
    for that. learnt: whether that is what earlier texts taught on this machine, and not arithmetic.
    """

    tokens: int | None
    verdict: str
    basis: str
    learnt: bool = False

    @property
    def sentence(self) -> str:
        """The verdict as a sentence."""
        return f"Speculation {self.verdict}."
