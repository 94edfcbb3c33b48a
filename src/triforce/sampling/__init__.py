"""Logits to probabilities (`LogitsProcessor`), tokens that may follow a text (`Constraint`), and a seed's `Noise`."""

from triforce.sampling.logits import Constraint, LogitsProcessor
from triforce.sampling.rng import Noise

__all__ = ["Constraint", "LogitsProcessor", "Noise"]
