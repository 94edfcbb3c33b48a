"""Control tokens: a chat template writes them. In text by people the same characters stay text.

A template is a program, so its output does not show who wrote which characters. Characters of people's text that spell
a control token are replaced by private ones before the template runs, one for one, so that lengths and slices stay.
Afterwards each control token in the output is the template's. The tokenizer then reads the whole output at once, as a
border inside would change its merges.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from secrets import token_hex
from threading import Lock
from typing import Any, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as Core

from triforce.errors import RequestError

PRIVATE_CHARACTERS = range(0xF0000, 0xFFFFE)
"""Unicode's plane 15, whose characters have no meaning of their own."""
END_MARKS = range(0x10F000, 0x10FFFE)
"""Characters of plane 16, which has none with a meaning of its own, either."""
_WRITTEN = re.compile(r"<[|\uff5c].+[|\uff5c]>|\[/?[A-Z_]+\]")
"""Added tokens that mark structure though a tokenizer's files do not call them special, as DeepSeek's of a turn."""
_ESCAPE = re.compile(r"\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}")
"""A character beyond the first plane as JSON may write it."""


class PlainTokenizer(NamedTuple):
    """A tokenizer that matches no control token by its text, but by a name of its own."""

    core: Core
    names: Mapping[str, str]
    """Names by text of control tokens."""
    original_ids: Mapping[int, int]
    """Ids of control tokens by those of their names."""


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens, and added tokens that are written like one."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = Lock()

    def __getstate__(self) -> Core:
        return self._core

    def __setstate__(self, core: Core) -> None:
        self.__init__(core)  # type: ignore[misc]

    def ids_in(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of those texts that are special tokens, which no text shows."""
        matches = (self._tokens.get(text) for text in texts)
        return frozenset(match[0] for match in matches if match and match[1].special)

    def hidden_in(self, value: object) -> HiddenTokens:
        """Return what replaces the control tokens that texts of a JSON value spell. Raises RequestError."""
        return HiddenTokens(self._pattern, value, frozenset())

    def hidden_parts_in(self, value: object) -> HiddenTokens:
        """Return what replaces each character that control tokens consist of, but letters, digits and underscores.

        Names of fields that a template reads, such as `tool_calls`, hold underscores and stay.
        """
        letters = {character for text in self._tokens for character in text}
        characters = {character for character in letters if not character.isalnum() and character != "_"}
        return HiddenTokens(self._pattern, value, frozenset(characters))

    def written_in(self, text: str) -> list[str]:
        """Return the control tokens that a text spells, in order."""
        return self._pattern.findall(text)

    @property
    def plain_core(self) -> Core:
        """A tokenizer for which control tokens that a text spells are text. Other added tokens match."""
        return self._plain.core

    def encode(self, text: str, hidden: HiddenTokens, encode: Callable[[Core, str, bool], list[int]]) -> list[int]:
        """Return the token ids of a template's output: its own control tokens, and people's text as text.

        hidden: what it replaced before the template ran. encode: returns the ids of a text by a tokenizer, without
        special tokens around it.
        """
        plain = self._plain
        named = hidden.restored(self._pattern.sub(lambda match: plain.names[match[0]], text))
        return [plain.original_ids.get(i, i) for i in encode(plain.core, named, False)]

    @cached_property
    def _tokens(self) -> dict[str, tuple[int, AddedToken]]:
        added = {i: (str(token.content), token) for i, token in self._core.get_added_tokens_decoder().items()}
        return {text: (i, token) for i, (text, token) in added.items() if token.special or _WRITTEN.fullmatch(text)}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(one_of_pattern(self._tokens) or "(?!)")

    @property
    def _plain(self) -> PlainTokenizer:
        with self._lock:
            return self._made_plain

    @cached_property
    def _made_plain(self) -> PlainTokenizer:
        """The names hold a secret of this process, else a text could hold them."""
        core = Core.from_str(self._core.to_str())
        core.encode_special_tokens = True
        core.add_special_tokens([_copied(text, token, special=True) for text, (_, token) in self._tokens.items()])
        secret = token_hex(16)
        holes = 1 + max(self._core.get_vocab().values(), default=0) - core.get_vocab_size()
        core.add_tokens(
            [AddedToken(f"<{secret}:no {i}>") for i in range(holes)]
        )  # new tokens get ids behind all others
        names = {text: f"<{secret}:{i}>" for text, (i, _) in self._tokens.items()}
        core.add_tokens([_copied(names[text], token, special=False) for text, (_, token) in self._tokens.items()])
        original_ids = {core.token_to_id(names[text]) or 0: i for text, (i, _) in self._tokens.items()}
        return PlainTokenizer(core, names, original_ids)


def _copied(text: str, token: AddedToken, *, special: bool) -> AddedToken:
    """Return another text with the matching options of a token."""
    matching = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
    return AddedToken(text, normalized=False, special=special, **matching)


class HiddenTokens:
    """Private characters in the place of control tokens that people's text spells. It is false without any."""

    def __init__(self, pattern: re.Pattern[str], value: object, characters: frozenset[str]) -> None:
        """characters: they are replaced everywhere, not only in control tokens."""
        texts = list(_texts(value))
        spelled = {character for text in texts for match in pattern.findall(text) for character in match}
        if characters:
            spelled = {character for text in texts for character in set(text) & characters}
            pattern = re.compile(f"[{''.join(map(re.escape, sorted(spelled)))}]+" if spelled else "(?!)")
        self._pattern = pattern
        self._private: dict[int, str] = {}
        if spelled:
            absent = absent_characters(texts, PRIVATE_CHARACTERS)
            if len(absent) < len(spelled):
                raise RequestError("the messages hold nearly all characters of Unicode's plane 15; leave some out")
            self._private = {ord(character): absent[i] for i, character in enumerate(sorted(spelled))}

    def __bool__(self) -> bool:
        return bool(self._private)

    def replaced(self, value: Any) -> Any:
        """Return a JSON value with private characters in the place of control tokens."""
        if not self:
            return value
        if isinstance(value, str):
            return self._pattern.sub(lambda match: match[0].translate(self._private), value)
        if isinstance(value, Mapping):
            return {self.replaced(key): self.replaced(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.replaced(entry) for entry in value]
        return value

    def restored(self, text: str) -> str:
        """Return a text with the original characters in the place of private ones, also where JSON escaped these."""
        for code, private in self._private.items():
            text = text.replace(json.dumps(private)[1:-1], json.dumps(chr(code))[1:-1]).replace(private, chr(code))
        return text


def end_mark(value: object) -> str:
    """Return a character that no text of a JSON value holds. Raises RequestError."""
    absent = absent_characters(list(_texts(value)), END_MARKS)
    if not absent:
        raise RequestError("the messages hold all characters of Unicode's plane 16; leave some out")
    return absent[0]


def absent_characters(texts: Sequence[str], characters: range) -> list[str]:
    """Return those of some characters that no text holds, also not as JSON writes them."""
    present = {character for text in texts for character in text}
    present.update(json.loads(f'"{escape}"') for text in texts for escape in _ESCAPE.findall(text))
    return [character for character in map(chr, characters) if character not in present]


def _texts(value: object) -> Iterator[str]:
    """Yield all texts of a JSON value, keys included."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, Mapping):
            pending += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple):
            pending += part


def one_of_pattern(words: Iterable[str]) -> str:
    """Return a regular expression of the longest of some words.

    Common beginnings stand in it once: thousands of alternatives at each `<` of a text would take seconds.
    """
    words_by_first: dict[str, list[str]] = {}
    for word in words:
        if word:
            words_by_first.setdefault(word[0], []).append(word)
    branches = []
    for group in words_by_first.values():
        prefix = _common_prefix(group)
        remainders = [word[len(prefix) :] for word in group]
        rest_pattern = one_of_pattern(remainders)
        optional = "?" if "" in remainders else ""
        branches.append(re.escape(prefix) + (f"(?:{rest_pattern}){optional}" if rest_pattern else ""))
    return "|".join(branches)


def _common_prefix(words: Sequence[str]) -> str:
    least_word = min(words)
    greatest_word = max(words)
    return next(
        (least_word[:i] for i in range(len(least_word)) if least_word[i : i + 1] != greatest_word[i : i + 1]),
        least_word,
    )
