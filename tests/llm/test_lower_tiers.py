"""Lower tiers that read int8 or int4: their proposals are rounded, and nothing else is.

Shape suffixes as in docs/design/request.md; N keys.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.helpers.extras import needs_torch
from tests.helpers.tiny_llm import GREEDY, MODES, SEEDED, ask, checkpoints, ids, llm
from triforce.arrays import Array
from triforce.backends import dispatch
from triforce.cli import main
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.sequence_group import prefill_batch
from triforce.engine.tier_builder import MODES as MODE_BUILDERS
from triforce.engine.tier_builder import TierBuilder
from triforce.interface.outputs import RequestOutput
from triforce.kvcache.selection import POLICIES
from triforce.llm import LLM
from triforce.ragged import ints
from triforce.session import Session

if dispatch.native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a pair whose draft fits the native kernels, too."""
    folder = tmp_path_factory.mktemp("pair")
    checkpoints(folder, head_dim=16)
    return folder


@pytest.fixture(params=["int8", "int4"])
def lower(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def rounding(pair: Path, lower: str) -> LLM:
    """Return an LLM with a budget of a few blocks of 64 keys: a partial block is not read from copies."""
    return llm(pair, lower_tiers=lower, retrieval_budget=160)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("mode", MODES)
def test_lower_tiers_texts_equal_plain_decoding(pair: Path, lower: str, mode: str, sampling: dict[str, Any]) -> None:
    prompts = [ids(length, seed=length) for length in (70, 250, 333)]
    texts = [
        [output.outputs[0].token_ids for output in model.generate(prompts, ask(**sampling), mode=how)]
        for model, how in ((rounding(pair, lower), mode), (llm(pair), "ar"))
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("mode", ["retrieval", "triforce"])
def test_lower_tiers_commit_exact_kv(pair: Path, lower: str, mode: str) -> None:
    """K and V of the whole text have the bits of plain decoding."""
    kv_by_llm = []
    for model, how in ((rounding(pair, lower), mode), (llm(pair), "ar")):
        batch = SequenceBatch(
            model.models, MODE_BUILDERS[how], model.speculation, "seeded", [TokenSequence(ids(300), ask(), seed=11)]
        )
        for _ in prefill_batch(batch):
            pass
        while not batch.done:
            batch.step()
        pool = batch.top.cache.pool
        kv_by_llm.append([pool.span(layer, 0, 0, 300 + 20) for layer in range(pool.config.layers)])
    for pairs in zip(*kv_by_llm, strict=True):
        for got_GND, wanted_GND in zip(*pairs, strict=True):
            assert np.array_equal(got_GND, wanted_GND)


def proposal_logits(model: LLM, texts: list[list[int]]) -> Array:
    """Return the retrieval tier's logits after the last of `texts`. One row reads them all, rewound between them."""
    rows = TierBuilder(model.models, model.speculation, [400])
    full = rows.full_view()
    middle = rows.middle_tier(full, POLICIES["observed"], "retrieval")
    for previous_text, text in zip([[], *texts], texts, strict=False):
        common = next((i for i, (a, b) in enumerate(zip(previous_text, text, strict=False)) if a != b), 0)
        for tier in (middle, rows.full_tier(full)):
            tier.cache.rewind(ints([common]))
        for start, stop in pairwise([common, len(text) - 16, len(text)]):  # the selection depends on the last pass
            ids_BT = np.array([text[start:stop]])
            model.models.target(ids_BT, ints([ids_BT.shape[1]]), full)
        logits_BJV = middle.model(np.array([[5, 6]]), ints([2]), middle.cache)
    return logits_BJV


def test_lower_tiers_rewind_drops_copies(pair: Path, lower: str) -> None:
    text = ids(300)
    for common in (10, 64, 100, 250):
        branch = text[:common] + ids(290 - common, seed=5)
        branch_logits = proposal_logits(rounding(pair, lower), [branch])
        assert np.array_equal(proposal_logits(rounding(pair, lower), [text, branch]), branch_logits)
        assert not np.array_equal(proposal_logits(rounding(pair, lower), [text]), branch_logits)


def test_lower_tiers_propose_rounded_logits(pair: Path, lower: str) -> None:
    rounded, exact = (proposal_logits(model, [ids(300)]) for model in (rounding(pair, how) for how in (lower, "same")))
    least_error, largest_error = {"int8": (1e-3, 0.1), "int4": (0.1, 0.5)}[lower]
    assert least_error < np.sqrt(np.square(rounded - exact).mean()) / exact.std() < largest_error


def test_lower_tiers_conversation_equals_plain_decoding(pair: Path, lower: str) -> None:
    """Turns that go on, go back and branch off."""
    chance = Random(0)
    model = rounding(pair, lower)
    session = Session(model)
    talk = ids(150)
    for number in range(6):
        params = ask(seed=number, max_tokens=chance.randint(1, 12))
        (output,) = (part for part in session.ask(talk, params) if isinstance(part, RequestOutput))
        answer = output.outputs[0].token_ids
        assert answer == model.generate(talk, params, mode="ar")[0].outputs[0].token_ids
        talk = talk + answer if chance.random() < 0.6 else talk[: chance.randint(64, len(talk))]
        talk = talk[:400] + ids(chance.randint(0, 90), seed=number)


@needs_torch
@pytest.mark.parametrize("missing", ["they were not built", ""])
def test_lower_tiers_without_native_kernels_exit_2(
    pair: Path, lower: str, missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dispatch, "native", None)
    monkeypatch.setattr(dispatch, "missing_reason", missing)
    assert main(["generate", str(pair / "target"), "some text", "--lower-tiers", lower]) == 2
    error = capsys.readouterr().err
    assert (missing or "TRIFORCE_KERNELS=torch") in error and "--lower-tiers same" in error
    assert error.startswith("triforce: error: ") and error.count("\n") == 1
