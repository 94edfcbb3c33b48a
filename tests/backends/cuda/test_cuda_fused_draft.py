"""Draft tokens of one graph have the bits of single passes and draws, probabilities and noise too.

The tests run in the interpreter, where a graph is a call; on a simulated device, where it is captured once and then
replayed; and on a GPU where one is present.
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
"""The live rows of each draft, and how many of its tokens are accepted.

After all of them, the next pass sees two new tokens.
"""
Coupling = type[Seeded | Rejection]
each_coupling = pytest.mark.parametrize("coupling", [Seeded, *slow(Rejection)])


@pytest.fixture(autouse=True)
def small(by_name: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "small", SMALL)


def drafting(coupling: Coupling, several: bool, device: str = str(DEVICE)) -> Drafting:
    config, weights = shapes.parts("small", 4000, "float32")
    view = StreamingView(config, 3, sinks=16, window=33, slack=64, device=device)

    def sampler(*arguments: Any) -> TritonSampling:
        return TritonSampling(*arguments, device)

    return Drafting((config, TritonModel(config, weights, device)), view, coupling, (sampler, PARAMS), several, gamma=3)


def proposals(scene: Drafting) -> list[Draft]:
    """Drafts of all rounds. The last round has other settings, as after a change of the batch's rows."""
    drafts = [scene.propose(*arguments) for arguments in ROUNDS[:-1]]
    scene.sampling = TritonSampling(OTHERS, PROMPTS, SMALL.vocab, scene.sampling.coupling, scene.tier.cache.kv.device)  # type: ignore[arg-type]
    drafts.append(scene.propose(*ROUNDS[-1]))
    return [replace(draft, probs_BKV=draft.probs_BKV.cpu()) for draft in drafts]


@cache
def single_pass_drafts(coupling: Coupling) -> tuple[list[Draft], Drafting]:
    """Return the drafts of single passes and draws, and the scene that made them."""
    drafting_scene = drafting(coupling, several=False)
    return proposals(drafting_scene), drafting_scene


def same_drafts(drafts: list[Draft], reference_drafts: list[Draft]) -> bool:
    return all(map(same, drafts, reference_drafts))


@each_coupling
def test_draft_in_one_graph_equals_single_passes_and_draws(coupling: Coupling) -> None:
    single_drafts, single_scene = single_pass_drafts(coupling)
    fused_scene = drafting(coupling, several=True)
    assert same_drafts(proposals(fused_scene), single_drafts)
    assert torch.equal(single_scene.noise.draws, fused_scene.noise.draws)
    assert np.array_equal(single_scene.tier.counters.passes_B, fused_scene.tier.counters.passes_B)
    assert np.array_equal(single_scene.tier.cache.lengths_B, fused_scene.tier.cache.lengths_B)


@pytest.mark.slow
@each_coupling
def test_draft_in_one_graph_by_sampler_in_parts_equals_single(coupling: Coupling) -> None:
    with looked_at_by(16):
        assert same_drafts(*(proposals(drafting(coupling, several)) for several in (False, True)))


@made_up
@pytest.mark.slow
@pytest.mark.timeout(900)
@each_coupling
def test_replayed_draft_equals_single_passes_and_draws(coupling: Coupling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shape is run once and captured once. All later passes are replays, of other texts, lengths and noise."""
    single_drafts, _ = single_pass_drafts(coupling)
    asked = 0
    shapes_run = list[Any]()
    run = model.run_draft
    draft = model.fused_draft

    def counted(*arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        return draft(*arguments)

    monkeypatch.setattr(
        model, "run_draft", lambda *run_arguments: shapes_run.append(run_arguments[2].shape) or run(*run_arguments)
    )
    monkeypatch.setattr(model, "fused_draft", counted)
    with machine() as device_stub:
        fused_scene = drafting(coupling, several=True, device="cuda:0")
        earlier_captures = device_stub.captured
        fused_drafts = proposals(fused_scene)
        captured = device_stub.captured - earlier_captures
        del fused_scene
        gc.collect()
    assert same_drafts(fused_drafts, single_drafts)
    assert captured == len(set(shapes_run)) == len(shapes_run) / 2 < asked


@contextmanager
def launches() -> Iterator[list[str]]:
    """Yield the names of the kernels that are launched, in order."""
    names = list[str]()
    launch = interpreter.GridExecutor.__call__

    def noted(kernel: Any, *args: Any, **options: Any) -> None:
        names.append(kernel.fn.__name__)
        launch(kernel, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", noted)
        yield names


@made_up
@pytest.mark.slow
def test_draft_in_one_graph_launches_what_single_passes_do() -> None:
    """The order is the same. Behind each draw one more kernel carries data to the next pass."""
    launches_by_kind = []
    for several in (False, True):
        drafting_scene = drafting(Seeded, several)
        with launches() as names:
            drafting_scene.propose(*ROUNDS[0])
        launches_by_kind.append(names)
    single_launches, fused_launches = launches_by_kind
    assert [name for name in fused_launches if name != "_go_on"] == single_launches
    draws = [i for i, name in enumerate(fused_launches) if name == "_decide"]
    assert [fused_launches[i + 1] for i in draws] == ["_go_on"] * len(draws) and fused_launches.count("_go_on") == len(
        draws
    ) >= 3


def test_draft_of_penalised_rows_is_drawn_per_token() -> None:
    fused_scene = drafting(Seeded, several=True)
    params = [SamplingParams(frequency_penalty=0.5)] * 3
    sampling = TritonSampling(params, PROMPTS, SMALL.vocab, Seeded(fused_scene.noise), DEVICE)
    live_B = np.ones(3, np.bool_)
    assert sampling.draws(0, 3, live_B) is None
    assert (
        fused_scene.tier.fused_draft
        and fused_scene.tier.fused_draft(fused_scene.tier, fused_scene.prefix, sampling, live_B, 3) is None
    )


def test_draft_in_one_graph_refuses_logits_that_are_not_finite() -> None:
    fused_scene = drafting(Seeded, several=True)
    view = fused_scene.tier.cache
    broken = torch.full((1, 1, 8), float("nan"), device=DEVICE)
    view.kv.write(0, torch.tensor([view.pages * 16 + 16], device=DEVICE), broken, broken)  # the first sink of row 1
    with pytest.raises(ModelError, match=r"logits are NaN \(row 1"):
        fused_scene.propose([True] * 3, [3] * 3)


@made_up
@pytest.mark.slow
@pytest.mark.parametrize("mutant", caught_in("test_cuda_draft_mutant_changes_a_draft"), ids=str)
def test_cuda_draft_mutant_changes_a_draft(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (coupling,) = (verification for verification in (Seeded, Rejection) if verification.__name__ in mutant.checks)
    single_drafts, _ = single_pass_drafts(coupling)
    mutant.apply(monkeypatch, tmp_path)
    assert not same_drafts(proposals(drafting(coupling, several=True)), single_drafts)
