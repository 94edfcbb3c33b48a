"""Names and phrases of a private language: their counts may only fall (`scripts/dialect.py`)."""

from __future__ import annotations

from pathlib import Path

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
    assert dialect.measured_counts() == dialect.count_limits(), (
        "python -m scripts.dialect --lower, if counts have fallen"
    )


def test_counts_of_names_phrases_and_packed_assignments() -> None:
    counts = dialect.counts_of([TEXT], python=True)
    assert counts == {"bare": 57.2, "filler": 500.0, "packed": 333.4}
    assert dialect.counts_of([TEXT], python=False) == {"filler": 500.0}


def test_generated_parts_of_pages_are_not_counted() -> None:
    page = "nobody\n<!-- triforce.cli, by scripts/docs.py -->\nwhoever\n<!-- end of triforce.cli -->\n"
    assert dialect.GENERATED.sub("", page) == "nobody\n\n"


def test_retired_words_are_not_used() -> None:
    assert dialect.retired_uses() == [], "docs/concepts/glossary.md names the word to use"


def test_uses_of_retired_words_are_found_in_names_and_sentences(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "glossary.md"
    page.write_text(
        "| old | x |\n\n## Retired words\n\n| retired | in use |\n|---|---|\n| lorry, motor car | truck, car |\n"
    )
    texts = ["class MotorCar: ...", "the_lorry_of = 1", "Motor cars, and lorryless roads"]
    monkeypatch.setattr(dialect, "GLOSSARY", page)
    monkeypatch.setattr(dialect, "texts_of", lambda area: texts if area == "src" else [])
    assert dialect.retired_uses() == ["src: lorry", "src: motor car"]


def test_count_above_its_limit_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dialect, "AREAS", {"csrc": dialect.AREAS["csrc"]})
    for limit, code in ((1000.0, 0), (-1.0, 1)):
        monkeypatch.setattr(dialect, "count_limits", lambda limit=limit: {"csrc": {"filler": limit}})
        assert dialect.main([]) == code
        assert capsys.readouterr().out.startswith("csrc filler ")
