"""Two schedules, and faults of the engine that they notice: what the tests of its rows are worth."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.engine_scene import LATE, ROWS, TOKENS, alone, check_empty, check_same, finish, request
from tests.helpers.mutants.law_mutants import Edit
from tests.helpers.tiny_llm import llm
from triforce.engine.engine import Request
from triforce.engine.sequence_batch import SequenceBatch
from triforce.interface.outputs import RequestOutput
from triforce.kvcache import FullView, PagePool, RetrievalView, StreamingView
from triforce.llm import LLM
from triforce.speculation.counters import Counters


def play(model: LLM, mode: str) -> None:
    """One schedule: two rows outlive one that came before them, and see another one come, to pages that are shared."""
    texts = model.open(ROWS, 900)
    early, twins, last = (request(model, length, mode, n=n) for length, n in ((150, 1), (91, 2), (260, 1)))
    texts.submit([early])
    for _ in range(4):
        texts.step()
    texts.submit([twins])
    outputs: dict[Request, RequestOutput] = {}
    while early not in outputs:
        outputs.update((one, event) for one, event in texts.step() if isinstance(event, RequestOutput))
    texts.submit([last])
    outputs |= finish(texts)
    for one, output in outputs.items():
        check_same(output.outputs, alone(model, len(one.prompt), mode=mode))
    check_empty(texts)


def play_swapped(model: LLM, mode: str) -> None:
    """Another one: two rows are swapped out in the middle of their texts, and swapped in to other pages."""
    texts = model.open(ROWS, 900)
    twins, other = request(model, 150, mode, n=2, max_tokens=LATE), request(model, 260, mode, seed=11)
    texts.submit([twins])
    (group,) = twins.groups
    while len(group.sequences[0].tokens) < 9:
        texts.step()
        assert group.error is None
    tables = texts.core.batches.of_mode[mode].top.cache.pool.tables
    texts.core.swap_out(group)
    texts.submit([other])
    texts.core.scheduler.groups.reverse()
    outputs: dict[Request, RequestOutput] = {}
    moved = False
    while texts.busy:
        for one, event in texts.step():
            assert not isinstance(event, Exception), event
            if isinstance(event, RequestOutput):
                outputs[one] = event
        moved |= (
            group in texts.core.scheduler.running
            and tables[0] not in texts.core.batches.of_mode[mode].top.cache.pool.tables
        )
    assert moved
    check_same(outputs[twins].outputs, alone(model, 150, mode=mode, tokens=LATE))
    check_same(outputs[other].outputs, alone(model, 260, mode=mode))
    check_empty(texts)


FAULTS = [
    Edit(SequenceBatch, "_make_sampler", ("if draws is not None:", "if False:")),
    Edit(StreamingView, "select", ("[each[b] for b in rows]", "each[: len(rows)]")),
    Edit(StreamingView, "join", ("other.lengths_B))", "0 * other.lengths_B))")),
    Edit(RetrievalView, "select", ("[self.selections[b] for b in rows]", "self.selections[: len(rows)]")),
    Edit(FullView, "select", ("[self.observations[b] for b in rows]", "self.observations[: len(rows)]")),
    Edit(PagePool, "select", ("self.lengths_B[list(rows)]", "self.lengths_B[: len(rows)]")),
    Edit(PagePool, "disown", (" if not self._owners[page]", "")),
    Edit(Counters, "select", ("[list(rows)]", "[: len(rows)]")),
    Edit(SequenceBatch, "swap_in", ("= row.draws", "= 0")),
    Edit(SequenceBatch, "swap_in", ("+ sequence.tokens", "+ sequence.prompt[: len(sequence.tokens)]")),
    Edit(FullView, "swap_in", ("= seen.observation", "= self.observations[0]")),
    Edit(RetrievalView, "swap_out", ("row.pages and replace", "False and replace")),
    Edit(RetrievalView, "swap_in", ("self.row_units(b)[held.pages.units]", "held.pages.units.int()")),
    Edit(StreamingView, "swap_in", ("self.highest[b] = ring", "self.highest[b] = ring[0], 0, 0")),
    Edit(Counters, "swap_in", ("= count", "= 0")),
]


@pytest.mark.parametrize(
    "fault", [None, *FAULTS], ids=lambda fault: str(fault and f"{fault.owner.__name__}.{fault.name}: {fault.changes}")
)
def test_faults_are_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch, fault: Edit | None) -> None:
    noticed = []
    for coupling, refresh in (("seeded", 1), ("rejection", 1), ("seeded", 0)):
        model = llm(folder, coupling=coupling, retrieval_refresh=refresh)
        for length, tokens in ((91, TOKENS), (150, TOKENS), (260, TOKENS), (150, LATE)):
            alone(model, length, mode="triforce", tokens=tokens)
        with monkeypatch.context() as patch:
            if fault:
                patch.setattr(fault.owner, fault.name, fault.function())
            try:
                play(model, "triforce")
                play_swapped(model, "triforce")
            except Exception as error:
                noticed.append(error)
    assert bool(noticed) == bool(fault), noticed
