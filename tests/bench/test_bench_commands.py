"""Parts of `triforce bench` start with nothing but a model, and with what may be said of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from triforce.cli.bench.setup import load
from triforce.cli.parser import parse


def test_what_is_not_said_is_as_usual(pair: Path) -> None:
    llm = load(parse(["bench", "speed", str(pair / "target"), "--draft", str(pair / "draft")]))
    assert llm.draft and llm.speculation.retrieval.budget.tokens == 2048 and llm.speculation.speculative_tokens == 6


@pytest.mark.parametrize("part", ["acceptance", "locality", "quality"])
def test_studies_are_no_parts(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["bench", part])
    assert "is not known" in capsys.readouterr().err
