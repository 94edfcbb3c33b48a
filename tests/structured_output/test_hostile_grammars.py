"""Hostile grammars are refused in bounded time, and the process that compiles them survives."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from triforce.errors import RequestError
from triforce.interface.grammar import MAX_CHARACTERS, Grammar
from triforce.llm import LLM
from triforce.ragged import ints
from triforce.sandbox import TrialLimits
from triforce.structured_output import compiler
from triforce.structured_output.compiler import GrammarCompiler


def chain(link: str, count: int) -> str:
    links = ", ".join(f'"a{i}": {link.replace("NEXT", f"a{i + 1}")}' for i in range(count))
    return f'{{"$ref": "#/$defs/a0", "$defs": {{{links}, "a{count}": {{"type": "integer"}}}}}}'


REF = '{"type": "array", "items": {"$ref": "#/$defs/NEXT"}}'
BAD = {
    "deep": (Grammar.json('{"type": "array", "items": ' * 300 + "{}" + "}" * 300), "recursion limit"),
    "a long chain": (Grammar.json(chain(REF, 900)), "too complex"),
    "rules upon rules": (
        Grammar.lark("start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(3000)) + '\na3000: "x"'),
        "too complex",
    ),
    "a large divisor": (
        Grammar.json({"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 99_999_989}}}),
        "too complex",
    ),
    "intersections": (Grammar.lark("start: T\nT: /.*a.{30}/ & /.*b.{30}/ & ~/.*c.{17}/"), "fuel"),
    "no JSON": (Grammar.json("{"), "Expecting property name"),
    "no schema": (Grammar.json("[1]"), "object"),
    "nothing satisfies it": (Grammar.json({"type": "integer", "minimum": 5, "maximum": 4}), "Unsatisfiable"),
    "more than a schema": (Grammar.json("{} | /.*/"), "Extra data"),
    "options": (Grammar.lark('%llguidance {"no_forcing": false}\nstart: "a"'), "not taken"),
    "elsewhere": (Grammar.json({"$ref": "http://example.org/schema"}), "does not fetch"),
    "an odd integer": (Grammar.json({"enum": ["a", 2**53 + 1]}), "9007199254740993 would be rounded"),
    "a large integer": (Grammar.json({"maximum": 10**400}), "would be rounded"),
    "a keyword": (Grammar.json({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "a keyword, leniently": (Grammar.json({"not": {}, "x-guidance": {"lenient": True}}), "not"),
    "look-ahead": (Grammar.regex("(?=a)b"), "regex parse error: look-around, including look-ahead"),
    "an open group in a schema": (
        Grammar.json({"type": "string", "pattern": "(a"}),
        "regex parse error: unclosed group;",
    ),
    "no text": (Grammar.regex("[a&&b]"), "no text fits it;"),
    "deep parentheses": (Grammar.regex("(" * 5000 + "a" + ")" * 5000), "regex"),
    "a lone surrogate": (Grammar.json('"\ud800"'), "object"),
    "a lone surrogate in a regex": (Grammar.regex("\ud800"), "surrogate"),
}


@pytest.mark.parametrize("name", BAD)
def test_grammar_bad_grammars_are_refused(llm: LLM, name: str) -> None:
    grammar, reason = BAD[name]
    start_times = os.times()
    with pytest.raises(RequestError, match="cannot be used") as refusal:
        llm.grammars.compile(grammar).follow()
    end_times = os.times()
    assert reason in str(refusal.value) and len(str(refusal.value)) < 500
    spent = [getattr(end_times, kind) - getattr(start_times, kind) for kind in ("user", "children_user")]
    assert sum(spent) < TrialLimits().cpu_seconds + 2


def test_grammar_long_schema_is_refused_at_once() -> None:
    for make in (Grammar.regex, Grammar.lark, Grammar.json):
        with pytest.raises(RequestError, match="too long"):
            make("a" * (MAX_CHARACTERS + 1))
    with pytest.raises(RequestError, match="at least one"):
        Grammar.regex("")


def test_grammar_deep_schema_is_refused() -> None:
    schema: dict[str, object] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="simplify"):
        Grammar.json(schema)


@pytest.mark.parametrize("pattern", ["(a|b)*a(a|b){40}", "((a+)+)+[0-9]{500}", "(.{1,1000}b){1000}"])
def test_grammar_exponential_regex_is_bounded(llm: LLM, pattern: str) -> None:
    """Backtracking would not end. The parser's limit ends a text, and reports it."""
    assert llm.tokenizer
    constraint = llm.grammars.compile(Grammar.regex(pattern)).follow()
    text = []
    letters = [llm.tokenizer.encode(letter)[0] for letter in "ab"]
    started = time.process_time()
    for _ in range(60):
        allowed = constraint.allowed(ints(text), ints([]))[0]
        assert allowed.any()
        text.append(next((i for i in letters if allowed[i]), int(np.flatnonzero(allowed)[0])))
    assert time.process_time() - started < 5


def test_grammar_parser_limit_ends_text_and_reports(llm: LLM) -> None:
    assert llm.tokenizer
    constraint = llm.grammars.compile(Grammar.regex("((a{1,1000}){1,1000}){1,1000}")).follow()
    a = llm.tokenizer.encode("a")
    for length in range(60):
        (allowed,) = constraint.allowed(ints(a * length), ints([]))
        if constraint.failure:
            break
    assert constraint.failure and np.flatnonzero(allowed).tolist() == sorted(llm.tokenizer.eos_ids)


def test_grammar_is_compiled_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.tokenizer
    grammars, compiled = GrammarCompiler(llm.tokenizer), []
    monkeypatch.setattr(compiler, "new_matcher", lambda *arguments: compiled.append(arguments[1:]) or plain(*arguments))
    for pattern in ("ab?", "b", "ab?"):
        grammars.compile(Grammar.regex(pattern)).follow()
    assert compiled == [("regex", "ab?"), ("regex", "b")]


plain = compiler.new_matcher
