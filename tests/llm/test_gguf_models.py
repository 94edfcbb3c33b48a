"""GGUF models give the texts of plain decoding in every mode. Read as numbers they equal a folder of these numbers.

Shape suffixes: T tokens, V vocabulary.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.helpers.gguf_models import MIXED, Written, write_model
from tests.helpers.slow_parameters import slow
from tests.helpers.thread_ranks import together
from tests.helpers.tiny_llm import GREEDY, MODES, SEEDED, ask, ids
from triforce.arrays import to_host
from triforce.backends import dispatch
from triforce.cli import main
from triforce.distributed.group import TPGroup
from triforce.engine.model_loader import ModelProfile, load
from triforce.engine.tier_builder import SpeculativeConfig
from triforce.errors import CacheError, RequestError
from triforce.kvcache import FullView, PagePool
from triforce.llm import LLM
from triforce.ragged import ints

if dispatch.native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)
PROMPTS = [ids(length, seed=length) for length in (70, 250, 333)]
FILES: dict[str, dict[str, Any]] = {
    "llama": dict(kind="Q4_K", others=MIXED),
    "qwen2": dict(kind="Q4_0", others={"attn_v": "Q8_0", "ffn_down": "Q5_1"}, tie_word_embeddings=True),
    "qwen3": dict(kind="Q5_K", others={"attn_q": "BF16", "attn_output": "F16", "token_embd": "Q4_1"}),
    "llama, numbers": dict(
        kind="F16", others={"ffn_up": "F32", "attn_k": "Q8_0", "token_embd": "F32", "output": "F16"}
    ),
    "qwen3, gate and up": dict(kind="Q4_K", others={"ffn_up": "Q6_K", "token_embd": "F16"}, tie_word_embeddings=True),
}


class Pair:
    """A target and a draft."""

    def __init__(self, folder: Path, family: str) -> None:
        self.target = write_model(folder / "target", family=family.split(",")[0], **FILES[family])
        self.draft = write_model(folder / "draft", "Q4_0", num_hidden_layers=1).gguf
        self.llm = cache(self._llm)

    def _llm(self, **how: Any) -> LLM:
        settings = dict(retrieval_budget=160, speculative_tokens=4, searched_layers="none")
        return LLM(self.target.gguf, self.draft, **(settings | how))


@pytest.fixture(scope="module", params=FILES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp(request.param), request.param)


def texts(model: LLM, mode: str, **how: Any) -> list[list[int]]:
    outputs = model.generate(PROMPTS, ask(**how), mode=mode)
    assert all(output.exactness == "bitwise" for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


def logits(path: Path, dtype: str) -> NDArray[np.float32]:
    """Return logits (T, V) of a text, in one pass."""
    decoder, (text,) = load(path, device="cpu", dtype=dtype).decoder, PROMPTS[:1]
    pool = PagePool(decoder.config, 1, 8, decoder.dtype)
    pool.reserve(0, len(text))
    return to_host(decoder(np.array([text]), ints([len(text)]), FullView(pool)))[0]


def test_gguf_float32_logits_equal_folder(pair: Pair) -> None:
    assert np.array_equal(*(logits(path, "float32") for path in pair.target))


def test_weight_size_is_of_packed_file(pair: Pair) -> None:
    packed, numbers = (load(pair.target.gguf, device="cpu", dtype=dtype) for dtype in ("bfloat16", "float32"))
    of_packed, of_numbers = (
        ModelProfile(
            loaded.files, loaded.config, loaded.decoder.dtype, loaded.decoder.device, SpeculativeConfig()
        ).weight_size
        for loaded in (packed, numbers)
    )
    assert of_packed == packed.files.weight_bytes / packed.config.parameters != of_numbers == 4


def test_gguf_float32_text_equals_folder(pair: Pair) -> None:
    ours, theirs = (texts(LLM(path, dtype="float32"), "ar") for path in pair.target)
    assert ours == theirs


def test_gguf_packed_logits_are_near(pair: Pair) -> None:
    """Logits are as near as bfloat16 allows: inputs of products are rounded to it or to 16 bits, as is KV."""
    exact_TV = logits(pair.target.gguf, "float32")
    packed_TV = logits(pair.target.gguf, "bfloat16")
    error = np.sqrt(np.square(packed_TV - exact_TV).mean()) / exact_TV.std()
    assert 2.0**-9 < error < 2.0**-3


@pytest.mark.parametrize("kind", ["F16", "F32"])
def test_gguf_numbers_are_nearer_than_bfloat16(tmp_path: Path, kind: str) -> None:
    """Only inputs are rounded here. A folder's weights are rounded, too."""
    file, folder = write_model(tmp_path, kind)
    exact_TV = logits(file, "float32")
    ours, rounded = (np.square(logits(path, "bfloat16") - exact_TV).mean() ** 0.5 for path in (file, folder))
    assert 0 < ours < 0.8 * rounded


