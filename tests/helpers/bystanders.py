"""Ordinary clients beside hostile ones, and how long each of them waits."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median
from threading import Event, Thread

import httpx

from tests.helpers.server_process import KEY

HEADERS = {"authorization": f"Bearer {KEY}"}
STREAM = {"prompt": "the cat", "max_tokens": 1500, "ignore_eos": True, "stream": True, "mode": "ar"}
PAUSE = 0.02
"""Seconds between two requests of the server's health."""


class Bystanders:
    """Requests `/health`, short completions, and one stream after the other, until the block ends."""

    def __init__(self, url: str) -> None:
        self._over = Event()
        self.health: list[float] = []
        self.completions: list[float] = []
        self.gaps: list[float] = []
        """Seconds of each health request, of each completion, and between two chunks of a stream."""
        self._errors: list[Exception] = []
        kinds = (self._ask_health, self._complete, self._stream)
        self._web = httpx.Client(base_url=url, headers=HEADERS, timeout=120)
        self._threads = [Thread(target=self._repeat, args=(kind,)) for kind in kinds]

    def __enter__(self) -> Bystanders:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._web.close()
        assert not self._errors, self._errors

    def report(self) -> dict[str, float]:
        """Return the longest waits, and the median of `/health`, in seconds."""
        longest = {"health": self.health, "completion": self.completions, "gap": self.gaps}
        return {"median": median(self.health)} | {name: max(waits) for name, waits in longest.items()}

    def _repeat(self, kind: Callable[[httpx.Client], None]) -> None:
        try:
            while not self._over.is_set():
                kind(self._web)
        except Exception as error:
            self._errors.append(error)

    def _ask_health(self, web: httpx.Client) -> None:
        began = time.monotonic()
        assert web.get("/health").status_code == 200
        self.health.append(time.monotonic() - began)
        time.sleep(PAUSE)

    def _complete(self, web: httpx.Client) -> None:
        began = time.monotonic()
        assert web.post("/v1/completions", json={"prompt": "the hat", "max_tokens": 4}).status_code == 200
        self.completions.append(time.monotonic() - began)
        time.sleep(5 * PAUSE)

    def _stream(self, web: httpx.Client) -> None:
        previous_arrival = None
        with web.stream("POST", "/v1/completions", json=STREAM) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    assert "error" not in json.loads(line[6:])
                    arrival = time.monotonic()
                    self.gaps.append(arrival - (previous_arrival or arrival))
                    previous_arrival = arrival
                if self._over.is_set():
                    return
