"""Calls in JSON: an object with the name of a function and its arguments, in the model's own characters."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, NoReturn

from triforce.server.answers.answer_parts import AnswerPart, Call
from triforce.server.answers.call_parser import BlockEnd
from triforce.server.answers.marks import Marks

ARGUMENTS_KEYS = ("arguments", "parameters")
"""Keys of a call's arguments. A model is asked for one of them, and some write the other."""
NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")
_IN_STRING = re.compile(r'[\\"]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_SEPARATORS = re.compile(r"[\s\[\],;]*")
"""Characters between the objects of a list, or of several calls in a row."""


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
        if not isinstance(name, str) or not NAME.fullmatch(name) or (names is not None and name not in names):
            return None
        arguments = read_arguments(next((members[key] for key in ARGUMENTS_KEYS if key in members), "{}"))
        return None if arguments is None else Call(name, arguments)
    except (KeyError, ValueError, RecursionError):
        return None


def read_arguments(raw: str) -> str | None:
    """Return the arguments of a call as the JSON of an object, from JSON as a model wrote it; None if they are none."""
    try:
        arguments = _LENIENT.decode(raw)
        if isinstance(arguments, str):  # some models write JSON in a text
            raw = arguments.strip() or "{}"
            arguments = _LENIENT.decode(raw)
    except (ValueError, RecursionError):
        return None
    if arguments is None:
        return "{}"
    return valid_json(raw) if isinstance(arguments, dict) else None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_LENIENT = json.JSONDecoder(parse_constant=_refuse_constant, strict=False)
"""A decoder that takes line ends inside strings, which models write."""
_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_UNWRITABLE = re.compile("[\x00-\x1f\ud800-\udfff]")


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
        _, place = _LENIENT.raw_decode(text, start)
        members[key] = valid_json(text[start:place])
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


def _separators_end(text: str, place: int) -> int:
    match = _SEPARATORS.match(text, place)
    return match.end() if match else place


def _space_end(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return match.end() if match else place


def decoded_json(raw: str) -> Any:
    """Return the value of JSON whose strings may hold bare control characters. Raises ValueError, also for NaN."""
    return _LENIENT.decode(raw)


def valid_json(raw: str) -> str:
    """Return JSON as a model wrote it, with escapes for bare control characters and halves of characters in strings."""
    return _STRING.sub(lambda string: _UNWRITABLE.sub(_escaped, string[0]), raw)


def _escaped(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1]


class JsonBlock:
    """Calls in JSON behind an opening mark: one object, several, or a list of them.

    opening: the mark. closing: the mark behind the calls; empty for a format without one. It may lack at the end.
    A call of an unknown function is a call, too, as no markup may reach the text.
    """

    def __init__(self, marks: Marks, opening: str, closing: str = "") -> None:
        self._marks = marks
        self._closing = closing
        self._place = len(opening)
        self._text_start = self._place  # of what is text unless an object follows
        self._object: ObjectEnd | None = None
        self._parts: list[AnswerPart] = []
        self._has_call = False
        self._has_extra_brace = False

    def read(self, text: str, is_final: bool) -> BlockEnd | None:
        while True:
            if self._object is None:
                if (end := self._seek(text, is_final)) is not None:
                    return end
                if self._object is None:
                    return None
            object_end = self._object.find(text)
            if object_end is None:
                return BlockEnd(self._parts, len(text), is_cut=True) if is_final else None
            raw = self._marks.restored_json(text[self._place : object_end])
            call = read_call(raw)
            self._parts.append(call or raw)
            self._has_call = self._has_call or call is not None
            self._object = None
            self._place = object_end
            self._text_start = object_end
            self._has_extra_brace = False

    def _seek(self, text: str, is_final: bool) -> BlockEnd | None:
        """Go to the next object; return the block's end if none follows. Without either, more text must come."""
        place = _separators_end(text, self._place)
        if text[place : place + 1] == "}" and self._has_call and not self._has_extra_brace:  # one too many
            self._has_extra_brace = True
            place = _separators_end(text, place + 1)
        self._place = place
        if text.startswith("{", place):
            self._object = ObjectEnd(place)
            return None
        next_text = text[place : place + len(self._closing)]
        if self._closing and next_text == self._closing:
            return BlockEnd(self._parts, place + len(self._closing))
        if place == len(text) or (next_text and self._closing.startswith(next_text)):
            return BlockEnd(self._parts, len(text), is_cut=not self._has_call) if is_final else None
        return BlockEnd(self._parts, place if self._has_call else _space_end(text, self._text_start))


_BARE_START = re.compile(r"\s*(?:```(?:json)?\s*)?(?=[\[{])")
_BARE_START_PREFIX = re.compile(r"\s*(?:`{0,3}|```(?:j|js|jso|json)?\s*)")
_HEAD_CHARACTERS = 256


class BareCalls:
    """An answer that consists of calls in JSON, perhaps in a code fence. What ends otherwise is text.

    names: functions of the request, the only ones that are called in this way. is_format: whether this is the model's
    own format; else an object is held back only while it begins as a call does.
    """

    def __init__(self, marks: Marks, names: Collection[str], *, is_format: bool, forced: bool = False) -> None:
        self._marks = marks
        self._names = names
        self._forced = forced
        self._is_format = is_format
        self._heads = [
            *(f'{{"name":"{name}"' for name in names),
            *(f'{{"{key}":' for key in ARGUMENTS_KEYS),
            '{"type":"function"',
        ]
        self._start: int | None = None
        self._place = 0
        self._object: ObjectEnd | None = None
        self._calls: list[AnswerPart] = []

    def read(self, text: str, is_final: bool) -> BlockEnd | None:
        if self._start is None:
            match = _BARE_START.match(text)
            if match is None:
                is_short = len(text) <= _HEAD_CHARACTERS and not is_final
                may_begin = is_short and bool(_BARE_START_PREFIX.fullmatch(text))
                return None if may_begin else self._not_bare(text, is_final)
            self._start = self._place = match.end()
        if not self._has_head(text):
            return self._not_bare(text, is_final)
        while True:
            if self._object is None:
                self._place = _separators_end(text, self._place)
                if not text.startswith("{", self._place):
                    break
                self._object = ObjectEnd(self._place)
            end = self._object.find(text)
            if end is None:
                return self._not_bare(text, is_final) if is_final else None
            call = read_call(self._marks.restored_json(text[self._place : end]), self._names)
            if call is None:
                return self._not_bare(text, is_final)
            self._calls.append(call)
            self._object = None
            self._place = end
        if not "```".startswith(text[self._place :].strip()):
            return self._not_bare(text, is_final)
        if not is_final:
            return None
        return BlockEnd(self._calls, len(text)) if self._calls else self._not_bare(text, is_final)

    def _has_head(self, text: str) -> bool:
        """Whether the answer begins as a call does, as far as it goes."""
        return self._is_format or self._begins_call(text, self._start or 0)

    def _begins_call(self, text: str, start: int) -> bool:
        head = "".join(text[start : start + _HEAD_CHARACTERS].split()).lstrip("[")
        return any(head.startswith(call_head) or call_head.startswith(head) for call_head in self._heads)

    def _not_bare(self, text: str, is_final: bool) -> BlockEnd:
        """Return the end before any text. A call that is cut is no text, and neither is what a grammar forced."""
        is_cut = is_final and (self._forced or self._is_cut_call(text))
        return BlockEnd(self._calls, len(text), is_cut=True) if is_cut else BlockEnd()

    def _is_cut_call(self, text: str) -> bool:
        """Whether a text without its end begins as a call does."""
        is_open = self._object is not None and self._object.find(text) is None
        return is_open and self._begins_call(text, self._place)
