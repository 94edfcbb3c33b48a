"""GET /: a playground, a static page. It requests all information on the model with the visitor's key."""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse

from triforce.disk_cache import documents as disk_cache_documents
from triforce.disk_cache.folder import CacheFolder
from triforce.server.errors import ApiError

router = APIRouter()
_WEB = Path(__file__).with_name("web")
_SAMPLE = Path(__file__).parents[1] / "assets" / "dracula.txt"


def _inlined_page() -> str:
    """Return the page with inlined style and scripts: at addresses of their own they would need a key."""

    def text(file: str) -> str:
        return (_WEB / file).read_text(encoding="utf-8")

    html = text("page.html")
    html = re.sub(r'<link rel="stylesheet" href="(.+?)">', lambda m: f"<style>\n{text(m[1])}</style>", html)
    return re.sub(r'<script src="(.+?)"></script>', lambda m: f"<script>\n{text(m[1])}</script>", html)


_HTML = _inlined_page()


def _hashes(tag: str) -> str:
    """Return the hashes of the page's own elements with a tag, for the Content-Security-Policy."""
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", _HTML, re.DOTALL)
    return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in contents)


_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@router.get("/", include_in_schema=False)
async def page() -> HTMLResponse:
    """Return the page."""
    return HTMLResponse(_HTML, headers=_HEADERS)


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
