"""How models write calls of functions: as Qwen does, between tags, or as Llama 3 does, with nothing beside them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from triforce.errors import RequestError
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


Said = str | Call


class CallReader(Protocol):
    """Tells calls from other text while it grows. A text that only looks like a call is a text."""

    def add(self, text: str) -> list[Said]:
        """What is certain by now."""

    def end(self) -> list[Said]:
        """The rest."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Each call is an object with the name and, as `arguments`, an object; `tagged` calls may be several."""

    arguments: str
    tagged: bool

    def grammar(self, functions: Mapping[str, dict[str, Any] | None], several: bool) -> Grammar:
        """Texts that are calls of these functions, by name and parameters, and nothing else. Raises RequestError."""
        opening, closing = (f"{OPEN}\n{{", f"}}\n{CLOSE}") if self.tagged else ("{", "}")
        rules = ['start: call ("\\n" call)*' if several and self.tagged else "start: call"]
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
        for i, (name, parameters) in enumerate(functions.items()):
            before = f'{opening}"name": "{name}", "{self.arguments}": '
            rules.append(f"call_{i}: {json.dumps(before)} arguments_{i} {json.dumps(closing)}")
            try:
                rules.append(f"arguments_{i}: {schema_grammar(parameters or NOTHING)}")
            except RecursionError as error:
                raise RequestError(f"the parameters of {name} are nested too deeply; simplify them") from error
            except ValueError as error:
                raise RequestError(f"the parameters of {name} cannot be kept to: {error}") from error
        return Grammar.lark("\n".join(rules))

    def reader(self, names: Collection[str]) -> CallReader:
        """For one text, of a model that may call these functions."""
        return _Tagged(self, names) if self.tagged else _Whole(self, names)

    def call(self, text: str, names: Collection[str]) -> Call | None:
        """The call that a text is, if it is one of these functions."""
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
    """How a model with this chat template writes calls; None if that is not known."""
    if "tools" not in template:
        return None
    if OPEN in template and '"arguments"' in template:
        return QWEN
    return LLAMA if '"parameters": ' in template and "ipython" in template else None


class Plain:
    """A `CallReader` of a model that has nothing to call."""

    def add(self, text: str) -> list[Said]:
        return [text]

    def end(self) -> list[Said]:
        return []


class _Tagged:
    def __init__(self, form: CallFormat, names: Collection[str]) -> None:
        self._form, self._names = form, names
        self._held, self._called = "", False

    def add(self, text: str) -> list[Said]:
        self._held += text
        said: list[Said] = []
        while (start := self._held.find(OPEN)) >= 0 and (stop := self._held.find(CLOSE, start)) >= 0:
            call = self._form.call(self._held[start + len(OPEN) : stop], self._names)
            if call is None:
                said += self._say(stop + len(CLOSE))
                continue
            said += [*self._say(len(self._held[:start].rstrip())), call]
            self._held, self._called = self._held.partition(CLOSE)[2], True
        return said + self._say(len(self._held[: self._undecided(start)].rstrip()))

    def end(self) -> list[Said]:
        return self._say(len(self._held.rstrip()) if self._called else len(self._held))

    def _undecided(self, start: int) -> int:
        """Where a call begins, or may begin."""
        if start >= 0:
            return start
        longest = max((n for n in range(1, len(OPEN)) if self._held.endswith(OPEN[:n])), default=0)
        return len(self._held) - longest

    def _say(self, length: int) -> list[Said]:
        shown, self._held = self._held[:length], self._held[length:]
        return [shown] if shown else []


class _Whole:
    def __init__(self, form: CallFormat, names: Collection[str]) -> None:
        self._form, self._names = form, names
        self._held, self._plain = "", False

    def add(self, text: str) -> list[Said]:
        self._held += text
        begun = self._held.lstrip()
        self._plain = self._plain or begun[:1] not in ("", "{")
        return self._say() if self._plain else []

    def end(self) -> list[Said]:
        call = self._form.call(self._held, self._names)
        return [call] if call else self._say()

    def _say(self) -> list[Said]:
        shown, self._held = self._held, ""
        return [shown] if shown else []
