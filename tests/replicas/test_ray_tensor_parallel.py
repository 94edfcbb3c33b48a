"""A replica of two ranks: its texts are those of one process, and none of them outlives the others. So with batches."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import psutil
import pytest

from tests.helpers.server_process import KEY, served
from tests.replicas.test_ray_batch import answered, batch, write
from tests.server.test_server_process import text  # noqa: F401

BODY = {"prompt": "the cat sat on the mat", "ignore_eos": True, "seed": 5, "temperature": 0.8, "max_tokens": 24}


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def second(family: list[psutil.Process]) -> psutil.Process:
    (rank,) = [child for child in family if "triforce.replicas.replica" in " ".join(child.cmdline())]
    return rank


def test_ray_replica_of_two_ranks_equals_one_process(pair: Path, text: str) -> None:  # noqa: F811
    """A killed rank ends its replica, and another replica is started."""
    with served(pair, "--replicas", "1", "--tp", "2") as (process, url):
        asked = {"json": BODY, "headers": {"authorization": f"Bearer {KEY}"}, "timeout": 240}
        assert httpx.post(f"{url}/v1/completions", **asked).json()["choices"][0]["text"] == text  # type: ignore[arg-type]
        rank_process = second(psutil.Process(process.pid).children(recursive=True))
        replica = rank_process.parent()
        rank_process.kill()
        assert replica and not psutil.wait_procs([replica], timeout=60)[1]
        assert httpx.post(f"{url}/v1/completions", **asked).json()["choices"][0]["text"] == text  # type: ignore[arg-type]
        family = psutil.Process(process.pid).children(recursive=True)
        assert second(family).pid != rank_process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    assert not psutil.wait_procs(family, timeout=30)[1], "all were to go with the server"


def test_ray_batch_of_two_ranks_equals_one_process(pair: Path, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    engine_output = tmp_path / "alone.jsonl"
    write(file)
    batch(pair, file, "-o", str(engine_output))
    batch(pair, file, "--replicas", "1", "--tp", "2")
    assert answered(tmp_path / "in.out.jsonl") == answered(engine_output)
