"""Heads that look things up work from the start, near and far, where a model without them predicts at chance."""

from __future__ import annotations

import pytest
import torch

from recipes.pair import circuits, model, optim
from recipes.pair.config import Shape, Stage

VOCAB = 1000


def build(planted: bool) -> torch.nn.Module:
    shape = Shape(256, 2, 4, 64, max_positions=131_072, rope_theta=1e7, yarn_factor=4.0, circuits=planted)
    return model.build(shape, VOCAB, seed=3)


def accuracy(llama: torch.nn.Module, gap: int) -> float:
    """Return the accuracy of the most probable tokens in the second of two equal spans of noise, `gap` tokens apart."""
    ids_RT = torch.randint(0, VOCAB, (4, 64), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    positions_RT = (torch.arange(128) + gap * (torch.arange(128) >= 64)).expand(4, -1)
    with torch.no_grad():
        best_RT = llama.lm_head(model.hidden(llama, ids_RT, positions_RT)).argmax(-1)
    return float((best_RT[:, 68:-1] == ids_RT[:, 69:]).float().mean())


@pytest.mark.parametrize("gap", [0, 2000, 30_000, 100_000])
def test_circuits_predict_repeated_noise_untrained(gap: int) -> None:
    assert accuracy(build(True), gap) > 0.75
    assert accuracy(build(False), gap) < 0.1


def test_circuits_have_own_learning_rate() -> None:
    llama = build(True)
    weights_before = {name: weight.clone() for name, weight in llama.named_parameters()}
    stage = Stage("a", "target", 8, 1, 1, 1, lr=1e-3, lr_end=0.0, mix={}, embedding_lr=0.0, circuit_lr=0.0, warmup=0)
    for weight in llama.parameters():
        weight.grad = torch.ones_like(weight)
    optim.update(optim.build(llama, stage), 1e-3)
    still = {id(weight) for weight in circuits.parameters(llama)} | {id(llama.get_input_embeddings().weight)}
    for name, weight in llama.named_parameters():
        assert torch.equal(weight, weights_before[name]) == (id(weight) in still), name
