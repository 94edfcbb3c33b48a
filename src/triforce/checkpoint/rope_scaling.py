"""Rotation frequencies of models with scaled positions: one class for each method, with its paper.

Shape suffixes: D head size, F = D / 2 frequencies. Operations keep transformers' order: saved KV depends on the
bits of the frequencies, and another order rounds differently in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log, pi, sqrt

import numpy as np
from numpy.typing import NDArray

from triforce.checkpoint.json_fields import Fields

Floats = NDArray[np.float32]
TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


def wavelengths(theta: float, D: int) -> Floats:
    """Return positions per radian, float32 (F): theta^(2i / D) (Su et al. 2021, arXiv 2104.09864, section 3.2.2).

    Base and exponents are float32, and powers are rounded once. Float32 powers of a library differ by machine.
    """
    exponents_F = np.arange(0, D, 2, dtype=np.float32) / np.float32(D)
    with np.errstate(over="ignore"):  # infinite beyond the range of float32
        return (np.float64(np.float32(theta)) ** exponents_F.astype(np.float64)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Scaling of rotations to more positions than in training."""

    def frequencies(self, theta: float, D: int, context: int) -> tuple[Floats, float]:
        """Return radians per position, float32 (F,), for `context` tokens, and the factor on cos and sin."""
        return 1.0 / wavelengths(theta, D), 1.0

    def reach(self, positions: int) -> int:
        """Return the context limit in tokens of a config with max_position_embeddings = `positions`."""
        return positions


class Unscaled(Scaling):
    """No scaling: the rotations of training."""


@dataclass(frozen=True, slots=True)
class Linear(Scaling):
    """Position interpolation: frequencies / factor (Chen et al. 2023, arXiv 2306.15595)."""

    factor: float

    def frequencies(self, theta: float, D: int, context: int) -> tuple[Floats, float]:
        return 1.0 / wavelengths(theta, D) / self.factor, 1.0

    def reach(self, positions: int) -> int:
        return int(positions * self.factor)


@dataclass(frozen=True, slots=True)
class Dynamic(Scaling):
    """A larger theta, theta s^(D / (D - 2)): NTK-aware (Peng et al. 2023, arXiv 2309.00071, section 3.1).

    In the paper, s grows with the text (section 3.3); here it follows the context.
    """

    factor: float
    positions: int

    def frequencies(self, theta: float, D: int, context: int) -> tuple[Floats, float]:
        length = max(context, self.positions)
        stretch = (self.factor * length / self.positions) - (self.factor - 1)
        return 1.0 / wavelengths(theta * stretch ** (D / (D - 2)), D), 1.0

    def reach(self, positions: int) -> int:
        return int(positions * self.factor)


