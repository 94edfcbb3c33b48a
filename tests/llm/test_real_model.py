"""A real model of 30 layers (`make smollm2`): its first token waits for the prompt alone; all modes write one text."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from tests.helpers.tiny_llm import counted
from triforce import LLM, SamplingParams
from triforce.planner import CostModel

FOLDER = Path(__file__).parents[2] / "build" / "smollm2"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (FOLDER / "config.json").exists(), reason="`make smollm2` did not run"),
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(FOLDER, None)


@pytest.fixture(scope="module")
def saved(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], Path]:
    """Return a prompt of 7,100 tokens, and the file of its saved KV."""
    book = (resources.files("triforce") / "assets" / "dracula.txt").read_text(encoding="utf-8")
    prompt = llm.encode(book[:32_000])[:7100]
    file = tmp_path_factory.mktemp("kv") / "prompt.kv"
    llm.generate(prompt, SamplingParams(max_tokens=1), mode="ar", save_cache=file)
    return prompt, file


@pytest.mark.parametrize("mode", ["auto", "retrieval"])
def test_real_model_first_token_needs_one_prefill(llm: LLM, saved: tuple[list[int], Path], mode: str) -> None:
    prompt, file = saved

    def passes(mode: str) -> list[int]:
        llm.reset_prefix_cache()
        llm.engines.parts = replace(llm.engines.parts, costs=CostModel())
        with counted(llm.target.decoder) as widths:
            llm.generate(prompt, SamplingParams(max_tokens=1), mode=mode, load_cache=file)
        return widths

    draft_tokens = llm.speculation.speculative_tokens if mode == "retrieval" else 0
    *read, last_width = passes("ar")
    assert passes(mode) == [*read, *[last_width] * draft_tokens, last_width + draft_tokens]


@pytest.mark.parametrize("temperature", [0.0, 0.6])
@pytest.mark.parametrize("mode", ["auto", "retrieval", "ngram"])
def test_real_model_texts_equal_plain_decoding(
    llm: LLM, saved: tuple[list[int], Path], mode: str, temperature: float
) -> None:
    prompt, file = saved
    params = SamplingParams(temperature, seed=3, max_tokens=160, ignore_eos=True)
    text, plain = (llm.generate(prompt, params, mode=how, load_cache=file)[0].outputs[0] for how in (mode, "ar"))
    assert text.token_ids == plain.token_ids
