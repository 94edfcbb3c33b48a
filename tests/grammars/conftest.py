"""A tiny pair whose tokens the grammars are in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llm(tmp_path_factory: pytest.TempPathFactory) -> object:
    from tiny_checkpoint import save, tiny_model, tiny_tokenizer

    from triforce.llm import LLM

    folder = tmp_path_factory.mktemp("pair")
    for name, layers in (("target", 2), ("draft", 1)):
        sizes = {"vocab_size": 300, "max_position_embeddings": 1024, "num_hidden_layers": layers}
        save(tiny_model(**sizes, eos_token_id=1), folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    return LLM(folder / "target", folder / "draft", budget=64)
