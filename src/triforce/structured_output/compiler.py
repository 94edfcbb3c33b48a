"""GrammarCompiler: compiles grammars of `SamplingParams.grammar` for the tokens of one tokenizer, with llguidance."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any

import numpy as np

from triforce.checkpoint.tokenizer import Tokenizer
from triforce.errors import RequestError
from triforce.interface.grammar import Grammar
from triforce.sandbox import Trial, TrialError, TrialLimitError
from triforce.structured_output.matcher import Matcher, NumberLimits

NO_FORCING = '%llguidance {"no_forcing": true}\n'
"""Option that switches forced tokens off.

With forced tokens, a text with only one possible continuation could have only one tokenization.
"""
JSON_OPTIONS = {"whitespace_pattern": r" |\n {0,20}", "lenient": False}
"""JSON may be indented, with a bounded count of spaces; a keyword that is not supported is refused."""

LARGEST_INTEGER = 2**63 - 1
ONE_OF = "oneOf is supported only where the types of its alternatives cannot overlap; write anyOf"


class Vocabulary:
    """A tokenizer for llguidance: the bytes of each token."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], eos: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a forced text. No text is forced, see `NO_FORCING`."""
        return []


def new_matcher(tokenizer: Any, kind: str, source: str) -> Any:
    """Return a matcher at the beginning of a text. Raises ValueError or RecursionError for a wrong grammar."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)
    written = LLMatcher.grammar_from_lark(NO_FORCING + _as_lark(kind, source))
    matcher = LLMatcher(tokenizer, written, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(_user_error(matcher.get_error(), kind))
    return matcher


_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): (?:failed to compile JSON schema: )?")
_LINE = re.compile(r"line (\d+), column \d+: ")


def _user_error(error: str, kind: str) -> str:
    """Return an error of llguidance in terms of the request: lines of Lark count without that of `NO_FORCING`."""
    place_format = "line {}, column {}: " if kind == "lark" else ""
    error = _PLACE.sub(lambda place: place_format.format(int(place[1]) - 1, place[2]), error)
    return re.sub(r"oneOf constraints are not supported\.[^\n]*", ONE_OF, error)


def schema_grammar(schema: Any) -> str:
    """Return a schema as a grammar's rule body. Raises ValueError unless it is an object, true or false."""
    if not isinstance(schema, dict | bool):
        raise ValueError("a schema is a JSON object")
    text = json.dumps(schema | {"x-guidance": JSON_OPTIONS} if isinstance(schema, dict) else schema)
    json.loads(text, parse_int=_exact_integer)
    return f"%json {text}"


def _exact_integer(digits: str) -> int:
    """Parse an integer as llguidance does, by way of float64. Raises ValueError for one that would be changed."""
    value = int(digits) if len(digits) < 20 else 2**63
    if abs(value) > LARGEST_INTEGER or (int(float(value)) != value and value != LARGEST_INTEGER):
        raise ValueError(f"the integer {digits[:30]} would be rounded; describe it as a string")
    return value


def rule_body(grammar: Grammar) -> str:
    """Return a grammar as the body of one rule. Raises RequestError for a grammar in Lark, which has its own rules."""
    if grammar.kind == "lark":
        raise RequestError("a grammar cannot be combined with tools; send a JSON schema or a regular expression")
    try:
        return _as_lark(grammar.kind, grammar.source).removeprefix("start: ")
    except (ValueError, RecursionError) as error:
        raise _unusable(grammar, str(error)) from error


def _as_lark(kind: str, source: str) -> str:
    from llguidance import regex_to_lark

    if kind == "json_schema":
        return f"start: {schema_grammar(json.loads(source))}"
    if kind == "regex" and re.search(r"(?<!\\)(\\\\)*\\$", source):
        raise ValueError("it ends with a backslash that escapes nothing")
    if kind == "regex":
        return f"start: /{regex_to_lark(source)}/"
    if "%llguidance" in source:
        raise ValueError("options (%llguidance) are not taken")
    return source


def trial(grammar: tuple[str, str, list[int]]) -> None:
    """Compile a grammar for a vocabulary of bytes, and of one token for all that the grammar names by id.

    grammar: its kind, its source and these ids. Raises ValueError or RecursionError for a wrong grammar.
    """
    from llguidance import LLTokenizer

    kind, source, token_ids = grammar
    named_token = 257
    for i in token_ids:
        source = source.replace(f"<[{i}]>", f"<[{named_token}]>")
    tokens = [*(bytes([i]) for i in range(256)), b"<end>", b"<named>"]
    letters: Any = Vocabulary(tokens, [256, named_token], 256)
    matcher = new_matcher(LLTokenizer(letters, slices=[]), kind, source)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(matcher.get_error())


CACHED_GRAMMARS = 64
"""Compiled grammars that are cached, the most recently used ones."""


class CompiledGrammar:
    """A grammar in the tokens of one tokenizer. matcher: an LLMatcher that always stays at the beginning of a text."""

    def __init__(self, matcher: Any, tokenizer: Tokenizer, numbers: NumberLimits | None) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._numbers = numbers

    def follow(self) -> Matcher:
        """Return a constraint for one row, at the beginning of its text. The call costs little."""
        ends = self._tokenizer.eos_ids
        size = self._tokenizer.vocab_size
        return Matcher(self._matcher.deep_copy(), ends, size, self._numbers)

    def accepts(self, ids: Sequence[int]) -> bool:
        """Whether the grammar accepts the text of these tokens, so that the text may end there."""
        (allowed_V,) = self.follow().allowed(np.array(ids, dtype=np.int64), np.zeros(0, dtype=np.int64))
        return bool(allowed_V[list(self._tokenizer.eos_ids)].any())


