"""Shared models of every family: logits and texts on several ranks have the bits of one process.

Shape suffixes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.family_models import FAMILY_MODELS, LENGTH, RAGGED, SIZES, family_model, paged_logits, texts
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.helpers.thread_ranks import together
from tests.helpers.tiny_checkpoint import save, tiny_model
from tests.helpers.tiny_llm import ask, ids
from triforce.backends import dispatch
from triforce.checkpoint.model_families import FAMILIES
from triforce.checkpoint.weights import read_weights
from triforce.distributed.group import ALONE, TPGroup
from triforce.engine.model_loader import load
from triforce.llm import LLM

NATIVE = pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")
KINDS = ["gpt-oss", "mixtral", "olmo-2", "gemma-2", "granite-3", "phi-4-mini", "glm-4", "glm-4.5", "llama-biases"]
"""Families with all optional parts: biases of sums, experts, norms of whole rows and of outputs, factors, partial RoPE,
shared experts beside layers that have none.
"""
ODD = dict(hidden_size=68, intermediate_size=75, vocab_size=101)
"""Sizes that neither two ranks nor blocks of 16 divide. Experts may have their own size."""
OWN_SIZE = ("qwen3-moe", "glm-4.5")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of models, which are written at first use."""
    return tmp_path_factory.mktemp("families")


@cache
def folder(home: Path, name: str, odd: bool = False) -> Path:
    changes = ODD | (dict(moe_intermediate_size=37) if name in OWN_SIZE else {}) if odd else {}
    return save(family_model(name, **changes), home / f"{name}{odd}")


def logits(path: Path, dtype: str, ranks: TPGroup = ALONE, bits: int = 0) -> Tensor:
    """Return the logits (B, T, V) of two texts, in ragged passes."""
    checkpoint = load(path, device="cpu", dtype=dtype, context=LENGTH, ranks=ranks, bits=bits)
    return paged_logits(checkpoint.lower_decoder if bits else checkpoint.decoder, texts(), RAGGED)


def largest_error(path: Path, exact: bool) -> float:
    """Return the largest error of two ranks' logits, which must agree, against one process in float32."""
    first_BTV, second_BTV = together(2, lambda ranks: logits(path, "float32", ranks), exact)
    assert torch.equal(first_BTV, second_BTV)
    return float((first_BTV - logits(path, "float32")).abs().max())


@NATIVE
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_family_logits_of_ranks_equal_one_process(home: Path, name: str, dtype: str) -> None:
    alone_BTV = logits(folder(home, name), dtype)
    for each_BTV in together(2, lambda ranks: logits(folder(home, name), dtype, ranks)):
        assert torch.equal(each_BTV, alone_BTV)


@NATIVE
@pytest.mark.parametrize("bits", [0, 8, 4], ids=["same", "int8", "int4"])
@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe", "olmo-2", "glm-4.5", "llama-biases"])
def test_odd_sizes_of_ranks_equal_one_process(home: Path, name: str, bits: int) -> None:
    path = folder(home, name, odd=True)
    alone_BTV = logits(path, "bfloat16", bits=bits)
    for each_BTV in together(2, lambda ranks: logits(path, "bfloat16", ranks, bits)):
        assert torch.equal(each_BTV, alone_BTV)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_torch_path_of_ranks_equals_one_process(
    home: Path, name: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products may round differently with fewer outputs: logits agree up to their last digits."""
    monkeypatch.setattr(dispatch, "native", None)
    assert largest_error(folder(home, name), exact) < 1e-4


@NATIVE
@pytest.mark.parametrize("name", KINDS)
def test_summed_shards_of_families_are_near(home: Path, name: str) -> None:
    """Partial sums are added up: biases once, norms after the sum."""
    assert largest_error(folder(home, name), exact=False) < 1e-4


@NATIVE
@pytest.mark.parametrize("mutant", caught_in("test_family_rank_mutant_is_noticed"), ids=str)
def test_family_rank_mutant_is_noticed(home: Path, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    name, kernels = mutant.checks
    path = folder(home, name)
    mutant.apply(monkeypatch)
    if kernels == "torch":
        monkeypatch.setattr(dispatch, "native", None)
    assert largest_error(path, exact=kernels != "summed") > 1e-3


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe", "olmo-2", "glm-4.5", "llama-biases"])
def test_rank_of_a_family_holds_only_its_shard(home: Path, name: str) -> None:
    """The shard is of every matrix but routers, and of every bias and sink logit."""

    def sizes(ranks: TPGroup) -> list[int]:
        loaded = load(folder(home, name), device="cpu", dtype="float32")
        weights = read_weights(
            loaded.path, loaded.files.archives(packed=False), loaded.config, rows=97, dtype="float32",
            ranks=ranks, names=FAMILIES[loaded.files.config.model_type].names,
        )  # fmt: skip
        fields = ("router_EC", "router_bias_E", "router_correction_E")
        routers = [id(getattr(layer, field)) for layer in weights.layers for field in fields]
        return [array.size for array in weights.tensors() if id(array) not in routers]

    full_sizes, *parts = [sizes(ALONE), *together(2, sizes)]
    shares = [(sum(pair), full_size) for *pair, full_size in zip(*parts, full_sizes, strict=True)]
    assert all(share in (full_size, 2 * full_size) for share, full_size in shares)
    assert sum(share > full_size for share, full_size in shares) <= 1 + 4 * 4, "norms alone are whole on each rank"


@NATIVE
@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe", "gemma-3", "olmo-3", "glm-4.5"])
def test_family_texts_of_ranks_equal_one_process(home: Path, name: str) -> None:
    """Modes are plain decoding, and all tiers at once."""
    draft = save(tiny_model(**SIZES | dict(num_hidden_layers=1)), home / "draft")
    params: Any = ask(temperature=0.8, max_tokens=16)

    def generated_texts(ranks: TPGroup, mode: str) -> Any:
        settings = dict(retrieval_budget=64, speculative_tokens=4, searched_layers="none")
        llm = LLM(folder(home, name), draft, ranks=ranks, **settings)  # type: ignore[arg-type]
        return [
            (output.outputs[0].token_ids, output.exactness)
            for output in llm.generate([ids(150), ids(40)], params, mode=mode)
        ]

    one_process = generated_texts(ALONE, "ar")
    for mode in ("ar", "triforce"):
        assert together(2, lambda ranks, mode=mode: generated_texts(ranks, mode)) == [one_process, one_process]  # type: ignore[misc]
