"""Several tokens of a draft in one graph are those of passes and draws one by one, bit for bit, laws and noise too.

In the interpreter, where a graph is a call; on a made-up device, where it is captured once and then replayed; and on a
GPU, where there is one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from tests.helpers.cuda.sampler_checks import looked_at_by
from tests.helpers.cuda.scene import DEVICE
from tests.helpers.cuda.stub import machine
from tests.helpers.drafting import PROMPTS, Drafting, same
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.helpers.slow_parameters import slow
from triforce.backends.cuda import model
from triforce.backends.cuda.model import TritonModel
from triforce.backends.cuda.sampler import TritonSampling
from triforce.bench import shapes
from triforce.errors import ModelError
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import StreamingView
from triforce.speculation import Draft, Rejection, Seeded

made_up = pytest.mark.skipif(torch.cuda.is_available(), reason="devices are made up here, or launches interpreted")
SMALL = shapes.ModelShape(16, 24, layers=1, heads=2, kv_heads=1, vocab=40, head_dim=8)
PARAMS = [SamplingParams(temperature=0.8, top_p=0.9), SamplingParams(temperature=0), SamplingParams(top_k=20)]
OTHERS = [SamplingParams(temperature=0.3), SamplingParams(temperature=1.5), SamplingParams(temperature=0)]
ROUNDS = [([True, True, True], [3, 1, 2]), ([True, False, True], [3, 0, 3]), ([True, True, True], [0, 3, 3])]
"""The rows of a draft, and how many of its tokens stay: of all of them, two are unseen in the next pass."""
Coupling = type[Seeded | Rejection]
each_coupling = pytest.mark.parametrize("coupling", [Seeded, *slow(Rejection)])


@pytest.fixture(autouse=True)
def small(by_name: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "small", SMALL)


def drafting(coupling: Coupling, several: bool, device: str = str(DEVICE)) -> Drafting:
    config, weights = shapes.parts("small", 4000, torch.float32, torch.device(device))
    view = StreamingView(config, 3, sinks=16, window=33, slack=64, device=device)

    def sampler(*given: Any) -> TritonSampling:
        return TritonSampling(*given, device)

    return Drafting((config, TritonModel(config, weights)), view, coupling, (sampler, PARAMS), several, gamma=3)


def proposals(one: Drafting) -> list[Draft]:
    """Some drafts, the last of them with other settings, as a batch has them whose rows have changed."""
    found = [one.propose(*each) for each in ROUNDS[:-1]]
    one.sampling = TritonSampling(OTHERS, PROMPTS, SMALL.vocab, one.sampling.coupling, one.tier.cache.device)  # type: ignore[arg-type]
    return [replace(each, probs_BKV=each.probs_BKV.cpu()) for each in [*found, one.propose(*ROUNDS[-1])]]


@cache
def single(coupling: Coupling) -> tuple[list[Draft], Drafting]:
    """Those of passes and draws one by one, and who made them."""
    one = drafting(coupling, several=False)
    return proposals(one), one


def alike(one: list[Draft], other: list[Draft]) -> bool:
    return all(map(same, one, other))


@each_coupling
def test_draft_in_one_graph_equals_single_passes_and_draws(coupling: Coupling) -> None:
    (wanted, one), many = single(coupling), drafting(coupling, several=True)
    assert alike(proposals(many), wanted)
    assert torch.equal(one.noise.draws, many.noise.draws)
    assert np.array_equal(one.tier.counters.passes_B, many.tier.counters.passes_B)
    assert np.array_equal(one.tier.cache.lengths_B, many.tier.cache.lengths_B)


@pytest.mark.slow
@each_coupling
def test_draft_in_one_graph_by_sampler_in_parts_equals_single(coupling: Coupling) -> None:
    with looked_at_by(16):
        assert alike(*(proposals(drafting(coupling, several)) for several in (False, True)))


@made_up
@pytest.mark.slow
@pytest.mark.timeout(900)
@each_coupling
def test_replayed_draft_equals_single_passes_and_draws(coupling: Coupling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shape is run once and captured once; what follows are replays, of other texts, lengths and noise."""
    (wanted, _), asked, shapes_run = single(coupling), 0, list[Any]()
    run, draft = model.run_draft, model.fused_draft

    def counted(*given: Any) -> Any:
        nonlocal asked
        asked += 1
        return draft(*given)

    monkeypatch.setattr(model, "run_draft", lambda *given: shapes_run.append(given[2].shape) or run(*given))
    monkeypatch.setattr(model, "fused_draft", counted)
    with machine() as made:
        many = drafting(coupling, several=True, device="cuda:0")
        before = made.captured
        found = proposals(many)
        captured = made.captured - before
        del many
        gc.collect()
    assert alike(found, wanted)
    assert captured == len(set(shapes_run)) == len(shapes_run) / 2 < asked


@contextmanager
def launches() -> Iterator[list[str]]:
    """The kernels that are launched, in order."""
    names, launch = list[str](), interpreter.GridExecutor.__call__

    def noted(kernel: Any, *args: Any, **how: Any) -> None:
        names.append(kernel.fn.__name__)
        launch(kernel, *args, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", noted)
        yield names


@made_up
@pytest.mark.slow
def test_draft_in_one_graph_launches_what_single_passes_do() -> None:
    """In the same order; only what goes from pass to pass is a kernel more, behind each draw."""
    found = []
    for several in (False, True):
        one = drafting(Seeded, several)
        with launches() as names:
            one.propose(*ROUNDS[0])
        found.append(names)
    single, together = found
    assert [name for name in together if name != "_go_on"] == single
    draws = [i for i, name in enumerate(together) if name == "_decide"]
    assert [together[i + 1] for i in draws] == ["_go_on"] * len(draws) and together.count("_go_on") == len(draws) >= 3


def test_draft_of_penalised_rows_is_drawn_per_token() -> None:
    one = drafting(Seeded, several=True)
    params = [SamplingParams(frequency_penalty=0.5)] * 3
    sampling, live_B = TritonSampling(params, PROMPTS, SMALL.vocab, Seeded(one.noise), DEVICE), np.ones(3, np.bool_)
    assert sampling.draws(0, 3, live_B) is None
    assert one.tier.fused_draft and one.tier.fused_draft(one.tier, one.prefix, sampling, live_B, 3) is None


def test_draft_in_one_graph_refuses_logits_that_are_not_finite() -> None:
    one = drafting(Seeded, several=True)
    view, broken = one.tier.cache, torch.full((1, 1, 8), float("nan"), device=DEVICE)
    view.kv.write(0, torch.tensor([view.pages * 16 + 16], device=DEVICE), broken, broken)  # the first sink of row 1
    with pytest.raises(ModelError, match=r"logits are NaN \(row 1"):
        one.propose([True] * 3, [3] * 3)


@made_up
@pytest.mark.slow
@pytest.mark.parametrize("mutant", caught_in("test_cuda_draft_mutant_changes_a_draft"), ids=str)
def test_cuda_draft_mutant_changes_a_draft(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (coupling,) = (each for each in (Seeded, Rejection) if each.__name__ in mutant.checks)
    wanted, _ = single(coupling)
    mutant.apply(monkeypatch, tmp_path)
    assert not alike(proposals(drafting(coupling, several=True)), wanted)
