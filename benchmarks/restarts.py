"""A disk cache under kill -9: entries that stay whole, and the first token of a second question after a restart.

    python -m benchmarks.restarts --context 32768
    python -m benchmarks.restarts --model smollm2 --context 7168

A server is killed again and again while it reads, answers and writes, each time at a moment drawn at random. Then one
server reads a document and is killed once all is written, and another answers a second question on it.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any, NamedTuple

import httpx

from benchmarks import study
from benchmarks.documents import QUESTIONS, ids
from triforce.cli.bench.setup import own_texts
from triforce.cli.options import described, json_file
from triforce.cli.text_files import BOOK
from triforce.disk_cache.entry_store import EntryStore
from triforce.disk_cache.folder import CacheFolder

SETTLED = 1.0
"""Seconds without a new entry, after which all is taken to be written."""


class Answer(NamedTuple):
    """Seconds to the first token, token ids as text, and tokens of the prompt that were read before."""

    first_seconds: float
    text: str
    cached: int


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", help="(default: the shipped pair)")
    parser.add_argument("--context", type=int, default=32_768, metavar="N", help=described("tokens of a document"))
    parser.add_argument("--kills", type=int, default=20, metavar="N", help=described("servers that are killed"))
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=described("of the moments of the kills"))
    json_file(parser)


def measure(options: Namespace) -> None:
    """Print what was damaged, seconds to the first token, and whether texts are the same."""
    with TemporaryDirectory() as folder, served(options.model) as (_, url), httpx.Client(base_url=url) as web:
        document = ids(web, own_texts()[BOOK][: 16 * options.context])[: options.context - 64]
        prompts = [document + ids(web, question) for question in QUESTIONS]
        warm_up(url)
        uncached = [answer(url, prompt, cache=False) for prompt in prompts]
        row = killed(options, Path(folder) / "cache", prompts, uncached)
    print(row)
    study.write(options, {"rows": [row]})


def killed(options: Namespace, cache: Path, prompts: list[list[int]], uncached: list[Answer]) -> dict[str, Any]:
    """Return the row of one model and context: damaged entries, wrong texts, and seconds to the first token."""
    draw = random.Random(options.seed)
    wrong = 0
    damaged = 0
    entry_count = 0
    for number in range(options.kills):
        prompt, expected = draw.choice(list(zip(prompts, uncached, strict=True)))
        wrong += not answered(options.model, cache, prompt, expected.text, draw.random() * 1.3 * expected.first_seconds)
        cache_faults = faults(cache)
        damaged = damaged + sum(fault is not None for fault in cache_faults)
        entry_count = len(cache_faults)
        print(
            f"kill {number + 1}: {len(cache_faults)} entries, {damaged} damaged so far, {wrong} wrong texts", flush=True
        )
    with served(options.model, cache) as (_, url):
        answer(url, prompts[0])
        settle(cache)
    with served(options.model, cache) as (_, url):
        warm_up(url)
        second = answer(url, prompts[1])
    return {
        "context": options.context, "model": options.model or "shipped", "kills": options.kills, "entries": entry_count,
        "damaged": damaged, "wrong": wrong, "first": uncached[1].first_seconds, "second": second.first_seconds,
        "ratio": uncached[1].first_seconds / second.first_seconds, "cached": second.cached,
        "same_text": second.text == uncached[1].text,
    }  # fmt: skip


def answered(model: str | None, cache: Path, prompt: list[int], expected: str, seconds: float) -> bool:
    """Ask a server that is killed after `seconds`. Returns False if the text that it sent by then is wrong."""
    texts: list[str] = []

    def ask(url: str) -> None:
        with suppress(httpx.HTTPError):
            for text in pieces(url, prompt):
                texts.append(text)

    with served(model, cache) as (server, url):
        asking = threading.Thread(target=ask, args=(url,))
        asking.start()
        asking.join(seconds)
        server.kill()
        asking.join()
    return expected.startswith("".join(texts))


def faults(cache: Path) -> list[str | None]:
    """Return the fault of each entry, None for an intact one."""
    folder = CacheFolder(cache)
    store = EntryStore(folder, sys.maxsize)
    entry_faults = [store.fault(entry.name) for entry in store.entries()]
    folder.close()
    return entry_faults


def settle(cache: Path) -> None:
    """Wait until no entry is written any more."""
    count = -1
    while count != (count := len(list(cache.glob("*.kv")))):
        sleep(SETTLED)


@contextmanager
def served(model: str | None, cache: Path | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a server that has read nothing yet, and its address; it is killed in the end."""
    cache_options = ["--disk-cache", str(cache)] if cache else []
    command = [sys.executable, "-m", "triforce", "serve", *([model] if model else []), "--port", "0", *cache_options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout
        try:
            yield server, server.stdout.readline().split()[-1]
        finally:
            server.kill()


def warm_up(url: str) -> None:
    """Have a server do what is done once in a process."""
    answer(url, list(range(10, 40)), cache=False)


def answer(url: str, prompt: list[int], **fields: Any) -> Answer:
    """Return the answer to a prompt; fields: more of the body."""
    started = perf_counter()
    first_seconds = 0.0
    texts = list[str]()
    usage: dict[str, Any] = {}
    for text in pieces(url, prompt, usage, **fields):
        first_seconds = first_seconds or perf_counter() - started
        texts.append(text)
    return Answer(first_seconds, "".join(texts), usage["prompt_tokens_details"]["cached_tokens"])


def pieces(url: str, prompt: list[int], usage: dict[str, Any] | None = None, **fields: Any) -> Iterator[str]:
    """Yield pieces of a text as they come; its usage goes to `usage`."""
    body = {"prompt": prompt, "max_tokens": 48, "stream": True, "ignore_eos": True, "seed": 1}
    body |= {"stream_options": {"include_usage": True}} | fields
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=3600) as stream:
        for line in stream.iter_lines():
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
            yield from (choice["text"] for choice in event.get("choices", ()))
            if usage is not None:
                usage |= event.get("usage") or {}


main = study.command("restarts", __doc__, add_arguments, measure)

if __name__ == "__main__":
    sys.exit(main())
