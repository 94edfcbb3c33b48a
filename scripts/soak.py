"""Sends half an hour of all kinds of requests to one server: python scripts/soak.py [MINUTES [MODEL]]. Prints JSON.

MODEL is a folder of a model with a context of 8,192 tokens; the default is a tiny random pair.

Exit code 1 means that one of these conditions does not hold, and `missed` names it. The server's memory at the end is
at most 5 % above its memory at the start. No answer is 5xx. Connections of slow clients are closed. KV that no request
needs is freed. The disk cache stays within its size, and evicts entries in each sixth of the run after the first.
Opened descriptors are closed. While the server reads a long prompt, the time between two tokens of a stream is at most
twice `--max-itl`. `gap_seconds` has the longest such time, and the longest time without a long prompt. A separate
process measures both (see `soak_listener`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from scripts.soak_checks import Gaps, KeptEntries, idle, within  # noqa: E402
from scripts.soak_hostile import hostile  # noqa: E402

TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
MAX_MEMORY_GROWTH = 0.05
MAX_ITL = 0.2  # seconds
QUICK = 12
DOCUMENTS = 6
CONTEXT = 8192
DISK = 8 << 20  # bytes: so few that the disk cache evicts throughout the run
HALF_OPEN = 40  # connections at a time
HEADERS = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Padding: a\r\nX-More: b\r\nConnection: close\r\n\r\n"
WARMING = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 2}
"""First request: it starts the process for chat templates, whose pipes stay open and must not count as leaks."""
Kind = Callable[[httpx.AsyncClient, random.Random], Awaitable[int]]


class Soak:
    """Clients that send whole, streamed, abandoned, slow, long, invalid and hostile requests until the run is over."""

    def __init__(self, url: str, until: float, modes: Sequence[str]) -> None:
        self.url = url
        self.until = until
        self.modes = modes
        self.answers = Counter[str]()
        self.readings: list[tuple[float, float]] = []

    async def all(self) -> None:
        quick = [self.whole, self.stream, self.stream, self.leave, self.nonsense]
        other_kinds: list[Kind] = [self.half_open, self.trickle, self.long, hostile]
        kinds: list[list[Kind]] = [quick] * QUICK + [[kind] for kind in other_kinds]
        async with httpx.AsyncClient(base_url=self.url, timeout=300) as web:
            await asyncio.gather(
                *(self.client(web, random.Random(i), kind_group) for i, kind_group in enumerate(kinds))
            )

    async def client(self, web: httpx.AsyncClient, chance: random.Random, kinds: Sequence[Kind]) -> None:
        while time.monotonic() < self.until:
            kind = chance.choice(kinds)
            try:
                status = await kind(web, chance)
            except httpx.ReadTimeout:
                status = 0
            self.answers[f"{kind.__name__} {status}"] += 1
            if status in (0, 429):
                await asyncio.sleep(0.2)

    async def whole(self, web: httpx.AsyncClient, chance: random.Random) -> int:
        return (await web.post("/v1/completions", json=self.body(chance))).status_code

    async def stream(self, web: httpx.AsyncClient, chance: random.Random) -> int:
        options = {"stream": True, "tier_stats": True, "trace": True}
        async with web.stream("POST", "/v1/completions", json=self.body(chance) | options) as answer:
            async for _ in answer.aiter_lines():
                pass
            return answer.status_code

    async def leave(self, web: httpx.AsyncClient, chance: random.Random) -> int:
        async with web.stream("POST", "/v1/completions", json=self.body(chance) | {"stream": True}) as answer:
            async for _ in answer.aiter_lines():
                break
            return answer.status_code

    async def nonsense(self, web: httpx.AsyncClient, chance: random.Random) -> int:
        long = b'{"prompt": "' + b"a" * 10**6
        sent = chance.choice([b"{", b"[" * 10**5, chance.randbytes(99), b'{"prompt": 5}', long])
        return (await web.post("/v1/completions", content=sent)).status_code

    async def half_open(self, web: httpx.AsyncClient, chance: random.Random) -> int:
        """Open connections with incomplete headers or none. The server must close all of them in time."""
        sent = [HEADERS[: chance.choice([0, chance.randrange(len(HEADERS))])] for _ in range(HALF_OPEN)]
        answers = await asyncio.gather(*(self.raw([part], 0, 60) for part in sent))
        return 408 if all(answer[9:12] in (b"408", b"") for answer in answers) else 599

    async def trickle(self, web: httpx.AsyncClient, chance: random.Random) -> int:
        """Send complete headers slowly."""
        parts = [HEADERS[i : i + 9] for i in range(0, len(HEADERS), 9)]
        return int((await self.raw(parts, chance.uniform(0, 0.4), 60))[9:12] or 599)

    async def raw(self, parts: Sequence[bytes], pause: float, patience: float) -> bytes:
        """Send the parts of a request, and return all that the server sends before it closes the connection."""
        reader, writer = await asyncio.open_connection(httpx.URL(self.url).host, httpx.URL(self.url).port)
        try:
            for part in parts:
                writer.write(part)
                await asyncio.sleep(pause)
            async with asyncio.timeout(patience):
                return await reader.read()
        except ConnectionError:
            return b""
        except TimeoutError:
            return b"HTTP/1.1 599 the server does not close the connection"
        finally:
            writer.close()

    async def long(self, web: httpx.AsyncClient, chance: random.Random) -> int:
        """Send a prompt without a cached prefix that fills most of the context."""
        prompt = chance.choices(range(5, 250), k=CONTEXT - 1000)
        asked = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True}
        began = time.monotonic()
        status = (await web.post("/v1/completions", json=asked)).status_code
        self.readings.append((began, time.monotonic()))
        await asyncio.sleep(chance.uniform(0, 2))
        return status

    def body(self, chance: random.Random) -> dict[str, object]:
        """Return the body of a question about one of a few documents, sometimes with a schema for the answer."""
        document = f"the {chance.randrange(DOCUMENTS)} cat sat on the mat " * chance.choice([2, 20])
        asked: dict[str, object] = {
            "prompt": document + f"the hat {chance.randrange(1000)}", "n": chance.choice([1, 1, 2]),
            "temperature": 0.8, "max_tokens": chance.choice([4, 40]), "mode": chance.choice(self.modes),
        }  # fmt: skip
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["the", 5]}}}
        return asked | ({"response_format": schema} if chance.random() < 0.1 else {})


class Listener:
    """A process that reads one stream after another until the run is over (see `soak_listener`)."""

    def __init__(self, url: str, seconds: float) -> None:
        command = [sys.executable, str(ROOT / "scripts" / "soak_listener.py"), url, str(seconds)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def report(self) -> dict[str, Any]:
        """Wait for the listener's end. Returns the report that it prints."""
        stdout, _ = self._process.communicate(timeout=300)
        listener_report: dict[str, Any] = json.loads(stdout)
        return listener_report


