"""The ASGI application: routes of OpenAI's interface and of the server itself, and its middleware."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from time import time
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from triforce import __version__
from triforce.disk_cache.folder import CacheFolder
from triforce.errors import ModelError
from triforce.interface.sampling_params import chat_defaults
from triforce.server import errors, page
from triforce.server.answers.answer_parts import TextParser
from triforce.server.body_parser import JsonRoute
from triforce.server.doors import anthropic as anthropic_door
from triforce.server.doors import completions as completions_door
from triforce.server.doors import ollama as ollama_door
from triforce.server.doors.anthropic import MessagesBody, MessagesWriter
from triforce.server.doors.chat import ChatBody, ChatWriter
from triforce.server.doors.codex import codex_card
from triforce.server.doors.completions import CompletionWriter
from triforce.server.doors.ollama import OLLAMA_VERSION, GenerateBody, OllamaChatBody, OllamaWriter, ShowBody
from triforce.server.doors.responses import ResponsesBody, ResponsesWriter, overflow_stream
from triforce.server.engine_client import EngineClient, GenerationRequest, ServedModel
from triforce.server.errors import ApiError, HeadAsGet, TrailingSlashes
from triforce.server.limits import Limits
from triforce.server.logs import AccessLog
from triforce.server.metrics import CONTENT_TYPE, Metrics
from triforce.server.request_base import HEADER, LATEST
from triforce.server.request_parser import RequestParser
from triforce.server.schemas import (
    THINKING_SWITCH,
    CompletionBody,
    ConversationBody,
    DetokenizeBody,
    ModelField,
    TokenizeBody,
)
from triforce.server.security import ApiKeyAuth, BodyLimit, HostCheck, PreflightAdvice
from triforce.server.service import ResponseWriter, Service

Conversation = TypeVar("Conversation", bound=ConversationBody)
NextTurnWriter = Callable[[Conversation, list[GenerationRequest], Service], ResponseWriter]
router = APIRouter(route_class=JsonRoute)
_STARTED = int(time())


def create_app(
    llm: ServedModel,
    engine: EngineClient,
    name: str,
    *,
    limits: Limits | None = None,
    keys: Sequence[str] = (),
    hosts: Sequence[str] = (),
    origins: Sequence[str] = (),
    watched: CacheFolder | None = None,
    any_model: bool = True,
) -> FastAPI:
    """Return the application that serves `llm` as the model `name`; `engine` generates the texts.

    keys: accepted API keys; without any, no key is needed. hosts: names that a Host header may have. origins: of pages
    whose scripts may send requests (CORS). watched: a disk cache whose documents the page offers. any_model: whether
    requests for a model of another name are answered, too; a header says so. Raises ModelError for a model without a
    tokenizer.
    """
    if llm.tokenizer is None:
        raise ModelError("this model has no tokenizer, and a server of text needs one; put it into the model's folder")
    limits = limits or Limits()

    app = FastAPI(
        title="triforce",
        version=__version__,
        responses={"4XX": {"description": "An error in OpenAI's shape; its message says what to do"}},
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
    )
    parser = RequestParser(llm, llm.tokenizer, limits)
    metrics = Metrics(engine, name)
    app.state.service = Service(name, system_fingerprint(llm), parser, engine, metrics, limits)
    app.state.watched = watched
    app.state.any_model = any_model
    app.include_router(router)
    app.include_router(page.router)
    errors.install_handlers(app)
    paths = [route.path for route in router.routes if isinstance(route, APIRoute)]
    errors.install_advice(app, [path for path in paths if "{" not in path])
    _add_layers(app, limits, keys, hosts, origins)
    return app


def _add_layers(
    app: FastAPI, limits: Limits, keys: Sequence[str], hosts: Sequence[str], origins: Sequence[str]
) -> None:
    """Add the middleware. The layer added last handles a request first."""
    app.add_middleware(BodyLimit, limits=limits)
    app.add_middleware(ApiKeyAuth, keys=keys)
    if origins:  # outside of ApiKeyAuth, as preflight requests carry no key
        exposed = [HEADER, "X-Request-Id", "Retry-After"]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=exposed,
        )
    app.add_middleware(PreflightAdvice, origins=origins)
    app.add_middleware(HeadAsGet)
    app.add_middleware(TrailingSlashes)
    app.add_middleware(HostCheck, names=hosts)
    app.add_middleware(AccessLog)


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue one prompt or several."""
    service = _service_for(body, request)
    generations = await service.run_parser(request, service.parser.completion, body)
    write = partial(CompletionWriter, body, generations, service)
    writer = await asyncio.to_thread(write) if body.echo else write()  # an echo decodes prompts of token ids
    return await service.answer(request, generations, writer, body)


