"""Access control: ASGI middleware for host names, API keys, body sizes and CORS advice; `access` has the settings."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import Collection, Iterable
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triforce.server import page
from triforce.server.access import as_browsers_send, is_address
from triforce.server.errors import ApiError
from triforce.server.limits import Limits

LIVENESS = ("/health", "/ping")
"""Health checks. They need no Host header, which browsers always send and some load balancers do not."""
OPEN_PATHS = (*LIVENESS, *page.FILES)
"""Paths that need no key: the health checks, and files of the page, which contain nothing about the model."""
OPEN_BYTES = 1024
"""Largest body on an open path, to bound the memory of clients without a key."""
LINGER_SECONDS = 2.0
"""Seconds for which a refused body is still received."""


_ABSOLUTE = re.compile(r"https?://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)


class HostCheck:
    """Refuses requests whose host is another name: a page's name may resolve to this machine (DNS rebinding).

    names: accepted names beside `localhost`. Every IP address is accepted, as DNS cannot change it. Where the target of
    a request is an absolute URL, as for proxies, its host replaces the header (RFC 9112, 3.2.2).
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        self.app = app
        self.names = {"localhost", *(name.lower().rstrip(".") for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if target := _ABSOLUTE.fullmatch(scope["path"]):
            headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
            scope.update(path=target[2] or "/", headers=[*headers, (b"host", target[1].encode())])
        hosts = Headers(scope=scope).getlist("host")
        if self._is_known(hosts) or (not hosts and scope["path"] in LIVENESS):
            return await self.app(scope, receive, send)
        text = "the request names another server as its host; start this one with --allowed-host NAME"
        if len(hosts) != 1:
            header_count = f"{len(hosts)} Host headers" if hosts else "no Host header"
            text = f"the request has {header_count}; send one, which names this server"
        await ApiError(400, text).response(scope)(scope, receive, send)

    def _is_known(self, hosts: list[str]) -> bool:
        if len(hosts) != 1:
            return False
        name = hosts[0].lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0].rstrip(".")
        return name in self.names or is_address(name)


class ApiKeyAuth:
    """Requires a key on every path outside of `OPEN_PATHS`: a bearer token, or the header x-api-key as Anthropic's.

    keys: without any, no request needs one.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self.app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and self._digests:
            key_digest = self._key_digest(scope)
            if key_digest is None:
                text = "this key is not known here" if _sent_key(scope) else "a key is needed"
                text += "; send one that the server was started with, as 'Authorization: Bearer KEY'"
                refusal = ApiError(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
                return await refusal.response(scope)(scope, receive, send)
            scope.setdefault("state", {})["scope"] = key_digest.hex()  # only requests of one key share KV
        await self.app(scope, receive, send)

    def _key_digest(self, scope: Scope) -> bytes | None:
        """Return the digest of the request's key, or None for an unknown key."""
        key = _sent_key(scope)
        key_digest = _digest(key)
        # Compare with every key, each in constant time, so that the duration reveals nothing about the keys.
        matches = [hmac.compare_digest(key_digest, digest) for digest in self._digests]
        return key_digest if key and any(matches) else None


class BodyLimit:
    """Receives the whole body before the application runs, within `body_bytes` and `body_seconds` of the limits."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app = app
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        incoming = _IncomingBody(receive)
        max_bytes = self.limits.body_bytes
        if scope["path"] in OPEN_PATHS:
            max_bytes = min(max_bytes, OPEN_BYTES)
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                body = await _read(Headers(scope=scope), incoming, max_bytes)
        except TimeoutError:
            text = f"the body did not arrive within {self.limits.body_seconds:g} seconds; send it again"
            return await ApiError(408, text).response(scope)(scope, receive, send)
        except ApiError as refusal:
            return await _answer_early(refusal.response(scope), scope, incoming, send)
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        await self.app(scope, replay, send)


class _IncomingBody:
    """A body in transfer. `has_more` is False at its end, and after the client disconnects."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.has_more = True

    async def __call__(self) -> Message:
        message = await self._receive()
        self.has_more = message.get("more_body", False)
        return message


async def _read(headers: Headers, incoming: _IncomingBody, max_bytes: int) -> bytes:
    content_length = headers.get("content-length", "0")
    _check_size(float(content_length) if content_length.isdecimal() else 0, max_bytes)
    chunks = []
    size = 0
    while incoming.has_more:
        chunks.append((await incoming()).get("body", b""))
        size += len(chunks[-1])
        _check_size(size, max_bytes)
    return b"".join(chunks)


def _check_size(size: float, max_bytes: int) -> None:
    if size > max_bytes:
        advice = "send less" if max_bytes <= OPEN_BYTES else "send less, or start the server with a larger --max-body"
        raise ApiError(413, f"the body is larger than {max_bytes} bytes; {advice}", headers={"Connection": "close"})


async def _answer_early(response: ASGIApp, scope: Scope, incoming: _IncomingBody, send: Send) -> None:
    """Answer, and discard the rest of the body for a while: closing with unread bytes may lose the answer."""

    async def send_open(message: Message) -> None:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    await response(scope, incoming, send_open)
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while incoming.has_more:
                await incoming()
    await send({"type": "http.response.body"})


def _sent_key(scope: Scope) -> bytes:
    """Return the bearer token of a request, else its x-api-key, or an empty string."""
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token if scheme.lower() == "bearer" and token.strip() else headers.get("x-api-key", "")
    return key.strip().encode("latin-1")


def _digest(key: bytes) -> bytes:
    """Return the SHA-256 digest of a key."""
    return hashlib.sha256(key).digest()


_LONGEST = 100
"""Characters of an origin that an error quotes."""


class PreflightAdvice:
    """Answers a refused CORS preflight request with the option that would allow its origin."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self.app = app
        self.origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            headers = Headers(scope=scope)
            origin = headers.get("origin", "")
            if "access-control-request-method" in headers and not {"*", origin} & set(self.origins):
                shown = ascii(origin[:_LONGEST])[1:-1]
                text = f"pages of {shown} may not ask this server; start it with --cors-origin {shown} to let them"
                if as_browsers_send(origin) != origin:
                    text = (
                        f"the origin of this page ({shown}) cannot be allowed; if the page was opened from a file, "
                        "serve it at an address such as http://localhost:3000, and start this server with "
                        "--cors-origin and that address"
                    )
                return await ApiError(403, text).response(scope)(scope, receive, send)
        await self.app(scope, receive, send)
