"""Decoding at a given acceptance: draft tokens are accepted at the requested rates in every mode."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from triforce.backends import dispatch
from triforce.backends.cuda import graphs
from triforce.backends.decoder import Decoder
from triforce.bench import shapes, synthetic
from triforce.bench import synthetic as bench_synthetic
from triforce.bench.roofline import ModelWork, Roofline
from triforce.cli.bench.speed import line, verification_note
from triforce.engine import tier_builder
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.tier_builder import ModelSet, SpeculativeConfig
from triforce.interface.explain import TierStats
from triforce.kvcache import RetrievalConfig
from triforce.kvcache.retrieval_config import Budget
from triforce.ragged import ints
from triforce.speculation import Draft, SequenceState

PAPER = {"retrieval": 0.977, "draft": 0.35}
SIX_DRAFT_TOKENS = (1 - 0.977**7) / (1 - 0.977)
"""Expected tokens of a verification of six draft tokens: 6.54."""

setting = SpeculativeConfig(2, 6, retrieval=RetrievalConfig(Budget(64)))


@pytest.fixture(scope="module")
def models() -> ModelSet:
    return ModelSet(Decoder(*shapes.parts("30m", 1024, layers=1)), Decoder(*shapes.parts("30m-draft", 1024)))


def text_of_old_bench(models: ModelSet, mode: str, tokens: int) -> list[int]:
    """Return tokens of each verification as version 1 of the benches counted them: seed 1, the text cut at `tokens`."""
    batch = synthetic.prefilled_batch(models, mode, setting, 256, tokens)
    for sequence in batch.sequences:
        sequence.params = replace(sequence.params, max_tokens=tokens)
    batch.sampling, steps = synthetic.SyntheticSampler(batch, PAPER, 1), list[int]()
    while not batch.done:
        steps.append(sum(batch.step()))
    return steps


def test_old_bench_counts_too_few_tokens_of_a_verification(models: ModelSet) -> None:
    """Its text of 16 tokens over KV on the host: three verifications, the first one dropped, the last one cut."""
    first, *counted = text_of_old_bench(models, "triforce", 16)
    assert (first, counted) == (7, [4, 5])
    per_verification, plain, verification = sum(counted) / len(counted), 1.072, 1.106
    assert per_verification == 4.5
    assert per_verification * plain / verification == pytest.approx(4.36, abs=0.005), "the speedup that it recorded"
    assert SIX_DRAFT_TOKENS * plain / verification == pytest.approx(6.33, abs=0.005)
    verifications, deviation = 10 * len(counted), synthetic._expected(0.977, ints([6]))[1] ** 0.5
    luck = (10 * sum(counted) - verifications * SIX_DRAFT_TOKENS) / (deviation * verifications**0.5)
    assert luck < -3, "the same random numbers in ten turns are beyond what chance makes"


@pytest.mark.parametrize("mode", ["retrieval", "triforce"])
def test_ten_turns_make_tokens_to_expect(models: ModelSet, mode: str) -> None:
    """Mode retrieval drafts six tokens. Mode triforce drafts some more, as the draft's last tokens may exceed six."""
    turns = [
        synthetic.decode(synthetic.prefilled_batch(models, mode, setting, 256, 64), PAPER, turn, 64)
        for turn in range(10)
    ]
    row = synthetic.verification_figures(turns)
    made, expected = row["tokens_per_verification"], row["expected_tokens_per_verification"]
    assert abs(made - expected) < 2 * row["deviation"] < 0.35
    assert all(turn.tokens >= 64 and abs(turn.z_score) < 3 for turn in turns)
    assert len({(turn.tokens, turn.verifications) for turn in turns}) > 3, "each turn has a generator of its own"
    assert expected == pytest.approx(SIX_DRAFT_TOKENS) if mode == "retrieval" else SIX_DRAFT_TOKENS < expected < 7


def test_first_step_stands_apart(models: ModelSet) -> None:
    batch = synthetic.prefilled_batch(models, "ar", setting, 256, 8)
    turn = synthetic.decode(batch, {}, 0, 8)
    assert (turn.tokens, turn.verifications, turn.z_score) == (8, 8, 0.0)
    assert [tier.passes for tier in turn.tiers] == [8] and len(batch.sequences[0].tokens) == 9
    assert turn.seconds + turn.first_seconds == pytest.approx(batch.decode_seconds)


