"""Numbers in JSON end for any choices of a model, and nothing that a schema requires is lost."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from triforce.interface.grammar import Grammar
from triforce.llm import LLM
from triforce.ragged import ints
from triforce.sampling import Constraint
from triforce.structured_output import matcher
from triforce.structured_output.matcher import MAX_NUMBER_CHARACTERS, JsonState

TOOL = 'start: "call " arguments\narguments: %json {"type": "array", "items": {"type": "number"}, "maxItems": 1}'


def highest_digits(llm: LLM, constraint: Constraint, max_tokens: int = 200) -> str:
    """Return the text of a writer that chooses the highest digit wherever there is a choice."""
    assert llm.tokenizer
    text: list[int] = []
    while len(text) < max_tokens:
        allowed = np.flatnonzero(constraint.allowed(ints(text), ints([]))[0]).tolist()
        spelt = {token: llm.tokenizer.bytes_of(token) for token in allowed}
        digit = max(
            (token for token, written in spelt.items() if written.isdigit()), key=spelt.__getitem__, default=None
        )
        ends = [token for token in allowed if token in llm.tokenizer.eos_ids]
        if digit is None and ends:
            break
        text.append(allowed[-1] if digit is None else digit)
    return llm.tokenizer.decode(text)


@pytest.mark.parametrize(
    ("grammar", "min_length", "max_length"),
    [
        (Grammar.json({"type": "integer"}), 40, 41),
        (Grammar.json({"type": "number", "multipleOf": 7}), 40, 60),  # as soon as possible
        (Grammar.lark('start: "[" /[0-9]{60}/ "]" e?\ne: %json {"const": 1}'), 62, 63),  # no other token may follow
        (Grammar.json({"maximum": 2**63 - 1, "type": "integer", "minimum": 0}), 18, 18),
        (Grammar.json({"type": "string", "pattern": "^[0-9]{50,90}$"}), 92, 92),  # these are letters
        (Grammar.lark(TOOL), 40, 50),
        (Grammar.regex("[0-9]{10,90}"), 90, 90),  # no JSON
    ],
)
def test_json_number_ends_where_allowed(llm: LLM, grammar: Grammar, min_length: int, max_length: int) -> None:
    written = highest_digits(llm, llm.grammars.compile(grammar).follow())
    assert min_length <= len(written.replace(" ", "")) <= max_length, written
    if grammar.kind == "json_schema":
        json.loads(written)


def test_json_number_without_rule_continues(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher, "MAX_NUMBER_CHARACTERS", 10**9)
    assert len(highest_digits(llm, llm.grammars.compile(Grammar.json({"type": "integer"})).follow())) == 200


def test_json_number_mask_depends_on_text_only(llm: LLM) -> None:
    """A matcher with another history counts the same digits."""
    assert llm.tokenizer
    grammar = Grammar.json({"type": "array", "items": {"type": "integer"}})
    rng = random.Random(0)
    ids = {letter: llm.tokenizer.encode(letter)[0] for letter in "[]1234567890,-"}
    texts = [[ids[c] for c in "[" + ",".join("1" * rng.randrange(30, 50) for _ in range(3))] for _ in range(4)]
    used = llm.grammars.compile(grammar).follow()
    cut = 0
    for _ in range(40):
        text = rng.choice(texts)
        length = rng.randrange(len(text))
        draft_tokens = rng.randrange(6)
        text_and_draft = ints(text[:length]), ints([*text[length:], *rng.choice(texts)][:draft_tokens])
        unused_mask = llm.grammars.compile(grammar).follow().allowed(*text_and_draft)
        assert (used.allowed(*text_and_draft) == unused_mask).all()
        cut += bool((~unused_mask[:, ids["1"]]).any())
    assert cut


@pytest.mark.parametrize("tokens", [1, 2, 7, 100])
def test_json_number_position_independent_of_tokens(tokens: int) -> None:
    text = json.dumps({'a"\\': [-12.5e-7, '1\\"2', 123]}).encode()[:-2]
    place = JsonState()
    for i in range(0, len(text), tokens):
        place = place.after(text[i : i + tokens])
    assert (
        place == JsonState(quoted=False, escaped=False, length=3)
        and len("-1.7976931348623157e+308") < MAX_NUMBER_CHARACTERS
    )
