"""Layers of the retrieval tier that each pass searches: no text changes, whatever a search selects."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.lower_view import lower_view
from tests.helpers.small_decoder import CLOSE, feed, small_decoder, text
from tests.helpers.tiny_llm import CONTEXT, GREEDY, SEEDED, ask, checkpoints, ids
from triforce.backends import dispatch
from triforce.backends.decoder import Decoder
from triforce.backends.kernel_api import PAGE, Search
from triforce.engine.model_loader import load
from triforce.kvcache import Budget, FullView, PagePool, RetrievalConfig, RetrievalView
from triforce.kvcache.selection import POLICIES
from triforce.llm import LLM
from triforce.planner import SearchedLayers

torch.set_num_threads(1)
needs_native = pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    checkpoints(folder, head_dim=16)
    return folder


def view(decoder: Decoder, prompt: list[int], budget: int) -> RetrievalView:
    """Return a retrieval view of a prompt whose last tokens' attention was observed."""
    pool = PagePool(decoder.config, 1, CONTEXT // PAGE, decoder.dtype)
    pool.reserve(0, CONTEXT)
    full = FullView(pool)
    for part in (prompt[:-16], prompt[-16:]):
        feed(decoder, full, [part])
    return lower_view(full, POLICIES["observed"], RetrievalConfig(Budget(budget)))


def proposal_logits(decoder: Decoder, prompt: list[int], budget: int, searched: set[int]) -> torch.Tensor:
    lower = view(decoder, prompt, budget)
    lower.searched_layers = frozenset(searched)
    return feed(decoder, lower, [[5, 6]])[0]


def test_search_request_names_layers_and_budget() -> None:
    lower = view(small_decoder(), text(400), 64)
    lower.searched_layers = frozenset({1})
    chosen, searched_lists = lower.begin(lower.lengths_B * 0 + 2, 2).layer_tables()
    choice = lower.selections[0].pages
    recent = lower.selections[0].window_start
    assert choice is not None and chosen.search is None
    assert searched_lists.search == Search([1], [recent // PAGE], [recent // 4 // PAGE - 1])
    assert (
        searched_lists.starts == [400]
        and recent // 4 > choice.tokens
        and searched_lists.units.shape == (1, CONTEXT // PAGE)
    )


def test_memory_without_search_sees_everything() -> None:
    decoder = small_decoder()
    searched = proposal_logits(decoder, text(400), 64, {0, 1})
    torch.testing.assert_close(searched, proposal_logits(decoder, text(400), 1000, set()), **CLOSE)
    assert (searched - proposal_logits(decoder, text(400), 64, set())).abs().max() > 1e-2


@needs_native
def test_search_recalls_more_than_past_selection(pair: Path) -> None:
    decoder = load(str(pair / "target"), dtype="float32", device="cpu").decoder
    errors = dict.fromkeys(("chosen", "searched"), 0.0)
    for seed in range(8):
        exact = proposal_logits(decoder, ids(600, seed), 1000, set())
        for name, layers in (("chosen", set()), ("searched", set(range(decoder.config.layers)))):
            errors[name] += float((proposal_logits(decoder, ids(600, seed), 48, layers) - exact).norm())
    assert 0 < errors["searched"] < errors["chosen"]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("lower", ["same", pytest.param("int8", marks=needs_native)])
@pytest.mark.parametrize("mode", ["retrieval", "triforce", "auto"])
def test_searched_layers_texts_equal_plain_decoding(
    pair: Path, mode: str, lower: str, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = cycle([frozenset({0}), frozenset(), frozenset({0, 1})])
    monkeypatch.setattr(SearchedLayers, "next_layers", lambda *_: next(turns))
    model = LLM(pair / "target", pair / "draft", retrieval_budget=64, speculative_tokens=4, lower_tiers=lower)
    prompts = [ids(length, seed=length) for length in (70, 250, 333)]
    texts, plain = (
        [output.outputs[0].token_ids for output in model.generate(prompts, ask(**sampling), mode=how)]
        for how in (mode, "ar")
    )
    assert texts == plain
