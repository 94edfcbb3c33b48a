"""The context from which on speculation pays: by measured passes, or by a roofline before any verification ran.

The passes were measured on this machine. The roofline (see `pass_costs`) covers self-speculation only: the model drafts
through the retrieval budget, and verifies through all of its KV. The measured costs (see `LearntSpeed`) cover the
retrieval tier, and a draft model once `MIN_TOKENS` of its tokens were verified. N-grams do not count.

Shape suffix: G draft tokens of a verification.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from triforce.arrays import DType, is_gpu
from triforce.backends.dispatch import suits_native
from triforce.interface.explain import BreakEvenPoint
from triforce.model.config import ModelConfig
from triforce.model.expert_unions import ExpertUnions
from triforce.planner.cost_model import PRIOR_ACCEPTANCE, CostModel, kernel_level, machine_file
from triforce.planner.forecast import WIDEST
from triforce.planner.pass_costs import BALANCES, TierWork, default_machine
from triforce.planner.plan import NGRAM_GAMMAS, Estimates, NgramOdds, plan_space, proposals
from triforce.planner.planner_config import AMONG_MODELS, FULL
from triforce.whole_file import whole_file

ACCEPTANCE = 0.92
"""Share of the retrieval tier's tokens that the full tier accepts, on long texts and budgets of thousands of tokens."""
ASSUMED_ACCEPTANCE = {"retrieval": ACCEPTANCE, "draft": PRIOR_ACCEPTANCE["draft"]}
"""Prior acceptance by tier. That of the retrieval tier is assumed until its acceptance is known (`MIN_TOKENS`)."""
MIN_TOKENS = 64.0
"""The acceptance of a tier counts as known once this number of its tokens was verified: fewer may be mostly of one
text."""
BANDS = (0, 1, 2)
"""Bands of temperature whose acceptance counts: greedy texts, and texts up to a temperature of .9."""
_ZEROS_A = np.zeros(2)
_ZEROS_AG = np.zeros((2, max(NGRAM_GAMMAS) + 1))
NO_NGRAMS = NgramOdds(_ZEROS_A, _ZEROS_AG, _ZEROS_AG, _ZEROS_A, _ZEROS_AG, _ZEROS_AG)
"""Odds of a text that repeats nothing."""


class LearntSpeed:
    """Speed of a single text by a cost model. budget: tokens that the retrieval tier reads."""

    def __init__(self, costs: CostModel, budget: int) -> None:
        self._passes = costs.passes
        self._budget = budget
        pooled = {tier: costs.acceptance.pooled(tier, BANDS, prior) for tier, prior in ASSUMED_ACCEPTANCE.items()}
        self._acceptance = {tier: mean for tier, (mean, tokens) in pooled.items() if tokens >= MIN_TOKENS}

    @property
    def has_verifications(self) -> bool:
        """Whether verifications ran: passes of a single token give no evidence on wider ones."""
        return any(kind[0] > 1 for tier in (FULL, AMONG_MODELS) for kind in self._passes.of(tier).stats)

    def speedup(self, length: int) -> float:
        """Return the tokens per second of the best plan over those of plain decoding, at `length` tokens of context."""
        keys = {FULL: length, AMONG_MODELS: length, "retrieval": min(self._budget, length), "draft": 0, "ngram": 0}
        seconds_KW = {tier: self._passes.table(tier, 1, [count], WIDEST) for tier, count in keys.items()}
        accepted = ASSUMED_ACCEPTANCE | self._acceptance | {"ngram": 1.0}
        accepted_KZ = {tier: np.array([[share]]) for tier, share in accepted.items()}
        space = plan_space("draft" in self._acceptance, length > self._budget)
        tokens_KZN, seconds_KZN = proposals(space, Estimates(1, seconds_KW, accepted_KZ, NO_NGRAMS))
        return float((tokens_KZN / seconds_KZN).max() * seconds_KW[FULL][0, 1])

    @property
    def basis(self) -> str:
        """The evidence in words: the number of kinds of passes, and shares of draft tokens that were accepted."""
        kinds = sum(len(costs.stats) for costs in self._passes.tiers.values())
        shares = [f"{share:.0%} of the {tier} tier's tokens accepted" for tier, share in self._acceptance.items()]
        if "retrieval" not in self._acceptance:
            shares.append(f"{ACCEPTANCE:.0%} of the retrieval tier's tokens assumed accepted")
        passes = f"{kinds} kinds of passes of earlier texts on this machine, under the load it had then"
        return f"{passes}; {', '.join(shares)}"


