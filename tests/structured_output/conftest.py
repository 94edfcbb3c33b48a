"""A tiny pair whose tokenizer covers the grammars."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def llm(tmp_path_factory: pytest.TempPathFactory) -> object:
    from tests.helpers.tiny_checkpoint import tiny_pair
    from triforce.llm import LLM

    folder = tiny_pair(tmp_path_factory.mktemp("pair"), positions=1024)
    return LLM(folder / "target", folder / "draft", retrieval_budget=64)
