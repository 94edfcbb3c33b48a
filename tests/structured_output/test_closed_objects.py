"""Object schemas that list properties accept only those, unless that could refuse what is described elsewhere."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.helpers.json_schemas import Schema, two_hundred
from triforce.errors import RequestError
from triforce.interface.grammar import Grammar, closed_objects
from triforce.llm import LLM
from triforce.server.answers.call_format import CallableFunction
from triforce.server.answers.llama import LlamaFormat
from triforce.server.answers.marks import Marks
from triforce.server.tools import NO_PARAMETERS
from triforce.structured_output import compiler

NUMBER: Schema = {"type": "integer"}
LISTING: Schema = {"type": "object", "properties": {"a": NUMBER}}
CLOSED: Schema = LISTING | {"additionalProperties": False}
NULL: Schema = {"type": "null"}
NODE: Schema = {
    "title": "Node", "type": "object", "required": ["value"],
    "properties": {
        "value": NUMBER,
        "next": {"anyOf": [{"$ref": "#/$defs/Node"}, NULL], "default": None},
        "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
    },
}  # fmt: skip
"""A model that contains itself, as pydantic writes it."""
OPEN: dict[str, Schema] = {
    "no properties": {"type": "object"},
    "it says itself": LISTING | {"additionalProperties": True},
    "it describes others": LISTING | {"additionalProperties": NUMBER},
    "patternProperties": LISTING | {"patternProperties": {"^x": NUMBER}},
    "propertyNames": LISTING | {"propertyNames": {"maxLength": 3}},
    "unevaluatedProperties": LISTING | {"unevaluatedProperties": False},
    "required elsewhere": LISTING | {"required": ["b"]},
    "more than listed": LISTING | {"minProperties": 2},
    "constant": LISTING | {"const": {"a": 1, "b": 2}},
    "allOf": {"allOf": [LISTING, {"properties": {"b": {"properties": {"c": NUMBER}}}}]},
    "anyOf": {"anyOf": [LISTING, {"properties": {"b": NUMBER}}]},
    "oneOf": {"oneOf": [LISTING, {"properties": {"b": NUMBER}}]},
    "beside anyOf": LISTING | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "referenced from allOf": {"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": NUMBER}}], "$defs": {"a": LISTING}},
    "beside a reference": LISTING | {"$ref": "#/$defs/b", "$defs": {"b": {"properties": {"b": NUMBER}}}},
    "referenced plainly, too": {
        "prefixItems": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a", "required": ["b"]}], "$defs": {"a": LISTING},
    },
    "a reference elsewhere": {"items": LISTING, "contains": {"$ref": "https://example.org/a"}},
    "names that look like keywords": {"properties": {"properties": NUMBER}, "required": ["x"]},
}  # fmt: skip


def accepts(llm: LLM, grammar: Grammar, value: Any) -> bool:
    """Return whether a text of the grammar may be this JSON value."""
    assert llm.tokenizer
    tokens = np.array(llm.tokenizer.encode(json.dumps(value), add_special=False))
    allowed = llm.grammars.compile(grammar).follow().allowed(tokens[:0], tokens)
    return bool(allowed[np.arange(len(tokens)), tokens].all())


@pytest.mark.parametrize("reason", OPEN)
def test_object_stays_open_for(reason: str) -> None:
    assert closed_objects(OPEN[reason]) == OPEN[reason]


def test_listing_object_is_closed_at_any_depth() -> None:
    assert closed_objects(LISTING) == CLOSED
    assert closed_objects({"type": "object", "properties": {}}) == NO_PARAMETERS
    assert closed_objects({"items": {"properties": {"b": LISTING}}}) == {
        "items": {"properties": {"b": CLOSED}, "additionalProperties": False}
    }
    assert closed_objects({"prefixItems": [LISTING], "items": LISTING}) == {"prefixItems": [CLOSED], "items": CLOSED}
    assert closed_objects(LISTING | {"additionalProperties": False}) == CLOSED


def test_property_named_as_a_keyword_is_a_property() -> None:
    schema = {"type": "object", "properties": {"properties": LISTING, "anyOf": NUMBER, "items": {"type": "string"}}}
    closed = schema | {"additionalProperties": False}
    closed["properties"] = schema["properties"] | {"properties": CLOSED}  # type: ignore[operator]
    assert closed_objects(schema) == closed


def test_alternative_beside_null_is_closed() -> None:
    assert closed_objects({"anyOf": [LISTING, NULL]}) == {"anyOf": [CLOSED, NULL]}


def test_recursive_model_is_closed_everywhere() -> None:
    schema = {"$defs": {"Node": NODE}, "$ref": "#/$defs/Node"}
    assert closed_objects(schema) == schema | {"$defs": {"Node": NODE | {"additionalProperties": False}}}


def test_schema_given_is_not_changed() -> None:
    schema = json.loads(json.dumps(LISTING))
    assert closed_objects(schema) != schema == LISTING


def test_grammar_takes_listed_properties_alone_unless_told() -> None:
    assert json.loads(Grammar.json(LISTING).source) == json.loads(Grammar.json(json.dumps(LISTING)).source) == CLOSED
    assert json.loads(Grammar.json(LISTING, additional_properties=True).source) == LISTING
    assert Grammar.json("{").source == "{" and Grammar.json("[" * 60_000).source == "[" * 60_000
    with pytest.raises(RequestError, match="too long"):
        Grammar.json(" " * 70_000)


def test_text_of_a_closed_object_has_no_other_property(llm: LLM) -> None:
    for additional in (False, True):
        grammar = Grammar.json(LISTING, additional_properties=additional)
        assert accepts(llm, grammar, {"a": 1}) and accepts(llm, grammar, {"a": 1, "b": 2}) == additional


@pytest.mark.parametrize("parameters", [LISTING, {"type": "object", "properties": {}}, NO_PARAMETERS])
def test_arguments_of_calls_are_closed(parameters: Schema) -> None:
    functions = [CallableFunction("f", "tools.0.parameters", parameters)]
    grammar = LlamaFormat().grammar(Marks(), functions, several=False)
    assert '"additionalProperties": false' in grammar.source


def test_schemas_of_the_suite_compile_as_before() -> None:
    """Schemas that were refused are refused, and the others are not."""
    for schema in two_hundred():
        outcomes = []
        for additional in (False, True):
            grammar = Grammar.json(schema, additional_properties=additional)
            try:
                outcomes.append(compiler.trial((grammar.kind, grammar.source)))
            except ValueError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
