"""From logits to a law (`Warper`), within a `Constraint`, and from a seed to the noise that draws from it (`Noise`)."""

from triforce.sampling.constraint import Constraint
from triforce.sampling.logits import Warper
from triforce.sampling.rng import Noise

__all__ = ["Constraint", "Noise", "Warper"]
