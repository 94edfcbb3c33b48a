"""Requests whose work grows with their size: each would block all others if a server did it on the event loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TOKENIZE = "/tokenize"
MEBIBYTES = 15
"""Bytes of a body: nearly the server's default limit."""


@dataclass(frozen=True, slots=True)
class HostileRequest:
    """A kind of request: returns the i-th body, of about `size` bytes if the kind grows."""

    path: str
    body: Callable[[int, int], bytes]
    statuses: Sequence[int]
    """Allowed status codes."""
    count: int = 1
    """Concurrent requests."""
    patience: float = 120.0
    """Seconds after which the client disconnects."""


def schema(kind: dict[str, Any]) -> bytes:
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {"a": kind}}}}
    return json.dumps({"prompt": "the cat", "max_tokens": 2, "response_format": form}).encode()


def repeated(head: str, piece: str, tail: str, size: int) -> bytes:
    """Return pieces joined by commas, between `head` and `tail`."""
    count = max(1, size // (len(piece) + 1))
    return (head + ",".join([piece] * count) + tail).encode()


def long_text(head: str, tail: str, size: int) -> bytes:
    return (head + 'the cat, [sat] {on} \\"the\\" mat. ' * (size // 36) + tail).encode()


HOSTILE = {
    "slow schemas": HostileRequest(
        COMPLETIONS, lambda i, _: schema({"type": "integer", "multipleOf": 99_999_989 - 2 * i}), [400, 429], 30, 600.0
    ),
    "slow schemas of clients that hang up": HostileRequest(
        COMPLETIONS, lambda i, _: schema({"type": "integer", "multipleOf": 89_999_989 - 2 * i}), [400, 429], 12, 1.0
    ),
    "ordinary schemas": HostileRequest(
        COMPLETIONS, lambda i, _: schema({"type": "string", "maxLength": 3 + i}), [200, 429], 110
    ),
    "many ids that stop": HostileRequest(
        COMPLETIONS, lambda _, size: repeated('{"prompt": "a", "stop_token_ids": [', "77", "]}", size), [400]
    ),
    "many empty prompts": HostileRequest(
        COMPLETIONS, lambda _, size: repeated('{"prompt": [', "[]", "]}", size), [400]
    ),
    "many parts": HostileRequest(
        CHAT,
        lambda _, size: repeated(
            '{"messages": [{"role": "user", "content": [', '{"type": "text", "text": ""}', "]}]}", size
        ),
        [400],
    ),
    "many messages": HostileRequest(
        CHAT, lambda _, size: repeated('{"messages": [', '{"role": "user", "content": ""}', "]}", size), [400]
    ),
    "many biases": HostileRequest(
        COMPLETIONS,
        lambda _, size: json.dumps({"prompt": "a", "logit_bias": {str(i): 1 for i in range(size // 14)}}).encode(),
        [400],
    ),
    "many tools": HostileRequest(
        CHAT,
        lambda _, size: repeated(
            '{"messages": [{"role": "user", "content": "a"}], "tools": [',
            '{"type": "function", "function": {"name": "f"}}',
            "]}",
            size,
        ),
        [400],
    ),
    "escaped quotes without an end": HostileRequest(
        COMPLETIONS, lambda _, size: b'{"prompt": "' + b'\\"' * (size // 2), [400]
    ),
    "a prompt beyond the context": HostileRequest(
        COMPLETIONS, lambda _, size: long_text('{"prompt": "', '"}', size), [400], 2
    ),
    "a text beside the prompt": HostileRequest(
        COMPLETIONS, lambda _, size: long_text('{"prompt": "a", "max_tokens": 2, "user": "', '"}', size), [200], 2
    ),
    "arguments that are no object": HostileRequest(
        CHAT,
        lambda _, size: (
            b'{"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "'
            + b"[[]," * (size // 4)
            + b'"}}]}]}'
        ),
        [400],
    ),
    "a text as tokens": HostileRequest(
        TOKENIZE, lambda _, size: long_text('{"return_token_strs": true, "prompt": "', '"}', min(size, 250_000)), [200]
    ),
    "an echo of many log-probabilities": HostileRequest(
        COMPLETIONS,
        lambda _, size: json.dumps(
            {"prompt": ["the cat sat on the mat " * 700] * 4, "echo": True, "logprobs": 20, "max_tokens": 0}
        ).encode(),
        [400],
    ),
    "an answer of many alternatives": HostileRequest(
        CHAT,
        lambda _, size: json.dumps(
            {
                "messages": [{"role": "user", "content": "a"}],
                "logprobs": True,
                "top_logprobs": 20,
                "n": 8,
                "max_tokens": 150,
            }
        ).encode(),
        [200],
    ),
}
