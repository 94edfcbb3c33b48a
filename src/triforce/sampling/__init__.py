"""Constraints on the tokens that may follow a text, and checks of biases and logits."""

from triforce.sampling.logits import Constraint, check_bias, non_finite_logits

__all__ = ["Constraint", "check_bias", "non_finite_logits"]
