"""POST /v1/responses, stateless: the whole conversation comes with each request, and nothing is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import time
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from triforce.completion import Piece
from triforce.request import RequestOutput
from triforce.server.prompts import served
from triforce.server.schemas import ResponsesBody
from triforce.server.service import Service
from triforce.server.streaming import frame
from triforce.server.token_report import usage

router = APIRouter()


@router.post("/v1/responses")
async def responses(body: ResponsesBody, request: Request) -> Response:
    """The answer to a conversation."""
    service: Service = request.app.state.service
    served(body.model, service.name)
    ask = await service.reader.response(body)
    return await service.answer(request, [ask], ResponsesReply(body, service), stream=body.stream)


class ResponsesReply:
    """One message with one text in it. A stream tells of each part when it begins, grows and is done."""

    def __init__(self, body: ResponsesBody, service: Service) -> None:
        self._tiers, self._message_id, self._sent, self._text = bool(body.tier_stats), f"msg_{uuid4().hex}", 0, ""
        self._head = {
            **{"id": f"resp_{uuid4().hex}", "object": "response", "created_at": int(time()), "model": service.name},
            **{"error": None, "instructions": body.instructions, "max_output_tokens": body.max_output_tokens},
            **{"metadata": {}, "parallel_tool_calls": False, "tool_choice": "none", "tools": [], "store": False},
            **{"temperature": body.temperature, "top_p": body.top_p, "previous_response_id": None},
            **{"truncation": "disabled", "text": {"format": _format(body)}},
        }

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        new = output.outputs[0]
        status = "completed" if new.finish_reason == "stop" else "incomplete"
        details = None if status == "completed" else {"reason": "max_output_tokens"}
        counts = usage(outputs, self._tiers, ("input", "output"))
        counts |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        said = {"output": [self._message(status, [_part(new.text)])], "usage": counts}
        return self._head | {"status": status, "incomplete_details": details} | said

    def opening(self) -> Iterable[bytes]:
        begun = self._head | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        yield self._event("response.output_item.added", output_index=0, item=self._message("in_progress", []))
        yield self._event("response.content_part.added", **self._place(), part=_part(""))

    def piece(self, prompt: int, piece: Piece) -> Iterable[bytes]:
        self._text += piece.text
        tiers = {"token_tiers": piece.origins} if self._tiers else {}
        yield self._event("response.output_text.delta", **self._place(), delta=piece.text, logprobs=[], **tiers)

    def closing(self, outputs: Sequence[RequestOutput]) -> Iterable[bytes]:
        whole = self.whole(outputs)
        yield self._event("response.output_text.done", **self._place(), text=self._text, logprobs=[])
        yield self._event("response.content_part.done", **self._place(), part=_part(self._text))
        yield self._event("response.output_item.done", output_index=0, item=whole["output"][0])
        yield self._event(f"response.{whole['status']}", response=whole)

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self._message_id, "role": "assistant", "status": status, "content": content}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **data: Any) -> bytes:
        self._sent += 1
        return frame({"type": kind, "sequence_number": self._sent - 1} | data, event=kind)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _format(body: ResponsesBody) -> dict[str, Any]:
    """What the text was held to, as it was sent."""
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    return body.text.format.model_dump(by_alias=True, exclude_none=True)
