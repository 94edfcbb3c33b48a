"""`triforce info`: a model's properties, the tokens that fit in memory, and the bytes of a run with offloaded KV.

Figures of the model come from its config; no weights are loaded.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

from triforce.arrays import DType, is_gpu, itemsize
from triforce.backends.dispatch import require_offload
from triforce.backends.kernel_api import PAGE, pages_for
from triforce.checkpoint.hf_config import model_config
from triforce.checkpoint.hub import FINETUNE, SHIPPED, draft_for, local_path
from triforce.checkpoint.model_files import ModelFiles, open_model, require_sizes
from triforce.cli import answer_output
from triforce.cli.bench.setup import machine
from triforce.cli.machine_rates import measure_balances
from triforce.eagle.head_files import read_eagle_head
from triforce.engine.model_loader import (
    ModelProfile,
    known_draft,
    resolve_device,
    resolve_dtype,
    with_kv_dtype,
    with_weight_inputs,
)
from triforce.engine.tier_builder import SpeculativeConfig
from triforce.errors import printable
from triforce.kvcache import OffloadConfig
from triforce.kvcache.host_memory import free_memory
from triforce.kvcache.offload_sizing import CudaKVSizing, kv_sizing, memory_for
from triforce.kvcache.pool import max_window_pages, window_pages_for_rows
from triforce.kvcache.views.full import prefill_chunk
from triforce.model.config import ModelConfig
from triforce.model.kv_rows import kv_dtype

LENGTHS = (4_096, 16_384, 32_768, 131_072, 262_144, 1_048_576)


def run(options: Namespace) -> int:
    """Print the figures of a model. Of a model on the hub, only its config is fetched, if that is a separate file."""
    files = open_model(options.model or SHIPPED[0], weights=False)
    require_sizes(files)
    hf_config = files.config
    device = resolve_device(options.device)
    config = model_config(hf_config, vocab_size=hf_config.vocab_size, context=options.context)
    dtype = resolve_dtype(options.dtype, device, config)
    config = with_kv_dtype(config, options.kv_dtype, dtype)
    config = with_weight_inputs(config, options.weight_inputs, files, dtype, device)
    count = config.parameters
    weights = count * itemsize(dtype)
    precision = dtype
    offload = OffloadConfig.parse(options.kv_offload, options.kv_memory, options.kv_resident_layers)
    settings = SpeculativeConfig(lower_tiers=options.lower_tiers, offload=offload)
    profile = profile_of(options.model, files, config, dtype, device, settings)
    if packed := profile.packed:
        weights = files.weight_bytes
        precision = files.packing
    kv_bytes = config.kv_bytes(itemsize(dtype))
    copied_weights = 0
    copied_kv = 0.0
    if options.lower_tiers != "same":
        if files.has_numbers or not packed:
            experts = packed * files.packed_expert_weights
            int8 = options.lower_tiers == "int8"
            copied_weights = int8_weights(config, experts) if int8 else (config.matrix_weights - experts) * 5 // 8
        copied_kv = 0.0 if config.kv_int8 else int8_kv_bytes(config)
    draft_bytes = 0 if options.kv_offload != "none" else draft_bytes_per_token(options.model, files, config, dtype)
    free = _free_bytes(device) if is_gpu(device) else free_memory()
    held_tokens = tokens_held(config, device)
    lengths = (*(n for n in LENGTHS if n < config.context), config.context)
    lines = {
        "model": str(options.model or files.path),
        "architecture": _architecture(hf_config.model_type, config),
        "parameters": f"{count / 1e6:,.1f} million: {size(weights)} as {precision}"
        + _copy_note(copied_weights, options.lower_tiers),
        "KV cache": f"{size(kv_bytes)} per token as {kv_dtype(config, dtype)}"
        + _copy_note(copied_kv, "int8")
        + _windows(config, held_tokens)
        + (f"; {size(draft_bytes)} per token of its draft" if draft_bytes else ""),
        **{f"  {n:>9,} tokens": size(held_tokens.of(n) * (kv_bytes + copied_kv) + n * draft_bytes) for n in lengths},
        **reads(profile, kv_bytes),
        "sampling": answer_output.defaults(files),
        "machine": machine(),
        "memory free": f"{size(free)} on {device}" if free else "unknown",
        "fits": _fits(
            held_tokens, max(free - weights - copied_weights, 0) // (kv_bytes + copied_kv + draft_bytes), config
        )
        if free
        else "unknown",
        **offload_lines(config, dtype, device, weights + copied_weights, options),
    }
    for name, value in lines.items():
        print(f"{name:<18} {printable(value if isinstance(value, str) else size(value))}")
    return 0


class HeldTokens(NamedTuple):
    """Tokens of a text that layers hold: `full` of the `layers` hold all, the others at most `window_tokens`."""

    full: int
    layers: int
    window_tokens: int

    def of(self, tokens: int) -> float:
        """Return the mean number of tokens that a layer holds of a text with `tokens` tokens."""
        return (self.full * tokens + (self.layers - self.full) * min(tokens, self.window_tokens)) / self.layers

    def fitting(self, room: float) -> int | None:
        """Return tokens of the longest text, if layers have room for `room` tokens each on average; None: no limit."""
        if room <= self.window_tokens or self.full == self.layers:
            return int(room)
        return self.window_tokens + int((room - self.window_tokens) * self.layers / self.full) if self.full else None


def _free_bytes(device: str) -> int:
    from triforce.backends.torch.devices import free_bytes

    return free_bytes(device)


def tokens_held(config: ModelConfig, device: str) -> HeldTokens:
    """Return the tokens that the layers of a run without offload hold of a text."""
    window_tokens = max_window_pages(max(config.windows), max(prefill_chunk(device), SpeculativeConfig().reach)) * PAGE
    return HeldTokens(config.windows.count(0), config.layers, window_tokens)


def draft_bytes_per_token(model: str | None, files: ModelFiles, config: ModelConfig, dtype: DType) -> int:
    """Return the bytes of a token in the EAGLE head that a known model gets as its draft; 0 if it gets none."""
    draft_source = str(draft_for(model, files.path)) if model else ""
    if not draft_source.startswith(FINETUNE):
        return 0
    layer = read_eagle_head(Path(draft_source.removeprefix(FINETUNE)), config, "", finetune=True).config.layer
    return itemsize(dtype) * (layer.kv_size + config.hidden_size)


def _windows(config: ModelConfig, held_tokens: HeldTokens) -> str:
    window_layers = held_tokens.layers - held_tokens.full
    return (
        f"; {window_layers} of {config.layers} layers keep at most {held_tokens.window_tokens:,} tokens of a text"
        if window_layers
        else ""
    )


def _fits(held_tokens: HeldTokens, room: float, config: ModelConfig) -> str:
    """Return as text how many tokens fit in memory. One text has at most as many tokens as the context."""
    if held_tokens.full == held_tokens.layers:
        return (
            f"{int(room):,} tokens of all texts together, beside the weights; one text has at most {config.context:,}"
        )
    fitting_tokens = held_tokens.fitting(room)
    if fitting_tokens is None or fitting_tokens >= config.context:
        return f"{config.context:,} tokens of one text (the whole context) beside the weights, with room for more texts"
    return f"{fitting_tokens:,} tokens of one text beside the weights, of a context of {config.context:,}"


def profile_of(
    model: str | None,
    files: ModelFiles,
    config: ModelConfig,
    dtype: DType,
    device: str,
    speculation: SpeculativeConfig,
) -> ModelProfile:
    """Return the profile of a run with these settings and the draft that it chooses, if that is on this machine."""
    draft = known_draft(model or SHIPPED[0], files.path, speculation)
    draft_path = local_path(str(draft).removeprefix(FINETUNE)) if draft else None
    return ModelProfile(files, config, dtype, device, speculation, [draft_path] if draft_path else [])


def reads(profile: ModelProfile, kv_bytes: float) -> dict[str, str]:
    """Return lines on the bytes that one new token reads, and on the context from which on speculation pays.

    kv_bytes: bytes of KV per token.
    """
    measure_balances()
    config = profile.config
    break_even = profile.break_even()
    weights = profile.weight_size * config.weights_read
    kv_read = kv_bytes / config.kv_size * config.kv_numbers_read(config.context)
    return {
        "a token reads": f"{size(weights)} of weights, and {size(kv_read)} of KV at {config.context:,} tokens",
        "speculation": break_even.verdict,
        "  basis of that": break_even.basis,
    }


def int8_weights(config: ModelConfig, packed_experts: int) -> int:
    """Return bytes of the matrices as int8 without packed experts; each output row has a float32 scale."""
    parts = config.architecture
    C = config.hidden_size
    mlps = 0 if packed_experts else parts.experts.total if parts.experts else 1
    outputs = config.layers * ((config.heads + 2 * config.kv_heads) * config.head_dim + C)
    outputs += (config.layers - parts.dense_layers) * mlps * (2 * config.intermediate_size + C)
    outputs += parts.dense_layers * (2 * parts.dense_size + C)
    return config.matrix_weights - packed_experts + 4 * (outputs + config.vocab_size)


def int8_kv_bytes(config: ModelConfig) -> float:
    """Return bytes of a token's int8 KV copy: each page has two float32 scales per layer and KV head."""
    return config.kv_size + 2 * 4 * config.layers * config.kv_heads / PAGE


