"""The disk cache of models whose layers keep only windows: each segment's windows are an entry of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cache_folders import store_in
from tests.helpers.disk_llm import HOW, answer
from tests.helpers.engine_scene import check_same
from tests.helpers.family_models import SIZES, family_model
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.helpers.narrow_windows import narrow
from tests.helpers.slow_parameters import slow
from tests.helpers.tiny_checkpoint import save, tiny_model
from tests.helpers.tiny_llm import ask, ids
from triforce.backends import dispatch
from triforce.disk_cache.prefixes import SEGMENT
from triforce.errors import ModelError
from triforce.kvcache import PAGE
from triforce.kvcache.views.full import TAIL
from triforce.llm import LLM
from triforce.session import Session

if dispatch.native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)

CONTEXT = 2000
PROMPT = ids(1500)
WHOLE = (len(PROMPT) - 1 - TAIL) // PAGE * PAGE
"""Tokens restored from disk: segments and the pages after them, but not the last `TAIL` tokens."""
BRANCH = [*PROMPT[: 2 * SEGMENT + 50], *ids(400, seed=9)]
"""Another text, which branches off before the windows that are kept of PROMPT."""
FAMILIES = ["gemma-3", "gpt-oss", "mistral-window"]
"""Families of models. All layers of the last one have a window."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(autouse=True)
def narrow_windows() -> Iterator[None]:
    """Keep two whole segments of a prompt."""
    with narrow(3 * SEGMENT + 60):
        yield


def llm(home: Path, name: str, **how: Any) -> LLM:
    """Return a model with no prompt prefilled."""
    if not (home / name).exists():
        save(family_model(name, max_position_embeddings=CONTEXT), home / name)
        save(tiny_model(**SIZES | dict(num_hidden_layers=1, max_position_embeddings=CONTEXT)), home / "draft")
    return LLM(home / name, home / "draft", **HOW | how)


def kept(cache: Path, kind: str) -> list[str]:
    """Return the names of the entries of a kind."""
    store = store_in(cache)
    facts = {entry.name: store.facts(entry.name) for entry in store.entries()}
    return [name for name, entry_facts in facts.items() if entry_facts and entry_facts["kind"] == kind]


@pytest.mark.parametrize("how", [{}, {"kv_dtype": "int8"}], ids=["same", "int8 KV"])
@pytest.mark.parametrize("mode", ["triforce", *slow("ar", "retrieval")])
@pytest.mark.parametrize("name", FAMILIES)
def test_windows_from_disk_give_the_same_text(
    home: Path, cache: Path, name: str, mode: str, how: dict[str, str]
) -> None:
    expected_output = answer(llm(home, name, **how), PROMPT, mode)
    first_output, again = (answer(llm(home, name, disk_cache=cache, **how), PROMPT, mode) for _ in range(2))
    assert (first_output.cached_tokens, again.cached_tokens) == (0, WHOLE)
    assert again.exactness == expected_output.exactness == "bitwise"
    for output in (first_output, again):
        check_same(output.outputs, expected_output.outputs)
        assert output.kv.device_bytes == expected_output.kv.device_bytes, "a disk cache keeps no more in memory"


@pytest.mark.parametrize("name", ["gemma-3", "mistral-window"])
def test_second_question_finds_its_document_and_windows(home: Path, cache: Path, name: str) -> None:
    """The question branches off in the second last segment. The windows at the end of the segment before are there."""
    shared_tokens = len(PROMPT) // SEGMENT * SEGMENT - 40
    answer(llm(home, name, disk_cache=cache), PROMPT)
    question = [*PROMPT[:shared_tokens], *ids(200, seed=9)]
    output = answer(llm(home, name, disk_cache=cache), question)
    assert output.cached_tokens == shared_tokens // SEGMENT * SEGMENT
    check_same(output.outputs, answer(llm(home, name), question).outputs)


