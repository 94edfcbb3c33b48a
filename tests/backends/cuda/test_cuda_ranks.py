"""Ranks on the Triton path, as processes: the interpreter supports one thread only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.tiny_checkpoint import tiny_pair

PROMPT = "the cat sat on the mat, the hat and the cat. " * 3


def token_ids(pair: Path, mode: str, count: int) -> list[int]:
    command = [sys.executable, "-m", "triforce", "generate", str(pair / "target"), PROMPT, "--mode", mode, "--json"]
    sampling_options = f"--temperature 0 --max-tokens 6 --ignore-eos --dtype float32 --tp {count}"
    sampling_options += " --retrieval-budget 32 --searched-layers none"
    paths = [entry for entry in sys.path if entry]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths), "TRIFORCE_KERNELS": "triton", "TRITON_INTERPRET": "1",
    }  # fmt: skip
    options = [*command, "--draft", str(pair / "draft"), *sampling_options.split(), "--device", "cpu"]
    done = subprocess.run(options, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["ranks"] == count
    answer_ids: list[int] = answer["token_ids"]
    return answer_ids


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ar", "triforce"])
def test_cuda_ranks_text_equals_one_process(tmp_path: Path, mode: str) -> None:
    """Texts are greedy and float32: sums over ranks are rounded alike, but for the products of torch."""
    pair = tiny_pair(tmp_path, 256)
    one_process_ids = token_ids(pair, mode, 1)
    assert len(one_process_ids) == 6 and token_ids(pair, mode, 2) == one_process_ids
