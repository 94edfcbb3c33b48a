"""Weights of GGUF types in the Triton kernels: their values, products with them, and models of them.

Shape suffixes: N tokens, M outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.cuda.packed_checks import M, check_numbers, check_product, given, tokens
from tests.helpers.cuda.scene import DEVICE, by_the_term
from tests.helpers.gguf_blocks import KINDS, NUMBERS, random_blocks
from tests.helpers.gguf_models import MIXED, write_model
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.helpers.slow_parameters import slow
from tests.helpers.tiny_llm import ids
from triforce.backends import dispatch
from triforce.backends.cuda.model import TritonModel
from triforce.backends.cuda.packed_weight import PackedWeight, on_device, packed
from triforce.backends.cuda.triton.weight_tiles import HIGH_TILE, LOW_TILE, MAX_TOKENS, times
from triforce.bench import shapes
from triforce.engine import tier_builder
from triforce.engine.model_loader import load
from triforce.errors import ModelError, RequestError
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import FullView, PagePool
from triforce.llm import LLM
from triforce.model.weights import QuantizedWeight
from triforce.ragged import ints


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_are_numbers_of_their_file(kind: str) -> None:
    check_numbers(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_product_equals_float64(kind: str) -> None:
    check_product(kind, 5)


@pytest.mark.parametrize("N", [0, LOW_TILE + 1, HIGH_TILE + 1, MAX_TOKENS + 1])
def test_packed_product_of_many_tokens_equals_float64(N: int) -> None:
    """Products of several programs, and of prefill, which torch multiplies."""
    check_product("Q4_0", N)


@pytest.mark.parametrize("mutant", caught_in("test_packed_weight_mutant_fails_its_check"), ids=str)
def test_packed_weight_mutant_fails_its_check(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch, tmp_path)
    with pytest.raises(AssertionError):
        for kind in ("Q4_0", "Q4_1", "Q6_K"):
            check_numbers(kind)
            check_product(kind, 3)


def test_packed_product_bits_depend_on_height_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token has the same bits alone, last of sixteen, and beside NaN; in a strict pass, with any number of rows."""
    if DEVICE.type == "cpu":  # the interpreter multiplies by a BLAS, whose rows are not alike on every CPU
        monkeypatch.setattr(np, "matmul", by_the_term)
    _, weight = given("Q4_1", 288)
    for height in (LOW_TILE, HIGH_TILE):
        x_NK = tokens(height, 288, torch.bfloat16)
        batch_output = times(x_NK, weight)
        beside = torch.full_like(x_NK, torch.nan)
        beside[3] = x_NK[-1]
        assert torch.equal(times(beside, weight)[3], batch_output[-1])
    assert torch.equal(times(x_NK[:1], weight)[0], times(x_NK[:LOW_TILE], weight)[0])


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_of_gguf_files_become_a_matrix(kind: str) -> None:
    blocks = random_blocks(kind, M, 48)
    matrix = packed(QuantizedWeight(kind, blocks.blocks.numpy(), 48), DEVICE)
    assert isinstance(matrix, Tensor) and matrix.dtype == torch.bfloat16
    assert torch.equal(matrix.cpu(), blocks.weights_MK().bfloat16())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K"])
def test_scales_that_are_no_numbers_are_refused(kind: str) -> None:
    blocks = random_blocks(kind, M, 256).blocks.numpy()
    _, weights = shapes.parts("30m-draft", 64)
    bad_weights = replace(weights, head_VC=QuantizedWeight(kind, blocks, 256))
    head_VC = on_device(bad_weights, DEVICE).head_VC
    assert isinstance(head_VC, PackedWeight) and head_VC.shape == (M, 256) and len(head_VC) == M
    at = 208 if kind == "Q6_K" else 0
    blocks[7, at : at + 2] = np.array([np.nan], np.float16).view(np.uint8)
    with pytest.raises(ModelError, match=f"type {kind} has a scale that is NaN or Inf; download the file"):
        on_device(bad_weights, DEVICE)


FAMILIES = {
    "llama": dict(kind="Q4_K", others=MIXED),
    "qwen2": dict(kind="Q4_0", others={"attn_v": "Q8_0", "ffn_down": "Q5_1"}, tie_word_embeddings=True),
    "qwen3": dict(kind="Q4_1", others={"attn_q": "BF16", "attn_output": "F16"}),
}


def logits(path: Path, text: list[int], dtype: str) -> Tensor:
    """Return the logits of a prompt, and of five tokens behind it."""
    decoder = load(path, device=str(DEVICE), dtype=dtype).decoder
    pass_logits = list[Tensor]()
    at = 0
    pool = PagePool(decoder.config, 1, 20, decoder.dtype, decoder.device)
    pool.reserve(0, len(text))
    view = FullView(pool)
    for width in (len(text) - 6, 1, 5):
        pass_logits.append(decoder(ints([text[at : at + width]]), ints([width]), view)[0].float().cpu())
        at += width
    return torch.cat(pass_logits)


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("family", ["llama", *slow(*sorted({*FAMILIES} - {"llama"}))])
def test_gguf_logits_by_triton_equal_folder(
    family: str, tmp_path: Path, by_name: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error against float32 is that of a bfloat16 folder of the same numbers: rounding adds up there."""
    written = write_model(tmp_path, family=family, num_hidden_layers=1, **FAMILIES[family])
    text = ids(300, seed=2)
    packed_model = load(written.gguf, device=str(DEVICE), dtype="bfloat16").decoder.model
    assert isinstance(packed_model, TritonModel) and any(
        isinstance(weight, PackedWeight) for weight in packed_model.weights.tensors()
    )
    got, folder_logits = (logits(path, text, "bfloat16") for path in written)
    monkeypatch.setattr(dispatch, "requested", "torch")
    exact = logits(written.folder, text, "float32")
    error, expected = ((x - exact).norm() / exact.norm() for x in (got, folder_logits))
    assert error <= 1.25 * expected < 0.1 and (got - folder_logits).norm() > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gguf_text_by_triton_is_that_of_plain_decoding(
    tmp_path: Path, by_name: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_builder, "STRICT_ROWS", 1)  # of one text
    target = write_model(tmp_path / "target", **FAMILIES["llama"], num_hidden_layers=1).gguf
    draft = write_model(tmp_path / "draft", "Q4_0", num_hidden_layers=1).gguf
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=3, ignore_eos=True)
    texts = []
    llm = LLM(
        target, draft, dtype="bfloat16", retrieval_budget=32, speculative_tokens=3, searched_layers="none", strict=True
    )
    for mode in ("ar", "triforce"):
        texts.append(llm.generate([ids(40)], params, mode=mode)[0].outputs[0].token_ids)
    assert texts[0] == texts[1]


def test_lower_tiers_of_few_bits_are_refused_by_name(tmp_path: Path, by_name: None) -> None:
    written = write_model(tmp_path, "Q4_0", num_hidden_layers=1)
    for bits in ("int8", "int4"):
        with pytest.raises(RequestError, match=r"int8 or int4 lower tiers need native kernels.*lower_tiers='same'"):
            LLM(written.gguf, lower_tiers=bits).generate([ids(9)], SamplingParams(max_tokens=1), mode="retrieval")
