"""GrammarCompiler: grammars of `SamplingParams.grammar` in the tokens of one tokenizer, by llguidance."""

from __future__ import annotations

import re
from collections import OrderedDict
from threading import Lock
from typing import Any

from triforce.checkpoint.tokenizer import Tokenizer
from triforce.errors import RequestError
from triforce.interface.grammar import Grammar
from triforce.sandbox import TrialError, TrialLimitError, tried
from triforce.structured_output import guidance
from triforce.structured_output.matcher import Matcher, NumberLimits

REMEMBERED = 64
"""Compiled grammars that are kept: those used last."""


class GrammarCompiler:
    """Compiles grammars, one at a time, each once. Methods may be called from any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: Any = None
        self._numbers: NumberLimits | None = None
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self._table, self._compiling = Lock(), Lock()  # a text need not wait for another one's grammar

    def follow(self, grammar: Grammar) -> Matcher:
        """Return a constraint for one row, at the beginning of its text. Raises RequestError saying what is wrong."""
        matcher = self._known(grammar)
        if matcher is None:
            with self._compiling:
                matcher = self._known(grammar) or self._known(grammar, self._compile(grammar))
        numbers = self._numbers if grammar.holds_json else None
        return Matcher(matcher.deep_copy(), self._tokenizer.eos_ids, self._tokenizer.vocab_size, numbers)

    def _known(self, grammar: Grammar, fresh: Any = None) -> Any:
        """Return the matcher of a grammar, if it is known, or `fresh`, which is then kept."""
        with self._table:
            if fresh is not None:
                self._compiled[grammar] = fresh
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
            while len(self._compiled) > REMEMBERED:
                self._compiled.popitem(last=False)
            return self._compiled.get(grammar)

    def _compile(self, grammar: Grammar) -> Any:
        if not self._tokenizer.eos_ids:
            raise RequestError("this model has no end-of-sequence token, so no text of a grammar could end")
        self._vocabulary = self._vocabulary or self._read_vocabulary()
        _require_compiles(grammar)
        try:
            return guidance.compiled(self._vocabulary, grammar.kind, grammar.source)
        except (ValueError, RecursionError) as error:
            raise _unusable(grammar, str(error)) from error

    def _read_vocabulary(self) -> Any:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise RequestError(
                f"{error.name} is not installed, which follows grammars; get it with: pip install 'triforce[serve]'"
            ) from error
        tokens, ends = self._tokenizer.all_bytes(), sorted(self._tokenizer.eos_ids)
        self._numbers = NumberLimits(tokens)
        vocabulary: Any = guidance.Vocabulary(tokens, sorted(self._tokenizer.special_ids), ends[0])
        return LLTokenizer(vocabulary, n_vocab=len(tokens), eos_token=ends)


def _require_compiles(grammar: Grammar) -> None:
    """Compile a grammar in another process. Raises RequestError saying what is wrong with it."""
    try:
        tried(f"{guidance.__name__}:trial", [grammar.kind, grammar.source])
    except TrialLimitError:
        raise _unusable(grammar, "it is too complex") from None
    except TrialError as error:
        raise _unusable(grammar, str(error)) from error


def _unusable(grammar: Grammar, error: str) -> RequestError:
    """Return the error that llguidance gives, without the excerpts that it shows of its own source and of a regex."""
    reason = re.split(r"\n +\d+ \| ", error, maxsplit=1)[0].strip()
    reason = re.sub(r"regex parse error:\n.*\nerror: ", "regex parse error: ", reason, flags=re.DOTALL)
    reason = "no text fits it" if error.startswith("NoExtensionBias") else " ".join(reason.split())[:300]
    return RequestError(f"the grammar ({grammar.kind}) cannot be used: {reason}; change or simplify it")
