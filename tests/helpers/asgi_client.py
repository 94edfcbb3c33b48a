"""An ASGI client of the tests, without a socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from starlette.types import ASGIApp, Message

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}bot:{% endif %}"
)
SAMPLED = {"temperature": 0.8, "seed": 5, "max_tokens": 24, "ignore_eos": True}


def ask(app: ASGIApp, path: str, body: object = None, **options: Any) -> httpx.Response:
    """POST a body if there is one, else GET."""
    if body is not None:
        options["json"] = body
    method = "POST" if {"json", "content"} & options.keys() else "GET"

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    return asyncio.run(go())


def good(response: httpx.Response) -> dict[str, Any]:
    """Return the answer of a request; assert that it succeeded."""
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refused(response: httpx.Response, status: int = 400) -> str:
    """Return the message of an error; assert that it has OpenAI's shape."""
    assert response.status_code == status, (response.status_code, response.text)
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return str(error["message"])


def told_refusal(response: httpx.Response) -> tuple[str, str | None]:
    """Return the message and the field of an error; assert that it has the shape of its door."""
    body = response.json()
    path = response.request.url.path
    if path.startswith("/v1/messages"):
        assert (
            body.keys() == {"type", "error"} and body["type"] == "error" and body["error"].keys() == {"type", "message"}
        )
        return body["error"]["message"], None
    if path.startswith("/api/") and not path.startswith("/api/v1"):
        assert body.keys() == {"error"} and isinstance(body["error"], str)
        return body["error"], None
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]["message"], body["error"]["param"]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the JSON of each server-sent event, without the end mark of completions."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.removesuffix("\n\n").split("\n\n")
    lines = [frame.splitlines()[-1].removeprefix("data: ") for frame in frames]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def hang_up(app: ASGIApp, path: str, body: object, after: int) -> list[Message]:
    """POST, and disconnect once `after` messages have come; return these messages."""
    got: list[Message] = []
    enough = asyncio.Event()
    unread: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await enough.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        got.append(message)
        if len(got) >= after:
            enough.set()

    if not after:
        asyncio.get_running_loop().call_later(0.3, enough.set)
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    await app(scope | {"headers": headers, "http_version": "1.1", "scheme": "http"}, receive, send)
    return got
