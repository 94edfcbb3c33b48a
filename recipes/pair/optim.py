"""Muon for the matrices of the blocks, AdamW for embeddings and norms, one linear schedule for both."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from recipes.pair.config import Stage
from recipes.pair.model import trunk_parameters


def build(model: LlamaForCausalLM, stage: Stage) -> list[torch.optim.Optimizer]:
    """Both optimizers; with `match_rms_adamw` one learning rate suits both."""
    trunk = trunk_parameters(model)
    inside = {id(weight) for weight in trunk}
    others = [weight for weight in model.parameters() if id(weight) not in inside]
    muon = torch.optim.Muon(
        trunk, lr=stage.lr, weight_decay=stage.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, lr=stage.lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adamw]


def rate(stage: Stage, step: int) -> float:
    """Learning rate of `step`: linear from 0 to `lr` over the warmup, then linear to `lr_end` at the last step."""
    if step < stage.warmup:
        return stage.lr * (step + 1) / stage.warmup
    done = (step - stage.warmup) / max(1, stage.steps - stage.warmup)
    return stage.lr + (stage.lr_end - stage.lr) * done


def update(optimizers: list[torch.optim.Optimizer], learning_rate: float) -> None:
    """One step of each optimizer; gradients are dropped afterwards."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
