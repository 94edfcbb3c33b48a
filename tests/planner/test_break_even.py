"""Bytes and operations of a token by configs, and the context from which speculation pays, or why it does not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest

from triforce.model.config import Architecture, Experts, LayerKind, ModelConfig
from triforce.model.expert_unions import experts_touched
from triforce.model.rope import Rope
from triforce.planner.break_even import PAYING_SPEEDUP, STEP, UNBOUND, Balance, SelfSpeculationRoofline, contexts
from triforce.planner.pass_costs import PASS_OVERHEAD_BYTES, TierWork, default_machine

LLAMA_8B = ModelConfig(
    128_256, 4096, 14_336, 32, 32, 8, 128, 1e-5, tied=False, context=131_072, rope=Rope(np.ones(64, np.float32), 1.0)
)
WINDOWS = tuple(LayerKind(window=128 if layer % 4 else 0) for layer in range(32))


def test_kv_read_by_windows_is_bounded() -> None:
    windowed = replace(LLAMA_8B, architecture=Architecture(kinds=WINDOWS))
    assert LLAMA_8B.kv_numbers_read(1000) == 1000 * LLAMA_8B.kv_size
    assert windowed.kv_numbers_read(1000) == 2 * 8 * 128 * (8 * 1000 + 24 * 128)
    assert windowed.kv_numbers_read(100) == 100 * LLAMA_8B.kv_size


def test_experts_touched_equal_mean_of_draws() -> None:
    chance = Random(0)
    draws = [len({e for _ in range(4) for e in chance.sample(range(16), 3)}) for _ in range(20_000)]
    mean = sum(draws) / len(draws)
    assert experts_touched(Experts(16, 3, True), 4) == pytest.approx(mean, rel=0.01)
    assert experts_touched(Experts(16, 3, True, shared=2), 4) == pytest.approx(mean + 2, rel=0.01)


HERE = Balance(22.0, 22.0)
MIXTURE = replace(LLAMA_8B, intermediate_size=1792, architecture=Architecture(experts=Experts(64, 8, True)))


def even(
    config: ModelConfig = LLAMA_8B, weight: float = 0.6, number: float = 2.0, balance: Balance = HERE
) -> SelfSpeculationRoofline:
    return SelfSpeculationRoofline(config, 2048, weight, number, balance)


@pytest.mark.parametrize("weight", [0.6, 2.0])
def test_speculation_pays_from_the_first_context_that_gains(weight: float) -> None:
    point = even(weight=weight)
    begins = point.pays_from()
    assert begins is not None
    assert point.speedup(begins) >= PAYING_SPEEDUP > point.speedup(begins - STEP)


def test_speculation_by_windows_or_experts_pays_later() -> None:
    begins = even().pays_from()
    windowed = replace(LLAMA_8B, architecture=Architecture(kinds=WINDOWS))
    assert begins is not None
    for config in (windowed, MIXTURE):
        assert (even(config).pays_from() or LLAMA_8B.context) > begins
    assert replace(even(MIXTURE), same_experts=True).pays_from() in range(begins, begins + 2 * STEP)  # it has routers
    assert even(replace(windowed, context=8192)).pays_from() is None


@pytest.mark.parametrize("config", [LLAMA_8B, MIXTURE], ids=["dense", "experts"])
@pytest.mark.parametrize("number", [130 / 128, 2.0])
def test_speculation_with_more_arithmetic_pays_earlier(config: ModelConfig, number: float) -> None:
    balances = [2 ** (step / 2) for step in range(2, 17)]
    for series in ([Balance(ratio, 16.0) for ratio in balances], [Balance(ratio, ratio) for ratio in balances]):
        begins = [even(config, number=number, balance=balance).pays_from() or 1 << 40 for balance in series]
        assert begins == sorted(begins, reverse=True) and begins[0] > 1.5 * begins[-1]
    assert even(config, number=number, balance=Balance(1.0, 1.0)).pays_from() is None


def test_passes_take_the_longer_of_bytes_and_operations() -> None:
    """The weights and the KV each take the longer of the two, besides the fixed cost of a pass."""
    begins = PASS_OVERHEAD_BYTES + default_machine()[1] * LLAMA_8B.layers
    weights = 2.0 * LLAMA_8B.weights_read
    kv = 2.0 * LLAMA_8B.kv_size * 4096

    def taken(width: int, *balance: float) -> float:
        return float(even(weight=2.0, balance=Balance(*balance)).byte_times(width, 4096)) - begins

    assert taken(1, *UNBOUND) == pytest.approx(weights + kv)
    assert taken(8, *UNBOUND) == pytest.approx(weights + kv)
    assert taken(8, 2.0, 1e9) == pytest.approx(4 * weights + kv, rel=1e-3)
    assert taken(8, 1e9, 2.0) == pytest.approx(weights + 16 * kv, rel=1e-3)  # KV heads of four query heads each


@pytest.mark.parametrize(
    ("changes", "balance", "reason"),
    [
        (
            dict(context=32_768, architecture=Architecture(kinds=WINDOWS)), HERE,
            "24 of 32 layers have a window of 128: at 32,768 tokens KV is 0.24 of the weights that a token reads",
        ),
        (
            dict(context=16_384, intermediate_size=1792, architecture=MIXTURE.architecture), HERE,
            "a pass of 4 tokens reads 3.3 times the experts of one token",
        ),
        (
            dict(context=16_384), Balance(4.0, 6.0),
            "the machine can compute a pass of 1.2 tokens while it reads the weights, and attention of 1.5 tokens "
            "while it reads KV; verifying more tokens takes longer",
        ),
        (
            dict(context=8192, architecture=Architecture(kinds=WINDOWS)), HERE,
            "24 of 32 layers have a window of 128: at 8,192 tokens KV is 0.06 of the weights that a token reads",
        ),
        (dict(context=2048), Balance(4.0, 4.0), "at 2,048 tokens KV is 0.06 of the weights that a token reads"),
    ],
    ids=["windows", "experts", "arithmetic", "windows and KV", "KV"],
)  # fmt: skip
def test_reason_against_speculation_is_that_which_counts_most(
    changes: dict[str, Any], balance: Balance, reason: str
) -> None:
    point = even(replace(LLAMA_8B, **changes), balance=balance)
    assert point.pays_from() is None and point.why_not() == reason


@pytest.mark.parametrize(
    "parts",
    [
        Architecture(experts=Experts(64, 8, True)),
        Architecture(experts=Experts(64, 8, True, shared=1), dense_layers=3, dense_size=14_336),
    ],
    ids=["alike", "shared and dense"],
)
def test_work_of_a_pass_has_the_experts_that_some_token_chooses(parts: Architecture) -> None:
    """Operations take no time here, so the work is the bytes read, for any rows and widths."""
    mixture = replace(LLAMA_8B, intermediate_size=1792, architecture=parts)

    def read(width: float, rows: int = 1, sequential: bool = False) -> float:
        work = TierWork.of(mixture, 2.0, 2.0, sequential)
        return float(work.byte_times(width, rows, 0.0, 1e12, 0.0, 1.0)) - PASS_OVERHEAD_BYTES

    assert parts.experts is not None
    for width in (1, 2, 4, 8):
        added_weights = (experts_touched(parts.experts, width) - parts.experts.active) * mixture.expert_weights
        assert read(width) == pytest.approx(2 * (mixture.weights_read + added_weights), rel=1e-6)
    assert read(2, rows=4) == pytest.approx(read(8), rel=1e-6)
    assert read(4, sequential=True) == pytest.approx(4 * read(1), rel=1e-6)


def test_contexts_without_end_are_few() -> None:
    """A config may name any number of positions, and each context costs a fraction of a millisecond."""
    assert list(contexts(4096, 10_000)) == [4096, 5120, 6144, 7168, 8192, 9216, 10_000]
    assert list(contexts(STEP, 131_072)) == list(range(STEP, 131_073, STEP))
    assert list(contexts(4096, 100)) == [100]
    lengths = list(contexts(4096, (1 << 31) - 2))
    assert len(lengths) < 2000 and lengths[-1] == (1 << 31) - 2
    assert all(longer <= shorter * 1.25 for shorter, longer in pairwise(lengths))
