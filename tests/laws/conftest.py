"""Fixtures of the law tests."""

import pytest

from triforce.speculation import ngram


@pytest.fixture(autouse=True)
def short_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let n-grams match short suffixes: in texts of a few letters, longer ones hardly recur."""
    monkeypatch.setattr(ngram, "MIN_MATCH_ALONE", 1)
    monkeypatch.setattr(ngram, "MIN_MATCH_ABOVE_DRAFT", 2)
