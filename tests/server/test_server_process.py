"""A real process on a real socket, asked through the `openai` package; and how it ends."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import repeat
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from benchmarks import documents
from tests.helpers.asgi_client import SAMPLED
from tests.helpers.server_process import KEY, ROOT, served, wait_until_idle
from triforce.backends import dispatch
from triforce.engine.engine import OutputChunk
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM

EXAMPLES = ROOT / "examples"
PROMPT = "the cat sat on the mat"
EXTENSIONS = {"ignore_eos": True}
SETTINGS: dict[str, Any] = {"model": "target", "temperature": 0.8, "seed": 5, "max_tokens": 24}


@pytest.fixture(scope="module")
def url(pair: Path) -> Iterator[str]:
    with served(pair) as (_, url):
        yield url


@pytest.fixture(scope="module")
def text(pair: Path) -> str:
    llm = LLM(pair / "target", pair / "draft", retrieval_budget=64)
    return llm.generate(PROMPT, SamplingParams(**SAMPLED))[0].outputs[0].text  # type: ignore[arg-type]


def client(url: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, **options)


def test_openai_client_whole_and_streamed_texts_are_equal(url: str, text: str) -> None:
    with client(url) as api:
        assert [model.id for model in api.models.list()] == ["target"]
        full_text = api.completions.create(prompt=PROMPT, **SETTINGS, extra_body=EXTENSIONS)
        assert full_text.choices[0].text == text and full_text.usage and full_text.usage.completion_tokens == 24
        stream = api.completions.create(prompt=PROMPT, **SETTINGS, extra_body=EXTENSIONS, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == text
        talk: Any = [{"role": "user", "content": PROMPT}]
        answer = (
            api.chat.completions.create(messages=talk, **SETTINGS, extra_body=EXTENSIONS).choices[0].message.content
        )
        pieces = api.chat.completions.create(messages=talk, **SETTINGS, extra_body=EXTENSIONS, stream=True)
        assert answer and "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == answer
        options: Any = {"model": "target", "input": PROMPT, "max_output_tokens": 24, "temperature": 0.8}
        response = api.responses.create(**options, extra_body=EXTENSIONS | {"seed": 5})
        assert response.output_text == answer
        stream_events = list(api.responses.create(**options, extra_body=EXTENSIONS | {"seed": 5}, stream=True))
        assert stream_events[-1].type == "response.incomplete" and stream_events[-1].response.output_text == answer


def test_openai_async_client_gets_seeded_texts(url: str, text: str) -> None:
    async def ask(api: openai.AsyncOpenAI, stream: bool) -> str:
        answer = await api.completions.create(prompt=PROMPT, **SETTINGS, extra_body=EXTENSIONS, stream=stream)
        if isinstance(answer, openai.AsyncStream):
            return "".join([chunk.choices[0].text async for chunk in answer])
        return str(answer.choices[0].text)

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as api:
            return await asyncio.gather(*(ask(api, bool(i % 2)) for i in range(8)))

    assert asyncio.run(all_at_once()) == [text] * 8


def test_openai_client_knows_the_errors(url: str) -> None:
    with client(url) as api:
        with pytest.raises(openai.BadRequestError, match="temperature must be"):
            api.completions.create(model="target", prompt="x", temperature=-1)
        with pytest.raises(openai.NotFoundError, match="use 'target'"):
            api.models.retrieve("gpt")
    with client(url).with_options(api_key="wrong") as api, pytest.raises(openai.AuthenticationError):
        api.models.list()


def test_disconnected_client_is_cancelled(url: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True}
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=url, headers=headers) as web:
        with web.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            next(response.iter_lines())
        with pytest.raises(httpx.ReadTimeout):
            web.post("/v1/completions", json=body, timeout=0.2)
    wait_until_idle(url)


def test_many_streams_with_disconnects_finish(url: str) -> None:
    """Streams that stay get the whole text of their seed: 64 streams run at once, the limit of the queue."""
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"prompt": PROMPT, "ignore_eos": True, "stream": True}

    async def one(web: httpx.AsyncClient, i: int) -> str:
        long = {"max_tokens": 2000 if i % 3 == 0 else 6, "seed": i % 4}
        texts = []
        async with web.stream("POST", "/v1/completions", json=body | long) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                    if i % 3 == 0:
                        break
        return "".join(texts)

    async def all_at_once() -> list[str]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=250, limits=limits) as web:
            return await asyncio.gather(*(one(web, i) for i in range(64)))

    texts = asyncio.run(all_at_once())
    assert all(len({texts[i] for i in range(seed, 64, 4) if i % 3}) == 1 for seed in range(4))
    assert len({texts[i] for i in (1, 2, 4, 7)}) > 1
    wait_until_idle(url)


def test_oversized_body_is_refused_while_arriving(url: str) -> None:
    """A client that sends the whole body reads the answer; the connection of an endless body is closed."""
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    for size in (17, 20, 24):
        chunks = (b"x" * 2**20 for _ in range(size))
        assert httpx.post(f"{url}/v1/completions", content=chunks, headers=headers).status_code == 413
    with suppress(httpx.TransportError):  # whatever of the answer it has read by then
        assert httpx.post(f"{url}/v1/completions", content=repeat(b"x" * 2**20), headers=headers).status_code == 413


def test_document_questions_report_timing(url: str) -> None:
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as web:
        row = documents.measured(web, context=64, repeats=2)
    assert row["context"] == 64 and len(row["first"]) == len(row["second"]) == 2 and row["ratio"] > 0


def test_non_http_bytes_are_refused(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(4096)[:12] in (b"", b"HTTP/1.1 400")
    assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("example", ["openai_client.py", "curl.sh"])
def test_shipped_examples_run(url: str, example: str) -> None:
    program = sys.executable if example.endswith(".py") else shutil.which("sh")
    if not program or (example == "curl.sh" and not shutil.which("curl")):
        pytest.skip("no curl here")
    done = subprocess.run([program, EXAMPLES / example, url, KEY], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "retrieval" in done.stdout


@pytest.fixture
def signals_taken() -> Iterator[None]:
    """Reset ignored signals, as under `nohup`, so that child processes do not ignore them."""
    old_handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, old_handler)


@pytest.mark.usefixtures("signals_taken")
@pytest.mark.parametrize(
    ("sent_signal", "grace", "tokens", "ends"),
    [
        (signal.SIGTERM, "200", 100, '"finish_reason": "length"'),
        (signal.SIGHUP, "200", 100, '"finish_reason": "length"'),
        (signal.SIGTERM, "0.2", 2000, '"code": "stopping"'),
    ],
)
def test_signal_drains_or_reports(pair: Path, sent_signal: signal.Signals, grace: str, tokens: int, ends: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True, "seed": 5}
    headers = {"authorization": f"Bearer {KEY}"}
    with served(pair, "--shutdown-timeout", grace) as (process, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as response:
            lines = response.iter_lines()
            head = next(lines)
            process.send_signal(sent_signal)
            tail = list(lines)
        assert any(ends in line for line in tail[-6:]), tail[-6:]
        assert process.wait(timeout=60) == 0
        assert process.stderr
        log = [json.loads(line) for line in process.stderr.read().splitlines() if line.startswith("{")]
        assert [line["event"] for line in log] == ["listening", "stopping", "request"]
    events = [json.loads(line.removeprefix("data: ")) for line in [head, *tail] if line.startswith("data: {")]
    text = "".join(event["choices"][0]["text"] for event in events if "choices" in event)
    llm = LLM(pair / "target", pair / "draft", retrieval_budget=64)
    params = SamplingParams(seed=5, max_tokens=tokens, ignore_eos=True)
    joined = ""
    with closing(llm.stream(PROMPT, params)) as pieces:
        while len(joined) < len(text) and isinstance(piece := next(pieces), OutputChunk):
            joined += piece.text
    assert text and joined.startswith(text)  # no token that was made is lost, and no other one told


@pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")
def test_server_with_int8_kv_tells_its_type(pair: Path) -> None:
    """A server with int8 KV gives the texts of `LLM` with int8 KV, and names the type in its metrics."""
    with served(pair, "--kv-dtype", "int8") as (_, url), client(url) as api:
        full_text = api.completions.create(prompt=PROMPT, **SETTINGS, extra_body=EXTENSIONS)
        metrics = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    (output,) = LLM(pair / "target", pair / "draft", retrieval_budget=64, kv_dtype="int8").generate(
        PROMPT,
        SamplingParams(**SAMPLED),  # type: ignore[arg-type]
    )
    assert full_text.choices[0].text == output.outputs[0].text
    assert [line for line in metrics.splitlines() if line.startswith("triforce:kv_cache_dtype{")] == [
        'triforce:kv_cache_dtype{dtype="int8",model_name="target"} 1.0'
    ]


def test_port_in_use_is_reported_before_loading(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from triforce.cli import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "nowhere", "--port", str(taken.getsockname()[1])]) == 2
    stderr = capsys.readouterr().err
    assert "is taken by another program" in stderr and "choose another --port" in stderr and "Errno" not in stderr
