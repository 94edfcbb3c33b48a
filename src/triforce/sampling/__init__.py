"""Logits to probabilities (`LogitsProcessor`), what a text may go on with (`Constraint`), and the `Noise` of a seed."""

from triforce.sampling.logits import Constraint, LogitsProcessor
from triforce.sampling.rng import Noise

__all__ = ["Constraint", "LogitsProcessor", "Noise"]
