"""Routes: completions, chats and responses, and what is asked of the model and the server."""

from __future__ import annotations

from time import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from triforce.server.chat import ChatWriter
from triforce.server.completions import CompletionWriter
from triforce.server.errors import ApiError
from triforce.server.metrics import CONTENT_TYPE
from triforce.server.responses import ResponsesWriter
from triforce.server.schemas import ChatBody, CompletionBody, DetokenizeBody, ResponsesBody, TokenizeBody
from triforce.server.service import Service

router = APIRouter()
_STARTED = int(time())


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue one prompt or several."""
    service = _service(request, body.model)
    generations = await service.parser.completion(body)
    return await service.answer(request, generations, CompletionWriter(body, generations, service), body)


@router.post("/v1/chat/completions")
async def chat(body: ChatBody, request: Request) -> Response:
    """The next turn of a conversation, `n` times."""
    service = _service(request, body.model)
    generation = await service.parser.chat(body)
    return await service.answer(request, [generation], ChatWriter(body, service), body)


@router.post("/v1/responses")
async def responses(body: ResponsesBody, request: Request) -> Response:
    """The answer to a conversation."""
    service = _service(request, body.model)
    generation = await service.parser.response(body)
    return await service.answer(request, [generation], ResponsesWriter(body, service), body)


@router.get("/v1/models")
async def models(request: Request) -> JSONResponse:
    """List the one model there is."""
    return JSONResponse({"object": "list", "data": [_card(_service(request))]})


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> JSONResponse:
    """Describe a model."""
    return JSONResponse(_card(_service(request, name)))


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> JSONResponse:
    """Return token ids of a text or a conversation, as a prompt has them. Raises ApiError."""
    service = _service(request, body.model)
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
    service = _service(request, body.model)
    ids = await service.parser.ids(body.tokens) if body.tokens else []
    return JSONResponse({"prompt": service.parser.tokenizer.decode(ids)})


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """Answer 200 as long as texts can be made. Raises ApiError."""
    if not _service(request).engine.alive:
        raise ApiError(503, "the engine has stopped; start the server again")
    return JSONResponse({"status": "ok"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return Prometheus metrics."""
    return Response(_service(request).metrics.text(), media_type=CONTENT_TYPE)


def _service(request: Request, model: str | None = None) -> Service:
    """Return the application's. Raises ApiError unless `model` is None or the name of the served model."""
    service: Service = request.app.state.service
    if model not in (None, service.name):
        raise ApiError(404, f"model {model[:100]!r} is not served here; use {service.name!r}, or leave it out",
                      param="model", code="model_not_found")  # fmt: skip
    return service


def _card(service: Service) -> dict[str, Any]:
    about = {"id": service.name, "object": "model", "created": _STARTED, "owned_by": "triforce"}
    can = {"chats": service.parser.tokenizer.chats, "modes": service.parser.llm.modes}
    return about | {"max_model_len": service.parser.context, "triforce": can}
