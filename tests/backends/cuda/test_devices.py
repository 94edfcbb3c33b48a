"""A machine with one CUDA device, or two, made up on a CPU: which of them is asked, and that the text is the CPU's."""

from __future__ import annotations

import ast
import gc
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import gpu
from benchmarks.on_gpu.piece import Piece, capped
from tests.helpers.cuda.prompts import ids
from tests.helpers.cuda.stub import GIB, Machine, OnFirst, OnSecond, machine
from triforce.backends.cuda.graphs import Graphs, Replay
from triforce.backends.current_device import steps_on
from triforce.backends.dispatch import best_dtype
from triforce.backends.torch import attention
from triforce.bench import roofline, shapes
from triforce.bench.roofline import DeviceClock
from triforce.cli import main
from triforce.engine.model_loader import resolve_device
from triforce.errors import CacheError, ModelError
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache.offload_sizing import CudaKVSizing, kv_sizing, workspace
from triforce.kvcache.retrieval_config import Budget
from triforce.llm import LLM
from triforce.planner.cost_model import costs_path

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="devices are made up here")


@pytest.fixture
def one() -> Iterator[Machine]:
    with machine() as made:
        yield made
        gc.collect()  # memory of the host is unpinned while there still is a machine


@pytest.fixture
def two() -> Iterator[Machine]:
    with machine(devices=2) as made:
        yield made
        gc.collect()


def test_stub_tensors_are_where_they_were_made(two: Machine) -> None:
    first, second = (torch.ones(3, device=f"cuda:{index}") for index in range(2))
    assert (type(first), type(second)) == (OnFirst, OnSecond) and second.device == torch.device("cuda:1")
    assert (second + 1).device == second[1:].device == torch.empty_like(second).device == torch.device("cuda:1")
    assert second.cpu().device.type == torch.ones(1).device.type == "cpu" and second.cpu().tolist() == [1, 1, 1]
    assert torch.ones(3).to("cuda").device == torch.device("cuda:0")
    with pytest.raises(TypeError):
        first + second
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device="cuda:2")


def test_stub_graph_computes_what_its_inputs_hold(one: Machine) -> None:
    x = torch.ones(3, device="cuda")
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = 2 * x + 1
    x.fill_(5)
    assert y.cpu().tolist() == [3, 3, 3]
    graph.replay()
    assert y.cpu().tolist() == [11, 11, 11]
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="capturing"):
        y.cpu()


def test_device_without_number_becomes_current_one(two: Machine) -> None:
    assert resolve_device("cuda") == resolve_device("auto") == "cuda:0"
    torch.cuda.set_device(1)
    assert resolve_device("cuda") == resolve_device("auto") == "cuda:1"
    assert resolve_device("cuda:0") == "cuda:0"
    with pytest.raises(ModelError, match="'cuda:2' cannot be used here"):
        resolve_device("cuda:2")


