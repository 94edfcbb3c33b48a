"""An EAGLE head below every tier: texts, draft tokens beside any neighbours, KV entries, and planted faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.engine.test_engine_mutants import play, play_swapped
from tests.engine.test_schedules import Schedules
from tests.helpers.disk_llm import written
from tests.helpers.eagle_pair import DraftToken, check_consistent, check_draft_token, check_entries, eagle_pair, spied
from tests.helpers.engine_scene import ROWS, alone, finish, prompt, request
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.helpers.tiny_llm import MODES, ask, llm
from triforce.backends import dispatch
from triforce.disk_cache import prefixes
from triforce.eagle import eagle_draft
from triforce.eagle.head_files import read_eagle_head
from triforce.eagle.torch_passes import TorchEagleHeadPasses
from triforce.engine.engine import Engine
from triforce.errors import ModelError
from triforce.llm import LLM
from triforce.session import Session

torch.set_num_threads(1)
DRAFTING = ["draft", "triforce", "streaming", "draft-ngram"]


@pytest.fixture(scope="session")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eagle_pair(tmp_path_factory.mktemp("features"))


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "seeded"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "ar"])
def test_texts_are_those_of_plain_decoding(mode: str, temperature: float, features: Path) -> None:
    """Prompts are short and long, with two choices each. Some draft tokens are accepted."""
    model = llm(features)
    accepted_tokens = 0
    for length in (1, 40, 150, 260):
        plain, drafted = (alone(model, length, temperature, name) for name in ("ar", mode))
        assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
        accepted_tokens += sum(tier.accepted for output in drafted for tier in output.tiers if tier.name == "draft")
    assert accepted_tokens > 0 or mode not in DRAFTING


def test_int8_tiers_below_keep_the_text(features: Path) -> None:
    """Entries come from hidden states of rounded weights until the full tier has verified."""
    model = llm(features, lower_tiers="int8")
    plain, drafted = (alone(model, 260, 0.8, mode) for mode in ("ar", "triforce"))
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]


@pytest.mark.parametrize("coupling", ["rejection", "block"])
def test_other_couplings_draft_too(coupling: str, features: Path) -> None:
    """Sampled texts are only distributed alike. Greedy texts are equal."""
    model = llm(features, coupling=coupling)
    for mode in ("draft", "triforce"):
        for temperature in (0.0, 0.8):
            (output,) = model.generate(prompt(150), ask(temperature=temperature, max_tokens=20), mode=mode)
            assert len(output.outputs[0].token_ids) == 20
            if not temperature:
                assert output.outputs[0].token_ids == alone(llm(features), 150, 0.0)[0].token_ids


@pytest.mark.parametrize("mode", DRAFTING)
@pytest.mark.parametrize("schedule", [play, play_swapped])
def test_draft_tokens_are_those_of_the_row_alone(
    schedule: Callable[[LLM, str], None], mode: str, features: Path
) -> None:
    """Neighbours that come and go, forks, shared pages and swaps change no bit of a draft token."""
    in_company(features, schedule, mode)


def in_company(features: Path, schedule: Callable[[LLM, str], None], mode: str) -> list[DraftToken]:
    alone.cache_clear()
    with spied() as draft_tokens:
        schedule(llm(features), mode)
    check_consistent(draft_tokens)
    return draft_tokens


@pytest.mark.parametrize("passes", ["native", "torch"])
def test_draft_tokens_are_those_of_the_layer_in_torch(passes: str, features: Path) -> None:
    """Each draft token depends on the hidden states of the text before it, behind full verifications in float32."""
    if passes == "native":
        like_torch(features)
    else:
        by_torch(features)


def by_torch(features: Path) -> None:
    """Check the head's passes in torch over the same KV memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            eagle_draft,
            "eagle_head_passes",
            lambda config, weights, target, *where: TorchEagleHeadPasses(config, weights, target.embed, *where),
        )
        like_torch(features)


def like_torch(features: Path) -> None:
    model = LLM(features / "target", features / "draft", dtype="float32", draft_tokens=3, mode="draft")
    draft = read_eagle_head(features / "draft", model.target.config, model.target.fingerprint)
    with spied() as draft_tokens:
        for length in (3, 16, 150):  # the second text of a length finds the first one's KV
            for text in (prompt(length), prompt(length) + [5] * 20):
                model.generate(text, ask(max_tokens=12, temperature=0.8))
    for draft_token in draft_tokens:
        check_draft_token(model, draft, draft_token)
    assert {len(draft_token.text) - draft_token.committed for draft_token in draft_tokens} == {1, 2, 3}


@pytest.mark.parametrize("mode", ["ar", "retrieval", *DRAFTING])
def test_entries_of_committed_tokens_are_those_of_a_prompt(mode: str, features: Path) -> None:
    """Entries do not depend on the tier that proposed a token, nor on the tier that verified it."""
    like_a_prompt(features, mode)


