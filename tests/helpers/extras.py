"""Marks of tests that need what `make test-core` does not install; these tests are skipped there by name."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

COMMANDS_WITH_TORCH = ("bench", "eval", "train-draft")


def needs(package: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test where `package` is not installed."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


needs_torch = needs("torch")
needs_transformers = needs("transformers")


def skip_without_torch(command: str) -> None:
    """Skip a test whose command of triforce computes with torch, where that is not installed."""
    if command in COMMANDS_WITH_TORCH:
        pytest.importorskip("torch", reason="torch is not installed")
