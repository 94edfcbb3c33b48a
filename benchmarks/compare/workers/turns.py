"""Does what comes on stdin, a line of JSON each: first a task, and then turns, whose results go out on stdout.

Run as: python -m benchmarks.compare.workers.turns ENGINE.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module

WARM = 512, 8
"""Tokens of the prompt and of the text before the first turn: engines prepare passes as they first do them."""


def main(engine: str) -> None:
    """Load what the task names, and answer a turn after the other until there is none."""
    out = os.dup(1)
    os.dup2(2, 1)  # what an engine prints goes to stderr
    generate = import_module(f"benchmarks.compare.workers.{engine}_worker").load(json.loads(sys.stdin.readline()))
    warm = False
    with os.fdopen(out, "w") as stdout:
        for line in sys.stdin:
            try:
                turn = json.loads(line)
                if not warm:
                    generate(turn | {"ids": turn["ids"][-WARM[0] :], "tokens": WARM[1]})
                    warm = True
                answer = generate(turn)
            except Exception as error:  # each engine fails in its own way, and may be able to do another turn
                answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
            print(json.dumps(answer), file=stdout, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
