"""Pages of other origins: which may ask, and what a browser is told that asks for another one."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from triforce.server.errors import ApiError

_LONGEST = 100
"""Characters of an origin that are told back."""


class PreflightAdvice:
    """Tells a browser that asks for a page of another origin what would let that page in."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self.app, self.origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            headers = Headers(scope=scope)
            origin = headers.get("origin", "")
            if "access-control-request-method" in headers and not {"*", origin} & set(self.origins):
                shown = ascii(origin[:_LONGEST])[1:-1]
                text = f"pages of {shown} may not ask this server; start it with --cors-origin {shown} to let them"
                if origin == "null":
                    text = (
                        "a page that was opened from a file has no origin (null) that could be let in; serve it, from "
                        "http://localhost:3000, say, and start this server with that --cors-origin"
                    )
                return await ApiError(403, text).response()(scope, receive, send)
        await self.app(scope, receive, send)
