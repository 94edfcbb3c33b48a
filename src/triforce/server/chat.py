"""POST /v1/chat/completions: a conversation, laid out by the model's own chat template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import time
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from triforce.completion import Piece
from triforce.request import RequestOutput, TokenLogprobs
from triforce.server.prompts import served
from triforce.server.schemas import ChatBody
from triforce.server.service import Service
from triforce.server.streaming import DONE, frame
from triforce.server.token_report import chat_logprobs, usage

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat(body: ChatBody, request: Request) -> Response:
    """The next turn of a conversation, `n` times."""
    service: Service = request.app.state.service
    served(body.model, service.name)
    ask = await service.reader.chat(body)
    return await service.answer(request, [ask], ChatReply(body, service), stream=body.stream)


class ChatReply:
    """Whole messages, or what is new of them."""

    def __init__(self, body: ChatBody, service: Service) -> None:
        self._n, self._tokenizer, self._tiers = body.n or 1, service.reader.tokenizer, bool(body.tier_stats)
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time()), "model": service.name}

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [
            {"index": new.index, "message": {"role": "assistant", "content": new.text, "refusal": None}}
            | {"finish_reason": new.finish_reason}
            | self._report(new.logprobs, new.origins)
            for output in outputs
            for new in output.outputs
        ]
        return self._head | {"object": "chat.completion", "choices": choices, "usage": usage(outputs, self._tiers)}

    def opening(self) -> Iterable[bytes]:
        for index in range(self._n):
            yield self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def piece(self, prompt: int, piece: Piece) -> Iterable[bytes]:
        choice = {"index": piece.index, "delta": {"content": piece.text}, "finish_reason": None}
        yield self._chunk(choice | self._report(piece.logprobs, piece.origins))
        if piece.finish_reason:
            yield self._chunk({"index": piece.index, "delta": {}, "finish_reason": piece.finish_reason})

    def closing(self, outputs: Sequence[RequestOutput]) -> Iterable[bytes]:
        if self._with_usage:
            yield self._frame({"choices": [], "usage": usage(outputs, self._tiers)})
        yield DONE

    def _report(self, entries: Sequence[TokenLogprobs] | None, origins: Sequence[str]) -> dict[str, Any]:
        """What was asked for beside the text of some tokens."""
        logprobs = None if entries is None else chat_logprobs(self._tokenizer, entries)
        return {"logprobs": logprobs} | ({"token_tiers": origins} if self._tiers else {})

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._frame({"choices": [choice]} | ({"usage": None} if self._with_usage else {}))

    def _frame(self, data: dict[str, Any]) -> bytes:
        return frame(self._head | {"object": "chat.completion.chunk"} | data)
