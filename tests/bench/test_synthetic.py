"""Decoding at a given acceptance: that guesses are kept as asked, in every mode there is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from triforce.backends import native_loader
from triforce.bench import shapes, synthetic
from triforce.bench.model_work import ModelWork
from triforce.bench.roofline import Roofline
from triforce.cli.bench.speed import line
from triforce.engine import tier_builder
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.speculative_config import SpeculativeConfig
from triforce.interface.stats import TierStats
from triforce.kvcache import RetrievalConfig
from triforce.kvcache.retrieval_config import Budget
from triforce.ragged import ints
from triforce.speculation import Draft, SequenceState


@pytest.mark.parametrize(("outer", "inner", "tokens_a_pass"), [(1.0, 1.0, 7), (0.0, 0.0, 1)])
def test_synthetic_acceptance_equals_request(outer: float, inner: float, tokens_a_pass: int) -> None:
    """Draft tokens 2, speculative tokens 6: twice two guesses and a bonus token make 6, and one is the full tier's."""
    setting = SpeculativeConfig(2, 6, retrieval=RetrievalConfig(Budget(64)))
    rows = list(synthetic.rows("30m", [256], (outer, inner), setting, tokens=32, repeats=1))
    plain, two, three, auto = rows
    assert [row["mode"] for row in rows] == ["ar", "retrieval", "triforce", "auto"]
    assert plain["full_passes"] == 32 and auto["full_passes"] <= 32
    assert three["acceptance"] == {"retrieval": outer, "draft": inner}
    assert all(row["workload"] == "synthetic" and "synthetic" in line(row) for row in rows)
    for fast in (two, three):
        assert 32 / fast["full_passes"] == pytest.approx(tokens_a_pass, rel=0.25)


def test_synthetic_int8_is_compared_with_bfloat16_plain_decoding() -> None:
    setting = SpeculativeConfig(2, 6, retrieval=RetrievalConfig(Budget(64)))
    rows = list(synthetic.rows("30m", [256], (1.0, 1.0), setting, tokens=8, repeats=1, kv_int8=True, layers=2))
    assert [(row["mode"], row["kv_dtype"]) for row in rows] == [
        ("ar", "bfloat16"), ("ar", "int8"), ("retrieval", "int8"), ("triforce", "int8"), ("auto", "int8")
    ]  # fmt: skip
    assert {row["layers"] for row in rows} == {2} and rows[0]["speedup"] == 1
    for row in rows:
        assert row["speedup"] == pytest.approx(rows[0]["seconds"] / row["seconds"])
    whole, coded, *_, auto = (row["least_seconds"] for row in rows)
    assert whole > coded > 0 and auto is None


def test_least_seconds_count_passes_of_each_tier() -> None:
    """Two tiers: verification over 4 tokens, and each of these drafted over 64 tokens of KV."""
    work = ModelWork(*shapes.parts("30m", 512, layers=2))
    roof = Roofline(1e9, {"bfloat16": 1e15})
    tiers = [TierStats("retrieval", proposed=30, passes=30, visible_tokens=64), TierStats("full", 40, 40, passes=10)]
    least = synthetic.least_seconds(tiers, {"full": work}, roof, 512, int8=False)
    assert least == pytest.approx((30 * work.of(1, 64).bytes + 10 * work.of(4, 512).bytes) / 1e9)
    slow = Roofline(1e15, {"bfloat16": 1e9})
    least = synthetic.least_seconds(tiers, {"full": work}, slow, 512, int8=False)
    done = 30 * work.of(1, 64).operations["bfloat16"] + 10 * work.of(4, 512).operations["bfloat16"]
    assert least == pytest.approx(done / 1e9)


@pytest.mark.skipif(native_loader.native is None, reason="torch drafts token by token")
def test_synthetic_drafts_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tokens of a draft are one call, as in the decoding of texts."""
    made, plain = list[bool](), tier_builder.fused_draft

    def noted(*given: Any) -> Draft | None:
        made.append((found := plain(*given)) is not None)
        return found

    monkeypatch.setattr(tier_builder, "fused_draft", noted)
    setting = SpeculativeConfig(2, 6, retrieval=RetrievalConfig(Budget(64)))
    list(synthetic.rows("30m", [256], (1.0, 1.0), setting, tokens=16, repeats=1))
    assert made and all(made)


def test_synthetic_guesses_of_ngrams_are_never_kept() -> None:
    tiers = [SimpleNamespace(name=name) for name in ("ngram", "draft", "retrieval", "full")]
    step = Draft(np.ones((1, 3), dtype=np.int64), torch.zeros(1, 3, 0), np.full((1, 3), 3), np.array([3]))
    real = SimpleNamespace(verify=lambda *given: step)
    batch = cast(SequenceBatch, SimpleNamespace(sampling=real, tiers=tiers))
    sampling = synthetic.Synthetic(batch, {"retrieval": 1.0, "draft": 1.0})
    prefix, live_B = SequenceState(ints([0] * 8)[None], ints([4])), np.array([True])
    for origin, kept in ((0, 1), (1, 3), (2, 3)):
        guess = Draft(step.tokens_BK[:, :2], torch.zeros(1, 2, 0), np.array([[0, origin]]), np.array([2]))
        assert sampling.verify(guess, torch.zeros(1, 3, 8), prefix, live_B, 3).counts_B.tolist() == [kept]