@pytest.mark.parametrize("sampling", [*slow(GREEDY), SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("mode", MODES)
def test_gguf_texts_equal_plain_decoding(pair: Pair, mode: str, sampling: dict[str, Any]) -> None:
    assert texts(pair.llm(), mode, **sampling) == texts(pair.llm(), "ar", **sampling)


@pytest.mark.parametrize("lower", ["int8", "int4"])
@pytest.mark.parametrize("mode", ["draft", "triforce"])
def test_gguf_lower_tiers_keep_text(pair: Pair, mode: str, lower: str) -> None:
    model = pair.llm(lower_tiers=lower)
    assert texts(model, mode) == texts(pair.llm(), "ar")
    assert model.models.draft is not None


@pytest.mark.parametrize(
    ("matrix_types", "shared"),
    [({}, True), ({"token_embd": "F16"}, True), ({"attn_k": "F16"}, False), ({"output": "BF16"}, False)],
)
def test_gguf_lower_tiers_share_packed_weights(
    tmp_path: Path, matrix_types: dict[str, str], shared: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packed products leave nothing to round, so tiers share weights. Other weights exist twice."""
    file = write_model(tmp_path, "Q4_K", MIXED | matrix_types).gguf
    loaded = load(file, device="cpu", bits=4)
    assert (loaded.lower_decoder is loaded.decoder) == shared
    assert main(["info", str(file), "--lower-tiers", "int4"]) == 0
    assert ("as int4" in capsys.readouterr().out) != shared


def test_gguf_offloaded_text_equals_memory(tmp_path: Path) -> None:
    """The prompt's KV is larger than the memory for it."""
    sizes = dict(num_attention_heads=4, num_key_value_heads=4, head_dim=64, num_hidden_layers=6)
    file = write_model(tmp_path, "Q4_K", MIXED, "qwen2", max_position_embeddings=2600, **sizes).gguf
    (prompt,), how = [ids(2404)], dict(retrieval_budget=256, searched_layers="none")
    plain = LLM(file, **how).generate(prompt, ask(max_tokens=12), mode="ar")[0]
    for mode in ("ar", "retrieval"):
        outputs = LLM(file, **how, kv_offload="file", kv_memory="4750KiB").generate(
            prompt, ask(max_tokens=12), mode=mode
        )
        assert outputs[0].outputs[0].token_ids == plain.outputs[0].token_ids
        assert outputs[0].kv.file_bytes > 2 * outputs[0].kv.device_bytes


def test_gguf_saved_prompt_fits_its_types_alone(tmp_path: Path) -> None:
    prompt = PROMPTS[1]
    file = tmp_path / "kept"
    first_file, other_file = (write_model(tmp_path / kind, kind).gguf for kind in ("Q5_0", "Q4_0"))
    model = LLM(first_file)
    expected_ids = model.generate(prompt, ask(), mode="ar", save_cache=file)[0].outputs[0].token_ids
    for again in (model, LLM(first_file)):
        assert again.generate(prompt, ask(), mode="ar", load_cache=file)[0].outputs[0].token_ids == expected_ids
    for stranger in (LLM(other_file), LLM(first_file, dtype="float32")):
        with pytest.raises(CacheError):
            stranger.generate(prompt, ask(), mode="ar", load_cache=file)


def shared(model: Written, mode: str, exact: bool) -> list[list[list[int]]]:
    def run(ranks: TPGroup) -> list[list[int]]:
        llm = LLM(model.gguf, retrieval_budget=160, searched_layers="none", ranks=ranks)
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, ask(), mode=mode)]

    return together(2, run, exact)


@pytest.mark.parametrize("mode", ["ar", "retrieval"])
def test_gguf_sharded_text_equals_one_process(pair: Pair, mode: str) -> None:
    assert shared(pair.target, mode, True) == [texts(pair.llm(), "ar")] * 2


def test_gguf_summed_shards_agree(tmp_path: Path) -> None:
    first_text, second = shared(write_model(tmp_path, "Q5_1", {"attn_output": "Q4_0"}), "ar", False)
    assert first_text == second


def test_gguf_summed_shards_within_block_raise(tmp_path: Path) -> None:
    model = write_model(tmp_path, "Q4_K", MIXED)
    with pytest.raises(RequestError, match=r"Q4_K are in blocks of 256 inputs, .* leave out --tp-all-reduce"):
        shared(model, "ar", False)
