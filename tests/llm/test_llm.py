"""The public interface on tiny models: arguments, outputs, and memory that stays."""

from __future__ import annotations

import gc
import json
import os
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.extras import needs_torch
from tests.helpers.tiny_checkpoint import save, tiny_model, tiny_tokenizer
from triforce.backends.kernel_api import ForwardBatch
from triforce.checkpoint.weights import fingerprint
from triforce.engine.engine import OutputChunk
from triforce.engine.inputs import PROBE_CHARACTERS_PER_TOKEN
from triforce.engine.model_loader import locate_model
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.tier_builder import MODES
from triforce.errors import CacheError, ModelError, RequestError
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import PAGE, FullView, PagePool, RetrievalView
from triforce.llm import LLM
from triforce.model.weights import numbers
from triforce.ragged import Ints
from triforce.session import Session

PROMPT = list(range(2, 90))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, layers in (("target", 2), ("draft", 1)):
        model = tiny_model(vocab_size=300, num_hidden_layers=layers, max_position_embeddings=512)
        tiny_tokenizer().save_pretrained(save(model, folder / name))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder / "target", folder / "draft", retrieval_budget=32)


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.8, "seed": 5, "max_tokens": 24, "ignore_eos": True} | changes)  # type: ignore[arg-type]


def tokens(llm: LLM, *arguments: object, **options: object) -> list[int]:
    return llm.generate(*arguments, **options)[0].outputs[0].token_ids  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=needs_torch)])
@pytest.mark.parametrize("mode", MODES)
def test_llm_modes_run_in_every_dtype(folder: Path, mode: str, dtype: str) -> None:
    llm = LLM(folder / "target", folder / "draft", retrieval_budget=32, dtype=dtype)
    output = llm.generate(PROMPT, params(), mode=mode)[0]
    assert output.completion_tokens == 24 and output.mode == mode
    assert output.outputs[0].tiers[-1].prefill_seconds > 0


def test_llm_prompts_as_text_lists_arrays_and_tensors(llm: LLM) -> None:
    torch = pytest.importorskip("torch")
    expected_ids = tokens(llm, PROMPT, params())
    for prompt in (np.array(PROMPT), torch.tensor(PROMPT), list(np.array(PROMPT)), tuple(PROMPT), [PROMPT]):
        assert tokens(llm, prompt, params()) == expected_ids
    assert tokens(llm, "the cat", params()) == tokens(llm, llm.encode("the cat"), params())
    assert len(llm.generate(["the cat", "the hat"], [params(), None])) == 2


@pytest.mark.parametrize("prompt", ["", [[]], [1, 2, 300], [-1], [1] * 512])
def test_llm_bad_prompts_raise(llm: LLM, prompt: object) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompt, params())  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [None, b"abc", {"prompt": "x"}, 5, {1, 2}, [None], ["a", b"b"], [{"prompt": "x"}]])
def test_llm_prompts_of_wrong_type_raise(llm: LLM, prompt: object) -> None:
    with pytest.raises(TypeError, match="pass a text, a list of token ids, or a list of those"):
        llm.generate(prompt, params())  # type: ignore[arg-type]


@pytest.mark.parametrize("params_of_wrong_type", [{"max_tokens": 3}, 3, "greedy", [{"max_tokens": 3}]])
def test_llm_params_of_wrong_type_raise(llm: LLM, params_of_wrong_type: object) -> None:
    for call in (llm.generate, lambda *asked: next(llm.stream(*asked))):
        with pytest.raises(TypeError, match=r"say SamplingParams\(max_tokens=3\)"):
            call(PROMPT, params_of_wrong_type)  # type: ignore[operator]


