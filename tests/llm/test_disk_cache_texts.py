"""Texts restored from the disk cache equal texts of a fresh prefill, bit for bit, in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.disk_llm import HOW, PROMPT, WHOLE, answer, check_restored, started, written
from tests.helpers.tiny_llm import MODES, ask, counted, ids, llm
from triforce.disk_cache import prefixes
from triforce.disk_cache.prefixes import SEGMENT
from triforce.interface.outputs import RequestOutput
from triforce.kvcache import PAGE
from triforce.kvcache.views.full import TAIL
from triforce.llm import LLM
from triforce.session import Session


@pytest.mark.parametrize("coupling", ["seeded", "rejection"])
@pytest.mark.parametrize("mode", MODES)
def test_restored_text_equals_fresh_one(disk_pair: Path, cache: Path, mode: str, coupling: str) -> None:
    if (mode, coupling) == ("auto", "rejection"):
        pytest.skip("the clock has a say in its text")
    check_restored(disk_pair, cache, mode, coupling)


@pytest.mark.parametrize(
    "how",
    [
        dict(lower_tiers="int8"),
        dict(kv_offload="host"),
        dict(kv_offload="file"),
        dict(strict=True),
        dict(kv_dtype="int8"),
    ],
    ids=str,
)
def test_restored_text_equals_fresh_one_with_setting(disk_pair: Path, cache: Path, how: dict[str, Any]) -> None:
    check_restored(disk_pair, cache, "triforce", **how)


def test_kv_of_one_kind_is_not_found_by_the_other(disk_pair: Path, cache: Path) -> None:
    """Both kinds share one folder, and each finds its own entries."""
    kinds = ["auto", "int8", "auto", "int8"]
    outputs = [answer(started(disk_pair, cache, kv_dtype=kind), PROMPT, "ar", max_tokens=1) for kind in kinds]
    assert [output.cached_tokens for output in outputs] == [0, 0, WHOLE, WHOLE]


@pytest.mark.parametrize("policy", ["mean_key", "quest"])
def test_restored_text_equals_fresh_one_by_policy(disk_pair: Path, cache: Path, policy: str) -> None:
    check_restored(disk_pair, cache, "retrieval", "rejection", retrieval_policy=policy)


def test_only_what_is_not_on_disk_is_fed(disk_pair: Path, cache: Path) -> None:
    answer(started(disk_pair, cache), PROMPT)
    model = started(disk_pair, cache)
    with counted(model.models.target) as target, counted(model.models.draft) as draft:  # type: ignore[arg-type]
        answer(model, PROMPT, max_tokens=1)
    assert target[:2] == [len(PROMPT) - WHOLE - 1 - TAIL, TAIL]
    window = model.speculation.sinks + model.speculation.window
    assert sum(draft) < window + PAGE + 2 * model.speculation.reach, "it reads its window again"


def test_next_turn_finds_generated_tokens(disk_pair: Path, cache: Path) -> None:
    prompt = ids(500)
    generated_ids = answer(started(disk_pair, cache), prompt).outputs[0].token_ids
    turn = [*prompt, *generated_ids, *ids(40, seed=1)]
    again = answer(started(disk_pair, cache), turn)
    assert again.cached_tokens == 512 > len(prompt)
    assert again.outputs[0].token_ids == answer(llm(disk_pair), turn).outputs[0].token_ids


@pytest.mark.parametrize(("length", "cached"), [(200, 0), (SEGMENT, 0), (SEGMENT + TAIL, 0), (SEGMENT + TAIL + 1, 256)])
def test_prompt_begins_with_whole_segments_of_longer_one(
    disk_pair: Path, cache: Path, length: int, cached: int
) -> None:
    answer(started(disk_pair, cache), PROMPT)
    output = answer(started(disk_pair, cache), PROMPT[:length])
    assert output.cached_tokens == cached
    assert output.outputs[0].token_ids == answer(llm(disk_pair), PROMPT[:length]).outputs[0].token_ids


def test_first_writing_of_memory_is_no_slow_disk(disk_pair: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tokens written map memory, a cost that a prefill has, too."""
    answer(started(disk_pair, cache), PROMPT, "ar")
    clock = [0.0]
    copy = prefixes._copy

    def copy_for_long(*arguments: Any) -> bool:
        clock[0] += 1000.0
        return copy(*arguments)

    monkeypatch.setattr(prefixes, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(prefixes, "_copy", copy_for_long)
    output = answer(started(disk_pair, cache), PROMPT, "ar")
    assert (output.cached_tokens, output.reread) == (WHOLE, "")


def test_reason_for_reading_again_survives_a_restart(disk_pair: Path, cache: Path) -> None:
    """The reason names the token that differs, within the request's own scope only."""
    answer(started(disk_pair, cache), PROMPT, "ar", scope="a")
    changed_prompt = [*PROMPT[:40], 1, *PROMPT[41:]]
    again, foreign = (answer(started(disk_pair, cache), changed_prompt, "ar", scope=scope) for scope in "ab")
    assert again.reread == "from token 41 on it differs from recent texts"
    assert foreign.reread == "no recent text begins like it"


def test_short_text_is_not_kept(disk_pair: Path, cache: Path) -> None:
    answer(started(disk_pair, cache), PROMPT[:400])
    assert not list(cache.glob("*.kv"))


def test_choices_start_from_disk_together(disk_pair: Path, cache: Path) -> None:
    answer(started(disk_pair, cache), PROMPT)
    output, computed_output = (answer(model, PROMPT, n=3) for model in (started(disk_pair, cache), llm(disk_pair)))
    assert output.cached_tokens == WHOLE
    assert [completion.token_ids for completion in output.outputs] == [
        completion.token_ids for completion in computed_output.outputs
    ]


def test_scored_prompt_is_read(disk_pair: Path, cache: Path) -> None:
    answer(started(disk_pair, cache), PROMPT)
    output = answer(started(disk_pair, cache), PROMPT, prompt_logprobs=0, max_tokens=1)
    assert output.cached_tokens == 0 and len(output.prompt_logprobs) == len(PROMPT)


def test_session_goes_on_after_restart(disk_pair: Path, cache: Path) -> None:
    def turns(model: LLM, conversation: list[int]) -> tuple[list[int], list[int]]:
        session = Session(model)
        cached = []
        for number in range(2):
            *_, output = session.ask(conversation, ask(max_tokens=16))
            assert isinstance(output, RequestOutput)
            cached.append(output.cached_tokens)
            conversation = conversation + output.outputs[0].token_ids + ids(7, seed=number)
        return conversation, cached

    plain, _ = turns(LLM(disk_pair / "target", disk_pair / "draft", **HOW), PROMPT[:530])
    first_llm = started(disk_pair, cache)
    again = started(disk_pair, cache)
    assert turns(first_llm, PROMPT[:530])[0] == plain
    written(first_llm)
    conversation, cached = turns(again, PROMPT[:530])
    assert conversation == plain and cached[0] == 512


def test_generate_and_stream_keep_prompts(disk_pair: Path, cache: Path) -> None:
    with_disk = started(disk_pair, cache)
    with_disk.generate(PROMPT, ask())
    written(with_disk)
    *_, output = started(disk_pair, cache).stream(PROMPT, ask())
    assert isinstance(output, RequestOutput) and output.cached_tokens == WHOLE


def test_engines_that_run_take_each_others_texts(disk_pair: Path, cache: Path) -> None:
    """Both engines run before either writes."""
    writing_llm = started(disk_pair, cache)
    reading_llm = started(disk_pair, cache)
    answer(reading_llm, ids(100, seed=5))
    answer(writing_llm, PROMPT)
    assert answer(reading_llm, PROMPT).cached_tokens == WHOLE
