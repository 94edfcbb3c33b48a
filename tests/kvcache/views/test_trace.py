"""The trace of a retrieval view's visible pages equals its page lists."""

from __future__ import annotations

from itertools import chain, pairwise, repeat
from pathlib import Path

import pytest

from tests.helpers.controlled_batch import replan_always
from tests.helpers.tiny_llm import ask, checkpoints, ids, llm
from triforce.engine.engine import OutputChunk
from triforce.engine.sequence_batch import SequenceBatch
from triforce.kvcache import PAGE, RetrievalView
from triforce.kvcache.views import retrieval
from triforce.planner import Plan, PlanController
from triforce.planner.forecast import Choice


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    checkpoints(folder)
    return folder


@pytest.mark.parametrize("full_layers", ["none", "0", "0,1"])
@pytest.mark.parametrize("parts", [256, 5])
def test_trace_counts_selections_of_each_page(
    folder: Path, full_layers: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "MAX_TRACE_PARTS", parts)
    checked = []
    plain = SequenceBatch.take_snapshots

    def check(batch: SequenceBatch) -> None:
        plain(batch)
        view = batch.tiers[-2].cache
        percentages = batch.sequences[0].trace.seen
        table = view.full.pool.tables[0]
        if not percentages:
            return
        pages = -(-int(view.full.lengths_B[0]) // PAGE)
        if view.selections[0].pages is None or full_layers == "0,1":
            assert percentages == [100] * len(percentages)
            return
        free = 2 - len(view.full_layers)  # layers, of two KV heads each
        recent = view.selections[0].window_start // PAGE
        units = view.selections[0].pages.units[2 - free :]
        counts = [2 * free if i >= recent else int((units == table[i]).any(-1).sum()) for i in range(pages)]
        size = -(-pages // parts)
        groups = [counts[i : i + size] for i in range(0, pages, size)]
        assert percentages == [round(100 * sum(group) / (len(group) * 2 * free)) for group in groups]
        assert 0 < sum(percentages) < 100 * len(percentages) and len(percentages) <= parts
        checked.append(percentages)

    monkeypatch.setattr(SequenceBatch, "take_snapshots", check)
    model = llm(folder, searched_layers=full_layers)
    list(model.stream(ids(400), ask(trace=True), mode="triforce"))
    assert len({tuple(percentages) for percentages in checked}) > 1 or full_layers == "0,1"


def test_trace_without_request_is_empty(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces are empty until mode auto, which begins with plain decoding here, uses the retrieval tier."""
    plans = chain([Choice()], repeat(Choice(Plan(("retrieval", "full"), (4,)))))
    monkeypatch.setattr(PlanController, "choose", lambda *how: next(plans))
    replan_always(monkeypatch)
    *pieces, _ = llm(folder).stream(ids(400), ask(trace=True, max_tokens=48), mode="auto")
    looks = [piece.trace for piece in pieces]
    passes = [next(tier.passes for tier in snapshot.tiers if tier.name == "retrieval") for snapshot in looks]
    asked = [passes_after > passes_before for passes_before, passes_after in pairwise([0, *passes])]
    assert [bool(snapshot.seen) for snapshot in looks] == asked
    assert not asked[0] and any(asked)


def test_trace_unread_is_not_computed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RetrievalView, "coverage", None)
    *pieces, _ = llm(folder).stream(ids(400), ask(), mode="triforce")
    assert all(isinstance(piece, OutputChunk) and piece.trace is None for piece in pieces)


def test_trace_without_selection_is_empty(folder: Path) -> None:
    *pieces, output = llm(folder).stream(ids(400), ask(trace=True), mode="ar")
    looks = [piece.trace for piece in pieces]
    assert [snapshot.seen for snapshot in looks] == [[]] * 24
    assert [snapshot.tokens for snapshot in looks] == [400 + n for n in range(24)]
    assert [snapshot.tiers[0].passes for snapshot in looks] == list(range(1, 25))
    assert all(a.seconds < b.seconds <= output.decode_seconds for a, b in pairwise(looks))
    assert looks[-1].tiers[0].accepted == output.completion_tokens
