"""The other ranks of a replica: they make its text with it, and none of them outlives another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM

ONE = Path(__file__).parents[1] / "helpers" / "processes" / "one_replica.py"
SOURCE = Path(__file__).parents[2] / "src"
PROMPT = "the cat sat on the mat"


@contextmanager
def replica(pair: Path, *, temporary: Path) -> Iterator[tuple[subprocess.Popen[str], psutil.Process, str]]:
    """A replica, the other rank, and the text that they made."""
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "TMPDIR": str(temporary)}
    command = [sys.executable, str(ONE), str(pair), PROMPT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout
            text = bytes.fromhex(process.stdout.readline()).decode()
            (worker,) = psutil.Process(process.pid).children()
            yield process, worker, text
        finally:
            process.kill()


def test_killed_worker_ends_replica(pair: Path, llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)
    with replica(pair, temporary=tmp_path) as (process, worker, text):
        assert text == llm.generate(PROMPT, params)[0].outputs[0].text
        assert not list(tmp_path.iterdir()), "where they met is to be gone"
        worker.kill()
        assert process.wait(60) == 1


@pytest.mark.slow
def test_killed_replica_ends_workers(pair: Path, tmp_path: Path) -> None:
    with replica(pair, temporary=tmp_path) as (process, worker, _):
        process.kill()
        assert not psutil.wait_procs([worker], timeout=30)[1]
