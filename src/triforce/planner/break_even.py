"""The context from which on speculation pays: by what passes taught here, or by a roofline before any of them ran.

The roofline (see `tier_work`) is of self-speculation alone: the model drafts through the retrieval budget, and verifies
through all of its KV. What was learnt (see `learnt_speed`) is of all tiers that ran, a draft among them.

Shape suffix: G guesses of a verification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from triforce.interface.break_even_point import BreakEvenPoint
from triforce.model.config import ModelConfig
from triforce.model.expert_unions import ExpertUnions
from triforce.planner.learnt_speed import ACCEPTANCE, LearntSpeed
from triforce.planner.tier_work import TierWork, usual_machine

GUESSES_G = np.arange(1, 9)
"""Those that are considered."""
GAIN = 1.1
"""Speculation pays where it should make so many times the tokens."""
STEP, PARTS = 1024, 128
"""Contexts are looked at in steps of so many tokens, or of one of so many parts of a context, where that is more."""
EXAMPLE_WIDTH = 4
"""Tokens of the pass by whose experts it is told that these stand against speculation."""


class Balance(NamedTuple):
    """Operations that a machine does while it reads a byte: of products with weights, and of attention."""

    weights: float
    kv: float


UNBOUND = Balance(1e9, 1e9)
"""That of a machine whose operations take no time."""


@dataclass(frozen=True, slots=True)
class BreakEven:
    """A model that drafts for itself through `budget` tokens, on a machine of some balance.

    weight, number: bytes of a weight, and of a number of its KV. alike: all tokens of a pass choose the same experts,
    and not each its own by a router to which all are alike.
    """

    config: ModelConfig
    budget: int
    weight: float
    number: float
    balance: Balance
    alike: bool = False

    def bytes(self, width: Any, seen: int) -> Any:
        """Bytes whose reading would take as long as a pass of so many tokens that see so many."""
        config, (balance, of_kv) = self.config, self.balance
        work = TierWork.of(config, self.weight, self.number)
        # Attention at another rate does as many operations as that of numbers which take so many bytes.
        work = replace(work, key=work.number * config.kv_size, number=work.number * of_kv / balance)
        if self.alike:
            work = replace(work, experts=0.0, unions=None)
        return work.bytes(width, 1, config.kv_read(seen) / config.kv_size, balance, *usual_machine()[1:])

    def speedup(self, length: int) -> float:
        """Return the tokens per second of speculation over plain decoding's, by the best number of guesses."""
        plain, draft = self.bytes(1, length), self.bytes(1, min(self.budget, length))
        kept_G = (1 - ACCEPTANCE ** (GUESSES_G + 1)) / (1 - ACCEPTANCE)
        return float(np.max(kept_G * plain / (GUESSES_G * draft + self.bytes(GUESSES_G + 1, length))))

    def pays_from(self) -> int | None:
        """Return the context in tokens from which on it should pay; None: not within the model's positions."""
        return first_gain(self.speedup, self.budget, self.config.context)

    def why_not(self) -> str:
        """Return the reason that counts most where it does not pay: without which it would be fastest.

        Where it would not pay without all of them, KV is small beside the weights: by windows, if there are some.
        """
        config, parts = self.config, self.config.architecture
        whole = replace(config, architecture=replace(parts, kinds=parts.rotations_only))
        ratio = self.number * config.kv_read(config.context) / (self.weight * config.weights_read)
        small = f"at {config.context:,} tokens KV is {ratio:.2f} of the weights that a token reads"
        if windows := [window for window in config.windows if window]:
            small = f"{len(windows)} of {config.layers} layers have a window of {max(windows):,}: {small}"
        if BreakEven(whole, self.budget, self.weight, self.number, UNBOUND, alike=True).speedup(config.context) < GAIN:
            return small
        of_weights = self.balance.weights * self.weight / 2
        of_kv = self.balance.kv * self.number / 2 * config.kv_heads / config.heads
        told = (
            f"no more than {of_weights:.1f} tokens are computed while the weights are read, and {of_kv:.1f} while KV is"
        )
        reasons = {told: replace(self, balance=UNBOUND), small: replace(self, config=whole)}
        if parts.experts:
            times = ExpertUnions(parts.experts).times(EXAMPLE_WIDTH)
            told = f"a pass of {EXAMPLE_WIDTH} tokens reads {times:.1f} times the experts of one token"
            reasons[told] = replace(self, alike=True)
        return max(reasons, key=lambda told: reasons[told].speedup(config.context))


def first_gain(speedup: Callable[[int], float], least: int, context: int) -> int | None:
    """Return the first context, from `least` tokens to the model's, at which the speedup is enough; None: at none."""
    return next((length for length in contexts(least, context) if speedup(length) >= GAIN), None)


def contexts(least: int, context: int) -> Iterator[int]:
    """Yield the contexts that are looked at, of which the model's is the last."""
    while least < context:
        yield least
        least += max(STEP, least // PARTS)
    yield context


def break_even_point(even: BreakEven, known: str, learnt: LearntSpeed) -> BreakEvenPoint:
    """Return from which context on speculation pays: by what was learnt, where that is enough, or else by `even`.

    known: how the balance of `even` is known.
    """
    context, balance = even.config.context, even.balance
    if learnt.known:
        begins = first_gain(learnt.speedup, min(STEP, context), context)
        if begins is None:
            most = f"{learnt.speedup(context):.2f} times plain decoding at {context:,} tokens"
            verdict = (
                f"does not pay here: passes of earlier texts predict {most}, and less than {GAIN:g} is not worth it"
            )
        else:
            verdict = f"pays from {begins:,} tokens on, as passes of earlier texts predict"
        return BreakEvenPoint(begins, verdict, learnt.basis, learnt=True)
    begins = even.pays_from()
    if begins is None:
        verdict = f"should not pay without a draft model: {even.why_not()}"
    else:
        verdict = f"should pay from {begins:,} tokens on, without a draft model"
    operations = f"{balance.weights:.0f} operations with weights while a byte is read, {balance.kv:.0f} of attention"
    return BreakEvenPoint(begins, verdict, f"{operations} ({known}), {ACCEPTANCE:.0%} of draft tokens accepted")
