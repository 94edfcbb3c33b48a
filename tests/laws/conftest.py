"""What the tests of the laws share."""

import pytest

from triforce.speculation import ngram


@pytest.fixture(autouse=True)
def short_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a few letters, in which longer ends hardly recur."""
    monkeypatch.setattr(ngram, "MIN_MATCH_ALONE", 1)
    monkeypatch.setattr(ngram, "MIN_MATCH_ABOVE_DRAFT", 2)
