"""Half an hour of all kinds of requests to one server: python scripts/soak.py [MINUTES [MODEL]]. Prints a line of JSON.

MODEL is a folder of a model with a context of 8,192 tokens; without one a tiny random pair serves.

Exit code 1 where the memory of the server at the end is not what it was at first (+- 5 %), it answered 5xx, let slow
clients hang on, kept KV that nobody needs, did not close what it had opened, or let a stream wait for more than twice
`--max-itl` between two tokens while a long prompt was read. `gap_seconds` is the longest such time, and that of times
when none was.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil
from soak_clients import CONTEXT, Soak

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
FLAT = 0.05
MAX_ITL = 0.2  # seconds


async def watch(soak: Soak, server: psutil.Process, begun: float) -> list[tuple[float, int]]:
    """Memory of the server in bytes at each share of the time."""
    seen = []
    while (now := time.monotonic()) < soak.until:
        seen.append(((now - begun) / (soak.until - begun), server.memory_info().rss))
        await asyncio.sleep((soak.until - begun) / 120)
    return seen


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether something holds within so many seconds, or at their end."""
    until = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < until:
        time.sleep(0.5)
    return held


def idle(url: str) -> bool:
    """Whether nothing runs, waits or is held."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    busy = [line for line in lines if line.startswith(("vllm:num_requests_", "triforce:kv_tokens{"))]
    return bool(busy) and all(line.endswith(" 0.0") for line in busy)


def verdict(seen: list[tuple[float, int]], soak: Soak, gave_back: bool, opened: tuple[int, int]) -> dict[str, object]:
    """What is printed. The first sixth of the time is for caches to fill."""
    first = [rss for share, rss in seen if 1 / 6 <= share < 1 / 3]
    last = [rss for share, rss in seen if share >= 5 / 6]
    growth = sum(last) / len(last) / (sum(first) / len(first)) - 1
    broken = sum(count for name, count in soak.answers.items() if name.split()[1] >= "500")
    steady = abs(growth) <= FLAT and soak.gaps.while_reading <= 2 * MAX_ITL
    held = gave_back and not broken and steady and opened[1] <= opened[0]
    gaps = {"while_reading": round(soak.gaps.while_reading, 3), "otherwise": round(soak.gaps.otherwise, 3)}
    mib = [round(rss / 2**20) for _, rss in seen[:: max(1, len(seen) // 12)]]
    return {"held": held, "requests": soak.answers.total(), "broken": broken, "kv_given_back": gave_back,
            "descriptors": opened, "gap_seconds": gaps, "memory_growth": round(growth, 4), "memory_mib": mib,
            "answers": dict(sorted(soak.answers.items()))}  # fmt: skip


def tiny_models(folder: Path) -> list[str]:
    """Arguments that serve a random pair."""
    from tests.helpers.tiny_checkpoint import tiny_pair

    pair = tiny_pair(folder, positions=CONTEXT, chat_template=TEMPLATE)
    return [str(pair / "target"), "--draft", str(pair / "draft"), "--retrieval-budget", "64"]


def main() -> int:
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    with TemporaryDirectory() as folder, open(Path(folder) / "log", "w") as log:
        models = sys.argv[2:3] or tiny_models(Path(folder))
        limits = ["--max-body", "0.5", "--max-kv-tokens", str(3 * CONTEXT), "--max-itl", str(1000 * MAX_ITL)]
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "triforce", "serve", *models, "--port", "0", *limits]
        env = os.environ | {"PYTHONPATH": path} | ({} if sys.argv[2:] else {"OMP_NUM_THREADS": "1"})
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env)
        assert server.stdout
        try:
            url, begun = server.stdout.readline().split()[-1], time.monotonic()
            process = psutil.Process(server.pid)
            within(60, lambda: idle(url))
            time.sleep(1)  # for the connection that asked
            before = process.num_fds()
            modes = ["ar", "retrieval", "auto"] if sys.argv[2:] else ["ar", "triforce", "draft-ngram"]
            soak = Soak(url, begun + 60 * minutes, modes)

            async def both() -> list[tuple[float, int]]:
                return (await asyncio.gather(watch(soak, process, begun), soak.all()))[0]

            seen, gave_back = asyncio.run(both()), within(60, lambda: idle(url))
            within(30, lambda: process.num_fds() <= before)
            result = verdict(seen, soak, gave_back, (before, process.num_fds()))
        finally:
            server.terminate()
            server.wait()
    print(json.dumps({"minutes": minutes} | result))
    return 0 if result["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
