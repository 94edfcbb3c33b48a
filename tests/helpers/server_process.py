"""A server in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

import httpx

ROOT = Path(__file__).parents[2]
KEY = "a-key-of-many-letters"


@contextmanager
def served(pair: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a server process of a target and a draft, and its URL."""
    models = (str(pair / "target"), "--draft", str(pair / "draft"), "--retrieval-budget", "64")
    with serving(*models, *arguments) as process_and_url:
        yield process_and_url


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a server process with these arguments, and its URL."""
    command = [sys.executable, "-m", "triforce", "serve", "--port", "0", *arguments]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRIFORCE_API_KEYS": KEY, "PYTHONPATH": path}
    # The log goes to a file: a pipe without a reader would block the server after some hundred requests.
    with NamedTemporaryFile() as log, open(log.name) as read:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        process.stderr = read
        assert process.stdout
        line = process.stdout.readline()
        try:
            assert line.startswith("triforce serves "), read.read()
            yield process, line.split()[-1]
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def wait_until_idle(url: str) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    for _ in range(200):
        lines = httpx.get(f"{url}/metrics", headers=headers).text.splitlines()
        busy = [line for line in lines if line.startswith(("vllm:num_requests_", "triforce:kv_tokens{"))]
        if busy and all(line.endswith(" 0.0") for line in busy):
            return
        time.sleep(0.05)
    raise AssertionError(busy)
