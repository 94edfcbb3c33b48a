"""Host syncs of a step: one for each verification pass, and one for each draft.

No tensor is on a device here, so tensors are marked: tensors made with a `device`, and results of marked tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime import interpreter

from tests.helpers.cuda.prompts import ids
from tests.helpers.mutants.registry import caught_in
from triforce.backends.cuda import model as cuda_model
from triforce.backends.cuda.sampler import TritonSampling
from triforce.backends.tensor_parallel import ShardedModel
from triforce.backends.torch.model import forward_layerwise
from triforce.distributed.group import TPGroup
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a device is made up here")
ANSWERS = {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__float__,
           Tensor.__index__, Tensor.nonzero, torch.nonzero, torch.unique, torch.masked_select}  # fmt: skip


HEARD, DRAFTED = "cpu in sampler.py, verify", "cpu in model.py, fused_draft"


class OnDevice(Tensor):
    """A marked tensor. Results of marked tensors are marked."""


class Watch(TorchFunctionMode):
    """Counts operations that would make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _waits(func, args, kwargs):
            frame = inspect.currentframe()
            assert frame and frame.f_back
            caller = frame.f_back
            self.waits.append(f"{func.__name__} in {Path(caller.f_code.co_filename).name}, {caller.f_code.co_name}")
        result = func(*args, **kwargs)
        if func is Tensor.cpu:
            return result.as_subclass(Tensor)
        made_there = kwargs.get("device") is not None or _moves(func, args)
        return result.as_subclass(OnDevice) if made_there and isinstance(result, Tensor) else result


def _waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the host would wait: for a value, or for a copy from memory that is not pinned."""
    on_device = [isinstance(x, OnDevice) for x in args[:2]]
    if func is torch.tensor:
        return kwargs.get("device") is not None
    if func is Tensor.__getitem__:
        return _by_mask(args[1])
    if _moves(func, args):
        return not on_device[0] and args[0].numel() > 0 and not kwargs.get("non_blocking")
    if func is Tensor.copy_:
        return on_device[0] != on_device[1] and not kwargs.get("non_blocking")
    return func in ANSWERS and any(on_device)


def _moves(func: Any, args: Any) -> bool:
    return func is Tensor.to and any(isinstance(x, torch.device) for x in args[1:])


def _by_mask(index: Any) -> bool:
    indices = index if isinstance(index, tuple) else (index,)
    return any(isinstance(x, OnDevice) and x.dtype == torch.bool for x in indices)


@pytest.fixture
def watch(by_name: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    launch = interpreter.GridExecutor.__call__

    def unwatched(*args: Any, **kwargs: Any) -> None:
        with torch._C.DisableTorchFunction():
            launch(*args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", unwatched)
    with Watch() as watch:
        yield watch


def steps(folder: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[list[str], int, int]:
    """Return the host's waits in a few steps, and the numbers of verifications and drafts of these steps."""
    llm = LLM(
        folder / "target",
        folder / "draft",
        dtype="float32",
        retrieval_budget=32,
        speculative_tokens=2,
        searched_layers="none",
        **options,
    )
    texts = llm.open(1, 200)
    passes = []
    drafts = []
    texts.submit([llm.request(ids(70), SamplingParams(seed=3, max_tokens=9, ignore_eos=True), mode="triforce")])
    while not texts.core.batches:
        texts.step()
    verify = TritonSampling.verify
    monkeypatch.setattr(TritonSampling, "verify", lambda *args: passes.append(1) or verify(*args))
    draft = cuda_model.fused_draft
    monkeypatch.setattr(cuda_model, "fused_draft", lambda *args: drafts.append(1) or draft(*args))
    watch.waits.clear()
    for _ in range(2):
        texts.step()
    return watch.waits, len(passes), len(drafts)


def test_step_syncs_once_per_pass(folder: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, passes, drafts = steps(folder, watch, monkeypatch)
    assert passes > 2 and drafts > 1
    assert sorted(waits) == sorted([HEARD] * passes + [DRAFTED] * drafts)


@pytest.mark.slow
def test_host_sync_mutant_is_noticed(folder: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    (mutant,) = caught_in("test_host_sync_mutant_is_noticed")
    mutant.apply(monkeypatch)
    waits, *_ = steps(folder, watch, monkeypatch)
    assert {*waits} == {HEARD, DRAFTED, "__bool__ in <broken pick>, pick"}


def test_host_sync_kinds_are_counted() -> None:
    device = torch.device("cpu")
    host = torch.ones(3)
    with Watch() as watch:
        on_device = torch.zeros(3, device=device)
        on_device.copy_(host, non_blocking=True)
        torch.from_numpy(np.ones(3)).to(device, non_blocking=True)
        host.tolist(), on_device + host
        assert not watch.waits
        (
            on_device.copy_(host),
            host.to(device),
            torch.tensor([1], device=device),
            (2 * on_device).tolist(),
            on_device[on_device > 0],
        )
    assert [wait.split()[0] for wait in watch.waits] == ["copy_", "to", "tensor", "tolist", "__getitem__"]


def test_sharded_model_can_be_captured(folder: Path, by_name: None) -> None:
    """A graph cannot copy from the host's memory."""
    decoder = LLM(folder / "target", dtype="float32").target.decoder
    ranks = cast(TPGroup, SimpleNamespace(rank=1, count=2, exact=True, gather=lambda x, width: x.repeat(1, 2)))
    model = ShardedModel(decoder.config, decoder.model, ranks, decoder.dtype, forward_layerwise)  # type: ignore[arg-type]
    with Watch() as watch:
        ids_N = torch.zeros(3, dtype=torch.long, device=torch.device("cpu"))
        assert isinstance(ids_N, OnDevice) and model.embed(ids_N).shape == (3, decoder.config.hidden_size)
    assert not watch.waits
