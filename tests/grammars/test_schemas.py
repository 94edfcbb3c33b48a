"""Texts of many schemas: a second opinion finds them valid, they come to an end, and they are plain decoding's."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest
from schemas import WRITTEN, Schema, drawn, keywords

from triforce.errors import RequestError
from triforce.grammar import Grammar
from triforce.llm import LLM
from triforce.request import SamplingParams

PROMPT = "the cat sat on the mat and the hat"
LONGEST = 512


def check(llm: LLM, schemas: list[Schema], refusable: int = 0) -> None:
    """At most `refusable` are refused, 95 in 100 of the others end in time, and all that end are right."""
    params = []
    for seed, schema in enumerate(schemas):
        try:
            grammar = Grammar.json(schema)
            llm.follow(grammar)
        except RequestError as error:
            assert "cannot be used" in str(error)
            continue
        params.append((schema, SamplingParams(temperature=0.9, seed=seed, max_tokens=LONGEST, grammar=grammar)))
    assert len(schemas) - len(params) <= refusable
    asked = [each for _, each in params]
    plain, tiered = (llm.generate([PROMPT] * len(asked), asked, mode=mode) for mode in ("ar", "triforce"))
    ended = 0
    for (schema, _), one, other in zip(params, plain, tiered, strict=True):
        (text,), (same,) = one.outputs, other.outputs
        assert text.token_ids == same.token_ids
        if text.finish_reason == "stop":
            jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(
                json.loads(text.text)
            )
            ended += 1
    assert ended >= 0.95 * len(params)


def test_a_few(llm: LLM) -> None:
    check(llm, random.Random(0).sample(WRITTEN, 6) + drawn(5))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred(llm: LLM) -> None:
    schemas = WRITTEN + drawn(220)
    assert len(keywords(schemas)) >= 20 and len(schemas) - 40 >= 200
    check(llm, schemas, refusable=40)


def test_every_keyword_is_taken(llm: LLM) -> None:
    for schema in WRITTEN:
        llm.follow(Grammar.json(schema))


def test_a_wrong_text_is_noticed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar of something else stands for one that is not held to."""
    plain = Grammar.json
    monkeypatch.setattr(Grammar, "json", lambda schema: plain({"const": 1}))
    with pytest.raises(jsonschema.ValidationError):
        check(llm, [{"type": "string"}])
