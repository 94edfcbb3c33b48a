"""Saved prompts: their texts equal those of a fresh prefill."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.helpers.saved_prompt import MAKER, PROMPT, loaded
from tests.helpers.small_decoder import CLOSE, assert_holds, dense, make_pool, prefill, small_decoder, text
from tests.helpers.tiny_llm import GREEDY, MODES, SEEDED, ask, counted, ids, llm
from triforce.arrays import DType
from triforce.disk_cache import prompt_file
from triforce.disk_cache.entry import unpacked
from triforce.kvcache import FullView
from triforce.kvcache.views.full import TAIL
from triforce.llm import LLM

torch.set_num_threads(1)


PROMPTS = {
    "same": PROMPT,
    "longer": PROMPT + ids(40, seed=1),
    "branches": PROMPT[:80] + ids(60, seed=2),
    "shorter": PROMPT[:60],
    "unrelated": ids(70, seed=3),
    "few": PROMPT[:5],
    "one": PROMPT[:1],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompt_file_serves_any_mode_and_prompt(pair: Path, saved_file: Path, prompt: str, mode: str) -> None:
    assert_same_text(llm(pair), PROMPTS[prompt], saved_file, mode, SEEDED)


@pytest.mark.parametrize("mode", MODES)
def test_prompt_file_greedy_text_is_unchanged(pair: Path, saved_file: Path, mode: str) -> None:
    assert_same_text(llm(pair), PROMPT, saved_file, mode, GREEDY)


def assert_same_text(model: LLM, prompt: list[int], saved_file: Path, mode: str, sampling: dict[str, Any]) -> None:
    params = ask(**sampling, max_tokens=12)
    expected_ids = model.generate(prompt, params, mode="ar")[0].outputs[0].token_ids
    assert model.generate(prompt, params, mode=mode, load_cache=saved_file)[0].outputs[0].token_ids == expected_ids


@pytest.mark.parametrize(
    ("prompt", "reused"),
    [
        (PROMPT, 150 - 1 - TAIL), (PROMPT + ids(40, seed=1), 149), ([*PROMPT[:80], 1, *ids(60, seed=2)], 80),
        (PROMPT[:60], 59 - TAIL), ([1, *PROMPT[1:]], 0), (PROMPT[:5], 0),
    ],
)  # fmt: skip
def test_prompt_file_prefills_new_tokens_only(pair: Path, saved_file: Path, prompt: list[int], reused: int) -> None:
    """The prompt's last token is fed with the first new one, and its last `TAIL` tokens for the page selection."""
    model = llm(pair)
    with counted(model.models.target) as passes:
        model.generate(prompt, ask(max_tokens=1), mode="ar", load_cache=saved_file)
    assert sum(passes) == len(prompt) - reused


def test_prompt_file_starts_batch_and_choices(pair: Path, saved_file: Path) -> None:
    model = llm(pair)
    prompts = [PROMPT, ids(33, seed=4), PROMPT[:100] + ids(9, seed=5)]
    params = ask(n=2, max_tokens=12)
    expected_ids = [[o.token_ids for o in r.outputs] for r in model.generate(prompts, params, mode="ar")]
    assert [
        [o.token_ids for o in r.outputs] for r in model.generate(prompts, params, load_cache=saved_file)
    ] == expected_ids
    assert expected_ids[0][0] != expected_ids[0][1]


def test_prompt_file_keeps_prompt_logprobs(pair: Path, saved_file: Path) -> None:
    model = llm(pair)
    params = ask(prompt_logprobs=0, max_tokens=2)
    computed_logprobs = model.generate(PROMPT, params)[0].prompt_logprobs
    again = model.generate(PROMPT, params, load_cache=saved_file)[0].prompt_logprobs
    assert computed_logprobs is not None and again is not None and len(again) == len(PROMPT)
    pairs = zip(computed_logprobs[1:], again[1:], strict=True)
    assert all(a and b and a.chosen.logprob == pytest.approx(b.chosen.logprob, abs=1e-4) for a, b in pairs)