GAMMAS_G = np.arange(1, 9)
"""Gammas that are considered."""
PAYING_SPEEDUP = 1.1
"""Least ratio of tokens per second, to plain decoding, at which speculation pays."""
STEP, PARTS = 1024, 128
"""Contexts are tried in steps of `STEP` tokens, or of 1/`PARTS` of the context just tried, where that is more."""
EXAMPLE_WIDTH = 4
"""`why_not` gives as an example the experts that a pass of this number of tokens reads."""


class Balance(NamedTuple):
    """Operations of a machine in the time of reading one byte: of products with weights, and of attention."""

    weights: float
    kv: float


UNBOUND = Balance(1e9, 1e9)
"""Balance of a machine whose operations take no time."""


@dataclass(frozen=True, slots=True)
class SelfSpeculationRoofline:
    """A model that drafts for itself through `budget` tokens, on a machine of this balance.

    bytes_per_weight, bytes_per_element: bytes of one weight, and of one element of its KV. same_experts: all tokens
    of a pass choose the same experts; else each token chooses independently, with all experts equally likely.
    """

    config: ModelConfig
    budget: int
    bytes_per_weight: float
    bytes_per_element: float
    balance: Balance
    same_experts: bool = False

    def byte_times(self, width: Any, visible_tokens: int) -> Any:
        """Return the time of a pass over `width` tokens that see `visible_tokens`.

        The unit is the time of reading one byte.
        """
        config = self.config
        (weights_balance, kv_balance) = self.balance
        work = TierWork.of(config, self.bytes_per_weight, self.bytes_per_element)
        # `TierWork.byte_times` takes the balance of weights, so that of attention is part of the bytes of an element.
        bytes_per_element = work.bytes_per_element * kv_balance / weights_balance
        token_kv_bytes = work.bytes_per_element * config.kv_size
        work = replace(work, token_kv_bytes=token_kv_bytes, bytes_per_element=bytes_per_element)
        if self.same_experts:
            work = replace(work, expert_bytes=0.0, unions=None)
        keys = config.kv_numbers_read(visible_tokens) / config.kv_size
        return work.byte_times(width, 1, keys, weights_balance, *default_machine()[1:])

    def speedup(self, length: int) -> float:
        """Return the tokens per second of speculation over those of plain decoding, at the best gamma."""
        plain = self.byte_times(1, length)
        draft = self.byte_times(1, min(self.budget, length))
        tokens_G = (1 - ACCEPTANCE ** (GAMMAS_G + 1)) / (1 - ACCEPTANCE)
        return float(np.max(tokens_G * plain / (GAMMAS_G * draft + self.byte_times(GAMMAS_G + 1, length))))

    def pays_from(self) -> int | None:
        """Return the context in tokens from which on speculation should pay; None: not within the model's positions."""
        return first_gain(self.speedup, self.budget, self.config.context)

    def why_not(self) -> str:
        """Return the main reason why speculation does not pay: the one without which speculation would be fastest.

        The reasons are windows, operations and experts. If speculation would not pay even without all of them, the
        reason is that KV is small relative to the weights.
        """
        config = self.config
        parts = self.config.architecture
        unwindowed = replace(config, architecture=replace(parts, kinds=parts.kinds_without_windows))
        ratio = (
            self.bytes_per_element
            * config.kv_numbers_read(config.context)
            / (self.bytes_per_weight * config.weights_read)
        )
        kv_reason = f"at {config.context:,} tokens KV is {ratio:.2f} of the weights that a token reads"
        if windows := [window for window in config.windows if window]:
            kv_reason = f"{len(windows)} of {config.layers} layers have a window of {max(windows):,}: {kv_reason}"
        without_reasons = replace(self, config=unwindowed, balance=UNBOUND, same_experts=True)
        if without_reasons.speedup(config.context) < PAYING_SPEEDUP:
            return kv_reason
        weights_tokens = self.balance.weights * self.bytes_per_weight / 2
        kv_tokens = self.balance.kv * self.bytes_per_element / 2 * config.kv_heads / config.heads
        reason = (
            f"the machine can compute a pass of {weights_tokens:.1f} tokens while it reads the weights, and attention "
            f"of {kv_tokens:.1f} tokens while it reads KV; verifying more tokens takes longer"
        )
        reasons = {reason: replace(self, balance=UNBOUND), kv_reason: replace(self, config=unwindowed)}
        if parts.experts:
            union_size = ExpertUnions(parts.experts).multiple(EXAMPLE_WIDTH)
            reason = f"a pass of {EXAMPLE_WIDTH} tokens reads {union_size:.1f} times the experts of one token"
            reasons[reason] = replace(self, same_experts=True)
        return max(reasons, key=lambda reason: reasons[reason].speedup(config.context))


