"""A tiny pair with a tokenizer."""

import pytest

from triforce.backends.dispatch import has_torch

if has_torch():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The folders of a target and of a draft."""
    from tests.helpers.tiny_checkpoint import save, tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("pair")
    for name, layers in (("target", 2), ("draft", 1)):
        save(tiny_model(vocab_size=310, max_position_embeddings=640, num_hidden_layers=layers), folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    return str(folder / "target"), str(folder / "draft")


@pytest.fixture(scope="session")
def llm(folders: tuple[str, str]) -> object:
    from triforce.llm import LLM

    return LLM(*folders, dtype="float32")