def test_steps_that_capture_a_graph_are_left_out(models: ModelSet, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = iter([0, 1, 1, 1, 1, 3, *[3] * 99])  # before and behind steps: the first and the third one capture
    monkeypatch.setattr(graphs, "captured_graphs", lambda: next(captures))
    batch = synthetic.prefilled_batch(models, "ar", setting, 256, 4)
    turn = synthetic.decode(batch, {}, 0, 4)
    assert (turn.verifications, len(batch.sequences[0].tokens)) == (4, 6)


@pytest.mark.parametrize(("outer", "inner", "tokens_a_pass"), [(1.0, 1.0, 7), (0.0, 0.0, 1)])
def test_synthetic_acceptance_equals_request(outer: float, inner: float, tokens_a_pass: int) -> None:
    """Two draft tokens, 6 speculative tokens: twice two and a bonus token make 6, and one token is the full tier's."""
    rows = list(bench_synthetic.rows("30m", [256], (outer, inner), setting, tokens=32, repeats=1))
    plain, two, three, auto = rows
    assert [row["mode"] for row in rows] == ["ar", "retrieval", "triforce", "auto"]
    assert plain["full_passes"] == 32 and auto["full_passes"] <= 32
    assert three["acceptance"] == {"retrieval": outer, "draft": inner}
    assert all(row["workload"] == "synthetic" and "synthetic" in line(row) for row in rows)
    for fast in (two, three):
        assert 32 / fast["full_passes"] == pytest.approx(tokens_a_pass)
        note = f"{tokens_a_pass}.00 tokens per verification, {tokens_a_pass}.00 +- 0.00 expected"
        assert note in verification_note(fast)


def test_synthetic_int8_is_compared_with_bfloat16_plain_decoding() -> None:
    rows = list(bench_synthetic.rows("30m", [256], (1.0, 1.0), setting, tokens=8, repeats=1, kv_int8=True, layers=2))
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
    least = bench_synthetic.least_seconds(tiers, {"full": work}, roof, 512, int8=False)
    assert least == pytest.approx((30 * work.pass_work(1, 64).bytes + 10 * work.pass_work(4, 512).bytes) / 1e9)
    slow = Roofline(1e15, {"bfloat16": 1e9})
    least = bench_synthetic.least_seconds(tiers, {"full": work}, slow, 512, int8=False)
    done = 30 * work.pass_work(1, 64).operations["bfloat16"] + 10 * work.pass_work(4, 512).operations["bfloat16"]
    assert least == pytest.approx(done / 1e9)


@pytest.mark.skipif(dispatch.native is None, reason="torch drafts token by token")
def test_synthetic_drafts_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tokens of a draft are one call, as in the decoding of texts."""
    made, plain = list[bool](), tier_builder.fused_draft

    def noted(*given: Any) -> Draft | None:
        made.append((found := plain(*given)) is not None)
        return found

    monkeypatch.setattr(tier_builder, "fused_draft", noted)
    list(bench_synthetic.rows("30m", [256], (1.0, 1.0), setting, tokens=16, repeats=1))
    assert made and all(made)


def test_synthetic_draft_tokens_of_ngrams_are_never_accepted() -> None:
    tiers = [SimpleNamespace(name=name) for name in ("ngram", "draft", "retrieval", "full")]
    step = Draft(np.ones((1, 3), dtype=np.int64), np.zeros((1, 3, 0)), np.full((1, 3), 3), np.array([3]))
    real = SimpleNamespace(verify=lambda *given: step)
    batch = cast(SequenceBatch, SimpleNamespace(sampling=real, tiers=tiers))
    sampling = synthetic.SyntheticSampler(batch, {"retrieval": 1.0, "draft": 1.0}, 0)
    prefix, live_B = SequenceState(ints([0] * 8)[None], ints([4])), np.array([True])
    for origin, kept in ((0, 1), (1, 3), (2, 3)):
        draft = Draft(step.tokens_BK[:, :2], np.zeros((1, 2, 0)), np.array([[0, origin]]), np.array([2]))
        assert sampling.verify(draft, np.zeros((1, 3, 8), np.float32), prefix, live_B, 3).counts_B.tolist() == [kept]
