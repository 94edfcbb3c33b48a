"""Dispatch of the kernels that decoding needs: a model multiplies with weights, a memory holds K and V."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache, partial
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from triforce.arrays import Array, DType, is_gpu
from triforce.backends.current_device import device_context
from triforce.backends.kernel_api import (
    PAGE,
    ForwardBatch,
    ForwardOutput,
    KVBackend,
    ModelBackend,
    OffloadedKVBackend,
    OffloadLayout,
)
from triforce.backends.layerwise import forward_layerwise, layer_steps
from triforce.backends.tensor_parallel import ShardedModel
from triforce.distributed.group import ALONE, TPGroup
from triforce.errors import RequestError, TriforceError, argument
from triforce.model.config import ModelConfig
from triforce.model.weights import Weights
from triforce.ragged import Ints

VARIABLE = "TRIFORCE_KERNELS"


def load(requested: str) -> tuple[ModuleType | None, str]:
    """Return the native extension, or None and the reason; `requested` is a kernel set, "" the best available.

    Raises TriforceError if `requested` is not available.
    """
    if requested in ("torch", "triton"):
        return None, ""
    try:
        from triforce.backends.cpu import _native
    except ImportError as error:
        reason = f"they were not built; installing triforce where there is a C++ compiler builds them ({error})"
        if requested:
            raise TriforceError(f"{VARIABLE}={requested} asks for native kernels, but {reason}") from error
        return None, reason
    try:
        if requested:
            _native.use(requested)
    except ValueError as error:
        raise TriforceError(f"{VARIABLE}={requested}: {error}. There are also torch and triton") from error
    return _native, ""


def suits_triton(requested: str, device: str) -> bool:
    """Return whether Triton's kernels are to be used on a device.

    Raises TriforceError where `requested` names them and they are not available.
    """
    if requested != "triton" and (requested or not is_gpu(device)):
        return False
    if not _installed():
        if requested:
            raise TriforceError(f"{VARIABLE}={requested}, but Triton is not installed; pip install 'triforce[gpu]'")
        return False
    if is_gpu(device) or os.environ.get("TRITON_INTERPRET") == "1":
        return True
    raise TriforceError(
        f"{VARIABLE}={requested}, but these kernels are for CUDA devices and this is {device}. Leave {VARIABLE} out, "
        "name a CUDA device, or set TRITON_INTERPRET=1 to have Triton interpret them, which is for tests and very slow"
    )


def has_torch() -> bool:
    """Return whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


def require_torch(purpose: str) -> None:
    """Raise TriforceError where torch is not installed. purpose: what needs it, in the plural."""
    if not has_torch():
        raise TriforceError(f"{purpose} need torch, which is not installed; pip install 'triforce[torch]'")


@contextmanager
def torch_alone() -> Iterator[None]:
    """Use the torch path for all models and memories made in this context: the reference of other kernels."""
    global native, requested
    saved_kernels = native, requested
    native = None
    requested = "torch"
    try:
        yield
    finally:
        native, requested = saved_kernels


def usable_cpus() -> int:
    """Return the CPUs that this process may use: by its affinity, and by cgroup quota if the extension was built."""
    try:
        from triforce.backends.cpu import _native
    except ImportError:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _native.usable_cpus()


def use_threads(count: int) -> None:
    """Set the threads of this process, in kernels and in torch: processes on one machine share its processors."""
    if native is not None:
        native.set_threads(count)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(count)


def build_identity() -> str:
    """Return an identity of the kernels' build and SIMD level. Other builds or levels may compute other bits."""
    if native is None:
        return f"torch {version('torch')}"
    digest = blake2b(Path(str(native.__file__)).read_bytes(), digest_size=4).hexdigest()
    return f"{native.level()} {digest}"


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


requested = os.environ.get(VARIABLE, "")
native, missing_reason = load(requested)
"""`missing_reason` says why native kernels are absent; it is empty if the user turned them off."""


FusedDraft = Callable[..., Array]
"""Function that drafts several tokens in one call, and returns their probabilities."""


def claim_threads(config: ModelConfig, dtype: DType, device: str) -> None:
    """Limit torch's threads for the whole process, to one if native kernels will compute.

    Torch has little work beside native kernels, and its threads would spin on cores that native threads need, or wait
    for cores that other processes use. Without native kernels torch is limited to the quota of the control groups,
    which torch does not read itself.
    """
    computes_natively = suits_native(config.head_dim, dtype, device)
    if computes_natively and "torch" not in sys.modules:
        return
    import torch

    thread_limit = 1 if computes_natively else usable_cpus()
    torch.set_num_threads(min(torch.get_num_threads(), thread_limit))


def keeps_packed(config: ModelConfig, dtype: DType, device: str) -> bool:
    """Return whether weights of GGUF files stay packed: products with them then take bfloat16 inputs."""
    suits = suits_native(config.head_dim, dtype, device) or _suits_triton(config, dtype, device)
    return dtype == "bfloat16" and suits


