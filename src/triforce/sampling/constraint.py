"""What a text may go on with. Its tokens' law is the model's, restricted to that and renormalised."""

from __future__ import annotations

from typing import Protocol

from triforce.ragged import Bools, Ints


class Constraint(Protocol):
    """Follows the text of one row, and what is guessed of it.

    What is allowed is a function of the text alone, so that every tier restricts its law alike: this is what keeps
    both couplings exact.
    """

    def allowed(self, text_T: Ints, guesses_K: Ints) -> Bools:
        """Tokens that may stand after `text` (the prompt left out) and each of the guesses: (J, V), J = K + 1.

        At least one in each column. Behind a guess that is not allowed, and behind the end of a text, any is.
        """

    @property
    def failure(self) -> str:
        """Why the text cannot be followed any more, though it was ended; empty if it can."""
