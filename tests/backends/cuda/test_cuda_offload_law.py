"""The place of pages changes nothing: texts grow, are cut, end and start again, in memory and on the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.cuda import paired_pools, torch_kernels
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from triforce.backends.cuda.graphs import Graphs
from triforce.bench import shapes


@pytest.fixture(autouse=True)
def fast() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(shapes.SHAPES, "paired", paired_pools.SHAPE)
        torch_kernels.replace_kernels(patch)
        yield


def run(seed: int, resident_layers: int = 1, steps: int = 40, selection: str = "observed") -> paired_pools.PairedPools:
    decoder = shapes.decoder("paired", paired_pools.CAPACITY)
    pair = paired_pools.PairedPools(paired_pools.room(decoder, resident_layers), seed, selection)
    pair.run(steps)
    return pair


@pytest.mark.parametrize("resident_layers", [0, 1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_offloaded_passes_equal_memory(seed: int, resident_layers: int) -> None:
    assert run(seed, resident_layers).passes > 50


@pytest.mark.parametrize("selection", ["mean_key", "quest"])
def test_offloaded_key_selections_equal_memory(selection: str) -> None:
    run(3, selection=selection)


def fetched() -> int:
    """Return the pages of single KV heads that lower passes read from the host between ten verifications."""
    pair = paired_pools.PairedPools(
        paired_pools.room(shapes.decoder("paired", paired_pools.CAPACITY), 0, written_pages=20), 0
    )
    for b in range(paired_pools.ROWS):
        pair.same("begin", b, pair.ids(190))
    pair.verify(4)
    memory = pair.sides[1].pool.kv.manager
    fetched_before = int(memory.fetched)
    for _ in range(10):
        pair.verify(4)
    return int(memory.fetched) - fetched_before


def test_streamed_selected_pages_become_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched_with_admission = fetched()
    monkeypatch.setattr(
        "triforce.kvcache.views.full.FullView.budget", property(lambda _: None, lambda *_: None), raising=False
    )
    assert fetched() >= max(20, 3 * fetched_with_admission), "no more cross where nothing is kept"


def test_lower_tier_passes_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that stream are not captured."""
    captured: list[bool] = []
    monkeypatch.setattr(Graphs, "run", lambda self, replay, call: captured.append(True) or plain(self, replay, call))
    pair = paired_pools.PairedPools(paired_pools.room(shapes.decoder("paired", paired_pools.CAPACITY), 0), 0)
    for b in range(paired_pools.ROWS):
        pair.same("begin", b, pair.ids(120))
    side = pair.sides[1]
    captured.clear()
    side.feed(side.full, [[1], [2]])
    assert not captured
    side.lower.trying = True
    side.feed(side.lower, [[1], [2]])
    assert not captured, "such passes may never come again"
    side.lower.trying = False
    side.feed(side.lower, [[1], [2]])
    assert captured


plain = Graphs.run


@pytest.mark.parametrize("mutant", caught_in("test_cuda_offload_mutant_is_caught"), ids=str)
def test_cuda_offload_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        for seed in range(6):
            run(seed)
