"""Tool calls in generated text: Qwen's, between tags, and Llama 3's, with nothing beside them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from triforce.engine.output_stream import partial_match
from triforce.errors import RequestError
from triforce.interface.closed_objects import closed_objects
from triforce.interface.grammar import Grammar
from triforce.structured_output.compiler import schema_grammar

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The parameters of a function that has none."""


@dataclass(frozen=True, slots=True)
class Call:
    """A function by name, and its arguments as the JSON of an object."""

    name: str
    arguments: str


Parsed = str | Call


class ToolCallParser:
    """Separates calls from other text while it grows. What only looks like a call is text; here all is text."""

    def add(self, text: str, last: bool) -> list[Parsed]:
        """Return the parts that are certain by now; all that are left, where this is the last text."""
        return [text]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Each call is an object with the name and, as `arguments`, an object; `tagged` calls may be several."""

    arguments: str
    tagged: bool

    def grammar(self, functions: Mapping[str, dict[str, Any] | None], several: bool) -> Grammar:
        """Return a grammar of texts that are calls of these functions. Raises RequestError."""
        opening, closing = (f"{OPEN}\n{{", f"}}\n{CLOSE}") if self.tagged else ("{", "}")
        rules = ['start: call ("\\n" call)*' if several and self.tagged else "start: call"]
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
        for i, (name, parameters) in enumerate(functions.items()):
            before = f'{opening}"name": "{name}", "{self.arguments}": '
            rules.append(f"call_{i}: {json.dumps(before)} arguments_{i} {json.dumps(closing)}")
            try:
                rules.append(f"arguments_{i}: {schema_grammar(closed_objects(parameters or NOTHING))}")
            except RecursionError as error:
                raise RequestError(f"the parameters of {name} are nested too deeply; simplify them") from error
            except ValueError as error:
                raise RequestError(f"the parameters of {name} cannot be kept to: {error}") from error
        return Grammar.lark("\n".join(rules))

    def parser(self, names: Collection[str]) -> ToolCallParser:
        """Return a parser for one text of a model that may call these functions."""
        return _Tagged(self, names) if self.tagged else _Whole(self, names)

    def call(self, text: str, names: Collection[str]) -> Call | None:
        """Return the call that a text is, or None if it calls none of these functions."""
        try:
            written = json.loads(text)
            name, arguments = written["name"], written[self.arguments]
            if isinstance(arguments, dict) and name in names:
                return Call(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        return None


QWEN = CallFormat("arguments", tagged=True)
LLAMA = CallFormat("parameters", tagged=False)


def call_format(template: str) -> CallFormat | None:
    """Return the call format of a chat template; None if it is not known."""
    if "tools" not in template:
        return None
    if OPEN in template and '"arguments"' in template:
        return QWEN
    return LLAMA if '"parameters": ' in template and "ipython" in template else None


class _BufferedParser(ToolCallParser):
    def __init__(self, form: CallFormat, names: Collection[str]) -> None:
        self._form, self._names, self._buffer = form, names, ""

    def _release(self, length: int) -> list[Parsed]:
        shown, self._buffer = self._buffer[:length], self._buffer[length:]
        return [shown] if shown else []


class _Tagged(_BufferedParser):
    _called = False

    def add(self, text: str, last: bool) -> list[Parsed]:
        self._buffer += text
        parsed: list[Parsed] = []
        while (start := self._buffer.find(OPEN)) >= 0 and (stop := self._buffer.find(CLOSE, start)) >= 0:
            call = self._form.call(self._buffer[start + len(OPEN) : stop], self._names)
            if call is None:
                parsed += self._release(stop + len(CLOSE))
                continue
            parsed += [*self._release(len(self._buffer[:start].rstrip())), call]
            self._buffer, self._called = self._buffer.partition(CLOSE)[2], True
        # Text before `certain` is no part of a call, which begins or may begin there.
        certain = start if start >= 0 else len(self._buffer) - partial_match(self._buffer, [OPEN])
        parsed += self._release(len(self._buffer[:certain].rstrip()))
        if last:
            parsed += self._release(len(self._buffer.rstrip()) if self._called else len(self._buffer))
        return parsed


class _Whole(_BufferedParser):
    _plain = False

    def add(self, text: str, last: bool) -> list[Parsed]:
        self._buffer += text
        self._plain = self._plain or self._buffer.lstrip()[:1] not in ("", "{")
        if last and not self._plain and (call := self._form.call(self._buffer, self._names)):
            return [call]
        return self._release(len(self._buffer)) if last or self._plain else []
