"""Estimated memory of a run: weights, KV where it lies, read-ahead, and the process itself."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from triforce.model.config import ModelConfig


def offloaded(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, weights: float, options: Namespace
) -> dict[str, float | str]:
    """Bytes by name, of one text as long as the context whose KV is offloaded; {} where none is. Raises TriforceError.

    `weights`: bytes of them.
    """
    from triforce.backends.dispatch import require_offload
    from triforce.backends.kernel_api import pages_for
    from triforce.engine.speculative_config import SpeculativeConfig
    from triforce.kvcache import OffloadConfig
    from triforce.kvcache.offload.sizing import memory_for
    from triforce.kvcache.offload.sizing_cuda import CudaKVSizing, needs_of

    offload, usual = (
        OffloadConfig.parse(options.kv_offload, options.kv_memory, options.kv_resident_layers),
        SpeculativeConfig(),
    )
    if offload.kind != "none":
        require_offload(config, dtype, device, offload.kind)
    pages = pages_for(config.context + usual.reach)
    needs = needs_of(config, dtype, device, pages, 1, usual.reach, usual.retrieval.budget, int(weights))
    memory = memory_for(offload, needs)
    if memory is None:
        return {}
    frames, buffers, layers = needs.split(offload, memory)
    page, kept = needs.page_bytes, (frames + buffers * needs.buffer_frames) * needs.page_bytes
    apart = isinstance(needs, CudaKVSizing)
    prefill = needs.passing if isinstance(needs, CudaKVSizing) else config.context * config.hidden_size * 4
    host = needs.stored(layers) if offload.kind == "host" else 0
    return {
        f"KV {'on the device' if apart else 'in memory'}": kept,
        "  read ahead": buffers * needs.buffer_frames * page,
        "  retrieval": (config.layers - layers) * needs.selected * page,
        "  whole layers": f"{layers} of {config.layers}",
        f"KV in {'a file' if offload.kind == 'file' else 'host memory'}": needs.stored(layers),
        "prefill": prefill,
        "process": _resident(),
        **({"on the device, in all": weights + kept + prefill} if apart else {}),
        "in memory, in all": _resident() + host + (0 if apart else weights + kept + prefill),
    }


def _resident() -> int:
    """Bytes of this process with all that a run imports."""
    import resource

    import triforce.llm  # noqa: F401

    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
