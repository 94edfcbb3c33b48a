"""Requests for the next turn of a conversation, drawn from a seed: odd histories, tools and texts that spell marks.

The same seed with other marks of equal lengths draws a request of the same structure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

from tests.helpers.door_translation import MESSAGES, OLLAMA, messages_body, ollama_body

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
PIECES = (
    *(
        "the cat",
        "a < b",
        "<b>",
        "[x]",
        "{}",
        '{"a": 1}',
        "東京",
        "🙂",
        "\u0301",
        "\r\n",
        "\n",
        "\t",
        "",
        " ",
        "So:",
        "size",
    ),
    *("\x00", "\u2028", "\ufeff", "\U000f0000", "\U0010fffd", "\\u003c|im_end|\\u003e", "[INST]", "<|user|>", "</s >"),
)
HALVES = ("\ud83d", "\ude42 \ud83d", "\udfff")
"""Halves of characters."""
NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1,
    2**31,
    2**63,
    10**40,
    1e308,
    -1e-300,
    0.5,
    float("inf"),
    float("nan"),
    True,
    "1",
    None,
    [],
    {},
)
IDS = ("call_1", "a", "", "abc012345", "x" * 300, "名前", "call 1\n", "\x00")
NAMES = ("size", "purr", "functions.size", "f-1", "a b", "", "名前", "x" * 65, "size\n", "assistant")
LAST_BYTE = 258
"""Last id of tokens that every chain model has; marks follow."""
DEEP: Any = json.loads('{"a": [' * 40 + "1" + "]}" * 40)
DEEPER: Any = json.loads('{"a": [' * 150 + "1" + "]}" * 150)
VARIABLES = ("enable_thinking", "m", "loop", "call", "range", "namespace", "tojson", "told", "x")
"""Names of variables, among them some of chat templates and of Jinja."""


class Conversation(NamedTuple):
    """A request: its path, and its body without the choice whether to stream."""

    path: str
    body: dict[str, Any]

    def content(self, **changes: Any) -> bytes:
        """Return the body as JSON in ASCII, in which halves of characters are escapes."""
        return json.dumps(self.body | changes).encode()


def harmless(mark: str) -> str:
    """Return letters in the place of a mark. What JSON escapes stays, so that lengths of JSON are equal, too."""
    return re.sub(r'[^"\\]', "w", mark)


def drawn_conversation(seed: int, marks: Sequence[str]) -> Conversation:
    """Return the request of a seed, in whose texts stand marks."""
    return _Grammar(Random(seed), marks).conversation()


class _Grammar:
    """Draws parts of a request. No number of draws depends on the marks."""

    def __init__(self, random: Random, marks: Sequence[str]) -> None:
        self._random = random
        self._marks = marks
        self._oddity = random.choice((0.0, 0.0, 0.01, 0.05, 0.2))
        """Probability with which a field is one that a server may refuse."""
        self._has_halves = random.random() < 0.1
        """Whether halves of characters stand beside the turns: in tools, formats and other fields."""

    def conversation(self) -> Conversation:
        is_chat = self._chance(0.55)
        body = self._settings(is_chat)
        turns = [turn for _ in range(self._random.randint(1, 6)) for turn in self._turns(is_chat)]
        if is_chat:
            body["messages"] = turns
            return self._translated(body)
        body["input"] = self._text() if self._chance(0.15) else turns
        if self._chance(0.3):
            body["instructions"] = self._text()
        return Conversation(RESPONSES, body)

    def _translated(self, body: dict[str, Any]) -> Conversation:
        """Return a chat, often in the form of another door."""
        door = self._random.random()
        if door < 0.4:
            return Conversation(MESSAGES, messages_body(body))
        return Conversation(OLLAMA, ollama_body(body)) if door < 0.6 else Conversation(CHAT, body)

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _odd(self) -> bool:
        return self._chance(self._oddity)

    def _text(self) -> str:
        """Return a text of pieces and marks. A mark may be cut, escaped as JSON, or joined by its neighbours only."""
        text = ""
        for _ in range(self._random.randint(0, 5)):
            kind = self._random.random()
            mark = self._random.choice(self._marks)
            place = int(self._random.random() * len(mark))
            piece = self._random.choice(PIECES)
            if kind < 0.3:
                text += mark
            elif kind < 0.35:
                text += mark[:place] + piece + mark[place:]
            elif kind < 0.4:
                text += json.dumps(mark)[1:-1].replace("<", "\\u003c")
            else:
                text += piece
        return text + (self._random.choice(HALVES) if self._odd() and self._chance(0.2) else "")

    def _note(self) -> str:
        """Return a text that need not be in the prompt, perhaps with half of a character."""
        text = self._text()
        return text + (self._random.choice(HALVES) if self._has_halves and self._chance(0.4) else "")

    def _content(self) -> Any:
        """Return a text, parts of it, or something else."""
        if self._odd():
            bad_parts: list[Any] = [
                *({"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, {"type": "text", "text": None}),
                *(
                    [{"type": "text", "text": "a"}],
                    "a",
                    None,
                    {},
                    {"type": "text", "text": {"type": "text", "text": "a"}},
                ),
            ]
            return self._random.choice([None, 5, {}, DEEP, [self._random.choice(bad_parts)], [[]]])
        if self._chance(0.7):
            return self._text()
        kinds = ("text", "input_text", "output_text")
        parts: list[dict[str, Any]] = []
        for text in (
            self._cut_text() if self._chance(0.4) else [self._text() for _ in range(self._random.randint(0, 3))]
        ):
            part: dict[str, Any] = {"type": self._random.choice(kinds), "text": text}
            if self._chance(0.3):
                part |= {"annotations": [], "logprobs": None, "cache_control": {"type": "ephemeral"}}
            parts.append(part)
        return parts

    def _cut_text(self) -> tuple[str, str]:
        """Return a mark in two parts."""
        mark = self._random.choice(self._marks)
        place = int(self._random.random() * (len(mark) + 1))
        return mark[:place], mark[place:]

    def _turns(self, is_chat: bool) -> Iterator[dict[str, Any]]:
        """Yield a turn, or a call and its result."""
        kind = self._random.random()
        if kind < 0.4:
            yield self._turn(is_chat, self._random.choice(("user", "user", "user", "system", "developer")))
        elif kind < 0.6:
            yield self._turn(is_chat, "assistant")
        elif kind < 0.9:
            yield from self._called(is_chat)
        elif is_chat:
            yield self._result(self._id())
        else:
            summary: Any = [{"type": "summary_text", "text": self._text()}]
            if self._odd():
                summary = self._random.choice((None, [], "a", [5, {}, {"text": None}], DEEP))
            yield {"type": "reasoning", "id": self._id(), "summary": summary, "encrypted_content": self._note()}

    def _turn(self, is_chat: bool, role: Any) -> dict[str, Any]:
        if self._odd():
            role = self._random.choice(("tool", "function", "User", "", None, 5, "<|im_start|>"))
        turn: dict[str, Any] = {"role": role, "content": self._content()}
        if not is_chat and self._chance(0.5):
            turn |= {"type": "message", "id": self._id(), "status": "completed"}
        if is_chat and self._chance(0.15):
            turn["name"] = self._random.choice((self._text(), "Ada", None))
        if role == "assistant" and self._chance(0.5):
            replayed: dict[str, Any] = {
                "refusal": None, "audio": None, "annotations": [], "function_call": None, "tool_calls": None,
                "reasoning_content": self._text(), "reasoning_details": [DEEP], "x": {"y": [self._note()]},
            }  # fmt: skip
            turn |= dict(self._random.sample(sorted(replayed.items(), key=lambda field: field[0]), 4))
        if role == "assistant" and self._odd():
            turn["reasoning_content"] = self._random.choice((5, [self._text()], {"text": self._text()}, DEEPER))
        if self._odd():
            turn[self._random.choice(("x", "thinking", "tool_call_id", "function_call"))] = self._text()
        return turn

    def _called(self, is_chat: bool) -> Iterator[dict[str, Any]]:
        calls = [self._call() for _ in range(self._random.randint(1, 3))]
        if is_chat:
            turn = {"role": "assistant", "tool_calls": [self._nested_call(call) for call in calls]}
            yield turn | ({"content": self._content()} if self._chance(0.5) else {"content": None})
        for call in calls:
            if not is_chat:
                yield {"type": "function_call", "call_id": call["id"], "status": None, **call}
            if self._chance(0.8):
                result = self._result(self._id() if self._odd() else call["id"])
                if not is_chat:
                    names = {"role": "type", "tool_call_id": "call_id", "content": "output"}
                    result = {names.get(name, name): value for name, value in result.items()}
                    result["type"] = "function_call_output"
                yield result

    def _result(self, call_id: Any) -> dict[str, Any]:
        result = {"role": "tool", "content": self._content(), "tool_call_id": call_id}
        if self._odd():
            del result[self._random.choice(("content", "tool_call_id"))]
        return result | ({"name": self._text(), "is_error": False} if self._chance(0.2) else {})

    def _id(self) -> Any:
        if self._odd():
            return self._random.choice((*NUMBERS, self._text()))
        return self._text() if self._chance(0.2) else self._random.choice(IDS)

    def _call(self) -> dict[str, Any]:
        name = self._random.choice(NAMES if self._odd() else NAMES[:4])
        return {"id": self._id(), "name": name, "arguments": self._arguments()}

    def _nested_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = {"name": call["name"], "arguments": call["arguments"]}
        nested: dict[str, Any] = {"id": call["id"], "type": "function", "function": function}
        if self._chance(0.2):
            nested |= {"index": 0, "x": self._text()}
        if self._odd():
            del nested[self._random.choice(("id", "type", "function"))]
        return nested

    def _arguments(self) -> Any:
        values = {self._text(): self._value() for _ in range(self._random.randint(0, 3))}
        written = json.dumps(values, ensure_ascii=self._chance(0.5))
        kind = self._random.random()
        place = int(self._random.random() * len(written))
        if kind < 0.6:
            return written
        if kind < 0.75:
            return written[:place]
        other_arguments = (
            "",
            " ",
            "null",
            "[]",
            "5",
            '"x"',
            "{",
            "NaN",
            json.dumps(DEEP),
            '{"a": 1e999}',
            '{"a": ' + "9" * 400,
        )
        if kind < 0.95:
            return self._random.choice((*other_arguments, self._text(), json.dumps(self._text())))
        return values if self._odd() else written

    def _value(self) -> Any:
        return self._random.choice((self._text(), [self._text()], {self._text(): None}, 10**40, 1.5, True, None))

    def _settings(self, is_chat: bool) -> dict[str, Any]:
        random = self._random
        limit = "max_tokens" if is_chat else "max_output_tokens"
        body: dict[str, Any] = {
            limit: random.choice((1, 2, 4, 8, 16, 24)),
            "seed": random.randrange(1000),
            "model": "chain",
        }
        drawn: dict[str, Callable[[], Any]] = {
            "temperature": lambda: random.choice((0, 0.7, 2)),
            "top_k": lambda: random.choice((1, 5, 40)),
            "ignore_eos": lambda: random.choice((True, False)),
            "parallel_tool_calls": lambda: random.choice((True, False, None)),
            "reasoning_format": lambda: random.choice(("none", "auto", "deepseek")),
            "continue_final_message": lambda: random.choice((True, False)),
            "add_generation_prompt": lambda: random.choice((True, True, True, False)),
            "chat_template_kwargs": lambda: {random.choice(VARIABLES): random.choice((False, self._note(), DEEP))},
            "user": self._note,
            "metadata": lambda: {self._note(): self._note()},
            "cache_salt": self._note,
            "thinking": lambda: {"type": random.choice(("enabled", "disabled", "disabled"))},
            "stop_token_ids": lambda: [random.randint(0, LAST_BYTE), random.randint(0, LAST_BYTE)],
            "mode": lambda: random.choice(("ar", "ngram", "ngram")),
        }
        if is_chat:
            drawn |= {
                "stop": lambda: random.choice(
                    ([self._mark()], self._mark(), [self._mark(), "w", "\n"], ["}"], "\ud800")
                ),
                "n": lambda: 2,
                "logprobs": lambda: True,
                "presence_penalty": lambda: 2.0,
                "logit_bias": self._biases,
                "reasoning_effort": lambda: random.choice(("none", "high", self._note())),
            }
        for name, draw in drawn.items():
            if self._chance(0.25 if name in ("stop", "logit_bias") else 0.12):
                body[name] = draw()
        if self._chance(0.6):
            body |= self._tools(is_chat)
        if self._chance(0.25):
            form = self._format(is_chat)
            body |= {"response_format": form} if is_chat else {"text": {"format": form}}
        if self._odd():
            body[random.choice((*drawn, "seed", limit, "tools", "stream_options", "x", "top_p"))] = random.choice(
                NUMBERS
            )
        return body

    def _biases(self) -> dict[str, float]:
        """Return biases of tokens, often of marks, which then stand anywhere in an answer."""
        last = LAST_BYTE + len(self._marks)
        return {
            str(self._random.randint(LAST_BYTE - 5, last)): self._random.choice((-100, 10, 20, 30, 100))
            for _ in range(self._random.randint(1, 4))
        }

    def _mark(self) -> str:
        return self._random.choice(self._marks)

    def _tools(self, is_chat: bool) -> dict[str, Any]:
        count = self._random.randint(1, 3)
        names = NAMES[:1] + NAMES[3:4] + (self._random.choice(NAMES) if self._odd() else "purr",)
        tools = [self._tool(is_chat, name) for name in names[:count]]
        if self._chance(0.1):
            tools.append({"type": "web_search"})
        choices: list[Any] = ["none", "auto", "required", *self._named_choices(is_chat)]
        fields: dict[str, Any] = {"tools": tools}
        if self._chance(0.6):
            fields["tool_choice"] = self._random.choice(choices)
        return fields

    def _named_choices(self, is_chat: bool) -> list[Any]:
        name = "bark" if self._odd() else "size"
        good = {"type": "function", "function": {"name": name}} if is_chat else {"type": "function", "name": name}
        bad = ({"type": "web_search"}, {"type": "function"}, {"name": "size"}, "any", 5, {"type": "allowed_tools"})
        return [good, self._random.choice(bad) if self._odd() else good]

    def _tool(self, is_chat: bool, name: str) -> dict[str, Any]:
        function: dict[str, Any] = {"name": name}
        if self._chance(0.7):
            function["description"] = self._note()
        if self._chance(0.8):
            function["parameters"] = self._parameters()
        if self._chance(0.3):
            function["strict"] = self._chance(0.5)
        if self._chance(0.1):
            function["x"] = self._note()
        return {"type": "function", "function": function} if is_chat else {"type": "function", **function}

    def _parameters(self) -> dict[str, Any]:
        """Return a schema of an object, often one that is seldom seen."""
        text = self._note()
        size = {"of": {"type": "string", "description": text}, "cm": {"type": "integer"}}
        schemas: list[dict[str, Any]] = [
            {"type": "object", "properties": size, "required": ["of", "cm"]},
            {"type": "object", "properties": size, "required": ["cm"], "additionalProperties": False},
            {"type": "object", "properties": {}},
            {},
            {"type": ["object", "null"], "description": text},
            {"properties": {text or "a": {"enum": [text, 1, None, {"a": [text]}]}, "b": True}},
            {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}}}},
            {"type": "object", "patternProperties": {"^x": {"type": "number"}}, "minProperties": 1},
            {"type": "object", "properties": {"a": {"type": "array", "items": {"anyOf": [{"const": text}, {}]}}}},
            {"type": "object", "properties": {"a": {"type": ["string", "integer"], "default": text}}, "title": text},
            {"type": "object", "required": ["unlisted"], "additionalProperties": {"type": "boolean"}},
            {"type": "object", "properties": {"a": {"oneOf": [{"type": "null"}, {"type": "string", "maxLength": 2}]}}},
            {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-c]+$", "format": "date"}}},
            {"type": "object", "properties": {"a": {"type": "integer", "minimum": -(10**30), "maximum": 10**30}}},
            {"allOf": [{"type": "object", "properties": size}, {"required": ["of"]}]},
            {"type": "object", "properties": {"a": {"x-note": text, "type": "object", "properties": size}}},
        ]
        odd_schemas: list[dict[str, Any]] = [
            {"type": "string"}, {"not": {}}, {"type": "object", "properties": []}, {"$ref": "http://x/y"}, DEEP,
            {"type": "object", "properties": {"a": {"type": "text"}}}, {"type": "object", "required": "a"},
        ]  # fmt: skip
        return self._random.choice(odd_schemas if self._odd() else schemas)

    def _format(self, is_chat: bool) -> Any:
        schema = self._parameters()
        nested = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        flat = {"type": "json_schema", "name": "x", "schema": schema}
        forms: list[Any] = [
            {"type": "text"}, {"type": "json_object"}, nested if is_chat else flat, nested if is_chat else flat,
            {"type": "regex", "regex": "[a-c]{1,5}"}, {"type": "grammar", "grammar": 'start: "a"+'},
        ]  # fmt: skip
        odd_forms: list[Any] = [
            flat if is_chat else nested,
            {"type": "xml"},
            {},
            "json",
            {"type": "regex", "regex": "("},
        ]
        return self._random.choice(odd_forms if self._odd() else forms)
