"""Several questions on one document: how long the first token of the second one takes, beside that of the first.

    python -m benchmarks.documents --json benchmarks/results/documents_cpu.json

A server in a process of its own, the shipped pair, a part of the sample book, which no question before had.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import httpx

from triforce.cli.bench.common import machine, own_texts
from triforce.cli.demo import BOOK

Row = dict[str, Any]
QUESTIONS = ("\n\nWho is the first to speak?", "\n\nWhat happened then?")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.documents", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--context", type=int, default=16_384, help="tokens of a document")
    parser.add_argument("--repeats", type=int, default=3, help="documents")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with served() as url, httpx.Client(base_url=url, timeout=600) as web:
        row = measured(web, options.context, options.repeats)
    print("seconds to the first token, document by document:", row)
    if options.json:
        command = "python -m benchmarks.documents " + " ".join(arguments or sys.argv[1:])
        options.json.write_text(json.dumps({"machine": machine(), "command": command, "rows": [row]}, indent=1) + "\n")


@contextmanager
def served() -> Iterator[str]:
    """The address of a server that has read nothing yet."""
    command = [sys.executable, "-m", "triforce", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout
        try:
            yield server.stdout.readline().split()[-1]
        finally:
            server.terminate()


def measured(web: httpx.Client, context: int, repeats: int) -> Row:
    """Seconds to the first token of both questions, and the median of their ratios."""
    apart = context // 16
    book = ids(web, own_texts()[BOOK][: 8 * (context + repeats * apart)])
    first, second = [], []
    ttft(web, ids(web, QUESTIONS[0]))  # what is done once in a process
    for start in range(0, repeats * apart, apart):
        document = book[start : start + context]
        assert len(document) == context
        for question, seconds in zip(QUESTIONS, (first, second), strict=True):
            seconds.append(ttft(web, document + ids(web, question)))
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    return {"context": context, "first": first, "second": second, "ratio": median(ratios)}


def ids(web: httpx.Client, text: str) -> list[int]:
    answer = web.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).raise_for_status()
    found: list[int] = answer.json()["tokens"]
    return found


def ttft(web: httpx.Client, prompt: list[int]) -> float:
    """Seconds from sending a prompt to the first token of its text."""
    body = {"prompt": prompt, "max_tokens": 8, "stream": True, "ignore_eos": True, "seed": 1}
    started = perf_counter()
    with web.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                return perf_counter() - started
    raise RuntimeError("the text had no token")


if __name__ == "__main__":
    main()
