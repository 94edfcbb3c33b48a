"""POST /v1/responses, stateless: each request holds the whole conversation, and the server stores nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from time import time
from typing import Any
from uuid import uuid4

from triforce.engine.engine import OutputChunk
from triforce.interface.outputs import RequestOutput
from triforce.server.answer_fields import frame, usage
from triforce.server.answers.answer_parts import AnswerParser, Call, Thoughts
from triforce.server.engine_client import GenerationRequest, PrefillProgress
from triforce.server.schemas import ResponsesBody
from triforce.server.service import Service

ItemEvent = tuple[str, dict[str, Any]]
"""Name of an event without the prefix `response.`, and its fields. The next event may change these fields."""


class ResponsesWriter:
    """Writes answers of messages and calls. A stream has events for the beginning, growth and end of each part."""

    def __init__(self, body: ResponsesBody, generations: Sequence[GenerationRequest], service: Service) -> None:
        self._tiers = bool(body.tier_stats)
        self._sent = 0
        self._items = Items(service.parser.answer_parser(body, generations[0]))
        self._origins: list[str] = []  # of tokens that no event has reported yet
        form = body.text.format if body.text else None
        self._head = {
            **{"id": f"resp_{uuid4().hex}", "object": "response", "created_at": int(time()), "model": service.name},
            **{"error": None, "instructions": body.instructions, "max_output_tokens": body.max_output_tokens},
            **{"metadata": {}, "store": False, "temperature": body.temperature, "top_p": body.top_p},
            **{"previous_response_id": None, "truncation": "disabled"},
            **{"text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}}},
            **{"seed": generations[0].params.seed, "system_fingerprint": service.fingerprint},
            **_tools(body),
        }

    def full_answer(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        for _ in self._items.add(outputs[0].outputs[0].text, is_final=True):
            pass
        for _ in self._items.end(self._status(outputs)):
            pass
        return self._done(outputs)

    def opening(self) -> Iterable[bytes]:
        yield self._event("created", {"response": self._unfinished()})
        yield self._event("in_progress", {"response": self._unfinished()})

    def idle_frame(self) -> bytes:
        """Return an event: clients that measure the time between events skip comments."""
        unchanged: dict[str, Any] = {"instructions": None, "tools": []}  # the first event has told them
        return self._event("in_progress", {"response": self._unfinished() | unchanged})

    def prefill_progress(self, prompt: int, progress: PrefillProgress) -> Iterable[bytes]:
        return ()  # responses have no event for progress, and no field to request it

    def piece(self, prompt: int, piece: OutputChunk) -> Iterable[bytes]:
        self._origins += piece.origins
        for kind, fields in self._items.add(piece.text, is_final=piece.finish_reason is not None):
            yield self._event(kind, fields | (self._report() if kind.endswith(".delta") else {}))

    def closing(self, outputs: Sequence[RequestOutput]) -> Iterable[bytes]:
        status = self._status(outputs)
        for kind, fields in self._items.end(status):
            yield self._event(kind, fields)
        yield self._event(status, {"response": self._done(outputs)} | self._report())

    def _unfinished(self) -> dict[str, Any]:
        fields = {"status": "in_progress", "incomplete_details": None, "output": self._items.items, "usage": None}
        return self._head | fields

    def _done(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        status = self._status(outputs)
        details = None if status == "completed" else {"reason": "max_output_tokens"}
        counts = usage(outputs, self._tiers, ("input", "output"))
        counts |= {"output_tokens_details": {"reasoning_tokens": 0}}
        counts["input_tokens_details"] |= {"cache_write_tokens": 0}
        output_fields = {"output": self._items.items, "usage": counts}
        return self._head | {"status": status, "incomplete_details": details} | output_fields

    def _status(self, outputs: Sequence[RequestOutput]) -> str:
        is_stopped = outputs[0].outputs[0].finish_reason == "stop"
        return "completed" if is_stopped and not self._items.is_cut else "incomplete"

    def _report(self) -> dict[str, Any]:
        """Return the tier of each token since the last report, if the request asks for tiers."""
        pending_origins = self._origins
        self._origins = []
        return {"token_tiers": pending_origins} if self._tiers and pending_origins else {}

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        self._sent += 1
        name = f"response.{kind}"
        return frame({"type": name, "sequence_number": self._sent - 1} | fields, event=name)


class Items:
    """The items of one answer. Its methods are generators; iterate over them even where no events are sent."""

    def __init__(self, parser: AnswerParser) -> None:
        self.items: list[dict[str, Any]] = []
        self._parser = parser
        self._open = False  # whether the last item may grow

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended inside a call."""
        return self._parser.is_cut

    def add(self, text: str, is_final: bool) -> Iterator[ItemEvent]:
        """Add text of the answer, and yield its events. is_final: whether `text` ends the answer."""
        for part in self._parser.add(text, is_final):
            match part:
                case Call():
                    yield from self._call(part)
                case Thoughts():
                    yield from self._add_thoughts(part.text)
                case str():
                    yield from self._add_text(part)

    def end(self, status: str) -> Iterator[ItemEvent]:
        """End the answer, and yield the last events. An answer without items gets an empty message."""
        if not self.items:
            yield from self._begin_message()
        yield from self._close(status)

    def _add_thoughts(self, text: str) -> Iterator[ItemEvent]:
        """Add text to the last item if it is one of thoughts, or to a new one."""
        if not self._is_open("reasoning"):
            yield from self._close("completed")
            yield self._begin({"type": "reasoning", "id": f"rs_{uuid4().hex}", "summary": [_summary("")]})
            self._open = True
            yield "reasoning_summary_part.added", self._place("summary") | {"part": _summary("")}
        self._part["text"] += text
        yield "reasoning_summary_text.delta", self._place("summary") | {"delta": text}

    def _add_text(self, text: str) -> Iterator[ItemEvent]:
        if not self._is_open("message"):
            if not text:
                return
            yield from self._close("completed")
            yield from self._begin_message()
        self._part["text"] += text
        yield "output_text.delta", self._place() | {"delta": text, "logprobs": []}

    def _begin_message(self) -> Iterator[ItemEvent]:
        yield self._begin({"type": "message", "id": f"msg_{uuid4().hex}", "role": "assistant", "content": []})
        self._open = True
        self.items[-1]["content"] = [_part("")]
        yield "content_part.added", self._place() | {"part": _part("")}

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
        if self._is_open("reasoning"):
            self._open = False
            yield "reasoning_summary_text.done", self._place("summary") | {"text": self._part["text"]}
            yield "reasoning_summary_part.done", self._place("summary") | {"part": self._part}
            yield self._done(status)
        if self._is_open("message"):
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

    def _is_open(self, kind: str) -> bool:
        """Whether the last item is of this kind and may grow."""
        return self._open and self.items[-1]["type"] == kind

    @property
    def _part(self) -> dict[str, Any]:
        item = self.items[-1]
        part: dict[str, Any] = item["summary" if item["type"] == "reasoning" else "content"][0]
        return part

    def _place(self, parts: str = "content") -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, f"{parts}_index": 0}


def _summary(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _tools(body: ResponsesBody) -> dict[str, Any]:
    """Return the tool fields of the request for its answer."""
    choice = body.tool_choice or "auto"
    return {
        "tools": [tool.model_dump() for tool in body.tools or () if tool],
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
    }
