"""The draft goes on in each pass of the exact tier: rows come, go and stand aside, and no text knows of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from engine_scene import ROWS, alone, check_empty, finish, request
from tiny_checkpoint import save, tiny_model
from tiny_llm import CONTEXT, llm

from tests.laws.ahead import handed
from tests.laws.mutants import Edit
from triforce.cache import Full, Streaming
from triforce.ladder import Rows
from triforce.llm import LLM
from triforce.request import CompletionOutput, RequestOutput
from triforce.speculation import Beside, Proposer, Tier
from triforce.texts import Request

MODES = ["draft", "streaming", "triforce", "hybrid"]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that is nearly the target: much of what it guesses is kept, and not all."""
    folder = tmp_path_factory.mktemp("twins")
    for name, noise in (("target", 0.0), ("draft", 0.004)):
        model = tiny_model(max_position_embeddings=CONTEXT)
        for weight in model.parameters():
            weight.data += noise * torch.randn_like(weight)
        save(model, folder / name)
    return folder


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """As if KV streamed in every pass; how many drafts were handed over."""
    plain = Rows.exact

    def exact(rows: Rows, full: Full, below: Proposer | None = None) -> Tier[Full]:
        top = plain(rows, full, below)
        top.meanwhile = Beside(lambda: True, Streaming)
        return top

    with handed() as counts:
        monkeypatch.setattr(Rows, "exact", exact)
        yield counts


def check(output: RequestOutput, wanted: list[CompletionOutput]) -> None:
    """The text, and what became of all guesses; but for passes: what was drafted ahead for nothing is among them."""
    for one, other in zip(output.outputs, wanted, strict=True):
        assert one.token_ids == other.token_ids and one.origins == other.origins
        for tier, own in zip(one.tiers, other.tiers, strict=True):
            assert (tier.proposed, tier.accepted, tier.histogram) == (own.proposed, own.accepted, own.histogram)


def play(model: LLM, mode: str) -> None:
    """Rows that come at other times, one that is cancelled, and two that stand aside for a while."""
    texts = model.open(ROWS, 900)
    twins, early, gone = (request(model, length, mode, n=n) for length, n in ((91, 2), (150, 1), (40, 1)))
    outputs: dict[Request, RequestOutput] = {}
    for one in (twins, gone):
        texts.submit([one])
        for _ in range(3):
            for which, event in texts.step():
                assert not isinstance(event, Exception), event
                outputs |= {which: event} if isinstance(event, RequestOutput) else {}
    texts.cancel(gone)
    texts.submit([early])
    (group,) = twins.groups
    texts.engine.put_aside(group)
    outputs |= finish(texts)
    for one in (twins, early):
        check(outputs[one], wanted(model, len(one.prompt), mode)[: one.jobs[0].params.n])
    check_empty(texts)


def wanted(model: LLM, length: int, mode: str) -> list[CompletionOutput]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Beside, "__call__", lambda *_: nullcontext())
        return alone(model, length, mode=mode)


@pytest.mark.parametrize("coupling", ["seeded", "rejection", "block"])
@pytest.mark.parametrize("mode", MODES)
def test_no_text_knows_of_it(twins: Path, mode: str, coupling: str, ahead: list[int]) -> None:
    play(llm(twins, coupling=coupling, budget=128), mode)
    assert sum(ahead) > 0


FAULTS = [Edit(Tier, "select", ("self.ahead = None", "pass")), Edit(Tier, "join", ("self.ahead = None", "pass"))]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faults_are_noticed(twins: Path, fault: Edit, ahead: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault.owner, fault.name, fault.function())
    with pytest.raises((AssertionError, ValueError)):
        play(llm(twins, budget=128), "triforce")
