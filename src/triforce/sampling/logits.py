"""Tokens that may follow a text (`Constraint`), and checks of logits and of the biases on them.

Shape suffixes: J columns, K draft tokens, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from triforce.errors import ModelError, RequestError, argument
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import Bools, Ints


class Constraint(Protocol):
    """Restriction of one row's distribution to tokens that may follow its text and the draft tokens after it.

    The allowed tokens are a function of the text alone, so that all tiers restrict alike, which keeps couplings exact.
    """

    def allowed(self, text_T: Ints, draft_K: Ints) -> Bools:
        """Return a mask (J, V) of tokens that may follow the text (without its prompt) and each draft token: J = K + 1.

        Each column allows at least one token. After a banned draft token, and after the end of a text, a mask may allow
        any token.
        """

    @property
    def failure(self) -> str:
        """Reason why the text had to end before it satisfied the constraint; empty otherwise."""


def check_bias(params: Sequence[SamplingParams], size: int) -> None:
    """Raise RequestError if a bias names a token outside the vocabulary of `size` tokens."""
    unknown_token = next((token for p in params for token in p.logit_bias or {} if token >= size), None)
    if unknown_token is not None:
        raise RequestError(
            f"{argument('logit_bias')} names token {unknown_token}, but the vocabulary ends at {size - 1}"
        )


def non_finite_logits(row: int, column: int, peak: float) -> ModelError:
    """Return the error to raise where the largest of the logits is not finite."""
    problem = "NaN" if math.isnan(peak) else "+inf" if peak > 0 else "all -inf"
    return ModelError(
        f"the model's logits are {problem} (row {row}, column {column}): check its weights, or try a wider dtype"
    )