def test_gpu_benchmark_caps_memory_of_default_device(
    one: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def under_a_card(setup: Any) -> Iterator[Piece]:
        piece = Piece("share", "small", 1, lambda: {"share": one.shares[0]})
        yield replace(piece, run=partial(capped, setup, 24 * GIB, piece))

    monkeypatch.setitem(gpu.FIGURES, "c", under_a_card)
    assert gpu.main(["c", "--out", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "gpu_c.json").read_text())
    assert row["share"] == 24 / 80 and row["machine"] == "Made up 0" and one.shares == [1.0]


def test_info_with_offload_describes_gpu(one: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--kv-offload", "host", "--kv-memory", "512MiB", "--device", "cuda"]) == 0
    assert "on the device, in all" in capsys.readouterr().out


def answer(folder: Path, device: str, **how: Any) -> list[int]:
    llm = LLM(
        folder / "target", folder / "draft", device=device, dtype="float32", retrieval_budget=32,
        searched_layers="none", **how,
    )  # fmt: skip
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=4, ignore_eos=True)
    return llm.generate([ids(50)], params, mode="triforce")[0].outputs[0].token_ids


HOW: list[dict[str, Any]] = [{}, {"kv_offload": "host", "kv_memory": "64MiB", "kv_resident_layers": 0}]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", HOW, ids=["resident", "offloaded"])
def test_second_device_runs_all_launches(folder: Path, two: Machine, how: dict[str, Any]) -> None:
    """From a thread of its own, as a server's engine has one: its current device is the first."""
    found: list[list[int]] = []

    def work() -> None:
        with two:
            found.append(answer(folder, "cuda:1", **how))
            assert two.current == 0, "the caller's own device is current again"

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [answer(folder, "cpu")]
    assert len({name for name, *_ in two.launches}) >= 8
    assert {(current, *devices) for _, current, devices in two.launches} == {(1, 1)}
    assert two.captured
    assert {line for line in two.log if line.startswith("pin")} == ({"pin with device 1"} if how else set())


def test_second_device_reads_rows_of_the_head(folder: Path, two: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, current = LLM(folder / "target", device="cuda:1").target.decoder, list[int]()
    monkeypatch.setattr(decoder.model, "head_rows", lambda ids_N: current.append(two.current))
    decoder.head_rows(np.arange(3))
    assert current == [1] and two.current == 0


def test_current_device_is_the_callers_between_steps(two: Machine) -> None:
    seen: list[int] = []

    def steps() -> Iterator[int]:
        try:
            for step in range(3):
                seen.append(two.current)
                yield step
        finally:
            seen.append(two.current)

    for _ in steps_on("cuda:1", steps()):  # type: ignore[arg-type]
        assert two.current == 0
    assert seen == [1, 1, 1, 1]
    begun = steps_on("cuda:1", steps())  # type: ignore[arg-type]
    next(begun)
    begun.close()
    assert seen[4:] == [1, 1] and two.current == 0


def test_dtype_is_one_that_tensor_cores_know(one: Machine) -> None:
    config = shapes.config_of("30m-draft", 64)
    found = {}
    for capability in ((7, 5), (8, 0), (9, 0), (12, 0)):
        one.capability = capability
        found[capability] = best_dtype(config, "cuda:0")
    assert found == {(7, 5): "float16"} | dict.fromkeys([(8, 0), (9, 0), (12, 0)], "bfloat16")


def test_cost_file_names_its_device(two: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    paths = [costs_path(["a"], device, "bfloat16") for device in ("cpu", "cuda:0", "cuda:1")]
    assert len(set(paths)) == 3 and "costs-made-up-1-" in str(paths[2])


def test_device_time_leaves_out_a_slow_host(one: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is kept busy before the first event, so that the host is ahead of it."""
    clock = DeviceClock("cuda:0")
    assert clock.device_seconds(lambda: one.log.append("call"), 1) == 2e-3
    assert one.log == 2 * ["wait", "sleep", "event", "call", "event", "wait"]
    one.log.clear()
    clock.seconds(lambda: one.log.append("call"), 1)
    assert one.log == 2 * ["wait", "call", "wait"]
    monkeypatch.setattr(roofline, "COPY_BYTES", (1 << 12, 1 << 12))
    assert clock.bandwidth > 0 and clock.bus > 0


def test_captures_of_one_memory_are_of_one_stream() -> None:
    """Torch gives working memory of one capture to the next only there."""
    with machine() as made:
        graphs = Graphs("cuda:0")
        for key in range(3):
            replay: Replay[None, Tensor] = graphs.get(key, lambda: Replay(None))
            graphs.run(replay, lambda: torch.zeros(1, device="cuda:0"))
        assert made.captured == 3 and len(made.capture_streams) == 1


@pytest.mark.parametrize(("capability", "flash"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_flash_attention_is_asked_of_what_has_it(capability: tuple[int, int], flash: bool) -> None:
    with machine(capability=capability):
        assert attention.has_flash(torch.device("cuda:0")) == flash


def test_gpu_tests_name_a_device() -> None:
    """Where there is a GPU, memory and noise of its tests must lie there: kernels by name are refused elsewhere."""
    takes = {"PagePool": 5, "make_noise": 3}
    for file in Path(__file__).parent.glob("test_*.py"):
        for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
            least = takes.get(call.func.id, 0) if isinstance(call.func, ast.Name) else 0
            named = any(each.arg == "device" for each in call.keywords)
            assert named or len(call.args) >= least, f"{file.name}:{call.lineno}"


def test_strict_memory_is_reserved(one: Machine) -> None:
    """Of Llama-2-7B at 128K, in passes of 8 rows of 32 tokens: parts of 128 splits have .54 GB, what is told .7 GB."""
    s = shapes.SHAPES["llama-2-7b-128k"]
    config = replace(
        shapes.config_of("30m-draft", 64), hidden_size=s.hidden, intermediate_size=s.intermediate, layers=s.layers,
        heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim,
    )  # fmt: skip
    parts = 4 * 8 * 32 * s.heads * (131_072 // 1024) * s.head_dim
    assert parts == 536_870_912
    mass, queries = 4 * s.layers * 8 * s.kv_heads * 8192, 2 * s.layers * 8 * 32 * s.heads * s.head_dim
    told = 2 * (mass + queries) + 4 * 8 * 32 * config.vocab_size
    assert parts + told < workspace(config, 2, 8, 25, 8192) < 1.6 * parts + told
    assert workspace(config, 2, 1, 25, 8192) * 8 == workspace(config, 2, 8, 25, 8192)
    finer = 4 * 15 * 8192 * 8 * (32 * s.heads + 2 * s.layers * s.kv_heads)  # of each token, not of each page
    assert workspace(config, 2, 8, 25, 8192, unit=1) - workspace(config, 2, 8, 25, 8192) == finer
    plain, strict = (
        kv_sizing(config, "bfloat16", "cuda:0", 8191, 1, 52, Budget(4096), padded_rows=rows) for rows in (1, 8)
    )
    assert isinstance(plain, CudaKVSizing) and isinstance(strict, CudaKVSizing)
    assert strict.activation_bytes - plain.activation_bytes == workspace(config, 2, 8, 25, 8191) - workspace(
        config, 2, 1, 25, 8191
    )
    one.free = plain.offloadable_bytes + plain.activation_bytes
    plain.require_all()
    with pytest.raises(CacheError, match="the KV cache needs"):
        strict.require_all()
