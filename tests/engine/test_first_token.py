"""The first token waits for the prompt alone: with any number of layers, no mode runs an extra pass before it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.tiny_checkpoint import save, tiny_model
from tests.helpers.tiny_llm import CONTEXT, ask, counted, ids
from triforce.llm import LLM
from triforce.planner import CostModel

PROMPT = 300
BUDGET = 64  # it hides most of the prompt


@pytest.fixture(scope="module", params=[32, 80])
def deep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of many thin layers."""
    sizes = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1)
    model = tiny_model(max_position_embeddings=CONTEXT, num_hidden_layers=request.param, **sizes)
    return save(model, tmp_path_factory.mktemp("deep"))


def passes(llm: LLM, mode: str, tokens: int) -> list[int]:
    """Return the width of each target pass until `tokens` tokens are generated."""
    with counted(llm.target.decoder) as widths:
        llm.generate(ids(PROMPT), ask(max_tokens=tokens), mode=mode)
        return widths


def test_first_text_makes_plain_passes_only(deep: Path) -> None:
    llm = LLM(deep, None, retrieval_budget=BUDGET)
    plain = passes(llm, "ar", 1)
    for mode in ("auto", "retrieval"):
        llm.reset_prefix_cache()
        llm.engines.parts = replace(llm.engines.parts, costs=CostModel())  # nothing is known
        below = passes(llm, mode, 1)[len(plain) - 1 :]
        draft_tokens = llm.speculation.speculative_tokens if mode == "retrieval" else 0
        assert below == [1] * draft_tokens + [1 + draft_tokens], "the proposal that gives it, and nothing before it"


def test_speculation_starts_after_first_token(deep: Path) -> None:
    llm = LLM(deep, None, retrieval_budget=BUDGET)
    llm.reset_prefix_cache()
    llm.engines.parts = replace(llm.engines.parts, costs=CostModel())
    first_token_passes = passes(llm, "auto", 1)
    llm.reset_prefix_cache()
    assert first_token_passes == passes(llm, "ar", 1)
    assert not llm.engines.parts.costs.passes.of("retrieval").count


def test_first_text_teaches_pass_costs(deep: Path) -> None:
    llm = LLM(deep, None, retrieval_budget=BUDGET)
    llm.reset_prefix_cache()
    llm.engines.parts = replace(llm.engines.parts, costs=CostModel())
    passes(llm, "auto", 80)
    assert llm.engines.parts.costs.passes.of("full").count and llm.engines.parts.costs.passes.confirmed
