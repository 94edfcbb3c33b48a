"""From logits to a law (`Warper`) and from a seed to the noise that draws from it (`Noise`)."""

from triforce.sampling.noise import Noise
from triforce.sampling.warp import Warper

__all__ = ["Noise", "Warper"]
