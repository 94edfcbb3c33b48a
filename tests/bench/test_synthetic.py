"""Decoding at a given acceptance: that guesses are kept as asked, in every mode there is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from triforce.backends import native_loader
from triforce.bench import synthetic
from triforce.cli.bench.speed import line
from triforce.engine import tier_builder
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.speculative_config import SpeculativeConfig
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
