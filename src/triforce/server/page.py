"""GET /: a playground, one static file. It knows nothing of the model: it asks for that, with the visitor's key."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter()
_HTML = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def _hashes(tag: str) -> str:
    """What the page's own elements of a kind are, and nothing else is, allowed by."""
    inside = re.findall(rf"<{tag}>(.*?)</{tag}>", _HTML, re.DOTALL)
    return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in inside)


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
    """The page, the same for everybody."""
    return HTMLResponse(_HTML, headers=_HEADERS)
