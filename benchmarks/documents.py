"""Time to the first token of a second question on one document, beside that of the first.

    python -m benchmarks.documents --json benchmarks/results/documents_cpu.json

A server in a process of its own, the shipped pair, a part of the sample book, which no question before had.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import httpx

from benchmarks import study
from triforce.cli.bench.setup import own_texts
from triforce.cli.options import described, json_file
from triforce.cli.text_files import BOOK

Row = dict[str, Any]
QUESTIONS = ("\n\nWho is the first to speak?", "\n\nWhat happened then?")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--context", type=int, default=16_384, metavar="N", help=described("tokens of a document"))
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help=described("documents"))
    json_file(parser)


def measure(options: Namespace) -> None:
    """Print seconds to the first token, of both questions on each document."""
    with served() as url, httpx.Client(base_url=url, timeout=600) as web:
        row = measured(web, options.context, options.repeats)
    print("seconds to the first token, document by document:", row)
    study.write(options, {"rows": [row]})


@contextmanager
def served() -> Iterator[str]:
    """Yield the address of a server that has read nothing yet."""
    command = [sys.executable, "-m", "triforce", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout
        try:
            yield server.stdout.readline().split()[-1]
        finally:
            server.terminate()


def measured(web: httpx.Client, context: int, repeats: int) -> Row:
    """Return seconds to the first token of both questions, and the median of their ratios."""
    spacing = context // 16
    book = ids(web, own_texts()[BOOK][: 8 * (context + repeats * spacing)])
    first_seconds = list[float]()
    second_seconds = list[float]()
    ttft(web, ids(web, QUESTIONS[0]))  # what is done once in a process
    for start in range(0, repeats * spacing, spacing):
        document = book[start : start + context]
        assert len(document) == context
        for question, seconds in zip(QUESTIONS, (first_seconds, second_seconds), strict=True):
            seconds.append(ttft(web, document + ids(web, question)))
    ratios = [a / b for a, b in zip(first_seconds, second_seconds, strict=True)]
    return {"context": context, "first": first_seconds, "second": second_seconds, "ratio": median(ratios)}


def ids(web: httpx.Client, text: str) -> list[int]:
    answer = web.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).raise_for_status()
    token_ids: list[int] = answer.json()["tokens"]
    return token_ids


def ttft(web: httpx.Client, prompt: list[int]) -> float:
    """Return seconds from sending a prompt to the first token of its text."""
    body = {"prompt": prompt, "max_tokens": 8, "stream": True, "ignore_eos": True, "seed": 1}
    started = perf_counter()
    with web.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                return perf_counter() - started
    raise RuntimeError("the text had no token")


main = study.command("documents", __doc__, add_arguments, measure)

if __name__ == "__main__":
    sys.exit(main())
