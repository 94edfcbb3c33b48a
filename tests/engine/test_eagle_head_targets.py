"""Targets that an EAGLE head accepts, and the errors for others."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.engine.test_eagle_head import features
from tests.helpers.eagle_pair import eagle_pair
from tests.helpers.engine_scene import alone
from tests.helpers.tiny_checkpoint import edit
from tests.helpers.tiny_llm import llm
from triforce.arrays import Array
from triforce.backends import dispatch
from triforce.eagle import native_passes
from triforce.errors import ModelError, RequestError
from triforce.llm import LLM
from triforce.model.rope import BLOCK

__all__ = ["features"]
torch.set_num_threads(1)


@pytest.mark.parametrize("kind", ["file", "host"])
def test_offloaded_kv_is_refused_by_name(kind: str, features: Path) -> None:
    with pytest.raises(RequestError, match="draft reads hidden states, which cannot be had with kv_offload='"):
        LLM(features / "target", features / "draft", kv_offload=kind)


def test_draft_serves_its_target_with_int8_kv(features: Path, tmp_path: Path) -> None:
    """The head belongs to a model, whatever the model's KV type is."""
    folder = copytree(features / "draft", tmp_path / "draft")
    metadata = json.loads((folder / "config.json").read_text())["triforce"]
    made_for = LLM(features / "target", None).target.fingerprint
    edit(folder / "config.json", triforce=metadata | {"target": made_for})
    model = LLM(features / "target", folder, kv_dtype="int8")
    assert model.target.fingerprint != made_for
    plain, drafted = (alone(model, 40, 0.8, mode) for mode in ("ar", "draft"))
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_hidden_size_that_native_passes_do_not_take_gives_plain_text(dtype: str, tmp_path: Path) -> None:
    """The draft's passes run in torch then, beside any kernels of the target."""
    folder = eagle_pair(tmp_path, hidden_size=72, head_dim=16)
    model = LLM(folder / "target", f"finetune:{folder / 'draft'}", dtype=dtype)
    plain, drafted = (alone(model, 40, 0.8, mode) for mode in ("ar", "draft"))
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert sum(tier.accepted for output in drafted for tier in output.tiers if tier.name == "draft")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sinks_that_fill_no_page_give_plain_text(dtype: str, features: Path, tmp_path: Path) -> None:
    """The draft's passes and entries are torch's then, beside any kernels of the target."""
    folder = copytree(features / "draft", tmp_path / "draft")
    metadata = json.loads((folder / "config.json").read_text())["triforce"]
    edit(folder / "config.json", triforce=metadata | {"sinks": 15, "target": None})
    model = LLM(features / "target", folder, dtype=dtype)
    plain, drafted = (alone(model, 40, 0.8, mode) for mode in ("ar", "draft"))
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chunks_smaller_than_pages_give_plain_text(dtype: str, features: Path) -> None:
    """The target's entries are torch's then, beside any kernels of the draft."""
    model = llm(features, dtype=dtype, retrieval_chunk=8)
    plain, drafted = (alone(model, 200, 0.8, mode) for mode in ("ar", "triforce"))
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]


@pytest.mark.skipif(dispatch.native is None, reason="of the native passes")
def test_rotations_of_all_noted_positions_are_made(features: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of rotations are filled by blocks as positions are noted, for rows far apart and for the gap between."""
    passes = llm(features).models.eagle_head.passes  # type: ignore[union-attr]
    tables = list[Array]()
    monkeypatch.setattr(native_passes, "_pages", lambda memory: None)
    monkeypatch.setattr(passes, "_native", SimpleNamespace(note=lambda **arguments: tables.append(arguments["cos"])))
    positions_N = np.array([10, BLOCK + 5, 5 * BLOCK])
    ids_N = np.zeros(3, np.int64)
    states_SBTC = np.zeros((1, 1, 3, 8), np.float32)
    passes.record_entries(ids_N, SimpleNamespace(states_NC=None), (positions_N,) * 3, positions_N, states_SBTC)
    expected_cos, _ = passes.config.rope.cos_sin(positions_N)
    assert np.array_equal(tables[0][positions_N], expected_cos)


def test_another_target_is_refused_by_name(features: Path, tmp_path: Path) -> None:
    folder = copytree(features / "draft", tmp_path / "draft")
    metadata = json.loads((folder / "config.json").read_text())["triforce"]
    edit(folder / "config.json", triforce=metadata | {"target": "that of another model"})
    with pytest.raises(ModelError, match=r"draft was trained on the hidden states of another model.* use finetune:"):
        LLM(features / "target", folder)
    allowed = LLM(features / "target", f"finetune:{folder}", mode="draft")
    assert alone(allowed, 40, 0.8) and allowed.models.eagle_head
    with pytest.raises(RequestError, match="target is a model of its own"):
        LLM(features / "target", f"finetune:{features / 'target'}")
