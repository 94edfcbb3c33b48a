"""Tests in Triton's interpreter on a CPU: exact and slow, so shapes are small. Skipped where Triton is missing."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.tiny_checkpoint import save, tiny_model
from triforce.backends import dispatch

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]
SIZE = dict(vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=256)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save(tiny_model(**SIZE), folder / "target")
    save(tiny_model(**SIZE | {"hidden_size": 16, "head_dim": 8}), folder / "draft")
    return folder


@pytest.fixture
def by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select the Triton kernels, as TRIFORCE_KERNELS=triton does."""
    monkeypatch.setattr(dispatch, "native", None)
    monkeypatch.setattr(dispatch, "requested", "triton")
