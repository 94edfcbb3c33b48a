"""Texts of many schemas: a second validator accepts them, they end, and they are those of plain decoding."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import jsonschema
import pytest

from tests.helpers.json_schemas import REFUSED, WRITTEN, Schema, keywords, two_hundred
from triforce.checkpoint.hub import SHIPPED
from triforce.engine.tier_builder import MODES
from triforce.errors import RequestError
from triforce.interface.grammar import Grammar
from triforce.interface.outputs import CompletionOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.structured_output import compiler

PROMPT = "the cat sat on the mat and the hat"
LONGEST = 512


def texts(llm: LLM, schemas: Sequence[Schema], mode: str) -> list[CompletionOutput]:
    """Return one text of each schema. The seed is the schema's index."""
    params = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=LONGEST, grammar=Grammar.json(schema))
        for seed, schema in enumerate(schemas)
    ]
    return [output.outputs[0] for output in llm.generate([PROMPT] * len(params), params, mode=mode)]


def check(schemas: Sequence[Schema], written: Sequence[CompletionOutput], share: float = 0.95) -> None:
    """At least this share of the texts end in time, and all that end are valid."""
    ended = 0
    for schema, text in zip(schemas, written, strict=True):
        if text.finish_reason == "stop":
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text.text))
            ended += 1
    print(f"{ended} of {len(schemas)} end within {LONGEST} tokens; {len(keywords([*schemas]))} keywords")
    assert ended >= share * len(schemas)


def test_schema_few_texts_validate(llm: LLM) -> None:
    chance = random.Random(0)
    schemas = chance.sample(WRITTEN, 6) + chance.sample(two_hundred()[100:], 5)
    plain, tiered = (texts(llm, schemas, mode) for mode in ("ar", "triforce"))
    check(schemas, plain, share=0.7)  # the target is random, and is another one without torch
    assert [text.token_ids for text in plain] == [text.token_ids for text in tiered]


@pytest.fixture(scope="module")
def shipped() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "CACHED_GRAMMARS", 256)  # each is compiled once, and not once for each mode
        yield LLM(*SHIPPED)


@pytest.fixture(scope="module")
def plain(shipped: LLM) -> list[CompletionOutput]:
    return texts(shipped, two_hundred(), "ar")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_schema_suite_texts_validate(plain: list[CompletionOutput]) -> None:
    assert len(two_hundred()) == 200 and len(keywords(two_hundred())) >= 20
    check(two_hundred(), plain)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "ar"])
def test_schema_suite_texts_equal_in_every_mode(shipped: LLM, plain: list[CompletionOutput], mode: str) -> None:
    mode_texts = texts(shipped, two_hundred(), mode)
    assert [text.token_ids for text in mode_texts] == [text.token_ids for text in plain]


def test_schema_keywords_are_all_covered(llm: LLM) -> None:
    for schema in WRITTEN:
        llm.grammars.compile(Grammar.json(schema)).follow()


@pytest.mark.parametrize("keyword", REFUSED)
def test_schema_unsupported_keyword_is_refused_by_name(llm: LLM, keyword: str) -> None:
    with pytest.raises(RequestError) as refusal:
        llm.grammars.compile(
            Grammar.json({"type": "object", "properties": {"a": {keyword: REFUSED[keyword]}}})
        ).follow()
    assert f'"{keyword}"' in str(refusal.value) and "change or simplify it" in str(refusal.value)


def test_schema_invalid_text_is_detected(llm: LLM) -> None:
    """Negative control: texts of another schema are invalid, and a text without an end counts as a loop."""
    written = texts(llm, [{"const": 1}], "ar")
    with pytest.raises(jsonschema.ValidationError):
        check([{"type": "string"}], written)
    with pytest.raises(AssertionError):
        check([{"const": 1}], [replace(written[0], finish_reason="length")])