def size(count: float) -> str:
    """Return a number of bytes as text for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" or count == int(count) else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _copy_note(copied_bytes: float, precision: str) -> str:
    return f", and {size(copied_bytes)} as {precision}" if copied_bytes else ""


def _architecture(model_type: str, config: ModelConfig) -> str:
    heads = f"{config.heads} heads of {config.head_dim}, {config.kv_heads} KV heads"
    return (
        f"{model_type}, {config.layers} layers, hidden size {config.hidden_size}, {heads}, "
        f"vocabulary {config.vocab_size:,}, context {config.context:,}"
    )


def offload_lines(
    config: ModelConfig, dtype: DType, device: str, weights: float, options: Namespace
) -> dict[str, float | str]:
    """Return bytes by name for one text as long as the context with offloaded KV; {} without offload.

    weights: bytes of the weights. Raises TriforceError.
    """
    offload = OffloadConfig.parse(options.kv_offload, options.kv_memory, options.kv_resident_layers)
    speculation = SpeculativeConfig()
    if offload.kind != "none":
        require_offload(config, dtype, device, offload.kind)
    pages = pages_for(config.context + speculation.reach)
    windows = window_pages_for_rows(config.windows, pages, 1, max(prefill_chunk(device), speculation.reach))
    needs = kv_sizing(
        config, dtype, device, pages, 1, speculation.reach, speculation.retrieval.budget, windows, int(weights)
    )
    memory = memory_for(offload, needs)
    if memory is None:
        return {}
    frames, buffers, layers = needs.split(offload, memory)
    page = needs.page_bytes
    kv_bytes = (frames + buffers * needs.buffer_frames) * page + needs.window_bytes
    on_device = isinstance(needs, CudaKVSizing)
    prefill_tokens = prefill_chunk(device) if needs.window_bytes else config.context
    prefill = needs.activation_bytes if isinstance(needs, CudaKVSizing) else prefill_tokens * config.hidden_size * 4
    host = needs.store_bytes(layers) if offload.kind == "host" else 0
    return {
        f"KV {'on the device' if on_device else 'in memory'}": kv_bytes,
        "  read ahead": buffers * needs.buffer_frames * page,
        "  retrieval": (needs.offloadable_layers - layers) * needs.selected_frames * page,
        **({"  windows": needs.window_bytes} if needs.window_bytes else {}),
        "  whole layers": f"{layers} of {needs.offloadable_layers}",
        f"KV in {'a file' if offload.kind == 'file' else 'host memory'}": needs.store_bytes(layers),
        "prefill": prefill,
        "process": _resident_bytes(),
        **({"on the device, in all": weights + kv_bytes + prefill} if on_device else {}),
        "in memory, in all": _resident_bytes() + host + (0 if on_device else weights + kv_bytes + prefill),
    }


def _resident_bytes() -> int:
    """Return resident bytes of this process with all modules that a run imports."""
    import resource

    import triforce.llm  # noqa: F401

    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
