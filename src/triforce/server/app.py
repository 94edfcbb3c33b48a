"""The ASGI application: every route, and the layers around them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any
from uuid import uuid4

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triforce import __version__
from triforce.errors import ModelError
from triforce.server import errors, logs, playground, routes
from triforce.server.engine_client import EngineClient, ServedModel
from triforce.server.limits import Limits
from triforce.server.metrics import Metrics
from triforce.server.request_base import HEADER
from triforce.server.request_parser import RequestParser
from triforce.server.security import ApiKeyAuth, BodyLimit, HostCheck
from triforce.server.service import ClientDisconnected, Service

CLIENT_GONE = 499
"""Logged as the status of a request whose client hung up; nginx's number."""


def create_app(
    llm: ServedModel,
    engine: EngineClient,
    name: str,
    *,
    limits: Limits | None = None,
    keys: Sequence[str] = (),
    hosts: Sequence[str] = (),
    origins: Sequence[str] = (),
) -> FastAPI:
    """Serve `llm` as `name`, its texts made by `engine`, which is closed with the application.

    keys: of those who may ask (none: everybody). hosts: names of this machine that a Host header may have. origins:
    of pages elsewhere whose scripts may ask (CORS). Raises ModelError for a model without a tokenizer.
    """
    if llm.tokenizer is None:
        raise ModelError("this model has no tokenizer, and a server of text needs one; put it into the model's folder")
    limits = limits or Limits()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.close()

    app = FastAPI(
        title="triforce",
        version=__version__,
        lifespan=lifespan,
        responses={"4XX": {"description": "An error in OpenAI's shape; its message says what to do"}},
        docs_url=None,  # these pages load scripts from foreign hosts
        redoc_url=None,
    )
    app.state.service = Service(name, RequestParser(llm, llm.tokenizer, limits), engine, Metrics(engine, name), limits)
    for module in (routes, playground):
        app.include_router(module.router)
    errors.install(app)
    # The last one added is asked first.
    app.add_middleware(BodyLimit, limits=limits)
    app.add_middleware(ApiKeyAuth, keys=keys)
    if origins:  # before keys, as browsers ask without one whether they may
        exposed = [HEADER, "X-Request-Id", "Retry-After"]
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed
        )
    app.add_middleware(HostCheck, names=hosts)
    app.add_middleware(AccessLog)
    return app


class AccessLog:
    """Outermost: one line of log for each request, and an answer even where the server is at fault."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        report: dict[str, Any] = {"request": uuid4().hex, "method": scope["method"]}
        scope.setdefault("state", {})["report"] = report
        started, status = perf_counter(), 0

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", report["request"].encode())]
            await send(message)

        try:
            await self.app(scope, receive, note)
        except ClientDisconnected:
            status = CLIENT_GONE
        except Exception as error:
            logs.failure("request broke", error, request=report["request"])
            if not status:
                await errors.broken().response()(scope, receive, note)
        finally:
            # Of the path only a known route: what a client writes into it is its own affair.
            route = getattr(scope.get("route"), "path", None)
            seconds = round(perf_counter() - started, 4)
            logs.event("request", **report, route=route, status=status, seconds=seconds)
