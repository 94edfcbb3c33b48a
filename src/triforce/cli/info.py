"""`triforce info`: what a model is, what fits in memory, and what a run with offloaded KV takes: from its config."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import torch

from triforce.backends.dispatch import require_offload
from triforce.backends.kernel_api import PAGE, pages_for
from triforce.backends.kv_rows import kv_name
from triforce.checkpoint.hf_config import model_config
from triforce.checkpoint.hub import FINETUNE, SHIPPED, draft_for, path_here
from triforce.checkpoint.model_files import ModelFiles, open_model, require_sizes
from triforce.cli import answer_output
from triforce.cli.bench.setup import machine
from triforce.cli.machine_rates import measure_balances
from triforce.eagle.head_files import read_eagle_head
from triforce.engine.model_loader import ModelProfile, known_draft, resolve_device, resolve_dtype, with_kv_dtype
from triforce.engine.tier_builder import SpeculativeConfig
from triforce.errors import printable
from triforce.kvcache import OffloadConfig
from triforce.kvcache.offload_sizing import CudaKVSizing, free_memory, kv_sizing, memory_for
from triforce.kvcache.pool import max_window_pages, window_pages_for_rows
from triforce.kvcache.views.full import prefill_chunk
from triforce.model.config import ModelConfig

LENGTHS = (4_096, 16_384, 32_768, 131_072, 262_144, 1_048_576)


def run(options: Namespace) -> int:
    """Read the config; of a model on the hub, fetch nothing larger where it has a file of its own."""
    files = open_model(options.model or SHIPPED[0], weights=False)
    require_sizes(files)
    hf = files.config
    device = resolve_device(options.device)
    config = model_config(hf, vocab_size=hf.vocab_size, context=options.context, device=torch.device("cpu"))
    dtype = resolve_dtype(options.dtype, device, config)
    config = with_kv_dtype(config, options.kv_dtype, dtype)
    count = config.parameters
    weights = count * dtype.itemsize
    precision = str(dtype).removeprefix("torch.")
    offload = OffloadConfig.parse(options.kv_offload, options.kv_memory, options.kv_resident_layers)
    settings = SpeculativeConfig(lower_tiers=options.lower_tiers, offload=offload)
    profile = profile_of(options.model, files, config, dtype, device, settings)
    if packed := profile.packed:
        weights = files.weight_bytes
        precision = files.packing
    row = config.kv_bytes(dtype.itemsize)
    copies = 0
    copied = 0.0
    if options.lower_tiers != "same":
        if files.has_numbers or not packed:
            experts = packed * files.packed_experts
            int8 = options.lower_tiers == "int8"
            copies = int8_weights(config, experts) if int8 else (config.matrix_weights - experts) * 5 // 8
        copied = 0.0 if config.kv_int8 else int8_kv_bytes(config)
    entries = 0 if options.kv_offload != "none" else draft_entry(options.model, files, config, dtype)
    free = int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_memory()
    kept = held(config, device)
    lengths = (*(n for n in LENGTHS if n < config.context), config.context)
    lines = {
        "model": str(options.model or files.path),
        "architecture": _architecture(hf.model_type, config),
        "parameters": f"{count / 1e6:,.1f} million: {size(weights)} as {precision}" + _and(copies, options.lower_tiers),
        "KV cache": f"{size(row)} per token as {kv_name(config, dtype)}"
        + _and(copied, "int8")
        + _windows(config, kept)
        + (f"; {size(entries)} per token of its draft" if entries else ""),
        **{f"  {n:>9,} tokens": size(kept.of(n) * (row + copied) + n * entries) for n in lengths},
        **reads(profile, row),
        "sampling": answer_output.defaults(files),
        "machine": machine(),
        "memory free": f"{size(free)} on {device}" if free else "unknown",
        "fits": _fits(kept, max(free - weights - copies, 0) // (row + copied + entries), config) if free else "unknown",
        **offloaded(config, dtype, device, weights + copies, options),
    }
    for name, value in lines.items():
        print(f"{name:<18} {printable(value if isinstance(value, str) else size(value))}")
    return 0


class HeldTokens(NamedTuple):
    """Tokens that layers hold of a text: `full` of the layers hold all, the others at most so many."""

    full: int
    layers: int
    most: int

    def of(self, tokens: int) -> float:
        """Tokens that layers hold in the mean."""
        return (self.full * tokens + (self.layers - self.full) * min(tokens, self.most)) / self.layers

    def fitting(self, room: float) -> int | None:
        """Tokens of a text of which layers have room for so many in the mean; None for any number."""
        if room <= self.most or self.full == self.layers:
            return int(room)
        return self.most + int((room - self.most) * self.layers / self.full) if self.full else None


def held(config: ModelConfig, device: torch.device) -> HeldTokens:
    """Return what a run holds of a text, without offload."""
    most = max_window_pages(max(config.windows), max(prefill_chunk(device), SpeculativeConfig().reach)) * PAGE
    return HeldTokens(config.windows.count(0), config.layers, most)


def draft_entry(model: str | None, files: ModelFiles, config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a token in the draft that a known model gets and that reads its states; 0 if none."""
    found = str(draft_for(model, files.path)) if model else ""
    if not found.startswith(FINETUNE):
        return 0
    layer = read_eagle_head(Path(found.removeprefix(FINETUNE)), config, "", finetune=True).config.layer
    return dtype.itemsize * (layer.kv_size + config.hidden_size)


