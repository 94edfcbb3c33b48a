"""Conversations drawn from a seed, of texts in many scripts, code and JSON; and their form in chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

from tests.helpers.written_templates import WrittenTemplate

WORDS = (
    *("the cat", "sat on", "The hat", "naïve café", "Größe", "İstanbul", "Ελλάδα", "Привет, мир", "שלום", "مرحبا"),
    *("नमस्ते", "สวัสดีครับ", "東京の猫", "你好,世界", "한국어 문장", "გამარჯობა", "Tiếng Việt", "e\u0301a\u0308"),
    *("\ufb01 \uff21 ½", "\U0001d518\U0001d52b\U0001d526", "\u202eabc\u202c", "\U000f1234", "\u2028", "\u200b"),
    *("🙂", "👩\u200d👩\u200d👧", "🏳\ufe0f\u200d🌈", "🇯🇵", "∑∫√", "\ufeff", "1234567", "3.14159", "-1e-9", "0x1F"),
    *("\u0663\u0664\u0665", "I'll", "DON'T", "isn\u2019t", "…", "—", "!!!", "?", "a_b", "camelCase"),
)
LOOKALIKES = (
    *(
        "<b>",
        "</b>",
        "a < b",
        "a > b && c",
        "[x]",
        "[ ]",
        "<|",
        "|>",
        "<im_end>",
        "im_start",
        "|im_end|",
        "[INST",
        "/INST]",
    ),
    *(
        "<br/>",
        "<!-- -->",
        "<think>",
        "</think>",
        "<tool_call>",
        "{{ x }}",
        "{% if %}",
        "{# #}",
        "</",
        "<>",
        "<s",
        "s>",
    ),
    *("&lt;b&gt;", "\\u003c", "\\ud83d", "%3C", "$1", "\\n", "``", "'''", '"""', "▁the", "Ġthe", "<0x0A >"),
)
CODE = (
    "def f(x: int) -> int:\n\treturn x << 2 | 1  # ok\n",
    "for (int i = 0; i < n; ++i) {\r\n    a[i] = b[i] >> 1;\r\n}\r\n",
    '{"a": [1, 2.5, null, true], "b": {"c": "d\\"e", "f": "\\u00e9"}}',
    "SELECT * FROM t WHERE a <> 'b' AND c <= 3;",
    "```python\nprint('hi')\n```",
    '<div class="x"><p>text</p></div>',
    "# Title\n\n- item\n- [link](http://a.b/c?d=e&f=g)\n\n| a | b |\n|---|---|\n| 1 | 2 |\n",
    "$ grep -rn '^\\s*$' . | wc -l",
    "\\frac{a}{b} \\le \\sum_{i=1}^n x_i",
    "--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n-old\n+new\n",
)
SPACES = (" ", " ", " ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "       ", " \n ", "")
NAMES = ("size", "get_weather", "search-docs", "f", "A1")
KEYS = ("of", "cm", "größe", "a b", "x.y", "0", "type", "名前", "class", "items")
VARIABLES: dict[str, tuple[Any, ...]] = {
    "enable_thinking": (True, False),
    "date_string": ("01 Jan 2025", "2025年1月1日", "<b>today</b>"),
    "mood": ("merry", " ", "😀 & <i>"),
}
"""Values of variables of chat templates."""


class Chat(NamedTuple):
    """Arguments of `Tokenizer.chat`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]


def ordinary_chats(template: WrittenTemplate, seed: int = 0) -> Iterator[Chat]:
    """Yield conversations that a template takes."""
    random = Random(seed)
    while True:
        yield _chat(random, template)


def _chat(random: Random, template: WrittenTemplate) -> Chat:
    tools = [_tool(random) for _ in range(random.randrange(3))] if template.calls and random.random() < 0.5 else None
    messages: list[dict[str, Any]] = []
    if template.has_system and random.random() < 0.4:
        messages.append({"role": random.choice(("system", "developer")), "content": _content(random)})
    turn_count = random.randint(1, 8)
    role = "user"
    while len(messages) < turn_count:
        if role == "user":
            messages.append(_spoken(random, "user"))
        elif template.calls and random.random() < 0.4:
            messages += _called(random, template.calls)
        else:
            messages.append(_spoken(random, "assistant"))
        role = {"user": "assistant", "assistant": "user"}[role]
        if not template.alternates and random.random() < 0.15:
            role = random.choice(("user", "assistant"))
    values = {name: random.choice(VARIABLES[name]) for name in template.variables if random.random() < 0.5}
    return Chat(messages, tools, values)


def _spoken(random: Random, role: str) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": role, "content": _content(random)}
    if random.random() < 0.1:
        turn["name"] = random.choice(("Ada", "名前", None))
    if role == "assistant" and random.random() < 0.2:
        turn["reasoning_content"] = _text(random)
    if role == "assistant" and random.random() < 0.2:
        turn |= {"tool_calls": random.choice(([], None)), "refusal": None}
    return turn


def _called(random: Random, most_calls: int) -> list[dict[str, Any]]:
    """Return a turn with calls, and the turns of their results."""
    calls = [_call(random) for _ in range(random.randint(1, most_calls))]
    turn: dict[str, Any] = {"role": "assistant", "tool_calls": calls}
    kind = random.randrange(3)
    if kind:
        turn["content"] = None if kind == 1 else _content(random)
    results = [{"role": "tool", "content": _content(random), "tool_call_id": call["id"]} for call in calls]
    return [turn, *results]


def _call(random: Random) -> dict[str, Any]:
    arguments: Any = {random.choice(KEYS): _value(random) for _ in range(random.randrange(4))}
    if random.random() < 0.7:
        arguments = json.dumps(arguments, ensure_ascii=random.random() < 0.5, indent=random.choice((None, None, 1)))
    function = {"name": random.choice(NAMES), "arguments": arguments}
    if random.random() < 0.3:
        function = dict(reversed(function.items()))
    call_id = "".join(random.choices("abcxyzABC0123456789", k=9))
    return {"id": call_id, "type": "function", "function": function}


def _tool(random: Random) -> dict[str, Any]:
    properties = {random.choice(KEYS): _schema(random) for _ in range(random.randrange(4))}
    function: dict[str, Any] = {"name": random.choice(NAMES)}
    if random.random() < 0.8:
        function["description"] = _text(random)
    if random.random() < 0.8:
        function["parameters"] = {"type": "object", "properties": properties, "required": [*properties][:1]}
    if random.random() < 0.2:
        function["strict"] = True
    return {"type": "function", "function": function}


def _schema(random: Random) -> dict[str, Any]:
    return random.choice(
        (
            {"type": "string", "description": _text(random)},
            {"type": ["integer", "null"], "minimum": -3, "exclusiveMaximum": 1e3, "default": None},
            {"enum": [_text(random), 1, 2.5, None, True, []]},
            {"type": "array", "items": {"type": "object", "properties": {"größe": {"const": _text(random)}}}},
            {},
        )
    )


def _value(random: Random, level: int = 0) -> Any:
    kind = random.randrange(8 if level < 3 else 6)
    if kind == 6:
        return [_value(random, level + 1) for _ in range(random.randrange(3))]
    if kind == 7:
        return {random.choice(KEYS): _value(random, level + 1) for _ in range(random.randrange(3))}
    return (_text(random), _text(random), random.randint(-(10**12), 10**12), random.random() * 1e3, None, True)[kind]


def _content(random: Random) -> str | list[dict[str, Any]]:
    """Return a text, or parts of one."""
    if random.random() < 0.8:
        return _text(random)
    kinds = ("text", "input_text", "output_text")
    return [{"type": random.choice(kinds), "text": _text(random)} for _ in range(random.randrange(4))]


def _text(random: Random) -> str:
    """Return a text: empty, short, or long, perhaps with spaces around it."""
    kind = random.random()
    if kind < 0.05:
        return random.choice(("", " ", "\n", "\t", "\r\n"))
    size = random.randint(20, 300) if kind > 0.96 else random.randint(1, 9)
    pools = random.choice(((WORDS,), (WORDS, LOOKALIKES), (WORDS, CODE), (WORDS, LOOKALIKES, CODE)))
    text = "".join(random.choice(random.choice(pools)) + random.choice(SPACES) for _ in range(size))
    return random.choice(("", "", "", " ", "\n", "\n\n\t")) + (text if random.random() < 0.5 else text.strip())


def plain_turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them, which `Tokenizer.chat` does by itself.

    - The role developer, which templates do not know, is the system's.
    - Parts are joined, as most templates take a text only.
    - A turn without content has an empty one, as many templates append it to other text.
    - Nulls and an empty list of calls, which clients store with each answer, are left out: templates ask whether a
      turn has the field.
    - Arguments that are a text are parsed, as templates write them by `tojson`.
    - The function of a call is its name and its arguments, in this order, in which models write them; templates write
      the whole function by `tojson`.
    """
    return [_plain_turn(message) for message in messages]


def _plain_turn(message: dict[str, Any]) -> dict[str, Any]:
    turn = {name: value for name, value in message.items() if value not in (None, [])}
    content = message.get("content") or ""
    turn["content"] = content if isinstance(content, str) else "".join(part["text"] for part in content)
    turn["role"] = "system" if message["role"] == "developer" else message["role"]
    if "tool_calls" in turn:
        turn["tool_calls"] = [call | {"function": _plain_function(call["function"])} for call in turn["tool_calls"]]
    return turn


def _plain_function(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"name": function["name"], "arguments": parsed}


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts of a JSON value, names of members included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, member in value.items():
            yield name
            yield from texts_in(member)
    elif isinstance(value, list):
        for entry in value:
            yield from texts_in(entry)
