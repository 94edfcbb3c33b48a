"""Everyday calls of the library with their right answers: tests/data/everyday/library.json."""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
from pydantic import BaseModel, TypeAdapter

import triforce
from tests.helpers import chat_fixtures
from triforce import LLM, RequestOutput, SamplingParams, TokenLogprobs

pair, llm = chat_fixtures.pair, chat_fixtures.llm  # fixtures
CALLS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "everyday" / "library.json").read_text(encoding="utf-8")
)
SCORED = SamplingParams(seed=5, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True)
CALL = {"id": "a", "type": "function", "function": {"name": "depth", "arguments": '{"well": 3}'}}


class Answer(BaseModel):
    right: bool


def text_of(outputs: list[RequestOutput]) -> str:
    return outputs[0].outputs[0].text


def logprobs_of(llm: LLM) -> list[TokenLogprobs]:
    return llm.generate("the cat", SCORED)[0].outputs[0].logprobs or []


def kept_by_json(value: Any) -> bool:
    return bool(json.loads(json.dumps(value, allow_nan=False)) == value)


@pytest.mark.parametrize("row", CALLS, ids=lambda row: row["call"][:80])
def test_everyday_call_has_its_answer(pair: Path, llm: LLM, row: dict[str, Any]) -> None:
    names = {name: getattr(triforce, name) for name in triforce.__all__}
    names |= {
        "json": json,
        "re": re,
        "collections": collections,
        "Answer": Answer,
        "TypeAdapter": TypeAdapter,
        "llm": llm,
        "call": CALL,
        "scored": SCORED,
    }
    names |= {
        "numpy": numpy,
        "text_of": text_of,
        "logprobs_of": logprobs_of,
        "kept_by_json": kept_by_json,
    }
    names |= {"torch": pytest.importorskip("torch")} if "torch" in row["call"] else {}
    names |= {"hello": {"role": "user", "content": "hello"}, "drawn": SamplingParams(seed=-1, max_tokens=6)}
    names |= {"short": SamplingParams(seed=5, max_tokens=6, ignore_eos=True), "target": pair / "target"}
    if "gives" in row:
        assert eval(row["call"], names) == row["gives"]
        return
    with pytest.raises((TypeError, triforce.TriforceError)) as error:
        eval(row["call"], names)
    kinds = {kind.__name__ for kind in error.type.__mro__}
    assert row["raises"] in kinds and str(error.value) == row["says"]