def _windows(config: ModelConfig, kept: HeldTokens) -> str:
    layers = kept.layers - kept.full
    return f"; {layers} of {config.layers} layers keep at most {kept.most:,} tokens of a text" if layers else ""


def _fits(kept: HeldTokens, room: float, config: ModelConfig) -> str:
    """Say what memory has room for. A text has no more tokens than the context, however many would fit."""
    if kept.full == kept.layers:
        return f"{int(room):,} tokens beside the weights, of all texts together; of one text {config.context:,} at most"
    fitting = kept.fitting(room)
    if fitting is None or fitting >= config.context:
        return f"{config.context:,} tokens of one text beside the weights, which is the whole context, and more texts"
    return f"{fitting:,} tokens of one text beside the weights, of a context of {config.context:,}"


def profile_of(
    model: str | None,
    files: ModelFiles,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    speculation: SpeculativeConfig,
) -> ModelProfile:
    """Return the profile that a run has with these settings and the draft that it chooses itself, if that is here."""
    draft = known_draft(model or SHIPPED[0], files.path, speculation)
    found = path_here(str(draft).removeprefix(FINETUNE)) if draft else None
    return ModelProfile(files, config, dtype, device, speculation, [found] if found else [])


def reads(profile: ModelProfile, row: float) -> dict[str, str]:
    """Return what a token reads, where each has `row` bytes of KV, and from where on speculation pays."""
    measure_balances()
    config = profile.config
    found = profile.break_even()
    weights = profile.weight_size * config.weights_read
    kv = row / config.kv_size * config.kv_read(config.context)
    return {
        "a token reads": f"{size(weights)} of weights, and {size(kv)} of KV at {config.context:,} tokens",
        "speculation": found.verdict,
        "  taken for that": found.basis,
    }


def int8_weights(config: ModelConfig, packed_experts: int) -> int:
    """Return bytes of the matrices as int8, but for experts that are packed: each output has a scale in float32."""
    parts = config.architecture
    C = config.hidden_size
    mlps = 0 if packed_experts else parts.experts.total if parts.experts else 1
    outputs = config.layers * ((config.heads + 2 * config.kv_heads) * config.head_dim + C)
    outputs += (config.layers - parts.dense_layers) * mlps * (2 * config.intermediate_size + C)
    outputs += parts.dense_layers * (2 * parts.dense_size + C)
    return config.matrix_weights - packed_experts + 4 * (outputs + config.vocab_size)


def int8_kv_bytes(config: ModelConfig) -> float:
    """Return bytes of a token's int8 copies: each page has two float32 scales per layer and KV head."""
    return config.kv_size + 2 * 4 * config.layers * config.kv_heads / PAGE


def size(n: float) -> str:
    """Return bytes as text for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "bytes" or n == int(n) else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def _and(copy: float, precision: str) -> str:
    return f", and {size(copy)} as {precision}" if copy else ""


def _architecture(model_type: str, config: ModelConfig) -> str:
    heads = f"{config.heads} heads of {config.head_dim}, {config.kv_heads} of them with KV"
    return (
        f"{model_type}, {config.layers} layers, hidden size {config.hidden_size}, {heads}, "
        f"vocabulary {config.vocab_size:,}, context {config.context:,}"
    )


def offloaded(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, weights: float, options: Namespace
) -> dict[str, float | str]:
    """Bytes by name, of one text as long as the context whose KV is offloaded; {} where none is. Raises TriforceError.

    `weights`: bytes of them.
    """
    offload = OffloadConfig.parse(options.kv_offload, options.kv_memory, options.kv_resident_layers)
    usual = SpeculativeConfig()
    if offload.kind != "none":
        require_offload(config, dtype, device, offload.kind)
    pages = pages_for(config.context + usual.reach)
    windows = window_pages_for_rows(config.windows, pages, 1, max(prefill_chunk(device), usual.reach))
    needs = kv_sizing(config, dtype, device, pages, 1, usual.reach, usual.retrieval.budget, windows, int(weights))
    memory = memory_for(offload, needs)
    if memory is None:
        return {}
    frames, buffers, layers = needs.split(offload, memory)
    page = needs.page_bytes
    kept = (frames + buffers * needs.buffer_frames) * page + needs.window_bytes
    on_device = isinstance(needs, CudaKVSizing)
    at_once = prefill_chunk(device) if needs.window_bytes else config.context
    prefill = needs.activation_bytes if isinstance(needs, CudaKVSizing) else at_once * config.hidden_size * 4
    host = needs.store_bytes(layers) if offload.kind == "host" else 0
    return {
        f"KV {'on the device' if on_device else 'in memory'}": kept,
        "  read ahead": buffers * needs.buffer_frames * page,
        "  retrieval": (needs.layers - layers) * needs.selected_frames * page,
        **({"  windows": needs.window_bytes} if needs.window_bytes else {}),
        "  whole layers": f"{layers} of {needs.layers}",
        f"KV in {'a file' if offload.kind == 'file' else 'host memory'}": needs.store_bytes(layers),
        "prefill": prefill,
        "process": _resident(),
        **({"on the device, in all": weights + kept + prefill} if on_device else {}),
        "in memory, in all": _resident() + host + (0 if on_device else weights + kept + prefill),
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
