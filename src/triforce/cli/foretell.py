"""What a run would take: weights, KV where it lies, what is read ahead, and the process itself."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triforce.config import ModelConfig


def offloaded(config: ModelConfig, itemsize: int, weights: float, options: Namespace) -> dict[str, float | str]:
    """Bytes by name, of one text as long as the context whose KV is offloaded; {} where none is. Raises TriforceError.

    `weights`: bytes of them.
    """
    from triforce.cache import Offload
    from triforce.cache.pool import pages_for
    from triforce.cache.room import Needs, memory_for
    from triforce.ladder import Speculation

    offload, usual = Offload.parse(options.kv_offload, options.kv_memory, options.kv_layers), Speculation()
    pages = pages_for(config.context + usual.reach)
    needs = Needs(config, itemsize, pages, 1, usual.reach, usual.retrieval.budget)
    memory = memory_for(offload, needs)
    if memory is None:
        return {}
    frames, buffers, layers = needs.split(offload, memory)
    page, prefill = needs.page_bytes, config.context * config.hidden_size * 4
    host = needs.bytes if offload.kind == "host" else 0
    kept = (frames + buffers * needs.buffer_frames) * page
    return {
        "KV in memory": kept,
        "  read ahead": buffers * needs.buffer_frames * page,
        "  retrieval": (config.layers - layers) * needs.selected * page,
        "  whole layers": f"{layers} of {config.layers}",
        f"KV in {'a file' if offload.kind == 'file' else 'host memory'}": needs.bytes,
        "prefill": prefill,
        "process": _resident(),
        "in memory, in all": _resident() + weights + kept + host + prefill,
    }


def _resident() -> int:
    """Bytes of this process with all that a run imports."""
    import resource

    import transformers  # noqa: F401

    import triforce.llm  # noqa: F401

    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
