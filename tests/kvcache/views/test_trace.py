"""The picture of what a retrieval view sees is that of its lists."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.helpers.tiny_llm import ask, checkpoints, ids, llm
from triforce.engine.batch import Batch
from triforce.engine.output_stream import OutputChunk
from triforce.kvcache import PAGE
from triforce.kvcache.views import coverage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    checkpoints(folder)
    return folder


@pytest.mark.parametrize("full_layers", ["none", "0", "0,1"])
@pytest.mark.parametrize("parts", [256, 5])
def test_it_counts_the_lists_that_a_page_stands_in(
    folder: Path, full_layers: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coverage, "PARTS", parts)
    checked = []
    plain = Batch._look

    def check(batch: Batch) -> None:
        plain(batch)
        view = batch.tiers[-2].cache
        told, table = batch.jobs[0].trace.seen, view.full.pool.tables[0]
        if not told:
            return
        pages = -(-int(view.full.lengths_B[0]) // PAGE)
        if view.choices[0] is None or full_layers == "0,1":
            assert told == [100] * len(told)
            return
        free = 2 - len(view.full_layers)  # layers, of two KV heads each
        recent, units = view.recent[0] // PAGE, view.choices[0].units.numpy()[2 - free :]
        counts = [2 * free if i >= recent else int((units == table[i]).any(-1).sum()) for i in range(pages)]
        size = -(-pages // parts)
        groups = [counts[i : i + size] for i in range(0, pages, size)]
        assert told == [round(100 * sum(group) / (len(group) * 2 * free)) for group in groups]
        assert 0 < sum(told) < 100 * len(told) and len(told) <= parts
        checked.append(told)

    monkeypatch.setattr(Batch, "_look", check)
    model = llm(folder, searched_layers=full_layers)
    list(model.stream(ids(400), ask(trace=True), mode="triforce"))
    assert len({tuple(told) for told in checked}) > 1 or full_layers == "0,1"


def test_a_view_that_is_not_asked_sees_nothing(folder: Path) -> None:
    """Mode auto has a retrieval tier, and begins without it: lists are blank then, which else is to see all."""
    *pieces, _ = llm(folder).stream(ids(400), ask(trace=True), mode="auto")
    looks = [piece.trace for piece in pieces]
    passes = [next(tier.passes for tier in each.tiers if tier.name == "retrieval") for each in looks]
    asked = [now > before for before, now in pairwise([0, *passes])]
    assert [bool(each.seen) for each in looks] == asked
    assert not asked[0] and any(asked)


def test_it_costs_nothing_where_nobody_looks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triforce.engine.batch.in_sight", None)
    *pieces, _ = llm(folder).stream(ids(400), ask(), mode="triforce")
    assert all(isinstance(piece, OutputChunk) and piece.trace is None for piece in pieces)


def test_where_no_tier_selects_there_is_nothing_to_see(folder: Path) -> None:
    *pieces, output = llm(folder).stream(ids(400), ask(trace=True), mode="ar")
    looks = [piece.trace for piece in pieces]
    assert [each.seen for each in looks] == [[]] * 24
    assert [each.tokens for each in looks] == [400 + n for n in range(24)]
    assert [each.tiers[0].passes for each in looks] == list(range(1, 25))
    assert all(a.seconds < b.seconds <= output.decode_seconds for a, b in pairwise(looks))
    assert looks[-1].tiers[0].accepted == output.completion_tokens
