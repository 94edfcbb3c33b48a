"""The memory of a run with offloaded KV is that which `triforce info` predicts."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from triforce.backends import dispatch
from triforce.cli import main
from triforce.errors import CacheError
from triforce.interface.quantities import size_of
from triforce.kvcache.offload_sizing import KVSizing, OffloadConfig
from triforce.kvcache.retrieval_config import Budget
from triforce.llm import LLM

pytestmark = pytest.mark.skipif(dispatch.native is None, reason="a store is for the native kernels")
SCRIPT = Path(__file__).parents[2] / "helpers" / "processes" / "measure_offload.py"
FIXED = 32 << 20
"""Bytes that the prediction leaves out: of the tokenizer, the draft, and buffers of a prompt's chunk."""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="asks Linux for the peak")
def test_offloaded_memory_equals_info_prediction() -> None:
    run = subprocess.run([sys.executable, str(SCRIPT), "12000", "24MiB"], capture_output=True, text=True, timeout=600)
    predicted_bytes, peak = map(int, run.stdout.split()[-2:])
    assert 0.85 * predicted_bytes < peak < predicted_bytes + FIXED, run.stdout


def test_info_computes_offload_sizes(capsys: Any) -> None:
    assert main(["info", "--context", "32768", "--kv-offload", "file", "--kv-memory", "64MiB"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line.strip())
    assert lines["KV in memory"].strip() == "64 MiB"
    assert "KV in a file" in lines and "in memory, in all" in lines


def test_info_without_offload_omits_it(capsys: Any) -> None:
    assert main(["info"]) == 0
    assert "KV in memory" not in capsys.readouterr().out


@pytest.fixture(scope="module")
def needs() -> KVSizing:
    return KVSizing(LLM(draft=None).target.config, 2, 2050, 1, 20, Budget(2048), 0)


@pytest.mark.parametrize("memory", ["12MiB", "32MiB", "64MiB", "96MiB", "1GiB"])
def test_sizing_parts_sum_to_whole(needs: KVSizing, memory: str) -> None:
    frames, buffers, layers = needs.split(OffloadConfig("file"), size_of(memory))
    assert (frames + buffers * needs.buffer_frames) * needs.page_bytes <= size_of(memory)
    assert layers * needs.layer_frames + 1 <= frames
    assert layers == 6 or memory != "1GiB"


@pytest.mark.parametrize("kv_int8", [False, True])
def test_layer_stays_whole_in_third_of_kv(needs: KVSizing, kv_int8: bool) -> None:
    """A layer fits at any page size. Buffers of a fixed size would leave no room for it where pages are small."""
    needs = replace(needs, config=replace(needs.config, kv_int8=kv_int8))
    _, buffers, layers = needs.split(OffloadConfig("host"), needs.offloadable_bytes // 3)
    assert (layers, buffers >= 3) == (1, True)


def test_reported_minimum_memory_suffices(needs: KVSizing) -> None:
    with pytest.raises(CacheError, match=r"give (\d+MiB) or more") as error:
        needs.split(OffloadConfig("file"), 1 << 20)
    enough = str(error.value).split("give ")[1].split(" ")[0]
    needs.split(OffloadConfig("file"), size_of(enough))
    with pytest.raises(CacheError, match="more, or a smaller kv_resident_layers") as error:
        needs.split(OffloadConfig("file", layers=3), 64 << 20)
    reported_bytes = size_of(str(error.value).split("give ")[1].split(" ")[0])
    needs.split(OffloadConfig("file", layers=3), (64 << 20) + reported_bytes)
