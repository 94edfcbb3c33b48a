"""Marks: texts such as `<tool_call>` that structure an answer, told apart from text that spells them.

Where the vocabulary has a mark as one token, an answer shows this token as a lone surrogate, which no decoded text can
hold. A parser that looks for the surrogate never takes text that spells the mark for the mark itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from triforce.checkpoint.tokenizer import Tokenizer

FIRST_SURROGATE = 0xD800


class Marks:
    """The marks of a format in the tokens of one vocabulary; without a tokenizer, or a token, a mark is its text.

    Attributes:

    - token_texts: the surrogates by the id of a mark's token; see `Tokenizer.stream`.
    """

    def __init__(self, names: Iterable[str] = (), tokenizer: Tokenizer | None = None) -> None:
        ids = tokenizer.ids_of_names(names) if tokenizer else {}
        special_ids = tokenizer.special_ids if tokenizer else frozenset[int]()
        self._ids = ids
        self._shown = {name: chr(FIRST_SURROGATE + i) for i, name in enumerate(ids)}
        self._names = {self._shown[name]: "" if ids[name] in special_ids else name for name in ids}
        self._pattern = re.compile("|".join(map(re.escape, sorted(ids, key=len, reverse=True))) or "(?!)")
        self.token_texts = {ids[name]: shown for name, shown in self._shown.items()}

    def shown(self, text: str) -> str:
        """Return a text of a format as an answer shows it, with surrogates in the place of marks."""
        return self._pattern.sub(lambda match: self._shown[match[0]], text)

    def terms(self, text: str) -> str:
        """Return a text of a format as terms of a grammar in Lark; marks are named by the ids of their tokens."""
        terms = []
        end = 0
        for match in self._pattern.finditer(text):
            terms += [_quoted(text[end : match.start()]), f"<[{self._ids[match[0]]}]>"]
            end = match.end()
        return " ".join(term for term in [*terms, _quoted(text[end:])] if term)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the marks' tokens, in order."""
        return tuple(sorted(self.token_texts))

    def restored(self, text: str) -> str:
        """Return an answer's text as people read it: marks that are no special tokens are spelled, others dropped."""
        for shown, name in self._names.items():
            if shown in text:
                text = text.replace(shown, name)
        return text

    def restored_json(self, text: str) -> str:
        """Return JSON of an answer with marks as parts of its strings."""
        for shown, name in self._names.items():
            if shown in text:
                text = text.replace(shown, json.dumps(name)[1:-1])
        return text


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