def test_text_that_branches_off_behind_its_windows_is_read_again(home: Path, cache: Path) -> None:
    answer(llm(home, "gemma-3", disk_cache=cache), PROMPT)
    output = answer(llm(home, "gemma-3", disk_cache=cache), BRANCH)
    assert output.cached_tokens == 0
    check_same(output.outputs, answer(llm(home, "gemma-3"), BRANCH).outputs)


def test_windows_of_the_last_segments_are_kept(home: Path, cache: Path) -> None:
    answer(llm(home, "gemma-3", disk_cache=cache), PROMPT)
    assert len(kept(cache, "kv")) == len(PROMPT) // SEGMENT and len(kept(cache, "windows")) == 2


@pytest.mark.parametrize("kind", ["windows", "rest", "kv"])
def test_missing_entries_cost_a_reading(home: Path, cache: Path, kind: str) -> None:
    expected_output = answer(llm(home, "gemma-3", disk_cache=cache), PROMPT)
    for name in kept(cache, kind):
        (cache / name).unlink()
    output = answer(llm(home, "gemma-3", disk_cache=cache), PROMPT)
    assert output.cached_tokens == (len(PROMPT) // SEGMENT * SEGMENT if kind == "rest" else 0)
    assert output.outputs[0].token_ids == expected_output.outputs[0].token_ids


def test_damaged_windows_cost_a_reading(home: Path, cache: Path) -> None:
    expected_output = answer(llm(home, "gemma-3", disk_cache=cache), PROMPT)
    for name in kept(cache, "rest"):
        (cache / name).unlink()
    for name in kept(cache, "windows"):
        data = bytearray((cache / name).read_bytes())
        data[len(data) // 2] ^= 64
        (cache / name).write_bytes(data)
    output = answer(llm(home, "gemma-3", disk_cache=cache), PROMPT)
    assert output.cached_tokens == 0 and output.outputs[0].token_ids == expected_output.outputs[0].token_ids


def test_session_with_windows_and_a_disk_cache(home: Path, cache: Path) -> None:
    """Two turns run, and then the first turn of a later process."""

    def turn(session: Session, text: list[int]) -> Any:
        return [*session.ask(text, ask(max_tokens=20))][-1]

    model = llm(home, "gemma-3", disk_cache=cache)
    uncached_llm = llm(home, "gemma-3")
    session = Session(model)
    first_output = turn(session, PROMPT)
    longer = [*PROMPT, *first_output.outputs[0].token_ids, *ids(30, seed=4)]
    second = turn(session, longer)
    assert model.engines.parts.disk and model.engines.parts.disk.queue.flush()
    restarted_output = turn(Session(llm(home, "gemma-3", disk_cache=cache)), longer)
    assert restarted_output.cached_tokens >= len(PROMPT) // SEGMENT * SEGMENT
    expected_ids = answer(uncached_llm, longer, max_tokens=20).outputs[0].token_ids
    assert second.outputs[0].token_ids == restarted_output.outputs[0].token_ids == expected_ids


@pytest.mark.parametrize("mutant", caught_in("test_windows_on_disk_mutant_is_noticed"), ids=str)
def test_windows_on_disk_mutant_is_noticed(
    home: Path, cache: Path, mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_outputs = [answer(llm(home, "gemma-3"), prompt, logprobs=1) for prompt in (BRANCH, PROMPT)]
    mutant.apply(monkeypatch)
    with pytest.raises((AssertionError, ModelError)):
        for prompt in (PROMPT, PROMPT[: len(PROMPT) // SEGMENT * SEGMENT + 18]):
            answer(llm(home, "gemma-3", disk_cache=cache), prompt)
        for prompt, expected_output in zip((BRANCH, PROMPT), expected_outputs, strict=True):
            output = answer(llm(home, "gemma-3", disk_cache=cache), prompt, logprobs=1)
            check_same(output.outputs, expected_output.outputs)
            assert output.outputs[0].logprobs == expected_output.outputs[0].logprobs