def model(
    config: ModelConfig, weights: Weights, device: str = "cpu", bits: int = 0, ranks: TPGroup = ALONE
) -> ModelBackend:
    """Return the weights on a device, ready for the fastest kernels that take them.

    Raises RequestError for unsupported `bits`. With several `ranks`, which share the model, the weights are this rank's
    shard (see `ShardedModel`).
    """
    dtype = weights.dtype
    forward = forward_layerwise
    claim_threads(config, dtype, device)
    if suits_native(config.head_dim, dtype, device):
        from triforce.backends.cpu.model import NativeModel, NativeModelShard

        if ranks.count > 1:
            return ShardedModel(config, NativeModelShard(config, weights, bits), ranks, dtype, forward)
        return NativeModel(config, weights, bits)
    if bits:
        raise _no_int8()
    require_torch("models that native kernels do not take")
    plain: Any
    if _suits_triton(config, dtype, device):
        from triforce.backends.cuda.model import TritonModel

        plain = TritonModel(config, weights, device)
        forward = plain.run
    else:
        if not is_gpu(device) and missing_reason:
            _warn_of_missing_kernels()
        from triforce.backends.torch.model import TorchModel

        plain = TorchModel(config, weights, device)
    return ShardedModel(config, plain, ranks, dtype, forward) if ranks.count > 1 else plain


def with_int8_inputs(model: ModelBackend) -> ModelBackend:
    """Return a model on the same weights that rounds inputs to int8, or `model` itself where no kernel would do so."""
    if native:
        from triforce.backends.cpu.model import NativeModel

        if isinstance(model, NativeModel) and model.reads_groups and not model.config.int8_inputs:
            return model.with_int8_inputs()
    return model


def memory(
    config: ModelConfig,
    pages: int,
    dtype: DType,
    device: str = "cpu",
    unit: int = PAGE,
    int8: bool = False,
    window_pages: int = 0,
) -> KVBackend:
    """Allocate KV memory of `pages` pages, for the fastest kernels that support page tables of `unit`-token units.

    int8: whether the memory also has int8 copies of keys and values. window_pages: pages of each layer with a window;
    0: `pages`, as in other layers. Raises CacheError where memory is short, RequestError where no kernels read int8.
    """
    if unit == PAGE and suits_native(config.head_dim, dtype, device):
        from triforce.backends.cpu.kv import NativeKV

        return NativeKV(config, pages, dtype, int8, window_pages)
    if int8:
        raise _no_int8()
    require_torch(f"pages in units of {unit} tokens" if unit != PAGE else "models that native kernels do not take")
    if _suits_triton(config, dtype, device):
        from triforce.backends.cuda.kv import TritonKV

        return TritonKV(config, pages, dtype, device)
    from triforce.backends.torch.kv import TorchKV

    return TorchKV(config, pages, dtype, device, window_pages=window_pages)


def require_offload(config: ModelConfig, dtype: DType, device: str, kind: str) -> None:
    """Raise RequestError where no kernels read KV from a store of this kind, `host` or `file`."""
    host_option = argument("kv_offload", "host")
    none_option = argument("kv_offload", "none")
    if streams_layers(config, dtype, device):
        if kind == "file":
            raise RequestError(f"a GPU reads KV from the host's memory, not from a file; use {host_option}")
    elif is_gpu(device) and not config.architecture.has_plain_layers:
        raise RequestError(f"KV of this family cannot be offloaded on a GPU yet; use {none_option}")
    elif is_gpu(device):
        raise RequestError(f"KV offload on a GPU needs Triton; pip install 'triforce[gpu]', or use {none_option}")
    elif not suits_native(config.head_dim, dtype, device):
        raise RequestError(f"KV offload needs native kernels, but {_why_not_native()}; use {none_option}")


def streams_layers(config: ModelConfig, dtype: DType, device: str) -> bool:
    """Return whether offloaded KV streams to the device layer by layer.

    The device must then have room for a whole layer, and the store must be host memory.
    """
    return not suits_native(config.head_dim, dtype, device) and _suits_triton(config, dtype, device)


def offloaded(
    config: ModelConfig,
    pages: int,
    dtype: DType,
    device: str,
    offload_layout: OffloadLayout,
    window_pages: int = 0,
) -> OffloadedKVBackend:
    """Return KV memory of `pages` pages in a store. Raises CacheError where even its resident part does not fit.

    window_pages: see `memory`; they are resident.
    """
    if streams_layers(config, dtype, device):
        from triforce.backends.cuda.offload.kv import TritonOffloadedKV

        return TritonOffloadedKV(config, pages, dtype, device, offload_layout)
    from triforce.backends.cpu.offload import NativeOffloadedKV

    return NativeOffloadedKV(config, pages, dtype, offload_layout, window_pages)