class GrammarTrial:
    """Trial compilation of a grammar in a process of its own, which may crash, or be cancelled by another thread."""

    def __init__(self, grammar: Grammar) -> None:
        self._task = grammar.kind, grammar.source, list(grammar.token_ids)
        self._trial: Trial | None = None
        self._cancelled = False

    def run(self) -> str:
        """Return the grammar's fault; empty if it has none. Call this method once."""
        self._trial = Trial(f"{__name__}:trial", self._task)
        if self._cancelled:
            self._trial.stop()
        try:
            self._trial.result()
        except TrialLimitError:
            return "it is too complex"
        except TrialError as error:
            return str(error)
        return ""

    def cancel(self) -> None:
        """Cancel the trial: `run` returns a fault at once."""
        self._cancelled = True
        if self._trial:
            self._trial.stop()


class GrammarCompiler:
    """Compiles grammars and caches them. Methods may be called from any thread."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._vocabularies: dict[frozenset[int], Any] = {}
        """By the tokens that are part of no text, beside special tokens."""
        self._numbers: NumberLimits | None = None
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        # two locks, so that a look-up does not wait for the compilation of another grammar
        self._cache_lock = Lock()
        self._compile_lock = Lock()

    def cached(self, grammar: Grammar) -> CompiledGrammar | None:
        """Return a cached grammar, or None."""
        with self._cache_lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
            return self._compiled.get(grammar)

    def compile(self, grammar: Grammar, trial: GrammarTrial | None = None) -> CompiledGrammar:
        """Compile a grammar after a trial, and return it. Raises RequestError saying what is wrong."""
        if compiled := self.cached(grammar):
            return compiled
        self.prepare()
        if fault := (trial or GrammarTrial(grammar)).run():
            raise _unusable(grammar, fault)
        return self.compile_tried(grammar)

    def compile_tried(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar that has passed a trial, perhaps in another process, and return it. Raises RequestError."""
        tokenizer = self.prepare()
        with self._compile_lock:
            return self.cached(grammar) or self._compile(grammar, tokenizer)

    def prepare(self, token_ids: Iterable[int] = ()) -> Tokenizer:
        """Read the vocabulary for all grammars, or for those that name these tokens by id, and return the tokenizer.

        Raises RequestError without a tokenizer, without an end-of-sequence token, or without llguidance.

        The call takes about a second for a vocabulary of 262,144 tokens, and holds the interpreter's lock.
        """
        if self._tokenizer is None:
            raise RequestError("a grammar needs a tokenizer, and this model has none")
        if not self._tokenizer.eos_ids:
            raise RequestError("this model has no end-of-sequence token, so no text of a grammar could end")
        with self._compile_lock:
            self._vocabulary_without(token_ids, self._tokenizer)
        return self._tokenizer

    def _compile(self, grammar: Grammar, tokenizer: Tokenizer) -> CompiledGrammar:
        try:
            vocabulary = self._vocabulary_without(grammar.token_ids, tokenizer)
            matcher = new_matcher(vocabulary, grammar.kind, grammar.source)
        except (ValueError, RecursionError) as error:
            raise _unusable(grammar, str(error)) from error
        compiled = CompiledGrammar(matcher, tokenizer, self._numbers if grammar.holds_json else None)
        with self._cache_lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return compiled

    def _vocabulary_without(self, token_ids: Iterable[int], tokenizer: Tokenizer) -> Any:
        """Return the vocabulary in which these tokens are part of no text. Few sets of them are asked for."""
        other_ids = frozenset(token_ids) - tokenizer.special_ids
        if other_ids not in self._vocabularies:
            self._vocabularies[other_ids] = self._read_vocabulary(other_ids, tokenizer)
        return self._vocabularies[other_ids]

    def _read_vocabulary(self, token_ids: frozenset[int], tokenizer: Tokenizer) -> Any:
        from llguidance import LLTokenizer

        tokens = tokenizer.all_bytes()
        ends = sorted(tokenizer.eos_ids)
        self._numbers = NumberLimits(tokens)
        vocabulary: Any = Vocabulary(tokens, sorted(tokenizer.special_ids | token_ids), ends[0])
        return LLTokenizer(vocabulary, n_vocab=len(tokens), eos_token=ends)


class GrammarError(RequestError):
    """A grammar that cannot be used.

    reason: what is wrong. line: the line of the grammar with the error, counted from 1, if the grammar is in Lark.
    """

    reason: str
    line: int | None


def _unusable(grammar: Grammar, error: str) -> GrammarError:
    """Return the error that llguidance gives, without the excerpts that it shows of its own source and of a regex."""
    reason = re.split(r"\n +\d+ \| ", error, maxsplit=1)[0].strip()
    reason = re.sub(r"regex parse error:\n.*\nerror: ", "regex parse error: ", reason, flags=re.DOTALL)
    reason = "no text fits it" if error.startswith("NoExtensionBias") else " ".join(reason.split())[:300]
    refusal = GrammarError(f"the grammar ({grammar.kind}) cannot be used: {reason}; change or simplify it")
    place = _LINE.match(reason)
    refusal.line = int(place[1]) if place else None
    refusal.reason = _LINE.sub("", reason, count=1)
    return refusal
