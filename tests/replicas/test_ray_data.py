"""Lines on Ray Data while actors die: each is answered once, with its text, except the lines that kill actors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from time import sleep
from typing import Any

import psutil
import pytest

from tests.replicas.test_ray_node_loss import kill
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM
from triforce.replicas import ray_data
from triforce.server.batch import Answers

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LINES = 12
SAMPLED: dict[str, Any] = {"temperature": 0.8, "max_tokens": 300, "ignore_eos": True}
Answer = Callable[[], dict[str, Any]]


def prompt(i: int) -> list[int]:
    return [50 + i, 8, 7]


@pytest.fixture
def answer(cluster: Any, pair: Path, tmp_path: Path) -> Answer:
    """Has the lines answered, and gives texts by name, or codes of errors."""

    def go() -> dict[str, Any]:
        bodies = [{"prompt": prompt(i), "seed": i, **SAMPLED} for i in range(LINES)]
        head = {"method": "POST", "url": "/v1/completions"}
        asked = "".join(json.dumps(head | {"custom_id": str(i), "body": b}) + "\n" for i, b in enumerate(bodies))
        settings = {
            "model": str(pair / "target"),
            "draft": str(pair / "draft"),
            "retrieval_budget": 64,
            "device": "cpu",
        }
        with Answers(tmp_path / "out.jsonl", "model", lambda: None) as answers:
            ray_data.answer(settings, "tiny", 2, cluster.address, BytesIO(asked.encode()), answers)
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert sorted(int(a["custom_id"]) for a in rows) == list(range(LINES)), "each line once"
        return {a["custom_id"]: text(a) for a in rows}

    return go


def text(answer: dict[str, Any]) -> str:
    if answer["error"]:
        return str(answer["error"]["code"])
    return str(answer["response"]["body"]["choices"][0]["text"])


@pytest.fixture(scope="module")
def texts(llm: LLM) -> dict[str, str]:
    params = [SamplingParams(seed=i, **SAMPLED) for i in range(LINES)]
    return {str(i): llm.generate([prompt(i)], p)[0].outputs[0].text for i, p in enumerate(params)}


def test_ray_data_loses_only_killing_line(
    answer: Answer, texts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mortal(ray_data.BatchActor):
        async def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
            if row["place"] == 3:
                os._exit(1)
            return await ray_data.BatchActor.__call__(self, row)

    monkeypatch.setattr(ray_data, "BatchActor", Mortal)
    assert answer() == texts | {"3": "replica_lost"}


def working(node: Any) -> Iterator[str]:
    """Actors of a node that answer a line."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    for child in raylet.children(recursive=True):
        with suppress(psutil.Error):  # gone
            title = " ".join(child.cmdline())
            if "MapWorker" in title and "submit" in title:
                yield title


def test_ray_data_survives_node_loss(cluster: Any, answer: Answer, texts: dict[str, str]) -> None:
    (node,) = cluster.worker_nodes
    with ThreadPoolExecutor() as pool:
        pending_answer = pool.submit(answer)
        while not any(working(node)) and not pending_answer.done():
            sleep(0.02)
        assert not pending_answer.done()
        kill(cluster, node)
        assert pending_answer.result() == texts
