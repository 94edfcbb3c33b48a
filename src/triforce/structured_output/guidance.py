"""Grammars as llguidance takes them.

A grammar is a program of its sender: some overflow the stack of the compiler, some keep it busy for hours. So each is
compiled first in a process that may die (see `triforce.sandbox`). This imports nothing of triforce, so that such a
process starts at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

PURE = '%llguidance {"no_forcing": true}\n'
"""Otherwise a text that can go on in one way only would have to be cut into tokens in one way only, too."""
JSON_OPTIONS = {"whitespace_pattern": r" |\n {0,20}", "lenient": False}
"""JSON may be indented, but no text is lost in white space; a keyword that is not understood is refused."""

LARGEST = 2**63 - 1
ONE_OF = "oneOf is kept to only where its alternatives cannot overlap, by their types; write anyOf"


class Vocabulary:
    """A tokenizer for llguidance: the bytes of each token."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], eos: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that is forced. None ever is, see `PURE`."""
        return []


def compiled(tokenizer: Any, kind: str, source: str) -> Any:
    """Return a matcher at the beginning of a text. Raises ValueError or RecursionError for a wrong grammar."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)
    written = LLMatcher.grammar_from_lark(PURE + _as_lark(kind, source))
    matcher = LLMatcher(tokenizer, written, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(_in_words(matcher.get_error()))
    return matcher


def _in_words(error: str) -> str:
    """Return an error of llguidance in terms of what was sent: its lines are counted without that of `PURE`."""
    error = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", error)
    error = re.sub(r"^(\d+)\((\d+)\): ", lambda place: f"line {int(place[1]) - 1}, column {place[2]}: ", error)
    return re.sub(r"^oneOf constraints are not supported\.[^\n]*", ONE_OF, error)


def schema_grammar(schema: Any) -> str:
    """Return a schema as a part of a grammar. Raises ValueError unless it is an object, true or false."""
    if not isinstance(schema, dict | bool):
        raise ValueError("a schema is a JSON object")
    text = json.dumps(schema | {"x-guidance": JSON_OPTIONS} if isinstance(schema, dict) else schema)
    json.loads(text, parse_int=_exact)
    return f"%json {text}"


def _exact(digits: str) -> int:
    """Parse an integer as llguidance does, by way of float64. Raises ValueError for one that would be changed."""
    value = int(digits) if len(digits) < 20 else 2**63
    if abs(value) > LARGEST or (int(float(value)) != value and value != LARGEST):
        raise ValueError(f"the integer {digits[:30]} would be rounded; describe it as a string")
    return value


def _as_lark(kind: str, source: str) -> str:
    from llguidance import regex_to_lark

    if kind == "json_schema":
        return f"start: {schema_grammar(json.loads(source))}"
    if kind == "regex":
        return f"start: /{regex_to_lark(source)}/"
    if "%llguidance" in source:
        raise ValueError("options (%llguidance) are not taken")
    return source


def trial(grammar: tuple[str, str]) -> None:
    """Compile a grammar, its kind and its source, for letters. Raises ValueError or RecursionError for a wrong one."""
    from llguidance import LLTokenizer

    letters: Any = Vocabulary([*(bytes([i]) for i in range(256)), b"<end>"], [256], 256)
    matcher = compiled(LLTokenizer(letters, slices=[]), *grammar)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(matcher.get_error())
