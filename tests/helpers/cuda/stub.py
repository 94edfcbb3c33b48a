"""A simulated machine with CUDA devices on a CPU: it answers calls of torch and Triton, and records them.

Tensors "on" device i are of a class of their own: their `device` is `cuda:i`, results of operations on them are of
that class, and two devices do not mix. Triton's kernels are interpreted; each launch is recorded with the thread's
current device, where a real one would run. A captured graph is a list of calls that a replay repeats.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

import triforce.backends.cuda.offload.kv  # its annotations name what is patched below  # noqa: F401
from triforce import installed
from triforce.backends.torch import attention

GIB = 1 << 30
ANSWERS = {Tensor.cpu, Tensor.item, Tensor.tolist, Tensor.numpy}
BETWEEN = {Tensor.copy_, Tensor.to, Tensor.__getitem__, Tensor.__setitem__}
"""Functions that take tensors of a device and of the host together: copies, and indexing."""


class OnFirst(Tensor):
    index = 0


class OnSecond(Tensor):
    index = 1


KINDS = OnFirst, OnSecond
Call = Callable[[], Any]


class Graph:
    """The calls of a capture, and their results."""

    def __init__(self) -> None:
        self.calls: list[tuple[Call, Any]] = []

    def replay(self) -> None:
        for call, recorded in self.calls:
            for old, new in zip(tree_leaves(recorded), tree_leaves(call()), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Machine(TorchFunctionMode):
    def __init__(self, devices: int, capability: tuple[int, int], free: int) -> None:
        super().__init__()
        self.devices = devices
        self.capability = capability
        self.free = free
        self.launches: list[tuple[str, int, set[int]]] = []
        """Launches: the kernel, the current device, and the devices of its tensors."""
        self.shares = [1.0] * devices
        self.log: list[str] = []
        """Log of operations on streams, events, and host memory."""
        self.captured = 0
        self.capture_streams = list[Any]()
        self._capturing: Graph | None = None
        self._usual: Any = None
        self._threads = threading.local()

    # Replacements of torch.cuda.

    @property
    def current(self) -> int:
        return getattr(self._threads, "current", 0)

    def set_device(self, device: Any) -> None:
        self._threads.current = self.index(device)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        previous_index, self._threads.current = self.current, self.index(device)
        try:
            yield
        finally:
            self._threads.current = previous_index

    def index(self, device: Any, optional: bool = True) -> int:
        """Return the index of a device as `torch.cuda._utils._get_device_index` does."""
        index = device if isinstance(device, int) or device is None else torch.device(device).index
        if index is None and not optional and device is not None:
            raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")
        index = self.current if index is None else index
        if index >= self.devices:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return index

    def set_share(self, share: float, device: Any = None) -> None:
        self.shares[self.index(device, optional=False)] = share

    def share(self, device: Any = None) -> float:
        return self.shares[self.index(device, optional=False)]

    def stream(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            index=self.index(device),
            wait_stream=lambda _: None,
            wait_event=lambda _: None,
            record_event=self.event,
        )

    def event(self, enable_timing: bool = False) -> SimpleNamespace:
        return SimpleNamespace(
            record=lambda: self.log.append("event"), synchronize=lambda: None, elapsed_time=lambda end: 2.0
        )

    @contextmanager
    def graph(self, graph: Graph, pool: object = None, stream: Any = None) -> Iterator[None]:
        """Capture on a stream. The default is torch's own, on the device that was current at first."""
        self._usual = self._usual or self.stream()
        assert (stream or self._usual).index == self.current, "a capture on the stream of another device"
        self._capturing = graph
        self.captured = self.captured + 1
        self.capture_streams += [stream] * all(stream is not captured for captured in self.capture_streams)
        try:
            yield
        finally:
            self._capturing = None

    def cudart(self) -> SimpleNamespace:
        def noted(what: str) -> Callable[..., int]:
            return lambda *_: self.log.append(f"{what} with device {self.current}") or 0  # type: ignore[func-returns-value]

        return SimpleNamespace(cudaHostRegister=noted("pin"), cudaHostUnregister=noted("unpin"))

    # Operations on tensors.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return torch.device("cuda", args[0].index) if isinstance(args[0], KINDS) else func(*args)
        kwargs = dict(kwargs or {})
        graph = self._capturing
        if graph and func in ANSWERS and isinstance(args[0], KINDS):
            raise RuntimeError("operation not permitted when stream is capturing")
        result = self._done(func, args, kwargs)
        if graph and any(isinstance(leaf, KINDS) for leaf in tree_leaves((args, kwargs, result))):
            graph.calls.append((lambda: self._done(func, args, kwargs), result))
        return result

    def _done(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(leaf, KINDS) for leaf in leaves) and func not in BETWEEN:
            strangers = [leaf for leaf in leaves if leaf.ndim and not isinstance(leaf, KINDS)]
            if strangers:
                raise RuntimeError(f"Expected all tensors to be on the same device ({func.__name__})")
        args = [*args]
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        to: torch.device | None = None
        if kwargs.get("device") is not None:
            to = self._place(kwargs["device"])
            kwargs["device"] = "cpu"
        if func is Tensor.to:
            for i, value in enumerate(args[1:], 1):
                if isinstance(value, torch.device | str):
                    to, args[i] = self._place(value), "cpu"
        if func is Tensor.cpu:
            to = torch.device("cpu")
        result = func(*args, **kwargs)
        if to is None or not isinstance(result, Tensor):
            return result
        with torch._C.DisableTorchFunction():
            if args and isinstance(args[0], Tensor) and result.data_ptr() == args[0].data_ptr():
                moves = to.type == "cuda" or isinstance(args[0], KINDS)
                result = result.clone() if moves and getattr(args[0], "index", -1) != to.index else result
            return result.as_subclass(KINDS[to.index] if to.type == "cuda" else Tensor)

    def _place(self, device: Any) -> torch.device:
        place = torch.device(device)
        return torch.device("cuda", self.index(place)) if place.type == "cuda" else place

    def launch(self, name: str, tensors: list[Any], run: Call) -> None:
        of_host = [tensor for tensor in tensors if isinstance(tensor, Tensor) and not isinstance(tensor, KINDS)]
        if of_host and name != "_carry":  # which reads registered memory
            raise ValueError(f"Pointer argument of {name} cannot be accessed from Triton (cpu tensor?)")
        self.launches.append((name, self.current, {tensor.index for tensor in tensors if isinstance(tensor, KINDS)}))
        if self._capturing:
            self._capturing.calls.append((run, None))
        run()