def test_prompt_file_save_and_load_in_one_call(pair: Path, saved_file: Path, tmp_path: Path) -> None:
    """A conversation goes on: it loads a file and saves the longer text, over the same file too."""
    longer = PROMPT + ids(30, seed=6)
    path = tmp_path / "kv"
    shutil.copy(saved_file, path)
    llm(pair).generate(longer, ask(max_tokens=1), load_cache=path, save_cache=path)
    with safe_open(path, framework="pt") as file:
        assert file.get_tensor("ids").tolist() == longer[:-1]
    expected_ids = llm(pair).generate(longer, ask(), mode="ar")[0].outputs[0].token_ids
    assert llm(pair).generate(longer, ask(), load_cache=path)[0].outputs[0].token_ids == expected_ids


@pytest.mark.parametrize("length", [1, 2, 17])
def test_prompt_file_of_short_prompt_is_saved(pair: Path, tmp_path: Path, length: int) -> None:
    path = tmp_path / "kv"
    expected_ids = llm(pair).generate(PROMPT[:length], ask(), save_cache=path)[0].outputs[0].token_ids
    assert llm(pair).generate(PROMPT[:length], ask(), load_cache=path)[0].outputs[0].token_ids == expected_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("fragmented", [False, True])
def test_prompt_file_round_trip_of_any_shape_and_dtype(tmp_path: Path, dtype: DType, fragmented: bool) -> None:
    """KV moves bit for bit from a row with scattered pages into one with contiguous pages, and the other way round."""
    decoder = small_decoder(dtype=dtype)
    full = FullView(make_pool(decoder, 2, 100, fragmented=fragmented))
    prompt = text(90)
    prefill(decoder, full, 0, text(30, seed=1))
    prefill(decoder, full, 1, prompt[:-1])
    prompt_file.save(tmp_path / "kv", MAKER, full, 1, prompt)
    restored = FullView(make_pool(decoder, 2, 100, fragmented=not fragmented))
    assert loaded(tmp_path / "kv").restore(restored, 1, prompt) == 89 - TAIL
    assert restored.lengths_B.tolist() == [0, 89 - TAIL]
    for layer in range(2):
        for a, b in zip(
            full.pool.span(layer, 1, 0, 89 - TAIL), restored.pool.span(layer, 1, 0, 89 - TAIL), strict=True
        ):
            assert torch.equal(a, b)
    if dtype == "float32":
        prefill(decoder, restored, 1, prompt[:-1])
        assert_holds(restored, 1, dense(decoder, prompt[:-1]))


def test_prompt_file_is_an_entry_of_the_disk_cache(saved_file: Path) -> None:
    entry = unpacked(bytearray(saved_file.read_bytes()))
    assert entry.facts["kind"] == "prompt" and list(entry.parts["ids"].shape) == [len(PROMPT) - 1]
    assert set(entry.parts) == {"ids", *(f"{kind}.{layer}" for kind in ("keys", "values") for layer in range(2))}


def test_prompt_file_is_plain_safetensors(tmp_path: Path) -> None:
    decoder = small_decoder(dtype="float32")
    prompt = text(50)
    full = FullView(make_pool(decoder, 1, 64))
    prefill(decoder, full, 0, prompt)
    prompt_file.save(tmp_path / "kv", MAKER, full, 0, prompt)
    tensors = load_file(tmp_path / "kv")
    truth = dense(decoder, prompt)
    assert set(tensors) == {"ids", "checksum", "keys.0", "keys.1", "values.0", "values.1"}
    assert tensors["ids"].tolist() == prompt
    for layer in range(2):
        for kind, memory in (("keys", truth.keys), ("values", truth.values)):
            torch.testing.assert_close(
                tensors[f"{kind}.{layer}"].double(), memory[layer].transpose(0, 1).cpu(), **CLOSE
            )
