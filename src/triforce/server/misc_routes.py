"""Routes about the model and the server: /v1/models, /tokenize, /detokenize, /health, /metrics."""

from __future__ import annotations

from time import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from triforce.server.errors import ApiError
from triforce.server.metrics import CONTENT_TYPE
from triforce.server.request_parser import served
from triforce.server.schemas import DetokenizeBody, TokenizeBody
from triforce.server.service import Service

router = APIRouter()
_STARTED = int(time())


@router.get("/v1/models")
async def models(request: Request) -> JSONResponse:
    """List the one model there is."""
    return JSONResponse({"object": "list", "data": [_card(request.app.state.service)]})


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> JSONResponse:
    """Describe a model."""
    service: Service = request.app.state.service
    served(name, service.name)
    return JSONResponse(_card(service))


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> JSONResponse:
    """Return token ids of a text or a conversation, as a prompt has them. Raises ApiError."""
    service: Service = request.app.state.service
    served(body.model, service.name)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "send prompt or messages, one of them")
    if body.messages is not None:
        ids = await service.parser.conversation(body.messages)
    else:
        ids = await service.parser.tokens(body.prompt or "", special=body.add_special_tokens is not False)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": service.parser.context, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [service.parser.tokenizer.bytes_of(i).decode(errors="replace") for i in ids]
    return JSONResponse(answer)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> JSONResponse:
    """The text of token ids, without special tokens."""
    service: Service = request.app.state.service
    served(body.model, service.name)
    ids = await service.parser.ids(body.tokens) if body.tokens else []
    return JSONResponse({"prompt": service.parser.tokenizer.decode(ids)})


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """Answer 200 as long as texts can be made. Raises ApiError."""
    service: Service = request.app.state.service
    if not service.engine.alive:
        raise ApiError(503, "the engine has stopped; start the server again")
    return JSONResponse({"status": "ok"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return Prometheus metrics."""
    service: Service = request.app.state.service
    return Response(service.metrics.text(), media_type=CONTENT_TYPE)


def _card(service: Service) -> dict[str, Any]:
    about = {"id": service.name, "object": "model", "created": _STARTED, "owned_by": "triforce"}
    parser = service.parser
    can = {"chats": parser.tokenizer.chats, "modes": parser.llm.modes}
    return about | {"max_model_len": parser.context, "triforce": can}
