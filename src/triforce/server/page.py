"""GET /: the page, and what it loads. `make page` bundles these static files from web/src.

The page requests all information on the model with the visitor's key.
"""

from __future__ import annotations

import asyncio
import gzip
import re
from base64 import b64encode
from collections.abc import Callable
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response

from triforce.disk_cache import documents as disk_cache_documents
from triforce.disk_cache.folder import CacheFolder
from triforce.server.errors import ApiError

router = APIRouter()
_WEB = Path(__file__).with_name("web")
_SAMPLE = Path(__file__).parents[1] / "assets" / "dracula.txt"


class WebFile:
    """A static file with an ETag, which is sent compressed where the client takes that."""

    def __init__(self, name: str, media_type: str, policy: Callable[[], str]) -> None:
        """policy: returns its Content-Security-Policy. The file is read at its first request, not at the start."""
        self._name = name
        self.media_type = media_type
        self._policy = policy

    @cached_property
    def content(self) -> bytes:
        return (_WEB / self._name).read_bytes()

    @cached_property
    def compressed(self) -> bytes:
        return gzip.compress(self.content, mtime=0)

    @cached_property
    def _digest(self) -> str:
        return sha256(self.content).hexdigest()[:32]

    @cached_property
    def _headers(self) -> dict[str, str]:
        return {
            "Content-Security-Policy": self._policy(),
            "Cache-Control": "no-cache",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Vary": "Accept-Encoding",
            "X-Content-Type-Options": "nosniff",
        }

    async def response(self, request: Request) -> Response:
        """Return the file, or status 304 to a client that has it."""
        takes_gzip = "gzip" in request.headers.get("accept-encoding", "")
        tag = f'"{self._digest}{"-gzip" if takes_gzip else ""}"'
        headers = self._headers | {"ETag": tag}
        known_tags = {known.strip().removeprefix("W/") for known in request.headers.get("if-none-match", "").split(",")}
        if known_tags & {tag, "*"}:
            return Response(status_code=304, headers=headers)
        if takes_gzip:
            headers["Content-Encoding"] = "gzip"
            return Response(
                await asyncio.to_thread(lambda: self.compressed), headers=headers, media_type=self.media_type
            )
        return Response(self.content, headers=headers, media_type=self.media_type)


def _hash(text: bytes) -> str:
    """Return the source of an inline element for a Content-Security-Policy."""
    return f"'sha256-{b64encode(sha256(text).digest()).decode()}'"


def _page_policy() -> str:
    """Return the page's policy. It allows the page's own script and style, and the renderer's script, by their hashes.

    The style and the script are inlined, so the first view is one request. The renderer becomes an inline script when
    the page needs it: hashes hold for inline scripts only. A worker reads PDF files; it has a policy of its own.
    """
    html = (_WEB / "page.html").read_bytes()
    renderer = (_WEB / "renderer.js").read_bytes().rstrip()
    hashes = {tag: [_hash(text) for text in re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), html, re.DOTALL)]
              for tag in ("script", "style")}  # fmt: skip
    return (
        f"default-src 'none'; script-src {' '.join(hashes['script'])} {_hash(renderer)}; "
        f"style-src {' '.join(hashes['style'])}; worker-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _closed_policy() -> str:
    """Return the policy of a file that loads nothing."""
    return "default-src 'none'; frame-ancestors 'none'"


_JAVASCRIPT = "text/javascript; charset=utf-8"
FILES = {
    "/": WebFile("page.html", "text/html; charset=utf-8", _page_policy),
    "/page/renderer.js": WebFile("renderer.js", _JAVASCRIPT, _closed_policy),
    "/page/pdf.js": WebFile("pdf.js", _JAVASCRIPT, _closed_policy),
    "/page/licences.txt": WebFile("licences.txt", "text/plain; charset=utf-8", _closed_policy),
}
"""Files by path. They need no key, as a browser sends none for them, and they contain nothing about the model."""
for _path, _file in FILES.items():
    router.add_api_route(_path, _file.response, include_in_schema=False)


@router.get("/sample.txt", include_in_schema=False)
async def sample() -> FileResponse:
    """Return a long sample text in the public domain."""
    return FileResponse(_SAMPLE, media_type="text/plain; charset=utf-8")


@router.get("/documents", include_in_schema=False)
async def documents(request: Request) -> JSONResponse:
    """List the documents of the disk cache (see `triforce watch`), where the server shows them."""
    watched_documents = await asyncio.to_thread(_watched, request)
    return JSONResponse({"documents": [{"id": entry.id, "name": entry.name} for entry in watched_documents]})


@router.get("/documents/{name}", include_in_schema=False)
async def document(name: str, request: Request) -> PlainTextResponse:
    """Return the current text of a document. Raises ApiError or RequestError."""
    watched_documents = await asyncio.to_thread(_watched, request)
    requested_document = next((entry for entry in watched_documents if entry.id == name), None)
    if requested_document is None:
        raise ApiError(404, "there is no such document here; /documents lists the documents")
    return PlainTextResponse(await asyncio.to_thread(requested_document.text))


def _watched(request: Request) -> list[disk_cache_documents.Document]:
    cache: CacheFolder | None = request.app.state.watched
    return list(disk_cache_documents.documents(cache)) if cache else []
