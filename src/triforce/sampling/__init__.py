"""Sampling: a law of logits (`Warper`), within a `Constraint`, and noise of a seed that draws from it (`Noise`)."""

from triforce.sampling.constraint import Constraint
from triforce.sampling.logits import Warper
from triforce.sampling.rng import Noise

__all__ = ["Constraint", "Noise", "Warper"]