@dataclass(frozen=True, slots=True)
class Yarn(Scaling):
    """NTK by parts and a temperature (Peng et al. 2023, arXiv 2309.00071, sections 3.2 and 3.4).

    Frequencies with more than `fast_turns` turns in `original_positions` stay as they are. Frequencies with less than
    `slow_turns` are interpolated. In between, a ramp over the indices (in the paper: over turns) mixes the two.
    """

    factor: float
    original_positions: int
    fast_turns: float
    slow_turns: float
    scale: float
    """Factor on cos and sin: the square root of 1 / t."""
    rounds_ramp: bool
    """Whether the ramp's ends are rounded to integers."""

    def frequencies(self, theta: float, D: int, context: int) -> tuple[Floats, float]:
        lengths_F = wavelengths(theta, D)
        low, high = (
            D * log(self.original_positions / (turns * 2 * pi)) / (2 * log(theta))
            for turns in (self.fast_turns, self.slow_turns)
        )
        if self.rounds_ramp:
            low = floor(low)
            high = ceil(high)
        low = max(low, 0)
        high = min(high, D - 1)
        high += 0.001 * (low == high)
        unscaled_share_F = 1 - ((np.arange(D // 2, dtype=np.float32) - low) / (high - low)).clip(0, 1)
        return 1.0 / (self.factor * lengths_F) * (1 - unscaled_share_F) + 1.0 / lengths_F * unscaled_share_F, self.scale

    def reach(self, positions: int) -> int:
        """Return the scaled positions. Some configs give max_position_embeddings before scaling."""
        return max(positions, int(self.original_positions * self.factor))


@dataclass(frozen=True, slots=True)
class LongRope(Scaling):
    """A divisor for each frequency, found by search (Ding et al. 2024, arXiv 2402.13753).

    Contexts beyond `original_positions` use `long_divisors`, others `short_divisors`.
    """

    original_positions: int
    short_divisors: list[float]
    long_divisors: list[float]
    scale: float

    def frequencies(self, theta: float, D: int, context: int) -> tuple[Floats, float]:
        divisors_F = np.array(
            self.long_divisors if context > self.original_positions else self.short_divisors, dtype=np.float32
        )
        return 1.0 / (divisors_F * wavelengths(theta, D)), self.scale


@dataclass(frozen=True, slots=True)
class Llama3(Scaling):
    """Interpolation of long waves only.

    Waves longer than `original_positions` / `low_turns` are interpolated. Waves shorter than `original_positions` /
    `high_turns` stay as they are. Between the two, the unscaled share is linear in the number of turns: YaRN's NTK by
    parts (arXiv 2309.00071, section 3.2), without its temperature, as Meta released it with Llama 3.1 (arXiv
    2407.21783).
    """

    factor: float
    original_positions: int
    low_turns: float
    high_turns: float

    def frequencies(self, theta: float, D: int, context: int) -> tuple[Floats, float]:
        unscaled_F = 1.0 / wavelengths(theta, D)
        waves_F = 1.0 / unscaled_F * (2 * pi)  # transformers' numbers: torch divides by multiplying with reciprocals
        turns_F = 1.0 / waves_F * self.original_positions
        unscaled_share_F = (turns_F - self.low_turns) / (self.high_turns - self.low_turns)
        inv_freq_F = (1 - unscaled_share_F) * unscaled_F / self.factor + unscaled_share_F * unscaled_F
        inv_freq_F = np.where(waves_F > self.original_positions / self.low_turns, unscaled_F / self.factor, inv_freq_F)
        return np.where(waves_F < self.original_positions / self.high_turns, unscaled_F, inv_freq_F), 1.0


def read_scaling(rope: Fields, kind: str, D: int, positions: int) -> Scaling:
    """Return the scaling of type `kind` with the fields `rope`. Raises ModelError naming the wrong field."""
    original_positions = rope.integer("original_max_position_embeddings", positions, minimum=2)
    match kind:
        case "linear":
            return Linear(rope.number("factor"))
        case "dynamic":
            return Dynamic(rope.number("factor"), positions)
        case "yarn":
            # The factor is optional in a config with the positions before and after scaling.
            has_original = rope.get("original_max_position_embeddings") is not None
            factor = rope.number("factor", positions / original_positions if has_original else None)
            fast = rope.number("beta_fast", 32.0, minimum=1e-3)
            slow = rope.number("beta_slow", 1.0, minimum=1e-3)
            scale = rope.number("attention_factor", _yarn_attention_factor(rope, factor), minimum=1e-3)
            return Yarn(factor, original_positions, fast, slow, scale, rope.flag("truncate", True))
        case "longrope":
            factor = rope.number("factor", max(positions / original_positions, 1.0))
            scale = sqrt(1 + log(factor) / log(original_positions))  # as in the released LongRoPE
            scale = rope.number("attention_factor", scale, minimum=1e-3)
            return LongRope(
                original_positions, rope.numbers("short_factor", D // 2), rope.numbers("long_factor", D // 2), scale
            )
        case "llama3":
            low = rope.number("low_freq_factor", minimum=1e-3)
            high = rope.number("high_freq_factor", minimum=1e-3)
            if high <= low:
                raise rope.refusal("high_freq_factor", [f"numbers above low_freq_factor, {low:g}"])
            return Llama3(rope.number("factor"), original_positions, low, high)
        case _:
            return Unscaled()


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """Return 0.1 ln(factor) + 1 (YaRN, section 3.4).

    In DeepSeek's models, `mscale` weights the logarithm, and the same term with `mscale_all_dim` divides it.
    """
    mscale, mscale_all_dim = (rope.number(name, 0.0, minimum=0.0) for name in ("mscale", "mscale_all_dim"))
    if mscale and mscale_all_dim:
        return (0.1 * mscale * log(factor) + 1.0) / (0.1 * mscale_all_dim * log(factor) + 1.0)
    return 0.1 * log(factor) + 1.0
