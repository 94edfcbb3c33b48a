"""Parts of `triforce bench` start with nothing but a model, and with what may be said of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from triforce.cli.bench.common import load
from triforce.cli.parser import parse


@pytest.mark.parametrize("part", ["speed", "acceptance", "locality", "quality"])
def test_what_is_not_said_is_as_usual(part: str, pair: Path) -> None:
    llm = load(parse(["bench", part, str(pair / "target"), "--draft", str(pair / "draft")]))
    assert llm.draft and llm.speculation.retrieval.budget.tokens == 2048 and llm.speculation.speculative_tokens == 6


@pytest.mark.parametrize("part", ["acceptance", "locality"])
def test_what_is_said_is_taken(part: str, pair: Path) -> None:
    asked = ["--draft", "none", "--retrieval-budget", "512", "--speculative-tokens", "3", "--dtype", "float32"]
    llm = load(parse(["bench", part, str(pair / "target"), *asked]))
    assert (
        llm.draft is None and llm.speculation.retrieval.budget.tokens == 512 and llm.speculation.speculative_tokens == 3
    )