@router.post("/v1/chat/completions")
async def chat(body: ChatBody, request: Request) -> Response:
    """Return the next turn of a conversation, `n` times."""
    return await _next_turn(body, request, ChatWriter)


@router.post("/v1/responses")
async def responses(body: ResponsesBody, request: Request) -> Response:
    """Return the answer to a conversation."""
    try:
        return await _next_turn(body, request, ResponsesWriter)
    except ApiError as refusal:
        if body.stream and refusal.code == errors.TOO_LONG:
            return overflow_stream(body, _service(request), refusal)
        raise


@router.post("/v1/messages")
async def messages(body: MessagesBody, request: Request) -> Response:
    """Return the next turn of a conversation, in Anthropic's interface."""
    return await _next_turn(body, request, MessagesWriter)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: MessagesBody, request: Request) -> Response:
    """Return the number of tokens of a conversation, in Anthropic's interface."""
    service = _service_for(body, request)
    return await service.run_parser(request, partial(anthropic_door.count_tokens, service.parser), body)


@router.post("/api/chat")
async def ollama_chat(body: OllamaChatBody, request: Request) -> Response:
    """Return the next turn of a conversation, in Ollama's interface."""
    service = _service_for(body, request)
    if not body.messages:
        return JSONResponse(ollama_door.loaded(service, is_chat=True))
    generations = await service.run_parser(request, service.parser.answer, body)
    writer = OllamaWriter(body, service, service.parser.answer_parser(body, generations[0]))
    return await service.answer(request, generations, writer, body)


@router.post("/api/generate")
async def ollama_generate(body: GenerateBody, request: Request) -> Response:
    """Continue one prompt, in Ollama's interface."""
    service = _service_for(body, request)
    if not body.prompt:
        return JSONResponse(ollama_door.loaded(service, is_chat=False))
    if body.raw or not service.parser.tokenizer.chats:
        completion_body = body.completion(service.parser.context)
        generations = await service.run_parser(request, service.parser.completion, completion_body)
        return await service.answer(request, generations, OllamaWriter(body, service, TextParser()), body)
    generations = await service.run_parser(request, service.parser.answer, body)
    writer = OllamaWriter(body, service, service.parser.answer_parser(body, generations[0]))
    return await service.answer(request, generations, writer, body)


@router.get("/api/tags")
async def ollama_models(request: Request) -> JSONResponse:
    """List the served model, in Ollama's interface."""
    return JSONResponse({"models": [ollama_door.model_card(_service(request))]})


@router.get("/api/ps")
async def ollama_loaded_models(request: Request) -> JSONResponse:
    """List the loaded model, in Ollama's interface."""
    return JSONResponse({"models": [ollama_door.loaded_card(_service(request))]})


@router.post("/api/show")
async def ollama_show(body: ShowBody, request: Request) -> JSONResponse:
    """Describe a model, in Ollama's interface."""
    body.model = body.model or body.name
    return JSONResponse(ollama_door.shown_model(_service_for(body, request)))


