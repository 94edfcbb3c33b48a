"""POST /v1/responses, stateless: the whole conversation comes with each request, and nothing is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import time
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from triforce.engine.output_stream import OutputChunk
from triforce.interface.outputs import RequestOutput
from triforce.server.request_parser import served
from triforce.server.responses_items import Items
from triforce.server.schemas import ResponsesBody
from triforce.server.service import Service
from triforce.server.sse import frame
from triforce.server.tools import parser_of
from triforce.server.usage import usage

router = APIRouter()


@router.post("/v1/responses")
async def responses(body: ResponsesBody, request: Request) -> Response:
    """The answer to a conversation."""
    service: Service = request.app.state.service
    served(body.model, service.name)
    generation = await service.parser.response(body)
    return await service.answer(request, [generation], ResponsesWriter(body, service), body)


class ResponsesWriter:
    """Messages and calls. A stream tells of each part when it begins, grows and is done."""

    def __init__(self, body: ResponsesBody, service: Service) -> None:
        self._tiers, self._sent = bool(body.tier_stats), 0
        self._items = Items(parser_of(service.parser.tools(body)))
        self._origins: list[str] = []  # of tokens whose text was not told of yet
        self._head = {
            **{"id": f"resp_{uuid4().hex}", "object": "response", "created_at": int(time()), "model": service.name},
            **{"error": None, "instructions": body.instructions, "max_output_tokens": body.max_output_tokens},
            **{"metadata": {}, "store": False, "temperature": body.temperature, "top_p": body.top_p},
            **{
                "previous_response_id": None,
                "truncation": "disabled",
                "text": {"format": _format(body)},
                **_tools(body),
            },
        }

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        new, status = outputs[0].outputs[0], _status(outputs)
        for _ in (*self._items.add(new.text, last=True), *self._items.end(status)):
            pass
        return self._done(outputs)

    def opening(self) -> Iterable[bytes]:
        begun = self._head | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield self._event("created", {"response": begun})
        yield self._event("in_progress", {"response": begun})

    def piece(self, prompt: int, piece: OutputChunk) -> Iterable[bytes]:
        self._origins += piece.origins
        for kind, fields in self._items.add(piece.text, last=piece.finish_reason is not None):
            yield self._event(kind, fields | (self._report() if kind.endswith(".delta") else {}))

    def closing(self, outputs: Sequence[RequestOutput]) -> Iterable[bytes]:
        status = _status(outputs)
        for kind, fields in self._items.end(status):
            yield self._event(kind, fields)
        yield self._event(status, {"response": self._done(outputs)} | self._report())

    def _done(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        status = _status(outputs)
        details = None if status == "completed" else {"reason": "max_output_tokens"}
        counts = usage(outputs, self._tiers, ("input", "output"))
        counts |= {"output_tokens_details": {"reasoning_tokens": 0}}
        counts["input_tokens_details"] |= {"cache_write_tokens": 0}
        said = {"output": self._items.items, "usage": counts}
        return self._head | {"status": status, "incomplete_details": details} | said

    def _report(self) -> dict[str, Any]:
        """Return the tier of each token since the last report, where the request wants it."""
        new, self._origins = self._origins, []
        return {"token_tiers": new} if self._tiers and new else {}

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        self._sent += 1
        name = f"response.{kind}"
        return frame({"type": name, "sequence_number": self._sent - 1} | fields, event=name)


def _status(outputs: Sequence[RequestOutput]) -> str:
    return "completed" if outputs[0].outputs[0].finish_reason == "stop" else "incomplete"


def _tools(body: ResponsesBody) -> dict[str, Any]:
    """Return the tools, as they were sent."""
    choice = body.tool_choice or ("auto" if body.tools else "none")
    return {
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "parallel_tool_calls": bool(body.tools) and body.parallel_tool_calls is not False,
    }


def _format(body: ResponsesBody) -> dict[str, Any]:
    """Return the text format, as it was sent."""
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    return body.text.format.model_dump(by_alias=True, exclude_none=True)
