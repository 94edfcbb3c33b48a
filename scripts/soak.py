"""Half an hour of all kinds of requests to one server: python scripts/soak.py [MINUTES]. Prints one line of JSON.

Exit code 1 where the memory of the server at the end is not what it was at first (+- 5 %), it answered 5xx, or
kept KV that nobody needs.
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
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
CLIENTS, DOCUMENTS, CONTEXT = 12, 6, 1024
FLAT = 0.05


class Soak:
    """Clients that ask, stream, hang up and send nonsense until the time is over."""

    def __init__(self, url: str, until: float) -> None:
        self.url, self.until = url, until
        self.told: Counter[str] = Counter()

    async def all(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=300) as web:
            await asyncio.gather(*(self.client(web, random.Random(i)) for i in range(CLIENTS)))

    async def client(self, web: httpx.AsyncClient, chance: random.Random) -> None:
        while time.monotonic() < self.until:
            kind = chance.choice([self.whole, self.stream, self.stream, self.leave, self.nonsense])
            try:
                status = await kind(web, chance)
            except httpx.ReadTimeout:
                status = 0
            self.told[f"{kind.__name__} {status}"] += 1
            if status in (0, 429):
                await asyncio.sleep(0.2)

    async def whole(self, web: httpx.AsyncClient, chance: random.Random) -> int:
        return (await web.post("/v1/completions", json=body(chance))).status_code

    async def stream(self, web: httpx.AsyncClient, chance: random.Random) -> int:
        more = {"stream": True, "tier_stats": True, "look": True}
        async with web.stream("POST", "/v1/completions", json=body(chance) | more) as answer:
            async for _ in answer.aiter_lines():
                pass
            return answer.status_code

    async def leave(self, web: httpx.AsyncClient, chance: random.Random) -> int:
        async with web.stream("POST", "/v1/completions", json=body(chance) | {"stream": True}) as answer:
            async for _ in answer.aiter_lines():
                return answer.status_code
            return answer.status_code

    async def nonsense(self, web: httpx.AsyncClient, chance: random.Random) -> int:
        sent = chance.choice(
            [b"{", b"[" * 10**5, chance.randbytes(99), b'{"prompt": 5}', b'{"prompt": "' + b"a" * 10**6]
        )
        return (await web.post("/v1/completions", content=sent)).status_code


def body(chance: random.Random) -> dict[str, object]:
    """A question on one of a few documents, or a text under a schema."""
    document = f"the {chance.randrange(DOCUMENTS)} cat sat on the mat " * chance.choice([2, 20])
    asked: dict[str, object] = {"prompt": document + f"the hat {chance.randrange(1000)}", "n": chance.choice([1, 1, 2])}
    asked |= {
        "temperature": 0.8,
        "max_tokens": chance.choice([4, 40]),
        "mode": chance.choice(["ar", "triforce", "hybrid"]),
    }
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["the", 5]}}}
    return asked | ({"response_format": schema} if chance.random() < 0.1 else {})


async def watch(soak: Soak, server: psutil.Process, begun: float) -> list[tuple[float, int]]:
    """Memory of the server in bytes at each share of the time."""
    seen = []
    while (now := time.monotonic()) < soak.until:
        seen.append(((now - begun) / (soak.until - begun), server.memory_info().rss))
        await asyncio.sleep((soak.until - begun) / 120)
    return seen


def idle(url: str) -> bool:
    """Whether nothing runs, waits or is held, within a minute."""
    for _ in range(120):
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        busy = [line for line in lines if line.startswith(("vllm:num_requests_", "triforce:kv_tokens{"))]
        if busy and all(line.endswith(" 0.0") for line in busy):
            return True
        time.sleep(0.5)
    return False


def verdict(seen: list[tuple[float, int]], told: Counter[str], gave_back: bool) -> dict[str, object]:
    """What is printed. The first sixth of the time is for caches to fill."""
    first = [rss for share, rss in seen if 1 / 6 <= share < 1 / 3]
    last = [rss for share, rss in seen if share >= 5 / 6]
    growth = sum(last) / len(last) / (sum(first) / len(first)) - 1
    broken = sum(count for name, count in told.items() if name.split()[1] >= "500")
    held = gave_back and not broken and abs(growth) <= FLAT
    mib = [round(rss / 2**20) for _, rss in seen[:: max(1, len(seen) // 12)]]
    return {"held": held, "requests": told.total(), "broken": broken, "kv_given_back": gave_back,
            "memory_growth": round(growth, 4), "memory_mib": mib, "answers": dict(sorted(told.items()))}  # fmt: skip


def main() -> int:
    from tiny_checkpoint import tiny_pair

    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    with TemporaryDirectory() as folder, open(Path(folder) / "log", "w") as log:
        pair = tiny_pair(Path(folder), positions=CONTEXT, chat_template=TEMPLATE)
        models = [str(pair / "target"), "--draft", str(pair / "draft"), "--budget", "64", "--max-body", "0.5"]
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "triforce", "serve", *models, "--port", "0", "--max-kv-tokens", "4096"]
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | {"PYTHONPATH": path}
        )
        assert server.stdout
        try:
            url, begun = server.stdout.readline().split()[-1], time.monotonic()
            soak = Soak(url, begun + 60 * minutes)

            async def both() -> list[tuple[float, int]]:
                return (await asyncio.gather(watch(soak, psutil.Process(server.pid), begun), soak.all()))[0]

            result = verdict(asyncio.run(both()), soak.told, idle(url))
        finally:
            server.terminate()
            server.wait()
    print(json.dumps({"minutes": minutes} | result))
    return 0 if result["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
