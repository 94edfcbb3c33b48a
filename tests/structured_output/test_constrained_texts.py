"""Texts under a grammar: valid, and those of plain decoding in every mode, coupling and batch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from triforce.cli import main
from triforce.engine.tier_builder import MODES
from triforce.errors import RequestError
from triforce.interface.grammar import Grammar
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.structured_output.compiler import Matcher

PROMPT = "the cat sat on the mat and the hat"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": -20, "maximum": 2000},
        "tags": {"type": "array", "items": {"enum": ["the", "cat", None, 5]}, "minItems": 1, "maxItems": 4},
        "deep": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/pair"}]},
    },
    "required": ["name", "size", "tags", "deep"],
    "additionalProperties": False,
    "$defs": {"pair": {"type": "array", "prefixItems": [{"const": "a"}, {"type": "null"}], "items": False,
                       "minItems": 2}},
}  # fmt: skip
GRAMMARS = {
    "json": Grammar.json(SCHEMA),
    "regex": Grammar.regex(r"(the |cat ){3,6}[0-9a-f]{8}é?"),
    "lark": Grammar.lark('start: sum "."\nsum: part ("+" part)~0..5\npart: /[0-9]{1,2}/ | "(" sum ")" | "東京"'),
}


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.9, "seed": 3, "max_tokens": 400} | changes)


def ids(llm: LLM, sampling_params: SamplingParams, mode: str, prompt: str = PROMPT) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompt, sampling_params, mode=mode)[0].outputs]


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "ar"])
def test_constrained_texts_equal_plain_decoding(llm: LLM, mode: str, name: str) -> None:
    for temperature in (0.0, 0.9):
        sampling_params = params(grammar=GRAMMARS[name], temperature=temperature, max_tokens=60)
        assert ids(llm, sampling_params, mode) == ids(llm, sampling_params, "ar")


WARPED = {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3, "presence_penalty": 0.4}


def test_constrained_tokens_are_never_restored_by_processor(llm: LLM) -> None:
    sampling_params = params(grammar=GRAMMARS["regex"], **WARPED, logit_bias={token: 1e9 for token in range(40, 60)})
    for mode in ("ar", "triforce"):
        (output,) = llm.generate(PROMPT, sampling_params, mode=mode)[0].outputs
        assert re.fullmatch(GRAMMARS["regex"].source, output.text) and output.finish_reason == "stop"


@pytest.mark.parametrize("coupling", ["seeded", "rejection"])
def test_constrained_finished_text_matches_grammar(llm: LLM, coupling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "coupling", coupling)
    stopped = 0
    for output in llm.generate(PROMPT, params(grammar=GRAMMARS["json"], n=8, top_k=8))[0].outputs:
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), SCHEMA)
            stopped += 1
    assert stopped >= 6


def test_constrained_texts_independent_of_batch(llm: LLM) -> None:
    prompts = [PROMPT, "the hat", PROMPT]
    row_params = [
        params(grammar=GRAMMARS["json"]),
        params(max_tokens=40),
        params(grammar=GRAMMARS["regex"], temperature=0),
    ]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, row_params)]
    single_ids = [ids(llm, row, "ar", prompt)[0] for row, prompt in zip(row_params, prompts, strict=True)]
    assert together == single_ids


def test_constrained_logprobs_are_of_model(llm: LLM) -> None:
    free = llm.generate(PROMPT, params(max_tokens=1, logprobs=5))[0].outputs[0].logprobs
    constrained = (
        llm.generate(PROMPT, params(max_tokens=1, logprobs=5, grammar=GRAMMARS["json"]))[0].outputs[0].logprobs
    )
    assert free and constrained and free[0].top == constrained[0].top


def test_constrained_impossible_requests_raise(llm: LLM) -> None:
    with pytest.raises(RequestError, match="ignore_eos"):
        params(grammar=GRAMMARS["json"], ignore_eos=True)
    with pytest.raises(RequestError, match=r"Grammar\.json"):
        params(grammar=SCHEMA)
    with pytest.raises(RequestError, match=r"cannot be used: Unimplemented keys: \[.not"):
        llm.generate(PROMPT, params(grammar=Grammar.json({"not": {}})))


def test_constrained_grammar_failure_is_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is never returned as one of the grammar then."""
    monkeypatch.setattr(Matcher, "failure", "a limit")
    with pytest.raises(RequestError, match=r"too complex at token .*: a limit"):
        llm.generate(PROMPT, params(grammar=GRAMMARS["json"]))


def test_generate_command_accepts_schema(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "schema.json").write_text('{"enum": ["the cat", 5]}')
    command = ["generate", str(llm.target.path), "--draft", "none", PROMPT, "--seed", "1"]
    assert main([*command, "--json-schema", str(tmp_path / "schema.json")]) == 0
    assert json.loads(capsys.readouterr().out) in ("the cat", 5)
    (tmp_path / "schema.json").write_text("{")
    assert main([*command, "--json-schema", str(tmp_path / "schema.json")]) == 2
    assert "schema.json is not JSON" in capsys.readouterr().err
