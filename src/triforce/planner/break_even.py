"""The context from which on speculation pays: by what passes taught here, or by a roofline before any of them ran.

The roofline (see `pass_costs`) is of self-speculation alone: the model drafts through the retrieval budget, and
verifies through all of its KV. What was learnt (see `LearntSpeed`) is of all tiers that ran, a draft among them.

Shape suffix: G guesses of a verification.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from triforce.backends.dispatch import suits_native
from triforce.interface.explain import BreakEvenPoint
from triforce.model.config import ModelConfig
from triforce.model.expert_unions import ExpertUnions
from triforce.planner.cost_model import PRIOR_ACCEPTANCE, CostModel, kernel_level, machine_file
from triforce.planner.forecast import WIDEST
from triforce.planner.pass_costs import BALANCES, TierWork, usual_machine
from triforce.planner.plan import NGRAM_GAMMAS, Estimates, NgramOdds, plan_space, proposals
from triforce.planner.planner_config import AMONG_MODELS, FULL
from triforce.whole_file import whole_file

ACCEPTANCE = 0.92
"""Share of guesses through some thousand selected tokens that the whole context keeps, on long real texts."""
SUPPOSED = {"retrieval": ACCEPTANCE, "draft": PRIOR_ACCEPTANCE["draft"]}
"""Acceptance of tiers before any was seen."""
ENOUGH = 64.0
"""Verified tokens of a tier by which its acceptance is known: of less, one text is most."""
BANDS = (0, 1, 2)
"""Bands of temperature whose acceptance counts: greedy texts, and those up to a temperature of .9."""
_SHARE_A = np.zeros(2)
_AMOUNT_AG = np.zeros((2, max(NGRAM_GAMMAS) + 1))
NO_NGRAMS = NgramOdds(_SHARE_A, _AMOUNT_AG, _AMOUNT_AG, _SHARE_A, _AMOUNT_AG, _AMOUNT_AG)
"""Odds of a text in which nothing stood before."""


class LearntSpeed:
    """Speed by a cost model, of a text of its own. budget: tokens that the retrieval tier reads."""

    def __init__(self, costs: CostModel, budget: int) -> None:
        self._passes = costs.passes
        self._budget = budget
        found = {tier: costs.acceptance.pooled(tier, BANDS, prior) for tier, prior in SUPPOSED.items()}
        self._seen = {tier: mean for tier, (mean, tokens) in found.items() if tokens >= ENOUGH}

    @property
    def known(self) -> bool:
        """Whether verifications ran: passes of a single token say nothing of wider ones."""
        return any(kind[0] > 1 for tier in (FULL, AMONG_MODELS) for kind in self._passes.of(tier).seen)

    def speedup(self, length: int) -> float:
        """Return the tokens per second of the best plan over plain decoding's, at so many tokens of context."""
        keys = {FULL: length, AMONG_MODELS: length, "retrieval": min(self._budget, length), "draft": 0, "ngram": 0}
        seconds_KW = {tier: self._passes.table(tier, 1, [count], WIDEST) for tier, count in keys.items()}
        accepted = SUPPOSED | self._seen | {"ngram": 1.0}
        accepted_KZ = {tier: np.array([[share]]) for tier, share in accepted.items()}
        space = plan_space("draft" in self._seen, length > self._budget)
        tokens_KZN, seconds_KZN = proposals(space, Estimates(1, seconds_KW, accepted_KZ, NO_NGRAMS))
        return float((tokens_KZN / seconds_KZN).max() * seconds_KW[FULL][0, 1])

    @property
    def basis(self) -> str:
        """Evidence for that in words: how many kinds of passes, and shares of draft tokens that were accepted."""
        kinds = sum(len(costs.seen) for costs in self._passes.tiers.values())
        shares = [f"{share:.0%} of the {tier} tier's accepted" for tier, share in self._seen.items()]
        if "retrieval" not in self._seen:
            shares.append(f"{ACCEPTANCE:.0%} of the retrieval tier's supposed to be")
        passes = f"{kinds} kinds of passes of earlier texts on this machine, with whatever else ran meanwhile"
        return f"{passes}, and of draft tokens {', '.join(shares)}"


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
        config = self.config
        (balance, of_kv) = self.balance
        work = TierWork.of(config, self.weight, self.number)
        # Attention at another rate does as many operations as that of numbers which take so many bytes.
        work = replace(work, key=work.number * config.kv_size, number=work.number * of_kv / balance)
        if self.alike:
            work = replace(work, experts=0.0, unions=None)
        return work.bytes(width, 1, config.kv_read(seen) / config.kv_size, balance, *usual_machine()[1:])

    def speedup(self, length: int) -> float:
        """Return the tokens per second of speculation over plain decoding's, by the best number of guesses."""
        plain = self.bytes(1, length)
        draft = self.bytes(1, min(self.budget, length))
        kept_G = (1 - ACCEPTANCE ** (GUESSES_G + 1)) / (1 - ACCEPTANCE)
        return float(np.max(kept_G * plain / (GUESSES_G * draft + self.bytes(GUESSES_G + 1, length))))

    def pays_from(self) -> int | None:
        """Return the context in tokens from which on it should pay; None: not within the model's positions."""
        return first_gain(self.speedup, self.budget, self.config.context)

    def why_not(self) -> str:
        """Return the reason that counts most where it does not pay: without which it would be fastest.

        Where it would not pay without all of them, KV is small beside the weights: by windows, if there are some.
        """
        config = self.config
        parts = self.config.architecture
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
    context = even.config.context
    balance = even.balance
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


CODED_WEIGHTS, CODED_KV = "int16", "int8 KV"
"""Products with weights of few bits as they are, and attention over int8 KV; others are called by their type."""
CPU = torch.device("cpu")


def measured() -> dict[str, float]:
    """Return the balances that were kept, by name; {} where none were."""
    found: dict[str, float] = {}
    with suppress(OSError, ValueError, AttributeError, TypeError):  # whatever is wrong: it is as if none were
        path = _path()
        saved = json.loads(path.read_text(encoding="utf-8")) if path else {}
        found = {name: float(value) for name, value in saved.items() if 0 < float(value) < float("inf")}
    return found


def keep(balances: Mapping[str, float]) -> None:
    """Keep balances by name for all processes; a folder that cannot be written to is ignored."""
    if path := _path():
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as partial:
                partial.write_text(json.dumps(dict(balances)), encoding="utf-8")


def balance_of(coded: bool, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[Balance, str]:
    """Return how many operations a byte a device does, and how that is known: measured, where kernels are native.

    coded: products are those of weights of few bits, as they are. GPUs are not measured: they do most of all.
    """
    name = str(dtype).removeprefix("torch.")
    wanted = CODED_WEIGHTS if coded else name, CODED_KV if config.kv_int8 else name
    if suits_native(config.head_dim, dtype, device):
        kept = measured()
        if kept.keys() >= set(wanted):
            return Balance(*(kept[each] for each in wanted)), "measured here"
    usual = usual_machine(kernel_level(device))[0] if device.type == "cpu" else BALANCES[-1]
    return Balance(usual, usual), "as usual, not measured"


def _path() -> Path | None:
    return machine_file("balance", [], [kernel_level(CPU)], CPU)
