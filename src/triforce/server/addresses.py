"""Advice on addresses that are not here, and on methods that an address does not take; HEAD is taken where GET is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triforce.errors import suggest
from triforce.server.errors import ApiError

ELSEWHERE = {
    "audio": "audio is not made or read here",
    "batches": "files of requests are answered by `triforce batch`",
    "embeddings": "embeddings are not made here",
    "api": "Ollama's own interface is not here, and OpenAI's is at /v1",
    "files": "no files are kept here; `triforce batch` answers a file of requests",
    "fine_tuning": "no models are trained here",
    "images": "pictures are not made here",
    "messages": "Anthropic's interface is not here; /v1/chat/completions takes conversations",
    "moderations": "texts are not judged here",
    "rerank": "texts are not ranked here",
    "score": "texts are not ranked here",
}
"""Advice on addresses of other services, by a part of the address."""
_LONGEST = 100
"""Characters of an address that are compared."""


def install(app: FastAPI, addresses: Sequence[str]) -> None:
    """Answer requests to other addresses than these, and by other methods, with what is so."""

    async def absent(request: Request, error: HTTPException) -> JSONResponse:
        return ApiError(404, _absence(request.url.path, addresses)).response()

    async def other_method(request: Request, error: HTTPException) -> JSONResponse:
        taken = (error.headers or {}).get("Allow", "another method")
        text = f"this address takes {taken}, not {request.method[:20]}; see /openapi.json"
        return ApiError(405, text, headers=error.headers).response()

    app.add_exception_handler(404, absent)  # type: ignore[arg-type]
    app.add_exception_handler(405, other_method)  # type: ignore[arg-type]


def _absence(path: str, addresses: Iterable[str]) -> str:
    """Return what is so where nothing is at `path`."""
    parts, meant = path.strip("/").split("/"), _meant(path, addresses)
    reason = next((text for part in parts if (text := ELSEWHERE.get(part))), None)
    if reason and not meant:
        return f"{reason}; /openapi.json lists what there is"
    if parts == ["v1"]:
        return "this is the base of other addresses, such as /v1/models; /openapi.json lists them"
    nearest = f" (did you mean {meant}?)" if meant else suggest(path[:_LONGEST], addresses)
    return f"there is nothing at this address{nearest}; /openapi.json lists what there is"


def _meant(path: str, addresses: Iterable[str]) -> str:
    """Return the address that this is but for its base, which may be left out, or another one; or nothing."""
    bare = f"/{path.strip('/')}"[:_LONGEST]
    behind = [address for address in addresses if address.endswith(bare)]
    within = [address for address in addresses if bare.endswith(address)]
    return min(behind, key=len, default="") or max(within, key=len, default="")


class HeadAsGet:
    """Answers HEAD as GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            return await self.app(scope, receive, send)

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        asked = {**scope, "method": "GET"}
        await self.app(asked, receive, send_head)
        scope["route"] = asked.get("route")  # the access log names it
