"""Break-even by speeds learnt from earlier texts: it replaces the roofline arithmetic, and says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.test_break_even import LLAMA_8B, even
from triforce.planner import CostModel
from triforce.planner.break_even import MIN_TOKENS, PAYING_SPEEDUP, STEP, LearntSpeed, break_even_point
from triforce.planner.pass_costs import TierWork
from triforce.planner.planner_config import AMONG_MODELS

CONFIG = replace(LLAMA_8B, context=32_768)
KNOWN = "measured here"


def taught(weights: float, key: float, width: float = 0.0) -> CostModel:
    """Return costs of passes that take `weights` seconds, `key` more per key, and `width` more per further token."""
    costs = CostModel(works={name: TierWork.of(CONFIG, 2.0, 2.0) for name in ("full", "retrieval")})
    for tokens in (1, 2, 4, 8) * 4:
        for tier in ("full", AMONG_MODELS, "retrieval"):
            for keys in (2048,) if tier == "retrieval" else (2048, 8192, 32_768):
                costs.passes.observe(tier, tokens, 1, keys, weights + key * keys + width * (tokens - 1))
    return costs


def test_break_even_is_arithmetic_until_verifications_ran() -> None:
    costs = CostModel()
    roofline = even(CONFIG)
    for _ in range(9):
        costs.passes.observe("full", 1, 1, 4096, 1e-3)
    point = break_even_point(roofline, KNOWN, LearntSpeed(costs, 2048))
    assert (point.tokens, point.learnt) == (roofline.pays_from(), False)
    assert point.sentence == f"Speculation should pay from {point.tokens:,} tokens on, without a draft model."
    assert KNOWN in point.basis and "92% of draft tokens" in point.basis


def test_break_even_with_learnt_passes_is_theirs() -> None:
    """Speculation pays early where keys are expensive, and never where tokens are."""
    points = [
        break_even_point(even(CONFIG), KNOWN, LearntSpeed(taught(10e-3, *point), 2048))
        for point in ((5e-6,), (1e-6,), (1e-7, 5e-3))
    ]
    early, late_tokens, never = [point.tokens for point in points]
    assert early and late_tokens and STEP <= early < late_tokens and never is None
    assert all(point.learnt and KNOWN not in point.basis and "kinds of passes" in point.basis for point in points)
    assert points[0].sentence == f"Speculation pays from {early:,} tokens on, as passes of earlier texts predict."
    assert points[2].verdict.startswith("does not pay here: passes of earlier texts predict ")


def test_break_even_with_learnt_acceptance_is_later_where_less_is_kept() -> None:
    begins = []
    for accepted in (0.99, 0.8, 0.3):
        costs = taught(10e-3, 1e-6, 5e-4)
        costs.acceptance.add(("retrieval", 2, 14, 1.0), 300 * accepted, 300 * (1 - accepted))
        point = break_even_point(even(CONFIG), KNOWN, speed := LearntSpeed(costs, 2048))
        assert f"{(300 * accepted + 8 * 0.92) / 308:.0%} of the retrieval tier's tokens accepted" in point.basis
        begins.append(point.tokens or 1 << 20)
        assert not point.tokens or speed.speedup(point.tokens) >= PAYING_SPEEDUP > speed.speedup(point.tokens - STEP)
    assert begins == sorted(begins) and begins[0] < begins[-1]


@pytest.mark.parametrize("tokens", [MIN_TOKENS - 1, MIN_TOKENS + 1])
def test_draft_counts_once_enough_of_its_tokens_were_verified(tokens: float) -> None:
    costs = taught(10e-3, 1e-7)
    for width in (1, 2, 4, 8) * 4:
        costs.passes.observe("draft", width, 1, 0, 1e-4 * width)
    costs.acceptance.add(("draft", 0, 0, 1.0), 0.8 * tokens, 0.2 * tokens)
    point = break_even_point(even(CONFIG), KNOWN, LearntSpeed(costs, 2048))
    assert (point.tokens == STEP) == (tokens > MIN_TOKENS) == ("of the draft tier's tokens accepted" in point.basis)
