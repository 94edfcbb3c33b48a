"""Advice on keywords of other engines leaves calls as they are, and names keywords that there are."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

from triforce import LLM, SamplingParams, Session
from triforce.interface.keyword_advice import _FOREIGN_KEYWORDS, advised

CALLS = (LLM, LLM.generate, LLM.chat, LLM.stream, SamplingParams, Session.ask)
TAKEN = {name for call in CALLS for name in inspect.signature(call).parameters}


@advised
class Example:
    def __init__(self, size: int = 1) -> None:
        self.size = size

    def grown(self, by: int, **keywords: int) -> int:
        return self.size + by + sum(keywords.values())

    def doubled(self, *, times: int = 1) -> int:
        return self.size * 2**times


def test_signatures_of_advised_calls_stay_readable() -> None:
    assert list(inspect.signature(SamplingParams).parameters) == [field.name for field in fields(SamplingParams)]
    assert list(inspect.signature(LLM.chat).parameters)[:3] == ["self", "messages", "params"]
    assert not any(p.kind is p.VAR_KEYWORD for call in CALLS for p in inspect.signature(call).parameters.values())


def test_calls_with_known_keywords_are_made() -> None:
    assert Example(size=3).doubled(times=2) == 12
    assert Example().grown(by=1, others=5) == 7  # takes any keyword itself


def test_unknown_keyword_is_told_with_the_nearest_one() -> None:
    with pytest.raises(TypeError, match=r"^Example\(\) got an unexpected keyword argument 'sise' \(did you mean size"):
        Example(sise=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^Example\.doubled\(\) got an unexpected keyword argument 'zeal'$"):
        Example().doubled(zeal=3)  # type: ignore[call-arg]


def test_advice_names_keywords_that_calls_take() -> None:
    ours = {name for _, name, _ in _FOREIGN_KEYWORDS} - {""}
    foreign = {name for names, _, _ in _FOREIGN_KEYWORDS for name in names.split()}
    assert ours <= TAKEN
    assert foreign & TAKEN <= {"prompt", "prompts", "messages"}, "what a call takes needs no advice"
