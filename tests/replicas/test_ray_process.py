"""`triforce serve --replicas 2` in a process of its own, with a Ray of its own: asked what one engine is asked."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.helpers.server_process import KEY, served
from tests.server.test_server_process import (  # noqa: F401
    test_disconnected_client_is_cancelled,
    test_many_streams_with_disconnects_finish,
    test_non_http_bytes_are_refused,
    test_openai_async_client_gets_seeded_texts,
    test_openai_client_knows_the_errors,
    test_openai_client_whole_and_streamed_texts_are_equal,
    test_oversized_body_is_refused_while_arriving,
    text,
)
from triforce.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
BODY = {"prompt": "the cat sat on the mat", "ignore_eos": True, "seed": 5}
KEYED = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def url(pair: Path) -> Iterator[str]:
    with served(pair, "--replicas", "2") as (_, url):
        yield url


def test_ray_server_needs_key_and_host(url: str) -> None:
    for path in ("/v1/models", "/metrics", "/v1/completions"):
        assert httpx.get(url + path).status_code == 401
    assert httpx.get(url + "/health").status_code == 200
    assert httpx.get(url + "/v1/models", headers=KEYED | {"host": "evil.example"}).status_code == 400


def test_ray_server_full_queue_and_sigterm(pair: Path) -> None:
    arguments = ("--replicas", "1", "--max-num-seqs", "1", "--max-queue", "0", "--shutdown-timeout", "0.2")
    with served(pair, *arguments) as (process, url):
        family = psutil.Process(process.pid).children(recursive=True)
        asked = {"json": BODY | {"max_tokens": 2000, "stream": True}, "headers": KEYED, "timeout": 60}
        with httpx.stream("POST", f"{url}/v1/completions", **asked) as response:  # type: ignore[arg-type]
            lines = response.iter_lines()
            next(lines)
            full = httpx.post(f"{url}/v1/completions", json=BODY | {"max_tokens": 1}, headers=KEYED)
            assert full.status_code == 429 and full.headers["retry-after"]
            process.send_signal(signal.SIGTERM)
            output_rest = list(lines)
        assert any('"code": "stopping"' in line for line in output_rest[-6:])
        assert process.wait(timeout=60) == 0
        assert process.stderr
        log = [json.loads(line) for line in process.stderr.read().splitlines()]
        assert [line["event"] for line in log] == ["listening", "request", "stopping", "request"]
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, "Ray was to go with the server"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--replicas", "0"], "--replicas is 0"),
        (["--replicas", "2", "--host", "0.0.0.0"], "a key is needed"),
        (["--ray-address", "ray://127.0.0.1:1"], "such as 10.0.0.1:6379"),
        (["--ray-address", "127.0.0.1:1"], "ray start --address"),
        (["--ray-address", "nonsense"], "the Ray at nonsense cannot be joined"),
    ],
)
def test_ray_server_mistakes_are_reported(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert main(["serve", "--port", "0", *arguments]) == 2
    assert says in capsys.readouterr().err
