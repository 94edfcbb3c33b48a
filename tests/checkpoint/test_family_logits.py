"""Parity of each family: logits over paged KV, native and torch, fed in ragged parts, are transformers' to 1e-4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.family_models import FAMILY_MODELS, LENGTH, RAGGED, family_model, paged_logits, texts
from tests.helpers.mutants.mutation import Mutant
from tests.helpers.mutants.registry import caught_in
from tests.helpers.tiny_checkpoint import edit, save
from triforce.backends import dispatch
from triforce.backends.torch.model import choose
from triforce.backends.torch.tensors import as_tensor
from triforce.checkpoint.hf_config import checked
from triforce.checkpoint.model_families import FAMILIES
from triforce.checkpoint.weights import read_weights
from triforce.engine.model_loader import load
from triforce.errors import ModelError
from triforce.model.config import Experts


@pytest.fixture(scope="module", params=FAMILY_MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor, Any]:
    """Return a folder with a model, its logits in float32 by transformers, and the model."""
    model = family_model(request.param)
    with torch.no_grad():
        logits_BTV = model(texts()).logits
    assert logits_BTV.std() > 0.2  # logits that differ; closeness of equal logits would say nothing
    return save(model, tmp_path_factory.mktemp("family")), logits_BTV, model


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(dispatch, "native", None)
    elif dispatch.native is None:
        pytest.skip("without native kernels")
    return str(request.param)


def test_family_logits_in_ragged_parts_equal_transformers(saved: tuple[Path, Tensor, Any], kernels: str) -> None:
    folder, expected_BTV, _ = saved
    decoder = load(folder, device="cpu", dtype="float32", context=LENGTH).decoder
    for pieces in (RAGGED, [[LENGTH, LENGTH]]):
        found_BTV = paged_logits(decoder, texts(), pieces)
        torch.testing.assert_close(found_BTV, expected_BTV, atol=1e-4, rtol=0)


def test_qwen3_moe_has_its_window_in_all_layers(tmp_path: Path) -> None:
    """All layers have the window once it is switched on, whatever the config says of layers, as in transformers."""
    window_fields = dict(use_sliding_window=True, sliding_window=24, max_window_layers=4)
    model = family_model("qwen3-moe", **window_fields)
    with torch.no_grad():
        expected_BTV = model(texts()).logits
    checkpoint = load(save(model, tmp_path), device="cpu", dtype="float32", context=LENGTH)
    assert checkpoint.config.windows == [24] * 4
    found_BTV = paged_logits(checkpoint.decoder, texts(), [[LENGTH, LENGTH]])
    torch.testing.assert_close(found_BTV, expected_BTV, atol=1e-4, rtol=0)


def test_gemma_embeddings_are_scaled_by_a_rounded_number(tmp_path: Path, kernels: str) -> None:
    """The scale is the square root of the hidden size, as bfloat16.

    For sizes that are powers of two it is exact anyway.
    """
    model = family_model("gemma-3", hidden_size=80)
    decoder = load(save(model, tmp_path), device="cpu", dtype="bfloat16", context=LENGTH).decoder
    exact = torch.tensor(80.0).sqrt()
    ids_N = torch.arange(97)
    scaled_NC = model.model.embed_tokens.weight.data.bfloat16().float() * exact.bfloat16().float()
    assert exact.bfloat16().float() != exact
    expected_NC = scaled_NC if kernels == "native" else scaled_NC.bfloat16().float()
    assert torch.equal(as_tensor(decoder.model.embed(ids_N.numpy())).float(), expected_NC)


def test_family_bfloat16_is_near_enough(saved: tuple[Path, Tensor, Any], kernels: str) -> None:
    """The mean error against float32 is at most 1.5 times that of transformers' own bfloat16."""
    folder, expected_BTV, model = saved
    with torch.no_grad():
        theirs_BTV = model.to(torch.bfloat16)(texts()).logits.float()
        model.float()
    decoder = load(folder, device="cpu", dtype="bfloat16", context=LENGTH).decoder
    found_BTV = paged_logits(decoder, texts(), RAGGED)
    error, theirs = ((logits_BTV - expected_BTV).square().mean().sqrt() for logits_BTV in (found_BTV, theirs_BTV))
    assert error <= 1.5 * theirs


def largest_error(folder: Path, expected_BTV: Tensor) -> float:
    """Return the largest error of the torch path's logits."""
    decoder = load(folder, device="cpu", dtype="float32", context=LENGTH).decoder
    return float((paged_logits(decoder, texts(), RAGGED) - expected_BTV).abs().max())


