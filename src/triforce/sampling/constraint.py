"""Constraint: the tokens that a text may go on with, to which the model's distribution is restricted."""

from __future__ import annotations

from typing import Protocol

from triforce.ragged import Bools, Ints


class Constraint(Protocol):
    """Follows the text of one row, and draft tokens behind it.

    What is allowed is a function of the text alone, so that every tier restricts its distribution alike: this is what
    keeps all couplings exact.
    """

    def allowed(self, text_T: Ints, guesses_K: Ints) -> Bools:
        """Tokens that may follow the text (its prompt left out) and each of the draft tokens: (J, V), J = K + 1.

        At least one in each column. Behind a draft token that is not allowed, and behind the end of a text, any is.
        """

    @property
    def failure(self) -> str:
        """Reason why the text cannot be followed any more, though it was ended; empty if it can."""
