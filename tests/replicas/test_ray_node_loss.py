"""A node is killed in the middle of texts: texts that have begun there end with an error, all others are made."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import psutil
import pytest
from starlette.types import ASGIApp

from tests.helpers.asgi_client import ask, good
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.replicas.remote_engine import Replicas
from triforce.server.limits import Limits

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TOKENS = 1200
LONG: dict[str, Any] = {"temperature": 0.8, "max_tokens": TOKENS, "ignore_eos": True}
PROMPTS = [[50 + i, 8, 7] for i in range(6)]


@pytest.fixture(scope="module")
def limits() -> Limits:
    """Two texts may be sent to each replica, but the KV of one fills it: the other one waits there for its turn."""
    return Limits(rows=2, waiting=8, kv_tokens=TOKENS + 3)


def kill(cluster: Any, node: Any) -> None:
    """Kill all processes of a node at once, as when its machine loses power."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    for process in [raylet, *raylet.children(recursive=True)]:
        process.kill()
    cluster.remove_node(node, allow_graceful=False)


async def post(app: ASGIApp, place: int) -> str:
    """The text of a request, every other one streamed, or the code of its error."""
    body = {"prompt": PROMPTS[place], "seed": place, "stream": place % 2 == 1, **LONG}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        response = await client.post("/v1/completions", json=body)
    if place % 2 == 0:
        answer = response.json()
        return str(answer["choices"][0]["text"] if response.status_code == 200 else answer["error"]["code"])
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    code = events[-1].get("error", {}).get("code")
    return code or "".join(event["choices"][0]["text"] for event in events)


def test_ray_node_loss_ends_started_texts_only(
    cluster: Any, app: ASGIApp, served: tuple[Any, Replicas], llm: LLM
) -> None:
    texts = [llm.generate([p], SamplingParams(seed=i, **LONG))[0].outputs[0].text for i, p in enumerate(PROMPTS)]
    engine = served[1]

    async def play() -> list[str]:
        tasks = [asyncio.create_task(post(app, place)) for place in range(len(PROMPTS))]
        while sum(answer.started for answer in engine.answers) < 2:
            await asyncio.sleep(0.01)
        assert not any(task.done() for task in tasks)
        assert engine.load().running == 4 and engine.load().waiting == 2
        started = {answer.message.replica for answer in engine.answers if answer.started}
        assert len(started) == 2, "one on each"
        await asyncio.to_thread(kill, cluster, next(iter(cluster.worker_nodes)))
        return await asyncio.gather(*tasks)

    endings = asyncio.run(play())
    lost_rows = [place for place, text in enumerate(endings) if text == "replica_lost"]
    assert len(lost_rows) == 1
    assert [endings[i] for i in range(6) if i not in lost_rows] == [texts[i] for i in range(6) if i not in lost_rows]
    assert good(ask(app, "/health")) == {"status": "ok"}