@router.get("/api/version")
async def ollama_version() -> JSONResponse:
    """Return the version of Ollama's interface that this server speaks."""
    return JSONResponse({"version": OLLAMA_VERSION})


@router.get("/v1/models")
async def models(request: Request) -> JSONResponse:
    """List the served model, for Codex in `models`, too."""
    service = _service(request)
    models_of_codex = [
        codex_card(service.name, service.parser.context, "reasoning_effort" in service.parser.tokenizer.template)
    ]
    return JSONResponse({"object": "list", "data": [await _card(service)], "models": models_of_codex})


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> JSONResponse:
    """Describe a model."""
    if not name:  # /v1/models/
        return await models(request)
    return JSONResponse(await _card(_service(request, name)))


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Return the token ids of a text or a conversation, as in a prompt. Raises ApiError."""
    service = _service_for(body, request)
    return await service.run_parser(request, partial(completions_door.tokenize, service.parser), body)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """Return the text of token ids, without special tokens."""
    service = _service_for(body, request)
    return await service.run_parser(request, partial(completions_door.detokenize, service.parser), body)


@router.get("/ping")
@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """Answer 200 as long as the engine runs. Raises ApiError."""
    if not _service(request).engine.alive:
        raise ApiError(503, "the engine has stopped; start the server again")
    return JSONResponse({"status": "ok"})


@router.get("/version")
async def version() -> JSONResponse:
    """Return the version of triforce."""
    return JSONResponse({"version": __version__})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return Prometheus metrics."""
    return Response(_service(request).metrics.text(), media_type=CONTENT_TYPE)


def system_fingerprint(llm: ServedModel) -> str:
    """Return a digest of triforce's version and `llm.fingerprint`. Under equal digests a seed gives one text."""
    return f"fp_{blake2b(f'{__version__} {llm.fingerprint}'.encode(), digest_size=8).hexdigest()}"


def _service(request: Request, model: str | None = None) -> Service:
    """Return the application's service. Raises ApiError unless `model` is None or the name of the served model."""
    service: Service = request.app.state.service
    if model is not None and service.name not in (model, model.removesuffix(LATEST)):
        raise ApiError(404, f"model {model[:100]!r} is not served here; use {service.name!r}, or leave it out",
                      param="model", code="model_not_found")  # fmt: skip
    return service


def _service_for(body: ModelField, request: Request) -> Service:
    """Return the application's service for a request. Agents send model names of their own, which are ignored.

    The header of ignored fields then names `model`. Raises ApiError for another name where `any_model` is False.
    """
    try:
        return _service(request, body.model)
    except ApiError:
        if not request.app.state.any_model:
            raise
        body.ignore("model")
        return _service(request)


async def _next_turn(body: Conversation, request: Request, writer: NextTurnWriter[Conversation]) -> Response:
    """Return the next turn of a conversation. writer: makes the writer of its door. Raises ApiError."""
    service = _service_for(body, request)
    generations = await service.run_parser(request, service.parser.answer, body)
    return await service.answer(request, generations, writer(body, generations, service), body)


async def _card(service: Service) -> dict[str, Any]:
    card = {"id": service.name, "object": "model", "created": _STARTED, "owned_by": "triforce"}
    llm, tokenizer = service.parser.llm, service.parser.tokenizer
    break_even = await asyncio.to_thread(llm.break_even)  # it reads a file and evaluates many contexts
    capabilities = {
        "chats": tokenizer.chats,
        "thinks": tokenizer.chats and THINKING_SWITCH in tokenizer.template,
        "modes": llm.modes,
        "mode": llm.mode,
        "coupling": llm.coupling,
        "defaults": chat_defaults(llm.sampling_defaults) if tokenizer.chats else llm.sampling_defaults,
        "system_fingerprint": service.fingerprint,
        "pays_from": break_even.tokens,
        "pays": break_even.sentence,
    }
    return card | {"max_model_len": service.parser.context, "triforce": capabilities}