@pytest.mark.parametrize("mutant", caught_in("test_family_mutant_differs_from_transformers"), ids=str)
def test_family_mutant_differs_from_transformers(
    tmp_path: Path, mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "native", None)
    model = family_model(*mutant.checks)
    with torch.no_grad():
        expected_BTV = model(texts()).logits
    folder = save(model, tmp_path)
    mutant.apply(monkeypatch)
    assert largest_error(folder, expected_BTV) > 1e-2


def tied_experts(folder: Path, name: str) -> Path:
    """Return a model in which pairs of experts have equal router logits and other weights. Groups are tied, too."""
    model = family_model(name, **(dict(topk_group=3) if name == "glm-4.5" else {}))
    for layer in model.model.layers:
        if router := getattr(layer.mlp, "gate", None):
            half = len(router.weight) // 2
            router.weight.data[half:] = router.weight.data[:half]
            if name == "glm-4.5":
                router.e_score_correction_bias[half:] = router.e_score_correction_bias[:half]
    return save(model, folder)


def between_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the largest difference between logits of the torch path and of the native one."""
    decoder = load(folder, device="cpu", dtype="float32", context=LENGTH).decoder
    native_BTV = paged_logits(decoder, texts(), RAGGED)
    monkeypatch.setattr(dispatch, "native", None)
    return largest_error(folder, native_BTV)


@pytest.mark.skipif(dispatch.native is None, reason="without native kernels")
@pytest.mark.parametrize("name", ["qwen3-moe", "glm-4.5"])
def test_expert_ties_go_to_lowest_ids(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids_NK, _ = choose(torch.tensor([[1.0, 2.0, 1.0, 2.0]]), Experts(4, 3, True))
    assert ids_NK.tolist() == [[1, 3, 0]]
    grouped = Experts(8, 3, True, function="sigmoid", groups=4, chosen_groups=2)
    assert choose(torch.tensor([[0.0, 0, 0, 1, 0, 1, 0, 1]]), grouped)[0].tolist() == [[3, 5, 2]]
    assert between_kernels(tied_experts(tmp_path, name), monkeypatch) < 1e-4


@pytest.mark.skipif(dispatch.native is None, reason="without native kernels")
@pytest.mark.parametrize("mutant", caught_in("test_expert_tie_mutant_is_noticed"), ids=str)
def test_expert_tie_mutant_is_noticed(tmp_path: Path, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tied_experts(tmp_path, *mutant.checks)
    mutant.apply(monkeypatch)
    assert between_kernels(folder, monkeypatch) > 1e-2


def test_corrections_of_scores_are_not_rounded(tmp_path: Path) -> None:
    """Most of a correction is common to all experts, and bfloat16 has no digits left for the rest."""
    model = family_model("glm-4.5")
    folder = save(model, tmp_path)
    checkpoint = load(folder, device="cpu", dtype="bfloat16", context=LENGTH)
    weights = read_weights(
        folder, checkpoint.files.archives(packed=False), checkpoint.config, rows=97, dtype="bfloat16",
        names=FAMILIES["glm4_moe"].names,
    )  # fmt: skip
    for ours, theirs in zip(weights.layers[1:], model.model.layers[1:], strict=True):
        assert np.array_equal(ours.router_correction_E, theirs.mlp.gate.e_score_correction_bias.numpy())


def test_layers_that_draft_further_tokens_are_left_out(tmp_path: Path) -> None:
    """The extra layers must lie behind the others, and only such layers are skipped."""
    folder = save(family_model("glm-4.5"), tmp_path)
    plain_BTV = logits(folder)
    tensors = load_file(folder / "model.safetensors")
    extra = {
        name.replace("layers.3.", "layers.4."): tensor + 1 for name, tensor in tensors.items() if "layers.3." in name
    }
    save_file(tensors | extra | {"model.layers.4.eh_proj.weight": torch.ones(64, 128)}, folder / "model.safetensors")
    assert torch.equal(logits(folder), plain_BTV)
    edit(folder / "config.json", num_nextn_predict_layers=0)
    with pytest.raises(ModelError, match=r"tensor model\.layers\.4\..* is not part of such a model"):
        logits(folder)


def logits(folder: Path) -> Tensor:
    """Return the logits of texts in float32, fed in one pass."""
    decoder = load(folder, device="cpu", dtype="float32", context=LENGTH).decoder
    return paged_logits(decoder, texts(), [[LENGTH, LENGTH]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(n_group=5), "n_group = 5 is not supported .*divisors of 12 up to half of it"),
        (dict(n_group=12), "n_group = 12"),
        (dict(topk_group=5), "topk_group = 5"),
        (dict(topk_group=1, num_experts_per_tok=4), "num_experts_per_tok = 4"),
        (dict(first_k_dense_replace=4), "first_k_dense_replace = 4"),
        (dict(n_shared_experts=0), "n_shared_experts = 0"),
    ],
)
def test_choices_that_cannot_be_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        checked(family_model("glm-4.5").config.to_dict() | changes)
