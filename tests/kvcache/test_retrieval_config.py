"""Parsing of budgets and retrieval settings as users write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triforce.errors import RequestError
from triforce.kvcache import PAGE, RetrievalConfig
from triforce.kvcache.retrieval_config import Budget


@pytest.mark.parametrize(
    ("written", "context", "tokens"),
    [
        (2048, 10**6, 2048), ("2048", 5, 2048), ("2047", 0, 2048), (2049, 0, 2064), (33, 0, 48), (32, 0, 32),
        ("3%", 100_000, 3008), ("3%", 10, 32), ("100%", 1000, 1008), ("0.5%", 100_000, 512), ("50%", 64, 32),
    ],
)  # fmt: skip
def test_budget_parses_and_rounds_to_pages(written: str | int, context: int, tokens: int) -> None:
    assert Budget.parse(written).of(context) == tokens


@pytest.mark.parametrize(
    "written",
    ["", "many", "0", 0, "-5", -2048, "31", "0%", "-3%", "101%", "%", "nan%", "inf%", "3 percent", "2e3", "12.5"],
)
def test_budget_bad_values_raise(written: str | int) -> None:
    with pytest.raises(RequestError, match="budget"):
        Budget.parse(written)


@given(share=st.floats(0.01, 100), context=st.integers(0, 10**6))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_budget_share_grows_with_context(share: float, context: int) -> None:
    budget = Budget.parse(f"{share!r}%")
    tokens = budget.of(context)
    assert tokens % PAGE == 0 and max(32, share / 100 * context - 1e-6) <= tokens < max(33, share / 100 * context + 17)
    assert budget.of(context + 1000) >= tokens


@pytest.mark.parametrize(
    "changes",
    [
        dict(chunk=0),
        dict(chunk=-1),
        dict(searched_layers="-1"),
        dict(searched_layers="some"),
        dict(searched_layers="0,"),
        dict(searched_layers="3-1"),
        dict(searched_layers="0-1-2"),
        dict(refresh="often"),
        dict(refresh=-1),
        dict(refresh="1.5"),
        dict(budget="x"),
    ],
)
def test_retrieval_config_bad_values_raise(changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        RetrievalConfig.parse(**(dict(budget=64, chunk=16, refresh=1, searched_layers="none") | changes))


def test_retrieval_config_parses_user_values() -> None:
    assert RetrievalConfig.parse("3%", 8, "auto", "0,3-5") == RetrievalConfig(
        Budget(share=0.03), 8, None, frozenset({0, 3, 4, 5})
    )
    assert RetrievalConfig.parse(64, 16, "0", "auto") == RetrievalConfig(Budget(64), 16, 0, None)
