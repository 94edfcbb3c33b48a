"""A real model as people have it, in 4 bits: every mode writes one text, and rounding costs next to nothing.

By default the shortest versions that can fail; the slow tests are the runs of docs/results.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest
import torch

from benchmarks.perplexity import EXACT, losses, precisions
from tests.helpers.dequantised import dequantised, greedy_like
from tests.helpers.gguf_files import SMOLLM2
from triforce.backends import dispatch
from triforce.backends.decoder import Decoder
from triforce.checkpoint.model_sources import KNOWN
from triforce.cli import main
from triforce.engine.tier_builder import DRAFT_MODES
from triforce.eval.context import Text, spread_windows, tokenizer_of
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not SMOLLM2.exists(), reason=f"there is no {SMOLLM2.name}"),
    pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built"),
]
TEMPERATURES = ["--temperatures", "0,0.8", "--couplings", "seeded"]
ALL = ["books", "code", "copy", "summary", "many-shot"]
DEAREST = 0.002
"""The share by which the default precision may raise perplexity: as many nats."""


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(SMOLLM2, None)


@pytest.fixture(scope="module")
def book(llm: LLM) -> list[int]:
    """The tokens of the sample book."""
    text = (resources.files("triforce") / "assets" / "dracula.txt").read_text(encoding="utf-8")
    return tokenizer_of(llm).encode(text)


def certify(tmp_path: Path, texts: int, tokens: int, *more: str) -> tuple[int, int]:
    """Compare `texts` texts of each mode with plain decoding. Return the numbers of tokens and of differing texts."""
    file = tmp_path / "certificate.json"
    sizes = ["--batches", str(texts), "--tokens", str(tokens), "--json", str(file), "-q"]
    code = main(["bench", "lossless", str(SMOLLM2), *sizes, *TEMPERATURES, *more])
    report = json.loads(file.read_text())
    assert code == (report["differing"] > 0)
    return sum(row["tokens"] for row in report["rows"] if row["mode"] != "ar"), report["differing"]


def test_smollm2_modes_write_plain_decodings_text(tmp_path: Path) -> None:
    few = ["--contexts", "400", "--retrieval-budget", "128", "--workloads", "books", "--draft", "none"]
    assert certify(tmp_path, 2, 48, *few) == (2 * 48 * 2 * 4, 0)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_smollm2_modes_write_plain_decodings_texts_of_50_prompts(kv_dtype: str, tmp_path: Path) -> None:
    many = ["--contexts", "1024", "--retrieval-budget", "256", "--workloads", ",".join(ALL), "--kv-dtype", kv_dtype]
    many += ["--draft", "none"]
    assert certify(tmp_path, 10, 256, *many) == (50 * 256 * 2 * 4, 0)


@pytest.mark.parametrize(
    ("texts", "tokens", "kv_dtype"),
    [(2, 48, "auto"), *(pytest.param(10, 256, kv_dtype, marks=pytest.mark.slow) for kv_dtype in ("auto", "int8"))],
)
def test_smollm2_draft_is_found_and_keeps_texts(texts: int, tokens: int, kv_dtype: str, tmp_path: Path) -> None:
    """The modes that use the draft. The tests above compare those that need none."""
    workloads = ALL if texts > 2 else ALL[:1]
    modes = [*DRAFT_MODES, "auto"]
    sizes = ["--contexts", "400", "--retrieval-budget", "128", "--workloads", ",".join(workloads)]
    sizes += ["--modes", ",".join(modes), "--kv-dtype", kv_dtype]
    count = texts * len(workloads)
    assert certify(tmp_path, texts, tokens, *sizes) == (count * tokens * 2 * len(modes), 0)


def test_smollm2_has_no_draft_where_states_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KNOWN["smollm2"].variable, str(SMOLLM2))
    assert LLM("smollm2", mode="ar").eagle_head
    assert LLM("smollm2", mode="ar", kv_offload="file").eagle_head is None


@pytest.mark.slow
@pytest.mark.parametrize("lower", ["int8", "int4"])
def test_smollm2_lower_tiers_keep_texts(tmp_path: Path, lower: str) -> None:
    """With a draft, too: itself."""
    pair = ["--contexts", "1024", "--retrieval-budget", "256", "--draft", str(SMOLLM2), "--lower-tiers", lower]
    assert certify(tmp_path, 4, 64, *pair, "--workloads", "books,code") == (8 * 64 * 2 * 7, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("texts", "tokens"), [(2, 40), (50, 256)], ids=["few", "many"])
def test_smollm2_float32_text_equals_transformers(book: list[int], texts: int, tokens: int) -> None:
    llm, theirs = LLM(SMOLLM2, None, dtype="float32"), dequantised(SMOLLM2)
    prompts = [book[start : start + 100] for start in range(0, len(book) - 100, len(book) // texts)][:texts]
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, greedy, mode="ar"), strict=True):
        text = output.outputs[0].token_ids
        assert text == greedy_like(theirs, prompt, text, theirs.config.vocab_size)


@pytest.fixture(scope="module")
def decoders(llm: LLM) -> dict[str, Decoder]:
    return {name: each for name, each in precisions(llm).items() if name in ("default", EXACT)}


def windows(book: list[int], count: int) -> list[torch.Tensor]:
    """Stretches of 512 tokens."""
    return [window.ids_N for window in spread_windows(Text("", "", torch.tensor(book)), 512, count)]


@pytest.mark.slow
def test_smollm2_predictions_of_default_precision_stray_little(book: list[int], decoders: dict[str, Decoder]) -> None:
    """Their divergence is the increase of perplexity for a text of the model's own, known from few tokens."""
    strayed_N = torch.cat([losses(decoders, ids_N)["default"][1] for ids_N in windows(book, 2)])
    print(f"KL {strayed_N.mean():.5f}")
    assert 1e-6 < strayed_N.mean() < DEAREST


@pytest.mark.slow
def test_smollm2_perplexity_of_default_precision_is_float32s(book: list[int], decoders: dict[str, Decoder]) -> None:
    found = [losses(decoders, ids_N) for ids_N in windows(book, 64)]
    mean = {name: torch.cat([each[name][0] for each in found]).double().mean() for name in decoders}
    increase = (mean["default"] - mean[EXACT]).expm1().item()
    print(f"{increase:+.2%}")
    assert abs(increase) < DEAREST
