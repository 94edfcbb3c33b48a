"""Pages of other origins: which may ask, and what a browser is told that asks for another one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from triforce.errors import RequestError
from triforce.server.errors import ApiError

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
_LONGEST = 100
"""Characters of an origin that are told back."""


def require_origins(origins: Iterable[str]) -> None:
    """Raise RequestError unless each is the origin of pages, or `*` for all."""
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise RequestError(
                f"{origin!r} is no origin; give --cors-origin a scheme and a host, such as https://example.org, or *"
            )


class PreflightAdvice:
    """Tells a browser that asks for a page of another origin which option of the server would let that page in."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self.app, self.origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            headers = Headers(scope=scope)
            origin = headers.get("origin", "")
            if "access-control-request-method" in headers and not {"*", origin} & set(self.origins):
                shown = ascii(origin[:_LONGEST])[1:-1]
                text = f"pages of {shown} may not ask this server; start it with --cors-origin {shown} to let them"
                return await ApiError(403, text).response()(scope, receive, send)
        await self.app(scope, receive, send)
