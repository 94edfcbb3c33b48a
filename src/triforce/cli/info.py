"""`triforce info`: what a model is and what fits in memory, from its config alone."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from triforce.cli.memory_estimate import offloaded

if TYPE_CHECKING:
    import torch

    from triforce.model.config import ModelConfig

LENGTHS = (4_096, 16_384, 32_768, 131_072, 262_144, 1_048_576)


def run(options: Namespace) -> int:
    """Read config.json; of a model on the hub, fetch nothing larger."""
    import torch

    from triforce.checkpoint.families import model_config, read_config
    from triforce.engine.model_loader import resolve_device, resolve_dtype

    folder = _config_folder(options.model)
    hf = read_config(folder)
    device = resolve_device(options.device)
    config = model_config(hf, vocab_size=hf.vocab_size, context=options.context, device=torch.device("cpu"))
    dtype = resolve_dtype(options.dtype, device, config)
    count = config.parameters
    weights, precision = count * dtype.itemsize, str(dtype).removeprefix("torch.")
    row, copies, copied = config.kv_size * dtype.itemsize, 0, 0.0
    if options.lower_tiers == "int8":
        copies, copied = int8_weights(config), int8_kv_bytes(config)
    free = available(device)
    for name, value in {
        "model": str(options.model or folder),
        "architecture": _architecture(hf.model_type, config),
        "parameters": f"{count / 1e6:,.1f} million: {size(weights)} as {precision}" + _and(copies),
        "KV cache": f"{size(row)} per token" + _and(copied),
        **{
            f"  {n:>9,} tokens": size(n * (row + copied))
            for n in (*(n for n in LENGTHS if n < config.context), config.context)
        },
        "sampling": _sampling(folder),
        "memory free": f"{size(free)} on {device}" if free else "unknown",
        "fits": f"{int(max(free - weights - copies, 0) // (row + copied)):,} tokens beside the weights, of all texts "
        "together"
        if free
        else "unknown",
        **{
            name: value if isinstance(value, str) else size(value)
            for name, value in offloaded(config, dtype, device, weights + copies, options).items()
        },
    }.items():
        print(f"{name:<18} {value}")
    return 0


def _sampling(folder: Path) -> str:
    """Return the sampling defaults of the model's makers."""
    from triforce.checkpoint.families import GENERATION, sampling_defaults

    defaults = ", ".join(f"{name} {value:g}" for name, value in sampling_defaults(folder).items())
    return f"{defaults} by default ({GENERATION})" if defaults else "temperature 1 by default"


def int8_weights(config: ModelConfig) -> int:
    """Return bytes of the matrices as int8, each output with a scale in float32."""
    outputs = (config.heads + 2 * config.kv_heads) * config.head_dim + 2 * config.hidden_size
    outputs += 2 * config.intermediate_size
    return config.weights_read + 4 * (config.layers * outputs + config.vocab_size)


def int8_kv_bytes(config: ModelConfig) -> float:
    """Return bytes of a token's int8 copies: each page has two float32 scales per layer and KV head."""
    from triforce.backends.kernel_api import PAGE

    return config.kv_size + 2 * 4 * config.layers * config.kv_heads / PAGE


def available(device: torch.device) -> int:
    """Return bytes of memory that are free on `device`; 0 if the system does not say."""
    import torch

    from triforce.kvcache.offload.sizing import free_memory

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory()


def size(n: float) -> str:
    """Return bytes as text for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "bytes" or n == int(n) else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def _and(copy: float) -> str:
    return f", and {size(copy)} as int8" if copy else ""


def _architecture(model_type: str, config: ModelConfig) -> str:
    heads = f"{config.heads} heads of {config.head_dim}, {config.kv_heads} of them with KV"
    return (
        f"{model_type}, {config.layers} layers, hidden size {config.hidden_size}, {heads}, "
        f"vocabulary {config.vocab_size:,}, context {config.context:,}"
    )


def _config_folder(model: str | None) -> Path:
    from triforce.checkpoint.hub import HUB_NAME, SHIPPED, TEXTS, model_folder

    if model is None:
        return SHIPPED[0]
    if Path(model).expanduser().exists() or not HUB_NAME.fullmatch(model):
        return model_folder(model)
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=list(TEXTS)))
    except Exception:  # the hub's errors have no common type; this says what is wrong in our words
        return model_folder(model)