def patch(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Replace torch's and Triton's devices by the machine."""
    answers = {
        "is_available": lambda: True, "device_count": lambda: machine.devices, "device": machine.device,
        "current_device": lambda: machine.current, "set_device": machine.set_device, "Stream": machine.stream,
        "current_stream": machine.stream, "stream": lambda stream: nullcontext(), "Event": machine.event,
        "CUDAGraph": Graph, "graph": machine.graph, "graph_pool_handle": lambda: None, "cudart": machine.cudart,
        "mem_get_info": lambda device=None: (machine.free, 80 * GIB), "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0, "synchronize": lambda device=None: machine.log.append("wait"),
        "empty_cache": lambda: None, "get_device_name": lambda device=None: f"Made up {machine.index(device)}",
        "get_device_capability": lambda device=None: machine.capability,
        "_sleep": lambda _: machine.log.append("sleep"),
        "get_per_process_memory_fraction": machine.share, "set_per_process_memory_fraction": machine.set_share,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(installed, "GPU_DEVICE_FILES", ("null",))  # a file of /dev
    monkeypatch.setattr(attention, "_fused", _fused)
    launch = interpreter.GridExecutor.__call__

    def launched(kernel: Any, *args: Any, **kwargs: Any) -> None:
        def run() -> None:
            with torch._C.DisableTorchFunction():
                launch(kernel, *args, **kwargs)

        machine.launch(kernel.fn.__name__, [*args], run)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)


def _fused(q_HTD: Tensor, k_HSD: Tensor, v_HSD: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute torch's fused attention on a CPU."""
    batched = q_HTD[None], k_HSD[None], v_HSD[None]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*batched, is_causal=causal)
    return out[0], lse[0, :, : q_HTD.shape[1]].float()


@contextmanager
def machine(devices: int = 1, capability: tuple[int, int] = (9, 0), free: int = 70 * GIB) -> Iterator[Machine]:
    """Yield a simulated machine within a block."""
    stub_machine = Machine(devices, capability, free)
    with pytest.MonkeyPatch.context() as monkeypatch:
        patch(monkeypatch, stub_machine)
        with stub_machine:
            yield stub_machine
