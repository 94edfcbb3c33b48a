"""What the tests of the laws share."""

import pytest

from triforce.speculation import lookup


@pytest.fixture(autouse=True)
def short_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a few letters, in which longer ends hardly recur."""
    monkeypatch.setattr(lookup, "ALONE", 1)
    monkeypatch.setattr(lookup, "BEFORE_A_DRAFT", 2)
