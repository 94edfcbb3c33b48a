"""Loss on held-out tokens of the training sources, and early stopping by it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from recipes.pair.config import Config, Stage

TOKENS = 16_384  # per source and check, so a check takes the time of about two training steps


@torch.inference_mode()
def losses(model: LlamaForCausalLM, config: Config, stage: Stage, folder: Path) -> dict[str, float]:
    """Return the mean nats per token of each source of the stage, in windows of the stage's length."""
    return {source: _loss(model, config, stage, folder / f"{source}.heldout.npy") for source in stage.mix}


def _loss(model: LlamaForCausalLM, config: Config, stage: Stage, path: Path) -> float:
    tokens = torch.from_numpy(np.load(path).astype(np.int64)[: max(TOKENS, stage.length) + 1])
    inputs_RT = tokens[:-1][: len(tokens) // stage.length * stage.length].unfold(0, stage.length, stage.length)
    labels_RT = tokens[1:].unfold(0, stage.length, stage.length)
    total = 0.0
    machine = config.machine
    with torch.autocast(machine.device, dtype=machine.torch_dtype, enabled=machine.torch_dtype != torch.float32):
        for inputs, labels in zip(inputs_RT.split(stage.micro_rows), labels_RT.split(stage.micro_rows), strict=True):
            logits_NV = model(inputs.to(machine.device), use_cache=False).logits.flatten(0, 1).float()
            total += F.cross_entropy(logits_NV, labels.flatten().to(machine.device), reduction="sum").item()
    return total / labels_RT.numel()


def stalled(history: list[list[float]], patience: int) -> bool:
    """Return whether none of the last `patience` checks improved the best loss. history: pairs of step and nats.

    With `patience` 0 a run never stalls.
    """
    nats = [loss for _, loss in history]
    return 0 < patience < len(nats) and min(nats[-patience:]) >= min(nats[:-patience])