def test_llm_sampling_defaults_come_from_checkpoint(folder: Path, tmp_path: Path) -> None:
    for file in (folder / "target").iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert LLM(tmp_path, None).sampling_params() == SamplingParams()
    assert LLM(tmp_path, None).sampling_params(chat=True, n=2) == SamplingParams(0.8, 40, 0.95, 0.05, n=2)
    generation_config = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "repetition_penalty": 1.1,
        "do_sample": True,
        "min_p": None,
    }
    settings = tmp_path / "generation_config.json"
    settings.unlink(missing_ok=True)
    settings.write_text(json.dumps(generation_config))
    llm = LLM(tmp_path, None)
    expected_params = SamplingParams(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)
    assert llm.sampling_params() == llm.sampling_params(chat=True) == expected_params
    assert llm.sampling_params(top_k=0) == replace(expected_params, top_k=0)
    seeded = replace(expected_params, seed=3, max_tokens=20)
    assert tokens(llm, PROMPT, llm.sampling_params(seed=3, max_tokens=20)) == tokens(llm, PROMPT, seeded)
    settings.write_text(json.dumps({"temperature": -1}))
    with pytest.raises(ModelError, match=r"generation_config.json: temperature must be .* not -1; mend it"):
        LLM(tmp_path, None)


@pytest.mark.parametrize(
    "options",
    [{"draft_tokens": 0}, {"speculative_tokens": 33}, {"draft_tokens": 2.5}, {"mode": "fast"}, {"coupling": "x"}],
)
def test_llm_bad_settings_raise(folder: Path, options: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        LLM(folder / "target", folder / "draft", **options)  # type: ignore[arg-type]


def test_llm_far_too_long_text_is_encoded_in_part(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.tokenizer
    read = []
    encode = llm.tokenizer.encode
    context = llm.target.config.context
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text: read.append(len(text)) or encode(text))
    with pytest.raises(RequestError, match=f"context of {context} holds"):
        llm.encode("night " * 100 * context)
    assert read == [PROBE_CHARACTERS_PER_TOKEN * context]


def test_llm_text_long_in_characters_only_is_encoded_whole(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.tokenizer
    size = PROBE_CHARACTERS_PER_TOKEN * llm.target.config.context + 1
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text: [5] * (3 if len(text) == size else 1))
    assert llm.encode("x" * size) == [5, 5, 5]


def test_llm_makes_no_progress_bar_that_is_not_shown(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar opens a semaphore, of which multiprocessing warns when a pool ends its workers."""
    bars: list[object] = []
    monkeypatch.setattr("tqdm.tqdm", lambda **options: bars.append(options) or nullcontext())
    params = SamplingParams(max_tokens=2)
    llm.generate([3, 4], params)
    llm.generate([[3, 4], [5, 6]], params, use_tqdm=False)
    assert not bars
    llm.generate([3, 4], params, use_tqdm=True)
    assert len(bars) == 1


def test_llm_stream_pieces_join_to_output(llm: LLM) -> None:
    full_text = llm.generate(PROMPT, params())[0].outputs[0].text
    for at in range(0, len(full_text) - 3, 5):
        *pieces, output = llm.stream(PROMPT, params(stop=full_text[at : at + 3], logprobs=1))
        assert isinstance(output, RequestOutput)
        completion = output.outputs[0]
        assert "".join(piece.text for piece in pieces if isinstance(piece, OutputChunk)) == completion.text
        assert full_text.startswith(completion.text) and completion.finish_reason == "stop"
        assert [
            t for piece in pieces if isinstance(piece, OutputChunk) for t in piece.token_ids
        ] == completion.token_ids
        assert [o for piece in pieces if isinstance(piece, OutputChunk) for o in piece.origins] == completion.origins
        assert [
            p for piece in pieces if isinstance(piece, OutputChunk) for p in piece.logprobs or ()
        ] == completion.logprobs
        assert len(completion.logprobs or []) == len(completion.token_ids)


def test_llm_batch_frees_kv_cache(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more texts than rows, with logprobs. When a pool is created, no earlier one is alive."""
    alive: list[int] = []
    plain = PagePool.__init__

    def counting(self: PagePool, *arguments: object) -> None:
        alive.append(sum(type(thing) is PagePool and hasattr(thing, "memory") for thing in gc.get_objects()))
        plain(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PagePool, "__init__", counting)
    gc.collect()
    gc.disable()
    try:
        llm.reset_prefix_cache()
        for text in (PROMPT, PROMPT * 3, PROMPT * 5):  # each needs a larger pool
            llm.generate(text, params(n=17, max_tokens=2, logprobs=1))
        llm.reset_prefix_cache()
        llm.generate(PROMPT, params(max_tokens=2))
    finally:
        gc.enable()
    assert len(alive) == 4 and max(alive) == min(alive)


def test_llm_equal_prompts_are_prefilled_once(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "kv"
    tokens(llm, PROMPT, params(), save_cache=file)
    outputs = llm.generate([PROMPT, list(PROMPT)], params(n=2), load_cache=file)
    assert {tuple(completion.token_ids) for output in outputs for completion in output.outputs[:1]} == {
        tuple(tokens(llm, PROMPT, params()))
    }


def test_llm_save_cache_replaces_files_only(llm: LLM, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CacheError, match="no file"):
        tokens(llm, PROMPT, params(), save_cache=tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    tokens(llm, PROMPT, params(), save_cache=tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").is_file()


def test_llm_missing_cache_is_reported(llm: LLM) -> None:
    with pytest.raises(CacheError, match=r"GiB.*context"):
        PagePool(llm.target.config, 1, 2**40, "float32")


def test_llm_session_prompt_logprobs_cover_prompt(llm: LLM) -> None:
    session = Session(llm)
    list(session.ask(PROMPT, params()))
    *_, output = session.ask([*PROMPT, 7, 8], params(prompt_logprobs=0))
    assert isinstance(output, RequestOutput) and len(output.prompt_logprobs or []) == len(PROMPT) + 2


def test_llm_changed_weight_changes_fingerprint(folder: Path) -> None:
    target = LLM(folder / "target", None, dtype="bfloat16").target
    source = locate_model(folder / "target", device="cpu", dtype="bfloat16", kv_dtype="auto", context=None)
    weights = source.weights()
    assert fingerprint(source.config, weights) == target.fingerprint
    numbers(weights.layers[1].up_proj_IC)[17, 23] ^= 1
    assert fingerprint(source.config, weights) != target.fingerprint


@pytest.mark.parametrize("refresh", [0, 4, 1])
def test_llm_retrieval_tier_reads_within_budget(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch, refresh: int
) -> None:
    """The budget holds however old the selection is. Tokens of the running proposal come on top."""
    read: list[int] = []
    plain = RetrievalView.begin

    def counting(view: RetrievalView, counts_B: Ints, width: int) -> ForwardBatch:
        _, lists = (batch := plain(view, counts_B, width)).views[-1]
        read.append(max(map(sum, zip(lists.starts, lists.counts, strict=True))))
        return batch

    monkeypatch.setattr(RetrievalView, "begin", counting)
    how = dict(mode="triforce", retrieval_budget=64, retrieval_refresh=refresh, searched_layers="none")
    small_budget_llm = LLM(folder / "target", folder / "draft", **how)
    assert tokens(small_budget_llm, PROMPT, params(max_tokens=300)) == tokens(
        llm, PROMPT, params(max_tokens=300), mode="ar"
    )
    assert (
        max(read)
        <= 64 + small_budget_llm.speculation.draft_tokens + small_budget_llm.speculation.speculative_tokens + 1
    )


def test_llm_plain_decoding_does_not_observe_attention(llm: LLM) -> None:
    from triforce.engine.sequence import TokenSequence
    from triforce.engine.tier_builder import SpeculativeConfig

    for mode, grain in (("ar", 0), ("draft", 0), ("triforce", PAGE), ("streaming", 0)):
        batch = SequenceBatch(
            llm.models, MODES[mode], SpeculativeConfig(), "seeded", [TokenSequence(PROMPT, params(), 1)]
        )
        assert isinstance(batch.top.cache, FullView) and batch.top.cache.grain == grain


def test_llm_freed_weights_return_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed_llm = LLM(folder / "target", folder / "draft")
    tokens(freed_llm, PROMPT, params())
    weights = weakref.ref(freed_llm.target.decoder)
    surviving_weights = list[object]()
    monkeypatch.setattr("triforce.llm.trim_heap", lambda: surviving_weights.append(weights()))
    del freed_llm
    assert surviving_weights == [None]
