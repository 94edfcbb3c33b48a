"""LLMs over tiny random checkpoints without a tokenizer: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.tiny_checkpoint import HAS_TRANSFORMERS, save, tiny_model
from triforce.arrays import Array
from triforce.backends.decoder import Decoder
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.ragged import Ints

CONTEXT = 640
MODES = ["ar", "draft", "retrieval", "streaming", "triforce", "ngram", "draft-ngram", "auto"]


def checkpoints(folder: Path, **draft: Any) -> tuple[Path, Path]:
    """Write a target and a draft to a folder. The draft's heads are too small for native kernels, unless changed.

    Without torch they are large enough.
    """
    hidden_size = 32 if HAS_TRANSFORMERS else 64
    draft_size = dict(hidden_size=hidden_size, intermediate_size=48, num_hidden_layers=1) | draft
    for name, size in (("target", {}), ("draft", draft_size)):
        save(tiny_model(max_position_embeddings=CONTEXT, **size), folder / name)
    return folder / "target", folder / "draft"


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny target and a tiny draft."""
    folder = tmp_path_factory.mktemp("pair")
    checkpoints(folder)
    return folder


@cache
def _loaded(folder: Path, how: tuple[tuple[str, Any], ...]) -> LLM:
    return LLM(folder / "target", folder / "draft", **dict(how))


def llm(folder: Path, **how: Any) -> LLM:
    return _loaded(
        folder, tuple((dict(retrieval_budget=64, speculative_tokens=4, searched_layers="none") | how).items())
    )


def ask(**changes: Any) -> SamplingParams:
    return SamplingParams(**(dict(temperature=0.8, seed=11, max_tokens=24, ignore_eos=True) | changes))


GREEDY = dict(temperature=0.0)
SEEDED = dict(temperature=0.8)


def ids(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, 97, length).tolist()
    return tokens


@contextmanager
def counted(model: Decoder) -> Iterator[list[int]]:
    """Record the number of tokens of each pass through `model`."""
    passes: list[int] = []
    plain = Decoder.__call__
    plain_parts = Decoder.observe_parts

    def call(self: Decoder, ids_BT: Ints, *arguments: Any, **options: Any) -> Array:
        if self is model:
            passes.append(ids_BT.size)
        return plain(self, ids_BT, *arguments, **options)

    def observe_parts(self: Decoder, ids_1T: Ints, *arguments: Any) -> Any:
        if self is model:
            passes.append(ids_1T.size)
        return plain_parts(self, ids_1T, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "__call__", call)
        patch.setattr(Decoder, "observe_parts", observe_parts)
        yield passes
