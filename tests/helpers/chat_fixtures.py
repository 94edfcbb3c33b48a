"""Fixtures of a tiny chat pair, on disk and loaded. A conftest.py imports them."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with a tiny target, whose tokenizer has a chat template, and a tiny draft."""
    from tests.helpers.asgi_client import TEMPLATE
    from tests.helpers.tiny_checkpoint import tiny_pair

    return tiny_pair(tmp_path_factory.mktemp("pair"), positions=2048, chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def llm(pair: Path) -> object:
    from triforce.llm import LLM

    return LLM(pair / "target", pair / "draft", retrieval_budget=64)
