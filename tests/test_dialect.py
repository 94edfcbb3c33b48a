"""Names and phrases of a private language: their counts may only fall (`scripts/dialect.py`)."""

from __future__ import annotations

import pytest

from scripts import dialect

TEXT = '''
def total(found, tokens):
    """Whoever sums so many of those that are left."""
    first, last = tokens[0], tokens[-1]
    a, b = [found, 2]
    return [each for each in tokens]
'''


def test_counts_are_at_their_limits() -> None:
    assert dialect.measured() == dialect.limits(), "python -m scripts.dialect --lower, where counts have fallen"


def test_counts_of_names_phrases_and_packed_assignments() -> None:
    counts = dialect.counts_of([TEXT], python=True)
    assert counts == {"bare": 57.2, "filler": 500.0, "packed": 333.4}
    assert dialect.counts_of([TEXT], python=False) == {"filler": 500.0}


def test_generated_parts_of_pages_are_not_counted() -> None:
    page = "nobody\n<!-- triforce.cli, by scripts/docs.py -->\nwhoever\n<!-- end of triforce.cli -->\n"
    assert dialect.GENERATED.sub("", page) == "nobody\n\n"


def test_count_above_its_limit_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dialect, "AREAS", {"csrc": dialect.AREAS["csrc"]})
    for limit, code in ((1000.0, 0), (-1.0, 1)):
        monkeypatch.setattr(dialect, "limits", lambda limit=limit: {"csrc": {"filler": limit}})
        assert dialect.main([]) == code
        assert capsys.readouterr().out.startswith("csrc filler ")