def fused_draft_with(model: ModelBackend, kv: KVBackend, width: int) -> FusedDraft | None:
    """Return `fused_draft` of this model and memory, which drafts several tokens in one call; None without one.

    width: tokens per row in the first pass.
    """
    if native:
        from triforce.backends.cpu.kv import NativeKV
        from triforce.backends.cpu.model import NativeModel

        if isinstance(kv, NativeKV) and isinstance(model, NativeModel):
            return partial(model.fused_draft, kv)
    if _by_triton(model) and _by_triton(kv):
        from triforce.backends.cuda import model as cuda_model

        return cuda_model.fused_draft_for(model, kv, width)
    return None


def parts_of_pass(
    model: ModelBackend, kv: KVBackend, ids_1T: Ints, batch: ForwardBatch
) -> Generator[int, None, ForwardOutput]:
    """Run a pass over many unscored tokens of one row, which may be abandoned between two parts.

    Yields the progress after each part, as `Decoder.read` does. On a GPU the whole pass is one part.
    """
    no_columns_10 = np.empty((1, 0), np.int64)
    if native:
        from triforce.backends.cpu import model as cpu_model

        if steps := cpu_model.steps(model, kv, ids_1T, batch):
            return (yield from steps)
    if not is_gpu(kv.device):
        return (yield from layer_steps(model, ids_1T, kv, batch, no_columns_10))
    return model.forward(ids_1T, kv, batch, no_columns_10)


def top_columns(scores_GN: Array, candidates: range, picks: int) -> Array:
    """Return the columns of the `picks` highest scores (float32) among `candidates`, ascending: int64 (G, picks)."""
    if isinstance(scores_GN, np.ndarray):
        assert native is not None, "arrays on the host come from native kernels"
        ids_GP = np.empty((len(scores_GN), picks), np.int64)
        native.topk(np.ascontiguousarray(scores_GN), candidates.start, candidates.stop, ids_GP)
        return ids_GP
    device = str(scores_GN.device)
    if suits_triton(requested, device):
        from triforce.backends.cuda.triton import topk

        if len(candidates) <= topk.MAX_CANDIDATES:
            with device_context(device):
                return topk.best(scores_GN, candidates, picks)
    among_GN = scores_GN[:, candidates.start : candidates.stop]
    return among_GN.topk(picks, dim=1).indices.sort(dim=1).values + candidates.start


def identity(model: ModelBackend, memory: KVBackend) -> str:
    """Name the kernels that decide the bits: `torch`, `triton`, a level of the native kernels, or two of these."""
    return " and ".join(sorted({_kind(part) for part in (model, memory)}))


def _kind(part: ModelBackend | KVBackend) -> str:
    if type(part).__module__.startswith("triforce.backends.torch."):
        return "torch"
    if _by_triton(part) or native is None:
        return "triton"
    return str(native.level())


def _by_triton(part: ModelBackend | KVBackend) -> bool:
    return type(part).__module__.startswith("triforce.backends.cuda.")


def _no_int8() -> RequestError:
    return RequestError(
        f"int8 or int4 lower tiers need native kernels, but {_why_not_native()}; use {argument('lower_tiers', 'same')}"
    )


def _why_not_native() -> str:
    if native is not None:
        return "they are for CPUs, for bfloat16 and float32, and for heads whose size is a multiple of 16, at most 256"
    return missing_reason or f"{VARIABLE}=torch leaves them out"


@cache
def _warn_of_missing_kernels() -> None:
    """Warn once in a process."""
    logging.getLogger("triforce").warning("without native kernels, several times slower: %s", missing_reason)


def best_dtype(config: ModelConfig, device: str) -> DType:
    """Return the fastest dtype: bfloat16 on a GPU or for native kernels, because it halves the bytes read.

    A GPU before Ampere gets float16, because it has units for float16 only. Torch alone on a CPU gets float32, because
    its bfloat16 is slow there.
    """
    if is_gpu(device) and _capability(device) < (8, 0):
        return "float16"
    native_or_gpu = is_gpu(device) or suits_native(config.head_dim, "bfloat16", device)
    return "bfloat16" if native_or_gpu else "float32"


def suits_native(head_dim: int, dtype: DType, device: str) -> bool:
    """Return whether native kernels take models whose heads have `head_dim` numbers of type `dtype` on `device`."""
    fits = head_dim % 16 == 0 and head_dim <= 256 and dtype in ("bfloat16", "float32")
    return native is not None and not is_gpu(device) and fits


def _suits_triton(config: ModelConfig, dtype: DType, device: str) -> bool:
    fits = config.head_dim % 2 == 0 and config.head_dim <= 256
    if config.kv_int8 and is_gpu(device):  # older devices have neither integer products nor bfloat16
        fits = fits and _capability(device) >= (8, 0)
    is_supported = dtype in ("bfloat16", "float16", "float32") and config.architecture.has_plain_layers
    return fits and is_supported and suits_triton(requested, device)


def _capability(device: str) -> tuple[int, int]:
    from triforce.backends.torch.devices import capability

    return capability(device)
