"""The listener of a soak: python scripts/soak_listener.py URL SECONDS. Prints a line of JSON.

The listener reads one stream after another in a separate process, because a client on the event loop of other clients
would measure their work, too. `gaps` are the longest times between two tokens, each as its start and its end by the
monotonic clock, which all processes of a machine share. `stall` is the longest delay with which a sleep of this process
ended: gaps cannot be measured more exactly.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from heapq import nlargest
from itertools import pairwise
from threading import Thread

import httpx

KEPT = 1000
"""Number of printed gaps. A soak reads fewer long prompts, so the longest gap of each kind is among them."""
NAP = 0.01  # seconds
Gap = tuple[float, float]


class Stalls(Thread):
    """A thread that sleeps repeatedly. longest: seconds of its longest delay."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest = 0.0

    def run(self) -> None:
        while True:
            began = time.monotonic()
            time.sleep(NAP)
            self.longest = max(self.longest, time.monotonic() - began - NAP)


def measure_stream(web: httpx.Client, seed: int) -> tuple[int, list[Gap]]:
    """Read one stream. Returns its status and the gaps between its tokens.

    The stream has 200 tokens. The server swaps a request out after 256 steps, so never this one.
    """
    asked = {"prompt": "the cat", "max_tokens": 200, "ignore_eos": True, "stream": True, "mode": "ar", "seed": seed}
    with web.stream("POST", "/v1/completions", json=asked) as answer:
        times = [time.monotonic() for line in answer.iter_lines() if line.startswith("data: {")]
    return answer.status_code, list(pairwise(times))


def main() -> None:
    url = sys.argv[1]
    until = time.monotonic() + float(sys.argv[2])
    answers = Counter[int]()
    gaps = list[Gap]()
    chance = random.Random(16)
    stalls = Stalls()
    stalls.start()
    with httpx.Client(base_url=url, timeout=300) as web:
        while time.monotonic() < until:
            status, new = measure_stream(web, chance.randrange(99))
            answers[status] += 1
            gaps = nlargest(KEPT, gaps + new, key=lambda gap: gap[1] - gap[0])
            if status == 429:
                time.sleep(0.2)
    print(json.dumps({"answers": answers, "gaps": gaps, "stall": stalls.longest}))


if __name__ == "__main__":
    main()
