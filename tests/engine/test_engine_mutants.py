"""Two schedules, and faults of the engine that they notice: what the tests of its rows are worth."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.engine_scene import LATE, ROWS, TOKENS, alone, check_empty, check_same, finish, request
from tests.helpers.mutants.law_mutants import Edit
from tests.helpers.tiny_llm import llm
from triforce.engine.batch import Batch
from triforce.engine.engine import Request
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


def play_aside(model: LLM, mode: str) -> None:
    """Another one: two rows are put aside in the middle of their texts, and come back to pages that are others."""
    texts = model.open(ROWS, 900)
    twins, other = request(model, 150, mode, n=2, max_tokens=LATE), request(model, 260, mode, seed=11)
    texts.submit([twins])
    (group,) = twins.groups
    while len(group.jobs[0].tokens) < 9:
        texts.step()
        assert group.error is None
    tables = texts.engine._batches[mode].top.cache.pool.tables
    texts.engine.put_aside(group)
    texts.submit([other])
    texts.engine._waiting.rotate(1)
    outputs: dict[Request, RequestOutput] = {}
    moved = False
    while texts.busy:
        for one, event in texts.step():
            assert not isinstance(event, Exception), event
            if isinstance(event, RequestOutput):
                outputs[one] = event
        moved |= group in texts.engine._groups and tables[0] not in texts.engine._batches[mode].top.cache.pool.tables
    assert moved
    check_same(outputs[twins].outputs, alone(model, 150, mode=mode, tokens=LATE))
    check_same(outputs[other].outputs, alone(model, 260, mode=mode))
    check_empty(texts)


FAULTS = [
    Edit(Batch, "_sample", ("if draws is not None:", "if False:")),
    Edit(StreamingView, "select", ("[each[b] for b in rows]", "each[: len(rows)]")),
    Edit(StreamingView, "join", ("other.lengths_B))", "0 * other.lengths_B))")),
    Edit(RetrievalView, "select", ("[self.choices[b] for b in rows]", "self.choices[: len(rows)]")),
    Edit(RetrievalView, "select", ("self.ahead_B[list(rows)]", "self.ahead_B[: len(rows)]")),
    Edit(FullView, "select", ("[self.sights[b] for b in rows]", "self.sights[: len(rows)]")),
    Edit(PagePool, "select", ("self.lengths_B[list(rows)]", "self.lengths_B[: len(rows)]")),
    Edit(PagePool, "disown", (" if not self._owners[page]", "")),
    Edit(Counters, "select", ("[list(rows)]", "[: len(rows)]")),
    Edit(Batch, "bring_back", ("= row.draws", "= 0")),
    Edit(Batch, "bring_back", ("+ job.tokens", "+ job.prompt[: len(job.tokens)]")),
    Edit(FullView, "bring_back", ("= seen.sight", "= self.sights[0]")),
    Edit(RetrievalView, "aside", ("if choice:", "if False:")),
    Edit(RetrievalView, "bring_back", ("self.row_units(b)[choice.units]", "choice.units.int()")),
    Edit(StreamingView, "bring_back", ("self.highest[b] = ring", "self.highest[b] = ring[0], 0, 0")),
    Edit(Counters, "bring_back", ("= count", "= 0")),
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
                play_aside(model, "triforce")
            except Exception as error:
                noticed.append(error)
    assert bool(noticed) == bool(fault), noticed
