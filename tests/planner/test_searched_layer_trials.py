"""Layers that a retrieval tier searches: found by the attention of ordinary passes, and remembered."""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TypeVar

import numpy as np
import pytest
import torch

from tests.helpers.laws.tiny import MODELS, PROMPTS, SETTING, finished
from triforce import LLM, SamplingParams
from triforce.backends.kernel_api import ForwardBatch
from triforce.distributed.group import TPGroup
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.sequence_group import prefill_batch
from triforce.engine.tier_builder import MODES
from triforce.errors import RequestError
from triforce.kvcache import RetrievalView
from triforce.kvcache.views.retrieval import SEARCH_DIVISOR, SKETCH_DIVISOR
from triforce.model.config import ModelConfig
from triforce.planner import Findings, SearchedLayers
from triforce.planner.plan import WIDE_GAMMAS
from triforce.planner.searched_layers import BLOCK, MAX_LAYERS, MAX_TRIAL, MIN_REMAINING, Finding

T = TypeVar("T")
PARAMS = SamplingParams(0.8, max_tokens=40)
OPEN = replace(SETTING, retrieval=replace(SETTING.retrieval, searched_layers=None))
ONE = np.array([True])
LENGTH = 20_000


def read(mode: str, findings: Findings | None, prompts: list[list[int]] = PROMPTS) -> SequenceBatch:
    sequences = [TokenSequence(prompt, PARAMS, seed=7, choice=b) for b, prompt in enumerate(prompts)]
    batch = SequenceBatch(MODELS, MODES[mode], OPEN, "seeded", sequences, findings=findings)
    deque(prefill_batch(batch), maxlen=0)
    return batch


def search(findings: Findings, missed: list[float], monkeypatch: pytest.MonkeyPatch) -> SearchedLayers:
    """Return the searched layers of a one-row batch whose verifications report the `missed` attention of layers."""
    batch = read("retrieval", {}, PROMPTS[:1])
    assert batch.search
    batch.search.findings = findings
    monkeypatch.setattr(SearchedLayers, "_missed_attention", lambda self: missed)
    return batch.search


def played(
    searched_layers: SearchedLayers,
    acceptance: dict[tuple[int, ...], float],
    proposals: int,
    remaining: int = 10**6,
    seed: int = 4,
) -> list[set[int]]:
    """Play proposals, whose acceptance depends on the searched layers; return the searched layers of each."""
    generator = Random(seed)
    searched = []
    for _ in range(proposals):
        layers = searched_layers.next_layers(LENGTH, remaining)
        share = acceptance.get(tuple(sorted(layers)), acceptance[()])
        run = next((n for n in range(6) if generator.random() > share), 6)
        searched_layers.tier.counters.record_verdict(np.array([6]), np.array([run]), ONE)
        searched_layers.observe()
        searched.append(set(layers))
    return searched


