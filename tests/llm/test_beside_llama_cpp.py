"""Files quantised by llama.cpp: one text in every mode, transformers' text in float32, and logits near llama.cpp's.

Needs an interpreter with llama-cpp-python, which LLAMA_CPP_PYTHON names. The tiny model has whole blocks of K types.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers import llama_oracle
from tests.helpers.dequantised import dequantised, greedy_like
from tests.helpers.gguf_files import SMOLLM2
from tests.helpers.gguf_models import write_model
from tests.helpers.tiny_llm import GREEDY, MODES, SEEDED, ask, ids
from triforce.backends import dispatch
from triforce.checkpoint.gguf.file import GGUFFile
from triforce.engine.model_loader import load
from triforce.eval.context import tokenizer_of
from triforce.eval.scoring import full_view, read
from triforce.llm import LLM

pytestmark = [
    llama_oracle.NEEDED,
    pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built"),
]
torch.set_num_threads(1)
TEXTS = [ids(length, seed=length) for length in (70, 250)]
KINDS = {
    "Q4_0": {"Q4_0"}, "Q4_1": {"Q4_1"}, "Q5_0": {"Q5_0"}, "Q5_1": {"Q5_1"}, "Q8_0": {"Q8_0"}, "BF16": {"BF16"},
    "Q4_K_S": {"Q4_K", "Q5_K"}, "Q4_K_M": {"Q4_K"}, "Q5_K_M": {"Q5_K"}, "Q6_K": {"Q6_K"},
}  # fmt: skip
"""Kinds of files, and the types of most of their matrices. The embedding is Q6_K in nearly all."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file of f16 weights."""
    return write_model(tmp_path_factory.mktemp("plain"), "F16", tie_word_embeddings=True).gguf


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def file(plain: Path, kind: str) -> Path:
    return llama_oracle.quantized(plain, kind)


def logits(path: Path, texts: Sequence[list[int]], dtype: str = "auto") -> Tensor:
    """Return logits (T, V) after each token of the texts."""
    decoder = load(path, device="cpu", dtype=dtype).decoder
    return torch.cat(
        [logits_TV for text in texts for logits_TV in read(decoder, full_view(decoder, 600), torch.tensor(text))]
    )


def theirs(path: Path, texts: Sequence[list[int]], vocab_size: int) -> Tensor:
    """Return llama.cpp's logits (T, V); ids from `vocab_size` on are padding."""
    return torch.cat(llama_oracle.logits(path, texts))[:, :vocab_size]


def distance(one_TV: Tensor, other_TV: Tensor) -> float:
    """Return the root mean square of differences, relative to the standard deviation."""
    return ((one_TV.float() - other_TV.float()).square().mean().sqrt() / one_TV.float().std()).item()


def divergence(one_TV: Tensor, other_TV: Tensor) -> float:
    one_TV = one_TV.float().log_softmax(-1)
    other_TV = other_TV.float().log_softmax(-1)
    return (one_TV.exp() * (one_TV - other_TV)).sum(-1).mean().item()


def test_quantised_types_are_those_asked_for(file: Path, kind: str) -> None:
    types = [tensor.type for tensor in GGUFFile(file).tensors.values()]
    assert set(types) >= KINDS[kind] and sum(types.count(type_name) for type_name in KINDS[kind]) > 10


def test_quantised_float32_text_equals_transformers(file: Path) -> None:
    llm = LLM(file, None, dtype="float32")
    oracle = dequantised(file, **{"llama.rope.freq_base": 10_000})
    for text, output in zip(TEXTS, llm.generate(TEXTS, ask(temperature=0.0, max_tokens=48), mode="ar"), strict=True):
        generated_ids = output.outputs[0].token_ids
        assert generated_ids == greedy_like(oracle, text, generated_ids, llm.target.config.vocab_size)


def test_plain_logits_are_llama_cpps(plain: Path) -> None:
    """llama.cpp keeps KV in f16."""
    exact_TV = logits(plain, TEXTS, "float32")
    assert distance(exact_TV, theirs(plain, TEXTS, exact_TV.shape[1])) < 0.005


def test_quantised_logits_are_near_llama_cpps(file: Path) -> None:
    """Both round inputs differently; ours are no farther from float32 than llama.cpp's, within the margin."""
    exact_TV = logits(file, TEXTS, "float32")
    ours_TV = logits(file, TEXTS)
    theirs_TV = theirs(file, TEXTS, exact_TV.shape[1])
    our_distance = distance(exact_TV, ours_TV)
    their_distance = distance(exact_TV, theirs_TV)
    between = distance(theirs_TV, ours_TV)
    print(f"from float32: {our_distance:.4f}, llama.cpp {their_distance:.4f}; between them {between:.4f}")
    assert between < 0.12 and our_distance < max(1.3 * their_distance, 0.04)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_quantised_modes_write_plain_decodings_text(plain: Path, file: Path, sampling: dict[str, float]) -> None:
    model = LLM(file, plain, retrieval_budget=160, speculative_tokens=4, searched_layers="none")
    texts_by_mode = [
        [out.outputs[0].token_ids for out in model.generate(TEXTS, ask(**sampling), mode=mode)] for mode in MODES
    ]
    assert texts_by_mode == texts_by_mode[:1] * len(MODES)


@pytest.mark.skipif(not SMOLLM2.exists(), reason=f"there is no {SMOLLM2.name}")
def test_smollm2_logits_are_near_llama_cpps() -> None:
    book = (resources.files("triforce") / "assets" / "dracula.txt").read_text(encoding="utf-8")
    texts = [tokenizer_of(LLM(SMOLLM2, None)).encode(book[start : start + 1600])[:200] for start in (40_000, 400_000)]
    exact_TV = logits(SMOLLM2, texts, "float32")
    ours_TV = logits(SMOLLM2, texts)
    theirs_TV = theirs(SMOLLM2, texts, exact_TV.shape[1])
    pairs = (exact_TV, ours_TV), (exact_TV, theirs_TV), (theirs_TV, ours_TV)
    our_divergence, their_divergence, between = (divergence(*pair) for pair in pairs)
    equal_share = (theirs_TV.argmax(-1) == ours_TV.argmax(-1)).float().mean().item()
    print(
        f"KL from float32: {our_divergence:.5f}, llama.cpp {their_divergence:.5f}; between them {between:.5f}, "
        f"first tokens {equal_share:.1%}"
    )
    assert between < 0.01 and equal_share > 0.92 and our_divergence < 1.3 * their_divergence
