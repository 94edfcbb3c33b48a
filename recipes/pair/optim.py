"""Optimizers: Muon for the matrices of the layers, AdamW for embeddings and norms, with one linear schedule."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from recipes.pair import circuits
from recipes.pair.config import Stage


def build(model: LlamaForCausalLM, stage: Stage) -> list[torch.optim.Optimizer]:
    """Return both optimizers. `match_rms_adamw` makes one rate suit both; a group has its `share` of the rate."""
    matrices = [weight for name, weight in model.named_parameters() if ".layers." in name and weight.ndim == 2]
    embedding = model.get_input_embeddings().weight
    norms = [weight for weight in model.parameters() if weight.ndim == 1]
    circuit_ids = {id(weight) for weight in circuits.parameters(model)}
    groups = [
        {"params": [weight for weight in matrices if id(weight) not in circuit_ids], "share": 1.0},
        {"params": [weight for weight in matrices if id(weight) in circuit_ids], "share": stage.circuit_lr},
    ]
    muon = torch.optim.Muon(
        groups, lr=stage.lr, weight_decay=stage.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    groups = [{"params": norms, "share": 1.0}, {"params": [embedding], "share": stage.embedding_lr}]
    return [muon, torch.optim.AdamW(groups, lr=stage.lr, betas=(0.9, 0.95), weight_decay=0.0)]


def rate(stage: Stage, step: int) -> float:
    """Return the learning rate of `step`: linear from 0 to `lr` in the warmup, then linear to `lr_end` at the end."""
    if step < stage.warmup:
        return stage.lr * (step + 1) / stage.warmup
    done = (step - stage.warmup) / max(1, stage.steps - stage.warmup)
    return stage.lr + (stage.lr_end - stage.lr) * done


def update(optimizers: list[torch.optim.Optimizer], learning_rate: float) -> None:
    """Take one step of each optimizer, and drop the gradients."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group["share"]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