@pytest.mark.parametrize(
    ("missed", "acceptance", "proven_layers"),
    [
        ([0.8, 0.3], {(): 0.7, (0,): 0.95}, [0]),
        ([0.3, 0.8], {(): 0.7, (1,): 0.95}, [1]),
        ([0.8, 0.3], {(): 0.7, (0,): 0.7, (1,): 0.95}, [1]),  # a layer that misses much attention may not matter
        ([0.8, 0.8], {(): 0.7}, []),
        ([0.8, 0.8], {(): 0.998}, []),
        ([0.0, 0.0], {(): 0.7}, []),
    ],
)
def test_layer_is_searched_where_it_pays(
    missed: list[float],
    acceptance: dict[tuple[int, ...], float],
    proven_layers: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    findings: Findings = {}
    searched_layers = search(findings, missed, monkeypatch)
    searched = played(searched_layers, acceptance, 1000)
    (finding,) = findings.values()
    assert finding.layers == proven_layers and finding.trial is None
    assert searched[-1] == set(proven_layers) and searched[0] == set()


def test_layers_with_a_window_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with a window always sees its whole window, whatever a selection would miss."""
    searched_layers = search({}, [0.3, 0.8], monkeypatch)
    monkeypatch.setattr(ModelConfig, "windows", property(lambda self: [0, 24]))
    searched = played(searched_layers, {(): 0.7, (0,): 0.9, (1,): 0.99, (0, 1): 0.99}, 400)
    assert {0} in searched and not any(1 in layers for layers in searched)
    monkeypatch.setattr(ModelConfig, "windows", property(lambda self: [24, 24]))
    assert not any(played(search({}, [0.8, 0.8], monkeypatch), {(): 0.7}, 100))


def test_searched_layer_costs_its_own_keys_beside_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search adds the keys of its own layer; a layer with a window reads the same keys whatever is searched."""
    searched_layers = search({}, [0.8, 0.3], monkeypatch)
    monkeypatch.setattr(ModelConfig, "windows", property(lambda self: [0, 24]))
    view = searched_layers.tier.cache
    config = searched_layers.tier.cache.full.pool.config
    searched_layers._length = LENGTH
    selected_keys = view.keys_read(LENGTH, searched=0)
    searched_keys = view.keys_read(LENGTH, searched=1)
    searched = LENGTH // SEARCH_DIVISOR + LENGTH // SKETCH_DIVISOR if view.full.pool.kv.searches else LENGTH
    assert (selected_keys, searched_keys) == (view.budget(LENGTH), searched)
    added_seconds = 1 / searched_layers._rate(1.0, searched=1) - 1 / searched_layers._rate(1.0, searched=0)
    assert added_seconds == pytest.approx(
        min(WIDE_GAMMAS) * config.kv_size / config.layers * (searched_keys - selected_keys)
    )


def test_few_rejections_start_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    searched_layers = search({}, [], monkeypatch)
    monkeypatch.setattr(SearchedLayers, "_missed_attention", lambda self: pytest.fail("looked"))
    assert not any(played(searched_layers, {(): 0.998}, 100))


def test_rows_that_observed_nothing_start_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows were decoded plainly, swapped out, and swapped in to a batch of their own."""
    findings: Findings = {}
    assert not any(played(search(findings, [], monkeypatch), {(): 0.5}, 100))
    assert [finding.trial for finding in findings.values()] == [None]


def test_short_text_starts_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    searched_layers = search({}, [0.8, 0.1], monkeypatch)
    assert not any(played(searched_layers, {(): 0.7, (0,): 0.95}, 100, remaining=MIN_REMAINING - 1))
    assert any(played(searched_layers, {(): 0.7, (0,): 0.95}, 100))


def test_layer_trials_alternate_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    findings: Findings = {}
    searched_layers = search(findings, [0.8, 0.8], monkeypatch)
    searched = played(searched_layers, {(): 0.7}, 1000)
    turns = [set(layers) for layers in searched if layers]
    assert BLOCK < len(turns) <= 2 * MAX_TRIAL + BLOCK, "each layer is given up, and none is tried twice"
    trial_start = next(i for i, layers in enumerate(searched) if layers)
    assert searched[trial_start : trial_start + 2 * BLOCK] == [searched[trial_start]] * BLOCK + [set()] * BLOCK
    (finding,) = findings.values()
    assert sorted(finding.no_gain) == [0, 1] and not finding.layers


def test_layer_trial_results_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    findings: Findings = {}
    acceptance = {(): 0.7, (0,): 0.95}
    for seed in range(60):  # texts that end before a trial does
        played(search(findings, [0.8, 0.1], monkeypatch), acceptance, 6, seed=seed)
    (finding,) = findings.values()
    assert 0 in finding.layers
    assert search(findings, [], monkeypatch).next_layers(LENGTH, 100) >= {0}
    assert search(findings, [], monkeypatch).next_layers(2 * LENGTH, 100) >= {0}, (
        "what pays in shorter contexts pays here"
    )
    assert search(findings, [], monkeypatch).next_layers(LENGTH // 2, 100) == set(), "it may not pay in shorter ones"


def test_searched_layers_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    findings: Findings = {f"{LENGTH.bit_length()} 48 16": Finding(layers=[0])}
    searched_layers = search(findings, [0.8, 0.8], monkeypatch)
    assert MAX_LAYERS >= 1 and all(
        layers == {0} for layers in played(searched_layers, {(): 0.5, (0,): 0.5, (0, 1): 1.0}, 100)
    )


@pytest.mark.parametrize("mode", ["retrieval", "triforce", "ngram"])
def test_layer_trials_keep_text(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triforce.planner.searched_layers.MIN_TOKENS", 3)
    monkeypatch.setattr("triforce.planner.searched_layers.BLOCK", 1)
    monkeypatch.setattr(SearchedLayers, "_gain", lambda *_: 2.0)
    monkeypatch.setattr(SearchedLayers, "_saves", lambda *_: True)
    findings: Findings = {}
    looked = read(mode, findings)
    for b, prompt in enumerate(PROMPTS):
        assert looked.top.cache.lengths_B[b] == len(prompt) - 1
    assert torch.equal(finished(looked), finished(read("ar", None)))
    assert any(finding.layers or finding.trial for finding in findings.values())


def test_proven_layers_stay_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of a trial are not captured on a GPU."""
    batch = read("retrieval", {}, PROMPTS[:1])
    assert batch.search
    monkeypatch.setattr(SearchedLayers, "next_layers", lambda *_: frozenset({0}))
    begin = RetrievalView.begin
    started_batches = list[ForwardBatch]()
    monkeypatch.setattr(
        RetrievalView, "begin", lambda *args: started_batches.append(begin(*args)) or started_batches[-1]
    )
    for trying in (True, False):
        batch.search.trying = trying
        with torch.no_grad():
            batch.step()
        assert started_batches[-1].trial == trying


def test_missed_mass_is_outside_of_selection() -> None:
    batch = read("retrieval", {}, PROMPTS[:1])
    assert batch.search
    view = batch.search.tier.cache
    assert view.missed(0) is None, "nothing was selected yet"
    with torch.no_grad():
        batch.step()
    missed_L = view.missed(0)
    assert missed_L is not None and all(0 < share < 1 for share in missed_L)
    latest = view.full.observations[0]
    choice = view.selections[0].pages
    assert latest.mass_LGU is not None and choice is not None
    for layer, missed in enumerate(missed_L):
        shares = []
        for head in range(MODELS.target.config.kv_heads):
            places = {unit: at for at, unit in enumerate(view.row_units(0).tolist())}
            selected_units = {places[unit] for unit in choice.units[layer, head].tolist()}
            selected_units |= set(range(view.selections[0].window_start // view.unit, latest.mass_LGU.shape[2]))
            mass = latest.mass_LGU[layer, head].tolist()
            shares.append(sum(m for at, m in enumerate(mass) if at not in selected_units) / sum(mass))
        assert missed == pytest.approx(sum(shares) / len(shares), abs=1e-5)


def test_remembered_layers_beyond_model_are_ignored(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="0 to 5"):
        LLM(searched_layers="6")


class ReplayedGroup(TPGroup):
    """A rank of a replayed group: rank 0 records the values that it broadcasts, and others receive them in order."""

    def __init__(self, rank: int, messages: deque[bytes]) -> None:
        self.rank = rank
        self.messages = messages

    def broadcast(self, value: T) -> T:
        if self.rank:
            received: T = pickle.loads(self.messages.popleft())
            return received
        self.messages.append(pickle.dumps(value))
        return value


def test_batch_that_goes_on_alone_has_one_finding_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch prefills while another batch decodes and ends; the ended batch's findings count on each rank."""
    messages = deque[bytes]()
    rank_findings = []
    for rank in (0, 1):
        findings: Findings = {}
        running, waiting = (search(findings, [0.8, 0.1], monkeypatch) for _ in range(2))
        running._ranks = waiting._ranks = ReplayedGroup(rank, messages)
        played(running, {(): 0.7}, 2)
        waiting.next_layers(LENGTH, 0)
        played(running, {(): 0.7}, 1)
        played(waiting, {(): 0.7}, 20)
        rank_findings.append(findings)
    assert not messages and rank_findings[0] == rank_findings[1]
