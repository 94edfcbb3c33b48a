"""Int8 KV is another model, and every mode's texts are those of its plain decoding.

Shape suffixes as in docs/design/request.md.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.helpers.extras import needs_torch
from tests.helpers.tiny_llm import CONTEXT, GREEDY, MODES, SEEDED, ask, checkpoints, ids, llm
from tests.llm.test_bitwise import cut, passes
from triforce.arrays import itemsize, to_host
from triforce.backends import dispatch
from triforce.backends.kernel_api import pages_for
from triforce.checkpoint.weights import fingerprint
from triforce.cli import main
from triforce.engine.model_loader import locate_model
from triforce.errors import CacheError
from triforce.kvcache import FullView, PagePool
from triforce.llm import LLM
from triforce.model.kv_rows import numbers
from triforce.ragged import ints

needs_native = pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a pair whose draft fits the native kernels, too."""
    folder = tmp_path_factory.mktemp("pair")
    checkpoints(folder, head_dim=16)
    return folder


def int8(folder: Path, **how: Any) -> LLM:
    return llm(folder, kv_dtype="int8", **how)


def texts(model: LLM, mode: str, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in model.generate(prompts, ask(**sampling), mode=mode)]


PROMPTS = [ids(length, seed=length) for length in (70, 250, 333)]


@pytest.mark.parametrize(
    "how", [{}, {"lower_tiers": "int4"}, {"dtype": "float32"}, {"searched_layers": "auto"}], ids=str
)
@pytest.mark.parametrize("mode", MODES)
def test_int8_kv_texts_equal_plain_decoding(pair: Path, mode: str, how: dict[str, str]) -> None:
    if how.get("lower_tiers") and dispatch.native is None:
        pytest.skip("weights of few bits need native kernels")
    plain = {"dtype": how["dtype"]} if "dtype" in how else {}
    for sampling in (GREEDY, SEEDED):
        together = texts(int8(pair, **how), mode, PROMPTS, **sampling)
        single_texts = [texts(int8(pair, **plain), "ar", [prompt], **sampling)[0] for prompt in PROMPTS]
        assert together == single_texts


@pytest.mark.parametrize("policy", ["mean_key", "quest"])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=str)
def test_policies_that_look_at_int8_keys_keep_texts(pair: Path, policy: str, sampling: dict[str, Any]) -> None:
    generated_texts = texts(int8(pair, retrieval_policy=policy), "triforce", PROMPTS, **sampling)
    assert generated_texts == texts(int8(pair), "ar", PROMPTS, **sampling)


def test_int8_kv_is_another_model_than_bfloat16(pair: Path) -> None:
    int8_llm = int8(pair)
    bfloat16_llm = llm(pair)
    assert int8_llm.target.fingerprint != bfloat16_llm.target.fingerprint
    assert int8_llm.target.kv_dtype == "int8" and bfloat16_llm.target.kv_dtype in ("bfloat16", "float32")
    (output,) = int8_llm.generate(PROMPTS[0], ask())
    assert output.kv_dtype == "int8"


def test_rotation_of_heads_changes_fingerprint(pair: Path) -> None:
    """The rotation changes the fingerprint of int8 KV, which is rotated, and of no other KV."""
    target = LLM(pair / "target", None, dtype="float32").target
    source = locate_model(pair / "target", device="cpu", dtype="float32", kv_dtype="auto", context=None)
    weights = source.weights()
    configs = [replace(source.config, kv_int8=int8, hadamard=turn) for int8 in (True, False) for turn in (True, False)]
    rotated, still, *unrotated = (fingerprint(config, weights) for config in configs)
    assert len({rotated, still, *unrotated}) == 3 and unrotated[0] == unrotated[1] == target.fingerprint


@needs_native
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("seed", range(2))
def test_int8_kv_logits_of_any_passes_are_bitwise_equal(pair: Path, dtype: str, seed: int) -> None:
    decoder = int8(pair, dtype=dtype).target.decoder
    text = ids(300, seed=seed)
    (expected_TV,) = passes(decoder, [text], [[1] * len(text)])
    (got_TV,) = passes(decoder, [text], [cut(len(text), Random(seed), 90)], padding=seed)
    assert np.array_equal(got_TV, expected_TV)
    assert np.array_equal(passes(decoder, [text], [[len(text)]])[0], expected_TV)


