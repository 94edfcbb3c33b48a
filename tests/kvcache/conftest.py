"""A tiny pair, and the saved KV of one of its prompts."""

from pathlib import Path

import pytest

from tests.helpers import tiny_llm
from tests.helpers.saved_prompt import PROMPT

pair = tiny_llm.pair  # a fixture


@pytest.fixture(scope="session")
def saved_file(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file with the KV of PROMPT, saved by one mode."""
    path = tmp_path_factory.mktemp("kept") / "prompt.kv"
    tiny_llm.llm(pair).generate(PROMPT, tiny_llm.ask(max_tokens=1), save_cache=path)
    return path
