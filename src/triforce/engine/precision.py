"""The device that a model computes on, and the types of its weights and of its KV: what was asked for, checked."""

from __future__ import annotations

from dataclasses import replace

import torch

from triforce.backends import dispatch
from triforce.errors import ModelError, RequestError, argument
from triforce.model.config import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = ("auto", "bfloat16", "int8")
"""`auto` is the model's own dtype."""


def resolve_device(device: str | torch.device) -> torch.device:
    """Device to run on; a CUDA device with its number. Raises ModelError where there is no such device."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
        torch.empty(0, device=found).tolist()
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        asked, others = argument("device", device), (argument("device", "cpu"), argument("device", "auto"))
        raise ModelError(f"{asked} cannot be used here; use {' or '.join(others)}") from error
    if found.type == "cuda" and found.index is None:  # some functions of torch refuse it, and the current one changes
        return torch.device("cuda", torch.cuda.current_device())
    return found


def resolve_dtype(dtype: str | torch.dtype, device: torch.device, config: ModelConfig) -> torch.dtype:
    """Type of weights and KV. Raises ModelError for what is not in `DTYPES`."""
    if dtype == "auto":
        return dispatch.best_dtype(config, device)
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in DTYPES.values():
        raise ModelError(f"{argument('dtype', str(dtype))} is not supported; use one of auto, {', '.join(DTYPES)}")
    return found


def with_kv_dtype(config: ModelConfig, kv_dtype: str, dtype: torch.dtype) -> ModelConfig:
    """Return the config with KV of one of `KV_DTYPES`, of a model of a dtype. Raises RequestError."""
    if kv_dtype not in KV_DTYPES:
        raise RequestError(f"{argument('kv_dtype', kv_dtype)} is not known; choose from {', '.join(KV_DTYPES)}")
    if kv_dtype == "bfloat16" and dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise RequestError(
            f"KV is {name}, as the model is; use {argument('kv_dtype', 'auto')} or int8, or "
            f"{argument('dtype', 'bfloat16')}"
        )
    return replace(config, kv_int8=kv_dtype == "int8")