def first_gain(speedup: Callable[[int], float], min_context: int, context: int) -> int | None:
    """Return the first context from `min_context` to `context` tokens whose speedup pays; None: there is none."""
    return next((length for length in contexts(min_context, context) if speedup(length) >= PAYING_SPEEDUP), None)


def contexts(length: int, context: int) -> Iterator[int]:
    """Yield the contexts to try, from `length` tokens on. The last one is the model's `context`."""
    while length < context:
        yield length
        length += max(STEP, length // PARTS)
    yield context


def break_even_point(roofline: SelfSpeculationRoofline, source: str, learnt: LearntSpeed) -> BreakEvenPoint:
    """Return from which context on speculation pays: by `learnt` if verifications ran, or else by `roofline`.

    source: how the balance of `roofline` is known, in words.
    """
    context = roofline.config.context
    balance = roofline.balance
    if learnt.has_verifications:
        begins = first_gain(learnt.speedup, min(STEP, context), context)
        if begins is None:
            speedup = f"{learnt.speedup(context):.2f} times plain decoding at {context:,} tokens"
            verdict = (
                f"does not pay here: passes of earlier texts predict {speedup}, and less than {PAYING_SPEEDUP:g} is "
                "not worth it"
            )
        else:
            verdict = f"pays from {begins:,} tokens on, as passes of earlier texts predict"
        return BreakEvenPoint(begins, verdict, learnt.basis, learnt=True)
    begins = roofline.pays_from()
    if begins is None:
        verdict = f"should not pay without a draft model: {roofline.why_not()}"
    else:
        verdict = f"should pay from {begins:,} tokens on, without a draft model"
    operations = f"{balance.weights:.0f} operations with weights while a byte is read, {balance.kv:.0f} of attention"
    acceptance = f"{ACCEPTANCE:.0%} of draft tokens assumed accepted"
    return BreakEvenPoint(begins, verdict, f"{operations} ({source}), {acceptance}")


QUANTIZED_WEIGHTS, INT8_KV = "int16", "int8 KV"
"""Keys of the saved balances: of products with quantized weights, which multiply int16, and of attention over int8 KV.
Products with other weights, and attention over other KV, have the name of their dtype."""


def saved_balances() -> dict[str, float]:
    """Return the saved balances, by name; {} if there are none."""
    balances: dict[str, float] = {}
    with suppress(OSError, ValueError, AttributeError, TypeError):  # a damaged file counts as no file
        path = _path()
        saved = json.loads(path.read_text(encoding="utf-8")) if path else {}
        balances = {name: float(value) for name, value in saved.items() if 0 < float(value) < float("inf")}
    return balances


def save_balances(balances: Mapping[str, float]) -> None:
    """Save balances by name, for all processes. A folder that cannot be written to is ignored."""
    if path := _path():
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as partial:
                partial.write_text(json.dumps(dict(balances)), encoding="utf-8")


def balance_of(quantized: bool, config: ModelConfig, dtype: DType, device: str) -> tuple[Balance, str]:
    """Return the balance of a device, and how it is known: measured, if balances of its native kernels are saved.

    quantized: products read quantized weights. GPUs are not measured: they get the highest of `BALANCES`.
    """
    kernels = QUANTIZED_WEIGHTS if quantized else dtype, INT8_KV if config.kv_int8 else dtype
    if suits_native(config.head_dim, dtype, device):
        balances = saved_balances()
        if balances.keys() >= set(kernels):
            return Balance(*(balances[kernel] for kernel in kernels)), "measured here"
    operations = default_machine(kernel_level(device))[0] if not is_gpu(device) else BALANCES[-1]
    return Balance(operations, operations), "typical, not measured"


def _path() -> Path | None:
    return machine_file("balance", [], [kernel_level("cpu")], "cpu")
