"""Broken HTTP is refused in the shape of all errors; upgrades of the protocol are ignored."""

from __future__ import annotations

import json
import logging

import pytest

from tests.helpers.connections import HEAD, Scene, scene

POST = b"POST /quick HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # as TLS begins
        b"GET /quick HTTP/1.1\r\n\r\n",
        b"GET /quick HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        POST + b"Content-Length: abc\r\n\r\n",
        POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"hello\r\n\r\n",
    ],
)
def test_broken_http_is_refused_as_all_errors_are(sent: bytes) -> None:
    async def play(scene: Scene) -> None:
        reader, _ = await scene.connect(sent)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        error = json.loads(body)["error"]
        assert head.startswith(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n")
        assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
        assert "no valid request of HTTP/1.1" in error["message"]
        assert await scene.ask() == b"HTTP/1.1 200 OK\r\n"

    scene(play)


def test_broken_body_does_not_write_into_an_answer() -> None:
    """A body that breaks after the answer began closes the connection without a second answer."""

    async def play(scene: Scene) -> None:
        chunked = b"GET /endless HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        reader, writer = await scene.connect(chunked)
        assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
        writer.write(b"no length\r\n")
        assert b"HTTP/1.1 400" not in await reader.read()
        await scene.release.wait()

    scene(play)


def test_upgrade_is_answered_without_advice_to_install(caplog: pytest.LogCaptureFixture) -> None:
    async def play(scene: Scene) -> None:
        upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        reader, _ = await scene.connect((HEAD % b"quick").removesuffix(b"\r\n") + upgrade)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"

    with caplog.at_level(logging.WARNING):
        scene(play)
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]
