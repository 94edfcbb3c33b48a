"""Where pages lie changes nothing: texts that grow, are cut, end and begin anew, in memory and on the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.cuda import twins
from tests.helpers.mutants.law_mutants import Edit
from triforce.backends.cuda.kv import TritonKV
from triforce.backends.cuda.offload.kv import TritonOffloadedKV
from triforce.backends.cuda.offload.layout import DeviceLayout
from triforce.backends.cuda.offload.residency import OffloadManager
from triforce.backends.cuda.offload.working_set import WorkingSet
from triforce.backends.cuda.offload.write_slots import WriteSlots
from triforce.bench import shapes


@pytest.fixture(autouse=True)
def fast() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(shapes.SHAPES, "twins", twins.SHAPE)
        twins.replace_kernels(patch)
        yield


def run(seed: int, whole: int = 1, steps: int = 40, selection: str = "observed") -> twins.Twins:
    decoder = shapes.decoder("twins", twins.CAPACITY)
    pair = twins.Twins(twins.room(decoder, whole), seed, selection)
    pair.run(steps)
    return pair


@pytest.mark.parametrize("whole", [0, 1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_passes_give_what_they_give_in_memory(seed: int, whole: int) -> None:
    assert run(seed, whole).passes > 50


@pytest.mark.parametrize("selection", ["mean_key", "quest"])
def test_selections_by_keys_read_them_back(selection: str) -> None:
    run(3, selection=selection)


def fetched() -> int:
    """Pages of single KV heads that passes below read from the host, between ten verifications."""
    pair = twins.Twins(twins.room(shapes.decoder("twins", twins.CAPACITY), 0, seats=20), 0)
    for b in range(twins.ROWS):
        pair.same("begin", b, pair.ids(190))
    pair.verify(4)
    memory = pair.sides[1].pool.memory._hosted
    before = int(memory.fetched)
    for _ in range(10):
        pair.verify(4)
    return int(memory.fetched) - before


def test_what_comes_into_favour_is_kept_as_it_streams_by(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = fetched()
    monkeypatch.setattr(
        "triforce.kvcache.views.full.FullView.budget", property(lambda _: None, lambda *_: None), raising=False
    )
    assert fetched() >= max(20, 3 * kept), "no more cross where nothing is kept"


def test_passes_below_can_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that stream are not."""
    captured: list[bool] = []
    monkeypatch.setattr(TritonKV, "_run", lambda self, replay: captured.append(True) or plain(self, replay))
    pair = twins.Twins(twins.room(shapes.decoder("twins", twins.CAPACITY), 0), 0)
    for b in range(twins.ROWS):
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


plain = TritonKV._run


MUTANTS = {
    "what another text left in a page is still found": Edit(OffloadManager, "leave", ("self._tell(pages)", "pass")),
    "a text that is cut goes on in an empty page": Edit(
        OffloadManager, "write", ("self.places.to_parts(self.places.part, *self.at(begun))", "pass")
    ),
    "what is newer than the store is not laid over it": Edit(
        TritonOffloadedKV, "_open", ("places.from_part(layer, home, *streams.seated)", "pass")
    ),
    "what a pass writes stays in the buffer": Edit(
        TritonOffloadedKV, "_close", ("hosted.places.to_part(layer, home, *streams.written)", "pass")
    ),
    "what is written is thought to be stored": Edit(WriteSlots, "write", ("self._fresh.update(pages)", "pass")),
    "pages leave without being stored": Edit(
        OffloadManager, "store", ("self.places.to_store(self.places.part, *self.at(pages))", "pass")
    ),
    "a page that makes room is still found": Edit(WorkingSet, "take", ("frames_LGP.scatter_(2, gone_LGN, 0)", "pass")),
    "a layer that becomes whole is empty": Edit(DeviceLayout, "exchange", ("kept_GSD.copy_(here_GSD)", "pass")),
    "a layer that was whole is not stored": Edit(
        DeviceLayout, "exchange", ("stored.copy_(there, non_blocking=True)", "pass")
    ),
    "a layer that becomes whole leaves its working set behind": Edit(
        OffloadManager, "prefer", ("self.working.clear(coming)", "pass")
    ),
    "keys are those of another head": Edit(
        DeviceLayout, "at_frames", ("self._heads_G1 * self._frames", "(1 - self._heads_G1) * self._frames")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    monkeypatch.setattr(mutant.owner, mutant.name, mutant.function())
    with pytest.raises((AssertionError, IndexError)):
        for seed in range(6):
            run(seed)
