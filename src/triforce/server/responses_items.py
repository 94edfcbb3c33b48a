"""Output items of a response as it grows: messages of one text each, tool calls, and their stream events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from triforce.server.tool_call_parser import Call, ToolCallParser

ItemEvent = tuple[str, dict[str, Any]]
"""Name of an event without its `response.`, and its fields. Send it before the next one is drawn."""


class Items:
    """The items of one answer. Every step must be iterated over, even where no events are sent."""

    def __init__(self, parser: ToolCallParser) -> None:
        self.items: list[dict[str, Any]] = []
        self._parser, self._open = parser, False  # whether the last item is a message that may grow

    def add(self, text: str, last: bool) -> Iterator[ItemEvent]:
        """Add text of the answer, and yield its events."""
        for parsed in [*self._parser.add(text), *(self._parser.end() if last else ())]:
            yield from self._call(parsed) if isinstance(parsed, Call) else self._add_text(parsed)

    def end(self, status: str) -> Iterator[ItemEvent]:
        """End the answer, and yield the last events. There is at least one message, perhaps empty."""
        if not self.items:
            yield from self._add_text("")
        yield from self._close(status)

    def _add_text(self, text: str) -> Iterator[ItemEvent]:
        if not self._open:
            yield self._begin({"type": "message", "id": f"msg_{uuid4().hex}", "role": "assistant", "content": []})
            self._open = True
            self.items[-1]["content"] = [_part("")]
            yield "content_part.added", self._place() | {"part": _part("")}
        self._part["text"] += text
        yield "output_text.delta", self._place() | {"delta": text, "logprobs": []}

    def _call(self, call: Call) -> Iterator[ItemEvent]:
        yield from self._close("completed")
        item = {"type": "function_call", "id": f"fc_{uuid4().hex}", "call_id": f"call_{uuid4().hex}"}
        yield self._begin(item | {"name": call.name, "arguments": ""})
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        yield "function_call_arguments.delta", place | {"delta": call.arguments}
        yield "function_call_arguments.done", place | {"name": call.name, "arguments": call.arguments}
        self.items[-1]["arguments"] = call.arguments
        yield self._done("completed")

    def _close(self, status: str) -> Iterator[ItemEvent]:
        if self._open:
            self._open = False
            yield "output_text.done", self._place() | {"text": self._part["text"], "logprobs": []}
            yield "content_part.done", self._place() | {"part": self._part}
            yield self._done(status)

    def _begin(self, item: dict[str, Any]) -> ItemEvent:
        self.items.append(item | {"status": "in_progress"})
        return "output_item.added", {"output_index": len(self.items) - 1, "item": self.items[-1]}

    def _done(self, status: str) -> ItemEvent:
        self.items[-1]["status"] = status
        return "output_item.done", {"output_index": len(self.items) - 1, "item": self.items[-1]}

    @property
    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = self.items[-1]["content"][0]
        return part

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
