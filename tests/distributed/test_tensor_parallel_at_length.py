"""Two ranks of models of real size give the texts of one process, in little more than half of its memory each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from triforce.backends import dispatch

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "helpers" / "processes"
PATH = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
ENVIRONMENT = os.environ | {"PYTHONPATH": PATH}
MODES = "ar,triforce,retrieval"
pytestmark = pytest.mark.skipif(dispatch.native is None, reason="the native kernels were not built")


def run(script: str, *arguments: str, count: int, folder: Path) -> list[Any]:
    """Return what each rank prints."""
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    meeting = f"file://{folder / f'{script}-{count}'}"
    processes = [
        subprocess.Popen([*command, str(rank), str(count), meeting], env=ENVIRONMENT, stdout=subprocess.PIPE)
        for rank in range(count)
    ]
    try:
        return [json.loads(process.communicate()[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_shipped_pair_few_texts_equal_one_process(tmp_path: Path) -> None:
    """Texts are of all tiers, greedy and drawn. Other modes are in the long versions, and in test_shared_texts.py."""
    (one_process,) = run("many_texts.py", "1", "12", "all", "triforce", count=1, folder=tmp_path)
    for texts in run("many_texts.py", "1", "12", "all", "triforce", count=2, folder=tmp_path):
        assert texts == one_process


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_shipped_pair_five_texts_equal_one_process(tmp_path: Path) -> None:
    (one_process,) = run("many_texts.py", "5", "256", "all", MODES, count=1, folder=tmp_path)
    assert all(len(text) == 256 for texts in one_process.values() for text in texts)
    assert one_process["ar 0.8"] == one_process["triforce 0.8"] == one_process["retrieval 0.8"] != one_process["ar 0"]
    for texts in run("many_texts.py", "5", "256", "all", MODES, count=2, folder=tmp_path):
        assert texts == one_process


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_shipped_pair_offloaded_texts_equal_one_process(tmp_path: Path) -> None:
    """The KV of eight texts takes one and a half times the memory that is given."""
    (one_process,) = run("many_texts.py", "8", "128", "all", MODES, count=1, folder=tmp_path)
    for texts in run("many_texts.py", "8", "128", "24MiB", MODES, count=2, folder=tmp_path):
        assert texts == one_process


def large(folder: Path) -> Path:
    """Save a checkpoint of some 330 MiB."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=9, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=4096, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_rank_memory_is_little_more_than_half(tmp_path: Path) -> None:
    model = str(large(tmp_path / "model"))
    (one_process,) = run("rank_memory.py", model, count=1, folder=tmp_path)
    ranks = run("rank_memory.py", model, count=2, folder=tmp_path)
    print(
        [round(rank["grown"] / one_process["grown"], 3) for rank in ranks], f"of {one_process['grown'] / 2**20:.0f} MiB"
    )
    assert all(rank["tokens"] == one_process["tokens"] and rank["grown"] < 0.7 * one_process["grown"] for rank in ranks)
