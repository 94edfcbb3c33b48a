"""A matcher's mask is a function of the text alone. Random schemas allow only texts that validate."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.extras import needs_transformers
from tests.helpers.tiny_checkpoint import ours, tiny_tokenizer
from triforce.errors import RequestError
from triforce.interface.grammar import Grammar
from triforce.llm import LLM
from triforce.ragged import ints
from triforce.sampling import Constraint
from triforce.structured_output.compiler import GrammarCompiler

Schema = dict[str, Any]
few_examples = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def bounds(kind: str, low: str, high: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Schema]:
    return st.tuples(values, values).map(lambda pair: {"type": kind, low: min(pair), high: max(pair)})


COUNTS = st.integers(0, 4)
LEAVES: st.SearchStrategy[Schema] = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": ["integer", "null"], "minimum": 0, "maximum": 9}]),
    st.lists(st.sampled_from(["a", "é", '"', 1, -2.5, None, True, [], {"a": 1}]), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from(["x", 7, None, {"k": [1, "\n"]}]).map(lambda value: {"const": value}),
    bounds("integer", "minimum", "maximum", st.integers(-300, 300)),
    st.integers(-50, 50).map(lambda n: {"type": "integer", "exclusiveMinimum": n, "exclusiveMaximum": n + 9}),
    st.integers(2, 12).map(lambda n: {"type": "integer", "multipleOf": n, "minimum": 0, "maximum": 500}),
    bounds("number", "minimum", "maximum", st.integers(-40, 40).map(lambda n: n / 4)),
    bounds("string", "minLength", "maxLength", COUNTS),
    st.sampled_from(["^[a-c]{2,4}$", "^(cat|hat)[0-9]?$", "^\\w{1,3}-\\d$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.sampled_from(["date", "time", "uuid", "ipv4"]).map(lambda name: {"type": "string", "format": name}),
)


def nested_schemas(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    fields = st.dictionaries(st.sampled_from(["a", "b b", "é", '"']), inner, max_size=3)
    return st.one_of(
        st.tuples(fields, st.randoms(use_true_random=False)).map(
            lambda parts: {"type": "object", "properties": parts[0], "additionalProperties": False,
                           "required": [name for name in parts[0] if parts[1].random() < 0.6]}
        ),
        st.tuples(inner, COUNTS, COUNTS).map(
            lambda parts: {"type": "array", "items": parts[0], "minItems": min(parts[1:]), "maxItems": max(parts[1:])}
        ),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda schemas: {"type": "array", "prefixItems": schemas, "items": False, "minItems": len(schemas)}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda schemas: {"anyOf": schemas}),
        inner.map(lambda schema: {"allOf": [schema]}),
        inner.map(lambda schema: {"type": "object", "additionalProperties": schema, "maxProperties": 2}),
    )  # fmt: skip


NESTED = st.recursive(LEAVES, nested_schemas, max_leaves=5)
SCHEMAS = NESTED | NESTED.map(
    lambda schema: {"type": "array", "items": {"$ref": "#/$defs/it"}, "$defs": {"it": schema}}
)


def walk(constraint: Constraint, ends: frozenset[int], rng: random.Random, max_tokens: int = 150) -> list[int]:
    """Return a random text. Sometimes a draft token leads elsewhere."""
    text: list[int] = []
    while len(text) < max_tokens and not ends & set(text):
        masks = constraint.allowed(ints(text), ints([rng.randrange(256)]))
        allowed_now, then = [np.flatnonzero(mask) for mask in masks]
        assert len(allowed_now) and len(then)
        draft_token = int(rng.choice(allowed_now))
        detour = constraint.allowed(ints(text), ints([draft_token]))[1]
        text.append(int(rng.choice(allowed_now)))
        if text[-1] == draft_token:
            assert (constraint.allowed(ints(text), ints([]))[0] == detour).all()
    return text


@few_examples
@given(SCHEMAS, st.integers(0, 2**32))
def test_matcher_random_schemas_give_valid_texts(llm: LLM, schema: Schema, seed: int) -> None:
    assert llm.tokenizer
    try:
        constraint = llm.grammars.compile(Grammar.json(schema)).follow()
    except RequestError as error:
        assert "maxProperties" in str(error) or "Unsatisfiable" in str(error), (schema, error)
        return
    ends = llm.tokenizer.eos_ids
    text = walk(constraint, ends, random.Random(seed))
    if ends & set(text):
        value = json.loads(b"".join(llm.tokenizer.bytes_of(i) for i in text[:-1]))
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(value)


@few_examples
@given(st.integers(0, 2**32))
def test_matcher_detours_leave_no_trace(llm: LLM, seed: int) -> None:
    """A matcher that has followed other texts, also of other lengths, allows what a new one does."""
    assert llm.tokenizer
    grammar = Grammar.json({"type": "array", "items": {"type": ["string", "integer"]}})
    rng = random.Random(seed)
    ends = llm.tokenizer.eos_ids
    texts = [walk(llm.grammars.compile(grammar).follow(), ends, rng, 25) for _ in range(3)]
    used = llm.grammars.compile(grammar).follow()
    for _ in range(12):
        text = rng.choice(texts)
        cut = rng.randrange(len(text) + 1)
        draft_tokens = rng.randrange(4)
        text_and_draft = ints(text[:cut]), ints([*text[cut:], *rng.choice(texts)][:draft_tokens])
        assert (used.allowed(*text_and_draft) == llm.grammars.compile(grammar).follow().allowed(*text_and_draft)).all()


def test_matcher_after_end_allows_all(llm: LLM) -> None:
    assert llm.tokenizer
    end = min(llm.tokenizer.eos_ids)
    digits = [llm.tokenizer.encode(digit)[0] for digit in "12"]
    constraint = llm.grammars.compile(Grammar.regex("12?")).follow()
    allowed = constraint.allowed(ints([]), ints([digits[0], end, 5]))
    assert [np.flatnonzero(column).tolist() for column in allowed[:2]] == [
        digits[:1],
        sorted([*llm.tokenizer.eos_ids, digits[1]]),
    ]
    assert allowed[2:].all() and constraint.allowed(ints([digits[0], end]), ints([5])).all()
    assert not constraint.allowed(ints([]), ints([digits[1], 5]))[0, digits[1]]
    assert constraint.allowed(ints([]), ints([digits[1], 5]))[1:].all() and not constraint.failure


@needs_transformers
def test_matcher_special_tokens_are_masked_and_added_allowed() -> None:
    """Marks such as <|eot_id|> would be read as nothing. A <tool_call> of one token spells its text."""
    hf = tiny_tokenizer()
    hf.add_special_tokens({"extra_special_tokens": ["<|eot_id|>"]})
    hf.add_tokens(["<tool_call>"])
    tokenizer = ours(hf)
    mark, call = (hf.convert_tokens_to_ids(name) for name in ("<|eot_id|>", "<tool_call>"))
    assert tokenizer.special_ids >= {mark, *tokenizer.eos_ids} and call not in tokenizer.special_ids
    grammars = GrammarCompiler(tokenizer)
    free = grammars.compile(Grammar.regex("(?s:.*)")).follow()
    tagged = grammars.compile(Grammar.lark('start: "<tool_call>" /[0-9]+/')).follow()
    (allowed,) = free.allowed(ints([]), ints([]))
    assert allowed[call] and not allowed[mark] and all(allowed[end] for end in tokenizer.eos_ids)
    first_mask, then = tagged.allowed(ints([]), ints([call]))
    assert first_mask[call] and first_mask[tokenizer.encode("<")[0]] and not first_mask[mark]
    assert sorted(tokenizer.bytes_of(int(i)) for i in np.flatnonzero(then)) == [b"%d" % i for i in range(10)]
