"""Calls of functions in the text of an answer: their JSON, and the parsing of a growing text into text and calls."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from triforce.engine.engine import partial_match
from triforce.interface.messages import CALL_CLOSE, CALL_OPEN

ARGUMENTS_KEYS = ("arguments", "parameters")
"""Keys of a call's arguments. A model is asked for one of them, and some write the other."""
_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,64}")
_IN_STRING = re.compile(r'[\\"]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_BARE_START = re.compile(r"\s*(?:```(?:json)?\s*)?(?=\{)")
_BARE_START_PREFIX = re.compile(r"\s*(?:`{0,3}|```(?:j|js|jso|json)?\s*)")
_HEAD_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Call:
    """A function by name, and its arguments: the JSON of an object, as the model wrote it."""

    name: str
    arguments: str


Parsed = str | Call


class ObjectEnd:
    """Finds the end of a JSON object in a growing text. It reads each character once."""

    def __init__(self, start: int) -> None:
        """start: index of the object's opening brace."""
        self._position = start
        self._depth = 0
        self._in_string = False
        self._end: int | None = None

    def find(self, text: str) -> int | None:
        """Return the index behind the object; None if the text ends before. `text` may only have grown since."""
        while self._end is None:
            match = (_IN_STRING if self._in_string else _OUTSIDE).search(text, self._position)
            if match is None:
                self._position = len(text)
                break
            character = match[0]
            self._position = match.end()
            if character == "\\":
                if match.end() == len(text):  # the escaped character is yet to come
                    self._position = match.start()
                    return None
                self._position += 1
            elif character == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if character in "{[" else -1
                if not self._depth:
                    self._end = self._position
        return self._end


def read_call(text: str, names: Collection[str] | None = None) -> Call | None:
    """Return the call that a JSON object describes, or None. names: accepted functions; None accepts any name."""
    try:
        members = _raw_members(text)
        name = json.loads(members["name"])
        if not isinstance(name, str) or not _NAME.fullmatch(name) or (names is not None and name not in names):
            return None
        raw_arguments = next((members[key] for key in ARGUMENTS_KEYS if key in members), "{}")
        arguments = json.loads(raw_arguments)
        if isinstance(arguments, str):  # some models write JSON in a text
            raw_arguments = arguments.strip() or "{}"
            arguments = _DECODER.decode(raw_arguments)
        if arguments is None:
            return Call(name, "{}")
        return Call(name, _encodable(raw_arguments, arguments)) if isinstance(arguments, dict) else None
    except (KeyError, ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_LENIENT = json.JSONDecoder(parse_constant=_refuse_constant, strict=False)
"""A decoder that takes line ends inside strings, which models write."""
_SPACE = re.compile(r"\s*")


def _raw_members(text: str) -> dict[str, str]:
    """Return the members of a JSON object, each as JSON in the model's own characters. Raises ValueError."""
    members: dict[str, str] = {}
    place = _space_end(text, 1)
    while text[place : place + 1] != "}":
        key, place = _LENIENT.raw_decode(text, place)
        place = _space_end(text, place)
        if not isinstance(key, str) or text[place : place + 1] != ":":
            raise ValueError("a member has no name")
        start = _space_end(text, place + 1)
        value, place = _LENIENT.raw_decode(text, start)
        members[key] = _valid(text[start:place], value)
        place = _space_end(text, place)
        if text[place : place + 1] == ",":
            place = _space_end(text, place + 1)
            if text[place : place + 1] == "}":
                raise ValueError("a comma ends the object")
        elif text[place : place + 1] != "}":
            raise ValueError("a member does not end")
    if _space_end(text, place + 1) < len(text):
        raise ValueError("text follows the object")
    return members


def _space_end(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return match.end() if match else place


def _valid(raw: str, value: Any) -> str:
    """Return JSON as it was written, or rewritten where strings held bare control characters."""
    try:
        _DECODER.decode(raw)
        return raw
    except ValueError:
        return json.dumps(value, ensure_ascii=False)


def _encodable(raw: str, value: Any) -> str:
    """Return JSON as it was written. Halves of characters, which UTF-8 cannot hold, are written as escapes."""
    try:
        raw.encode()
        return raw
    except UnicodeEncodeError:
        return json.dumps(value)


class ToolCallParser:
    """Separates calls from other text in a growing answer. This base class treats all as text."""

    is_cut = False
    """Whether the answer ended inside a call, which is then dropped."""

    def add(self, text: str, is_final: bool) -> list[Parsed]:
        """Return the new parts that are certain. With `is_final` the text is complete, and all parts are returned."""
        return [text]


class CallParser(ToolCallParser):
    """Finds calls that stand between marks, and an answer that is one bare call.

    names: functions of the request. marked: whether calls may stand between `CALL_OPEN` and `CALL_CLOSE`; then a call
    of an unknown function is a call, too, as no marks may reach the text. bare: whether an answer that consists of the
    JSON of one call, perhaps in a code fence, is a call. several: whether text and calls may follow a call. forced:
    whether a grammar allows calls only.
    """

    def __init__(
        self, names: Collection[str], *, marked: bool, bare: bool, several: bool, forced: bool = False
    ) -> None:
        self._names = names
        self._marks = [CALL_OPEN, CALL_CLOSE] if marked else []
        self._several = several
        self._forced = forced
        self._text = ""  # of the answer, from `_place` on unread
        self._place = 0
        self._read = self._read_bare if bare else self._read_text
        self._bare_heads = (
            *(f'{{"name":"{name}"' for name in names),
            *(f'{{"{key}":' for key in ARGUMENTS_KEYS),
            '{"type":"function"',
        )
        self._object_end: ObjectEnd | None = None
        self._object_start = 0
        self._has_call = False
        self._block_has_call = False

    def add(self, text: str, is_final: bool) -> list[Parsed]:
        if self._object_end is None:  # else it counts from the beginning of the text
            self._text = self._text[self._place :]
            self._place = 0
        self._text += text
        parsed: list[Parsed] = []
        while self._read(parsed, is_final):
            pass
        return parsed

    def _read_bare(self, parsed: list[Parsed], is_final: bool) -> bool:
        """Hold text back while the answer can still be one bare call. Returns whether another reader goes on."""
        end = self._bare_object_end()
        may_be_bare = self._may_be_bare(end)
        if may_be_bare and not is_final:
            return False
        if may_be_bare and end and (call := read_call(self._text[self._object_start : end], self._names)):
            parsed.append(call)
            self._place = len(self._text)
            return False
        if self._forced:
            self.is_cut = True
            return False
        self._object_end = None
        self._read = self._read_text
        return True

    def _bare_object_end(self) -> int | None:
        """Return the index behind the object at the beginning of the answer; None before it ends."""
        if self._object_end is None and (match := _BARE_START.match(self._text)):
            self._object_start = match.end()
            self._object_end = ObjectEnd(match.end())
        return self._object_end.find(self._text) if self._object_end else None

    def _may_be_bare(self, end: int | None) -> bool:
        if self._object_end is None:
            return bool(_BARE_START_PREFIX.fullmatch(self._text))
        start = self._object_start
        head = "".join(self._text[start : start + _HEAD_CHARACTERS].split())
        if self._marks and not any(
            head.startswith(call_head) or call_head.startswith(head) for call_head in self._bare_heads
        ):
            return False
        return end is None or "```".startswith(self._text[end:].strip())

    def _read_text(self, parsed: list[Parsed], is_final: bool) -> bool:
        """Release text up to the next mark. White space before a mark, and behind the last call, is dropped."""
        starts = {start: mark for mark in self._marks if (start := self._text.find(mark, self._place)) >= 0}
        if starts:
            start = min(starts)
            self._release(parsed, start, trimmed=True)
            self._place = start + len(starts[start])
            if starts[start] == CALL_OPEN:
                self._block_has_call = False
                self._read = self._read_call
            return True
        certain_end = len(self._text) - partial_match(self._text[self._place :], self._marks)
        if is_final:
            self._release(parsed, len(self._text), trimmed=self._has_call)
            self._place = len(self._text)
        else:
            self._release(parsed, certain_end, trimmed=True)
        return False

    def _read_call(self, parsed: list[Parsed], is_final: bool) -> bool:
        """Read calls behind a mark, up to its closing mark. What is no call there is text, without its marks."""
        if self._object_end is None:
            while self._text[self._place : self._place + 1].isspace():
                self._place += 1
            next_text = self._text[self._place : self._place + len(CALL_CLOSE)]
            if next_text == CALL_CLOSE:
                self._place += len(CALL_CLOSE)
                self._read = self._read_text if self._several or not self._block_has_call else self._read_nothing
                return True
            if CALL_CLOSE.startswith(next_text):
                self.is_cut = is_final and not self._block_has_call
                self._place = len(self._text) if is_final else self._place
                return False
            if next_text.startswith("}") and self._block_has_call:  # one brace too many
                self._place += 1
                return True
            if not next_text.startswith("{"):
                self._read = self._read_text
                return True
            self._object_end = ObjectEnd(self._place)
        end = self._object_end.find(self._text)
        if end is None:
            self.is_cut = is_final
            self._place = len(self._text) if is_final else self._place
            return False
        call = read_call(self._text[self._place : end])
        parsed.append(call or self._text[self._place : end])
        self._has_call = self._has_call or call is not None
        self._block_has_call = self._block_has_call or call is not None
        self._place = end
        self._object_end = None
        if call and not self._several:
            self._read = self._read_nothing
        return True

    def _read_nothing(self, parsed: list[Parsed], is_final: bool) -> bool:
        self._place = len(self._text)
        return False

    def _release(self, parsed: list[Parsed], end: int, *, trimmed: bool) -> None:
        """Release text up to an index. trimmed: without white space at its end, which stays unread."""
        text = self._text[self._place : end]
        text = text.rstrip() if trimmed else text
        self._place += len(text)
        if text:
            parsed.append(text)
