"""A tiny pair with a tokenizer, texts to make prompts of, and the command on both."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from triforce.backends.dispatch import has_torch

if has_torch():
    import torch

    torch.set_num_threads(1)

POSITIONS = 2048


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a target and of a draft."""
    from tests.helpers.tiny_checkpoint import tiny_pair

    return tiny_pair(tmp_path_factory.mktemp("pair"), POSITIONS)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a book and some code."""
    folder = tmp_path_factory.mktemp("texts")
    generator = random.Random(1)
    words = ["cat", "hat", "mat", "sat", "on", "the", "naive", "and", "then", "saw", "a", "small", "dog", "run"]
    sentences = [" ".join(generator.choices(words, k=generator.randint(5, 11))).capitalize() + "." for _ in range(600)]
    (folder / "book.txt").write_text(" ".join(sentences), encoding="utf-8")
    lines = [f"def {generator.choice(words)}_{n}(x):\n    return x + {generator.randint(0, 99)}\n" for n in range(300)]
    (folder / "project.py").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def llm(pair: Path) -> object:
    from triforce.llm import LLM

    return LLM(pair / "target", pair / "draft", dtype="float32", retrieval_budget=64, searched_layers="none")


@pytest.fixture(scope="session")
def sources(llm: object, texts: Path) -> object:
    from triforce.cli.bench.setup import sources

    return sources(llm, [str(texts)])


@pytest.fixture(scope="session")
def bench(pair: Path, texts: Path) -> Callable[..., int]:
    """`triforce bench WHAT ...` on the tiny pair; its exit code."""
    from triforce.cli import main

    def run(what: str, *options: str) -> int:
        models = [str(pair / "target"), "--draft", str(pair / "draft")]
        if what != "compare":  # there each engine has its best setting
            models += ["--dtype", "float32"]
        return main(["bench", what, *models, "--texts", str(texts), *options])

    return run


@pytest.fixture(scope="session")
def study(pair: Path, texts: Path) -> Callable[..., int]:
    """`python -m benchmarks.NAME ...` on the tiny pair; its exit code."""

    def run(name: str, *options: str) -> int:
        package = import_module(f"benchmarks.{name}")
        module = import_module(f"benchmarks.{name}.__main__") if hasattr(package, "__path__") else package
        models = [str(pair / "target"), "--draft", str(pair / "draft"), "--dtype", "float32"]
        return module.main([*models, "--texts", str(texts), *options])

    return run
