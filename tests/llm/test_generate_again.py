"""The KV of a prompt stays from one call of `LLM.generate` to the next, until `reset_prefix_cache`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.tiny_llm import MODES, ask, checkpoints, counted, ids, llm
from triforce.backends.kernel_api import PAGE
from triforce.errors import RequestError
from triforce.kvcache.views.full import TAIL
from triforce.llm import LLM

PROMPT = ids(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a pair whose draft fits the native kernels, too."""
    folder = tmp_path_factory.mktemp("pair")
    checkpoints(folder, head_dim=16)
    return folder


@pytest.fixture
def model(folder: Path) -> LLM:
    shared_llm = llm(folder)
    shared_llm.reset_prefix_cache()
    return shared_llm


def read(model: LLM, prompt: list[int], **how: object) -> tuple[int, int, list[int]]:
    """Return prefilled tokens of the prompt, its cached tokens, and the text's ids."""
    with counted(model.target.decoder) as passes:
        (output,) = model.generate(prompt, ask(max_tokens=1), mode="ar", **how)  # type: ignore[arg-type]
    return sum(passes) - 1, output.cached_tokens, output.outputs[0].token_ids


def test_prompt_is_prefilled_once(model: LLM) -> None:
    prefilled, cached_tokens, text = read(model, PROMPT)
    assert (prefilled, cached_tokens) == (len(PROMPT) - 1, 0)
    longer = [*PROMPT, *ids(20, seed=3)]
    again, cached, _ = read(model, longer)
    assert cached == len(PROMPT) // PAGE * PAGE and again == len(longer) - 1 - cached
    cached_tokens = (len(PROMPT) - 1 - TAIL) // PAGE * PAGE
    assert read(model, PROMPT) == (len(PROMPT) - 1 - cached_tokens, cached_tokens, text)
    model.reset_prefix_cache()
    assert read(model, PROMPT) == (prefilled, 0, text)


@pytest.mark.parametrize("mode", MODES)
def test_texts_equal_fresh_engine(model: LLM, mode: str) -> None:
    prompts = [PROMPT, PROMPT[:200], ids(200, seed=5)]
    expected = []
    for prompt in prompts:
        model.reset_prefix_cache()
        expected += model.generate(prompt, ask(), mode=mode)
    model.reset_prefix_cache()
    again = [output for prompt in prompts for output in model.generate(prompt, ask(), mode=mode)]
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in expected]


def test_abandoned_stream_leaves_engine_usable(model: LLM) -> None:
    _, _, text = read(model, PROMPT)
    abandoned_stream, suspended = (model.stream(PROMPT, ask(max_tokens=50)) for _ in range(2))
    next(suspended)
    assert read(model, PROMPT)[2] == text, "while another one is under way"
    next(abandoned_stream)
    abandoned_stream.close()
    assert read(model, PROMPT)[1:] == (read(model, PROMPT)[1], text)
    pieces = list(suspended)
    assert pieces and read(model, PROMPT)[2] == text


def test_failed_call_keeps_no_pages(model: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, text = read(model, PROMPT)
    with pytest.raises(RequestError, match="stop here"):

        def stop(*_: int) -> None:
            raise RequestError("stop here")

        model.generate(ids(250, seed=9), ask(), on_prefill=stop)
    assert read(model, PROMPT) == (len(PROMPT) - 1, 0, text)
