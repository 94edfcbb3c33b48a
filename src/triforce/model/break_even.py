"""The context from which on speculation should pay, by the bytes that passes read: before anything is measured.

Self-speculation alone: the model drafts through the retrieval budget, and verifies through all of its KV. A pass takes
the time of its bytes, and each further token of a pass adds `TOKEN` of that of the weights.
"""

from __future__ import annotations

from triforce.model.config import ModelConfig
from triforce.model.expert_unions import experts_touched

ACCEPTANCE = 0.92
"""Share of guesses through some thousand selected tokens that the whole context keeps, on long real texts."""
TOKEN = 0.04
WIDTHS = range(1, 9)
"""Guesses of a verification that are considered."""
GAIN = 1.1
"""Speculation pays where it should make so many times the tokens."""
STEP = 1024
"""Contexts are looked at in steps of so many tokens."""


def kv_read(config: ModelConfig, seen: int) -> int:
    """Numbers of KV that a token reads which sees so many others: layers with a window read no more than that."""
    of_layer = config.kv_size // config.layers
    return sum(of_layer * min(seen, window or seen) for window in config.windows)


def weights_read(config: ModelConfig, width: int) -> float:
    """Weights that a pass of so many tokens reads: of experts, all that some token chooses."""
    experts = config.architecture.experts
    if experts is None:
        return config.weights_read
    more: float = experts_touched(experts, width) - experts.read
    return config.weights_read + more * config.expert_weights


def speedup(config: ModelConfig, length: int, budget: int, weight: float, number: float) -> float:
    """Tokens per second of speculation over plain decoding's, at best, by the bytes of a weight and of a KV number."""

    def bytes_read(width: int, seen: int) -> float:
        weights = weight * weights_read(config, width) * (1 + TOKEN * (width - 1))
        return weights + number * kv_read(config, seen)

    plain, draft = bytes_read(1, length), bytes_read(1, min(budget, length))
    kept = {guesses: (1 - ACCEPTANCE ** (guesses + 1)) / (1 - ACCEPTANCE) for guesses in WIDTHS}
    times = {guesses: guesses * draft + bytes_read(guesses + 1, length) for guesses in WIDTHS}
    return max(kept[guesses] * plain / times[guesses] for guesses in WIDTHS)


def pays_from(config: ModelConfig, budget: int, weight: float, number: float) -> int | None:
    """Return the context in tokens from which on speculation should pay; None: not within the model's positions."""
    for length in range(budget, config.context + STEP, STEP):
        length = min(length, config.context)
        if speedup(config, length, budget, weight, number) >= GAIN:
            return length
    return None


def why_not(config: ModelConfig, weight: float, number: float) -> str:
    """Return what stands against it, of a model for which it does not pay within its positions."""
    windows = [window for window in config.windows if window]
    kv, weights = number * kv_read(config, config.context), weight * config.weights_read
    about = f"at {config.context:,} tokens KV is {kv / weights:.2f} of the weights that a token reads"
    if windows:
        return f"{len(windows)} of {config.layers} layers have a window of {max(windows):,}: {about}"
    return about