def texts_of(engine: Engine) -> list[list[int]]:
    """Return the new tokens of the three rows, once all rows are decoding."""
    rows = [sequence.tokens for batch in engine.core.batches.values() for sequence in batch.sequences]
    return rows if len(rows) == 3 else []


def like_a_prompt(features: Path, mode: str) -> None:
    model = llm(features)
    engine = model.open(ROWS, 900)
    engine.submit([request(model, length, mode, n=n, max_tokens=60) for length, n in ((150, 2), (91, 1))])
    while min(map(len, texts_of(engine)), default=0) < 20:
        for _, event in engine.step():
            assert not isinstance(event, Exception), event
    check_entries(model, engine)
    finish(engine)
    engine.close()


def test_draft_tokens_of_a_session_are_those_of_a_first_question(features: Path) -> None:
    """A conversation goes on, and another conversation is rewound to the middle of a page."""
    model = llm(features, mode="draft")
    with spied() as draft_tokens:
        turns = Session(model)
        for text in (prompt(150), prompt(90) + [7] * 30, prompt(200)):
            *_, output = turns.ask(text, ask(max_tokens=12))
            assert output.outputs[0].token_ids == model.generate(text, ask(max_tokens=12))[0].outputs[0].token_ids
            model.reset_prefix_cache()
    check_consistent(draft_tokens)


def saved_and_loaded(features: Path, folder: Path, **how: Any) -> None:
    """Generate from a saved prompt, or from the disk cache of another process."""
    text = prompt(600)[:570]
    params = ask(max_tokens=12)
    with spied() as draft_tokens:
        for _ in range(2):
            model = LLM(features / "target", features / "draft", mode="draft", retrieval_budget=64, **how)
            if how:
                (output,) = model.generate(text, params)
                cached = output.cached_tokens
                written(model)
            else:
                file = folder / "prompt.kv"
                cache_option = {"load_cache": file} if file.exists() else {"save_cache": file}
                (output,) = model.generate(text, params, **cache_option)
                cached = output.cached_tokens
            del model
    assert cached >= 500
    check_consistent(draft_tokens)


def test_draft_tokens_behind_a_saved_prompt_are_those_of_a_fresh_one(features: Path, tmp_path: Path) -> None:
    saved_and_loaded(features, tmp_path)


def test_draft_tokens_behind_a_prompt_from_disk_are_those_of_a_fresh_one(
    features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "perf_counter", lambda: 0.0)  # however busy this machine is
    saved_and_loaded(features, tmp_path, disk_cache=tmp_path / "cache")


def test_draft_tokens_behind_pages_of_another_text_are_those_of_a_fresh_prompt(
    features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk cache holds a text that differs within a segment."""
    monkeypatch.setattr(prefixes, "perf_counter", lambda: 0.0)
    text = prompt(600)[:570]
    cached = []
    second_text = [*text[:545], *text[:25]]
    with spied() as draft_tokens:
        for ids, disk in ((text, tmp_path / "cache"), (second_text, tmp_path / "cache"), (second_text, None)):
            how = {"mode": "draft", "retrieval_budget": 64, "disk_cache": disk}
            with LLM(features / "target", features / "draft", **how) as model:  # `close` waits for pending writes
                cached.append(model.generate(ids, ask(max_tokens=12))[0].cached_tokens)
    assert cached == [0, 544, 0]
    check_consistent(draft_tokens)


def test_random_schedules_keep_texts_and_counts(features: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any modes run beside one another."""
    monkeypatch.setattr(Schedules, "model", llm(features), raising=False)
    test_settings = settings(max_examples=4, stateful_step_count=12, deadline=None, derandomize=True)
    run_state_machine_as_test(Schedules, settings=test_settings)


CHECKS: dict[str, Callable[[Path, Path], object]] = {
    "torch": lambda features, folder: like_torch(features),
    "reference": lambda features, folder: by_torch(features),
    "company": lambda features, folder: in_company(features, play, "draft"),
    "swapped": lambda features, folder: in_company(features, play_swapped, "draft"),
    "prompt": lambda features, folder: like_a_prompt(features, "triforce"),
    "saved": lambda features, folder: saved_and_loaded(features, folder),
    "disk": lambda features, folder: saved_and_loaded(features, folder, disk_cache=folder / "cache"),
}


@pytest.mark.skipif(dispatch.native is None, reason="bits are those of the native kernels")
@pytest.mark.parametrize("mutant", caught_in("test_tier_mutant_is_noticed"), ids=str)
def test_tier_mutant_is_noticed(
    mutant: Mutant, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant.apply(monkeypatch)
    for check in mutant.checks:
        with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError, ModelError)):
            CHECKS[check](features, tmp_path)
