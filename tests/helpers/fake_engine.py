"""Fake interpreter with an engine that is not installed: `python fake_engine.py BEHAVIOUR -m ... ENGINE`.

Speeds follow from the settings: 100 tokens/s with flash attention and 50 without, and a tenth more per draft token.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from time import sleep
from typing import Any


def interpreter(folder: Path, behaviour: str) -> str:
    """Write a program with this behaviour; return its path."""
    path = folder / f"python-{behaviour}"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S {Path(__file__).resolve()} {behaviour} "$@"\n')
    path.chmod(0o755)
    return str(path)


def answer(task: dict[str, Any], turn: dict[str, Any]) -> dict[str, Any]:
    rate = (100 if task["settings"].get("flash") else 50) * (1 + turn["settings"].get("lookup", 0) / 10)
    return {
        "prefill_seconds": len(turn["ids"]) / (rate * 10), "prefill_busy_cores": 1.0, "busy_cores": 1.0,
        "pass_seconds": turn["settings"].get("width", 1) / rate,
        "seconds": (turn["tokens"] - 1) / rate, "decoded": turn["tokens"] - 1, "ids": list(range(turn["tokens"])),
        "version": "9", "built": "CPU : AVX2 = 1 | ",
    }  # fmt: skip


def main(behaviour: str, *arguments: str) -> None:
    if arguments[0] == "-c":
        sys.exit("ModuleNotFoundError: No module named 'it'" if behaviour == "missing" else 0)
    task = json.loads(sys.stdin.readline())
    if behaviour == "unreadable":
        sys.exit("ValueError: Failed to load model from file: it.gguf")
    for number, line in enumerate(sys.stdin):
        turn = json.loads(line)
        decoding = turn["tokens"] > 1
        if behaviour == "dies" and (turn["temperature"] or turn["settings"].get("width", 1) > 1):
            print("ggml.c: out of luck", file=sys.stderr, flush=True)
            os.kill(os.getpid(), 9)
        if behaviour == "sleeps" and number:
            sleep(60)
        if behaviour == "babbles":
            print("hello", flush=True)
        elif behaviour == "refuses" and decoding and "lookup" in turn["settings"]:
            print(json.dumps({"failed": "ValueError: no lookup here"}), flush=True)
        else:
            print(json.dumps(answer(task, turn)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
