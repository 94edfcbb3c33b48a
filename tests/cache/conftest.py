"""The helpers beside the folder `cache` are importable from inside it, whichever tests are asked for."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target and a tiny draft."""
    from tiny_llm import checkpoints

    folder = tmp_path_factory.mktemp("pair")
    checkpoints(folder)
    return folder


@pytest.fixture(scope="session")
def kept(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of PROMPT, saved by one mode."""
    from saved_prompt import PROMPT
    from tiny_llm import ask, llm

    path = tmp_path_factory.mktemp("kept") / "prompt.kv"
    llm(pair).generate(PROMPT, ask(max_tokens=1), save_cache=path)
    return path