def fed(decoder: Any, text: list[int]) -> tuple[NDArray[Any], list[list[NDArray[Any]]]]:
    """Return logits (T, V) of a text in one pass, and the rows of its KV."""
    pool = PagePool(decoder.config, 1, pages_for(len(text)), decoder.dtype)
    pool.reserve(0, len(text))
    view = FullView(pool)
    logits_1TV = to_host(decoder(np.array([text]), ints([len(text)]), view))
    return logits_1TV[0], [
        [to_host(rows_GNR) for rows_GNR in pool.span(layer, 0, 0, len(text))] for layer in range(decoder.config.layers)
    ]


@needs_torch
@needs_native
def test_torch_path_has_nearly_the_logits_of_native_kernels(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = ids(200)
    native_TV, native_rows = fed(int8(pair, dtype="float32").target.decoder, text)
    monkeypatch.setattr(dispatch, "native", None)
    torch_TV, torch_rows = fed(LLM(pair / "target", None, dtype="float32", kv_dtype="int8").target.decoder, text)
    for ours, theirs in zip(native_rows[0], torch_rows[0], strict=True):  # later layers have rounded sums
        assert np.abs(ours[..., :-2].astype(int) - theirs[..., :-2]).max() <= 1
        np.testing.assert_allclose(numbers(ours), numbers(theirs), atol=0.03, rtol=0)
    exact_TV = fed(LLM(pair / "target", None, dtype="float32").target.decoder, text)[0]
    native_error, exact_error = (np.abs(x_TV - torch_TV).max() for x_TV in (native_TV, exact_TV))
    assert native_error < exact_error / 3, "the two are one model, and bfloat16 KV is another"


@needs_torch
def test_torch_path_texts_equal_plain_decoding(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "native", None)
    model = LLM(pair / "target", pair / "draft", dtype="float32", kv_dtype="int8", retrieval_budget=64)
    assert dispatch.identity(model.target.decoder.model, model.open(1, 100).core.store.pool.kv) == "torch"
    plain = texts(model, "ar", PROMPTS, **GREEDY)
    assert texts(model, "triforce", PROMPTS, **GREEDY) == plain


@pytest.mark.parametrize("mode", ["ar", "triforce"])
def test_saved_int8_kv_equals_fresh_prompt(pair: Path, mode: str, tmp_path: Path) -> None:
    model = int8(pair)
    file = tmp_path / "prompt.kv"
    prompt = PROMPTS[1]
    (expected_output,) = model.generate(prompt, ask(), mode=mode, save_cache=file)
    (again,) = model.generate(prompt, ask(), mode=mode, load_cache=file)
    assert again.outputs[0].token_ids == expected_output.outputs[0].token_ids
    assert again.cached_tokens > 200
    with pytest.raises(CacheError, match="another model, dtype"):
        llm(pair).generate(prompt, ask(), load_cache=file)
    plain = tmp_path / "plain.kv"
    llm(pair).generate(prompt, ask(), save_cache=plain)
    if dispatch.native:
        assert file.stat().st_size < 0.65 * plain.stat().st_size  # ids and scales do not shrink, and heads are small
    with pytest.raises(CacheError, match="another model, dtype"):
        model.generate(prompt, ask(), load_cache=plain)


def test_int8_kv_bytes_are_counted(pair: Path) -> None:
    for model in (int8(pair), llm(pair)):
        pool = model.open(1, CONTEXT).core.store.pool
        config = model.target.config
        tokens = (pool.allocator.pages + 1) * 16
        per_head = 2 * (config.head_dim + 2) if config.kv_int8 else 2 * config.head_dim * itemsize(pool.dtype)
        assert pool.bytes.device_bytes == tokens * config.layers * config.kv_heads * per_head


@pytest.mark.parametrize(("flags", "advice"), [
    (["--kv-dtype", "bfloat16", "--dtype", "float32"], "--kv-dtype auto"),
    (["--kv-dtype", "int4"], "bfloat16"),
])  # fmt: skip
def test_kv_dtype_that_cannot_be_exits_2(
    pair: Path, flags: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["generate", str(pair / "target"), "some text", *flags])
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code == 2 and advice in capsys.readouterr().err
