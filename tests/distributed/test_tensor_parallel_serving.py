"""`triforce serve`, `batch` and `chat` in several processes: answers are those of one process, and all ranks end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.helpers.slow_parameters import slow
from tests.helpers.tiny_checkpoint import tiny_pair
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
PROMPT = "the cat sat on the mat, the hat and the cat. " * 3
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}bot:"
SAMPLED = {"temperature": 0.8, "max_tokens": 24, "ignore_eos": True}
LONG = {"prompt": PROMPT, "max_tokens": 6000, "ignore_eos": True, "stream": True, "seed": 5}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pair(tmp_path_factory.mktemp("pair"), 8192, chat_template=TEMPLATE)


def triforce(command: str, pair: Path, *arguments: str, **pipes: Any) -> subprocess.Popen[str]:
    models = (str(pair / "target"), "--draft", str(pair / "draft"), "--retrieval-budget", "64", "--tp", "2")
    line = [sys.executable, "-m", "triforce", command, *models, *arguments]
    return subprocess.Popen(line, text=True, env=ENVIRONMENT, stdout=subprocess.PIPE, **pipes)


@contextmanager
def served(pair: Path, log: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a server of two ranks, and kill all of it at the end."""
    with log.open("w") as log_file:
        process = triforce("serve", pair, "--port", "0", *arguments, stderr=log_file)
    assert process.stdout
    try:
        line = process.stdout.readline()
        assert line.startswith("triforce serves target at http://"), log.read_text()
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def ranks(process: subprocess.Popen[str]) -> dict[str, psutil.Process]:
    return {child.environ()["RANK"]: child for child in psutil.Process(process.pid).children()}


def all_ended(processes: dict[str, psutil.Process]) -> bool:
    return not psutil.wait_procs(list(processes.values()), timeout=30)[1]


def text_of(pair: Path, seed: int) -> str:
    llm = LLM(pair / "target", pair / "draft", retrieval_budget=64)
    return llm.generate(PROMPT, SamplingParams(**SAMPLED, seed=seed))[0].outputs[0].text  # type: ignore[arg-type]


def test_sharded_server_answers_equal_one_process(pair: Path, tmp_path: Path) -> None:
    """Texts of seeds run beside an abandoned stream, ranks idle, and a text finishes after SIGTERM."""
    log = tmp_path / "log"
    with served(pair, log) as (process, url), httpx.Client(base_url=url, timeout=120) as web:
        started = ranks(process)
        assert sorted(started) == ["0", "1"]

        def ask(seed: int) -> str:
            body = {"prompt": PROMPT, "seed": seed, **SAMPLED}
            return str(web.post("/v1/completions", json=body).json()["choices"][0]["text"])

        with ThreadPoolExecutor() as pool, web.stream("POST", "/v1/completions", json=LONG) as abandoned:
            next(abandoned.iter_lines())
            got = list(pool.map(ask, [5, 6, 5, 7]))
        assert got[:2] == [text_of(pair, 5), text_of(pair, 6)] and got[2] == got[0] != got[3]
        answer = web.post("/v1/completions", json={"prompt": PROMPT, "temperature": -1})
        assert answer.status_code == 400
        cpu_seconds = {rank: sum(rank_process.cpu_times()[:2]) for rank, rank_process in started.items()}
        time.sleep(2)
        assert all(
            sum(rank_process.cpu_times()[:2]) - cpu_seconds[rank] < 0.5 for rank, rank_process in started.items()
        )
        body = LONG | {"max_tokens": 200}
        with web.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            for child in (process, *started.values()):  # as systemd does
                child.send_signal(signal.SIGTERM)
            remaining_lines = list(lines)
        assert any('"finish_reason": "length"' in line for line in remaining_lines[-6:]), remaining_lines[-6:]
        assert process.wait(60) == 0 and all_ended(started)
    assert "error" not in log.read_text()


@pytest.mark.parametrize("killed_rank", [*slow("0"), "1"])
def test_killed_rank_ends_server(pair: Path, tmp_path: Path, killed_rank: str) -> None:
    log = tmp_path / "log"
    with served(pair, log) as (process, url):
        started = ranks(process)
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=120) as response:
            lines = response.iter_lines()
            next(lines)
            started[killed_rank].kill()
            if killed_rank == "1":
                assert any("send the request again" in line for line in lines)
        assert process.wait(60) == 2 and all_ended(started)
    errors = log.read_text()
    assert f"rank {killed_rank} of 2 was killed by SIGKILL" in errors and "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("killed_rank", ["1", "all"])
def test_killed_rank_ends_idle_server(pair: Path, tmp_path: Path, killed_rank: str) -> None:
    """A rank is killed, or its launcher."""
    with served(pair, tmp_path / "log") as (process, _):
        started = ranks(process)
        started.get(killed_rank, process).kill()
        assert process.wait(60) != 0 and all_ended(started)


@pytest.mark.slow
def test_sharded_batch_equals_one_process(pair: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    output = tmp_path / "out.jsonl"
    line = {"method": "POST", "url": "/v1/completions"}
    bodies = [{"prompt": PROMPT, "seed": seed, **SAMPLED} for seed in (5, 6)]
    jobs = [json.dumps(line | {"custom_id": str(i), "body": body}) for i, body in enumerate(bodies)]
    source.write_text("\n".join(jobs))
    models = [
        str(source),
        str(pair / "target"),
        "--draft",
        str(pair / "draft"),
        "--retrieval-budget",
        "64",
        "--tp",
        "2",
    ]
    command = [sys.executable, "-m", "triforce", "batch", *models, "-o", str(output)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "2 answered, 0 refused" in done.stderr, done.stderr
    answers = {answer["custom_id"]: answer for answer in map(json.loads, output.read_text().splitlines())}
    texts = [answers[name]["response"]["body"]["choices"][0]["text"] for name in "01"]
    assert texts == [text_of(pair, 5), text_of(pair, 6)]


@pytest.mark.slow
def test_sharded_chat_equals_one_process(pair: Path) -> None:
    sampling = ("--seed", "5", "--max-tokens", "12", "--ignore-eos", "--temperature", "0.8")
    prompts = "the cat\nand the hat\n"
    with triforce("chat", pair, *sampling, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        two_ranks, errors = process.communicate(prompts, timeout=240)
    assert process.returncode == 0, errors
    with triforce("chat", pair, *sampling, "--tp", "1", stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        one_process, _ = process.communicate(prompts, timeout=240)
    assert two_ranks == one_process and two_ranks.count("\n") >= 2