async def watch(soak: Soak, server: psutil.Process, kept_entries: KeptEntries, start: float) -> list[tuple[float, int]]:
    """Sample the server until the run is over. Returns pairs of the share of the run and the memory in bytes."""
    samples = []
    while (now_seconds := time.monotonic()) < soak.until:
        samples.append(((now_seconds - start) / (soak.until - start), server.memory_info().rss))
        kept_entries.sample(samples[-1][0])
        await asyncio.sleep((soak.until - start) / 120)
    return samples


def verdict(
    samples: list[tuple[float, int]],
    soak: Soak,
    listener_report: dict[str, Any],
    kept_entries: KeptEntries,
    gave_back: bool,
    opened: tuple[int, int],
) -> dict[str, object]:
    """Return the printed result. Memory is compared after the first sixth of the run, in which caches fill.

    gave_back: whether all KV was freed at the end. opened: counts of file descriptors before and after the run.
    """
    soak.answers.update({f"listen {status}": count for status, count in listener_report["answers"].items()})
    longest = Gaps(listener_report["gaps"], soak.readings)
    early_rss = [rss for share, rss in samples if 1 / 6 <= share < 1 / 3]
    late_rss = [rss for share, rss in samples if share >= 5 / 6]
    growth = sum(late_rss) / len(late_rss) / (sum(early_rss) / len(early_rss)) - 1
    broken = sum(count for name, count in soak.answers.items() if name.split()[1] >= "500")
    holds = {
        "memory": growth <= MAX_MEMORY_GROWTH, "gaps": longest.while_reading <= 2 * MAX_ITL, "answers": not broken,
        "kv": gave_back, "disk": kept_entries.within_limits, "descriptors": opened[1] <= opened[0],
    }  # fmt: skip
    missed = [name for name, holding in holds.items() if not holding]
    gaps = {
        "while_reading": longest.while_reading,
        "otherwise": longest.otherwise,
        "listener_stall": listener_report["stall"],
    }
    gaps = {name: round(seconds, 3) for name, seconds in gaps.items()}
    mib = [round(rss / 2**20) for _, rss in samples[:: max(1, len(samples) // 12)]]
    return {"held": not missed, "missed": missed, "requests": soak.answers.total(), "broken": broken,
            "kv_given_back": gave_back, "descriptors": opened, "gap_seconds": gaps,
            "memory_growth": round(growth, 4), "memory_mib": mib,
            "disk_most": kept_entries.largest_size, "evicted": kept_entries.evicted,
            "answers": dict(sorted(soak.answers.items()))}  # fmt: skip


def tiny_models(folder: Path) -> list[str]:
    """Write a tiny random pair to `folder`. Returns the arguments of `triforce serve` for it."""
    from tests.helpers.tiny_checkpoint import tiny_pair

    pair = tiny_pair(folder, positions=CONTEXT, chat_template=TEMPLATE)
    return [str(pair / "target"), "--draft", str(pair / "draft"), "--retrieval-budget", "64"]


def main() -> int:
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    with TemporaryDirectory() as folder, open(Path(folder) / "log", "w") as log:
        models = sys.argv[2:3] or tiny_models(Path(folder))
        limits = ["--max-body", "0.5", "--max-kv-tokens", str(3 * CONTEXT), "--max-itl", str(1000 * MAX_ITL)]
        limits += ["--disk-cache", f"{folder}/cache", "--disk-cache-size", str(DISK)]
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "triforce", "serve", *models, "--port", "0", *limits]
        env = os.environ | {"PYTHONPATH": path} | ({} if sys.argv[2:] else {"OMP_NUM_THREADS": "1"})
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env)
        assert server.stdout
        try:
            url, start = server.stdout.readline().split()[-1], time.monotonic()
            httpx.post(f"{url}/v1/chat/completions", json=WARMING, timeout=60)
            within(60, lambda: idle(url))
            time.sleep(1)  # until the last check's connection is closed
            descriptors_before = (process := psutil.Process(server.pid)).num_fds()
            modes = ["ar", "retrieval", "auto"] if sys.argv[2:] else ["ar", "triforce", "draft-ngram"]
            soak = Soak(url, start + 60 * minutes, modes)
            entries = KeptEntries(Path(folder, "cache"), DISK)

            async def both() -> list[tuple[float, int]]:
                return (await asyncio.gather(watch(soak, process, entries, start), soak.all()))[0]

            listener = Listener(url, 60 * minutes)
            samples = asyncio.run(both())
            listener_report = listener.report()
            gave_back = within(60, lambda: idle(url))
            within(30, lambda: process.num_fds() <= descriptors_before)
            entries.sample(1.0)
            result = verdict(
                samples, soak, listener_report, entries, gave_back, (descriptors_before, process.num_fds())
            )
        finally:
            server.terminate()
            server.wait()
    print(json.dumps({"minutes": minutes} | result))
    return 0 if result["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
