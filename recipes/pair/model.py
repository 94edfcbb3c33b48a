"""Builds Llamas, with random weights or with an embedding from a teacher."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.pair import circuits
from recipes.pair.config import Shape


def build(shape: Shape, vocab: int, seed: int) -> LlamaForCausalLM:
    """Return a Llama with random weights of `seed`. Output projections are 0, so depth does not hinder training."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(llama_config(shape, vocab))
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(weight)
    if shape.circuits:
        circuits.plant(model)
    return model


def llama_config(shape: Shape, vocab: int) -> LlamaConfig:
    """Return the configuration for transformers. Id 0 both begins and ends a text."""
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=shape.max_positions,
        rope_parameters=rope_parameters(shape),
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )


def rope_parameters(shape: Shape) -> dict[str, Any]:
    """Return the rotation for transformers."""
    if shape.yarn_factor == 1:
        return {"rope_type": "default", "rope_theta": shape.rope_theta}
    original = int(shape.max_positions / shape.yarn_factor)
    yarn = {"rope_type": "yarn", "factor": shape.yarn_factor, "original_max_position_embeddings": original}
    return yarn | {"rope_theta": shape.rope_theta}


def hidden(model: LlamaForCausalLM, inputs_RT: torch.Tensor, positions_RT: torch.Tensor) -> torch.Tensor:
    """Return the last hidden states (R, T, C) of tokens at ascending positions. Attention is causal in each row.

    The layers are called separately, because the whole model treats a gap in positions as the start of another text.
    """
    trunk = model.model
    states_RTC = trunk.embed_tokens(inputs_RT)
    rotation = trunk.rotary_emb(states_RTC, positions_RT)
    for layer in trunk.layers:
        states_RTC = layer(states_RTC, attention_mask=None, position_embeddings=rotation)
    normed: torch.Tensor = trunk.norm(states_RTC)
    return normed


@torch.no_grad()
def sharpen(model: LlamaForCausalLM, factor: float) -> None:
    """Multiply the attention scores of every layer by `factor`."""
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.mul_(factor)


@torch.no_grad()
def borrow_embedding(model: LlamaForCausalLM, teacher: LlamaForCausalLM) -> None:
    """Set the embedding of `model` to the teacher's in its leading principal directions, at the scale of `model`."""
    wide = teacher.get_input_embeddings().weight
    narrow = model.get_input_embeddings().weight
    _, _, directions = torch.linalg.svd(wide.float(), full_matrices=False)
    projected = wide.float() @ directions[: narrow.shape[1]].T
    narrow.copy_(projected * (narrow.std() / projected.std()))


def count(model: LlamaForCausalLM) -> int:
    """Return the number of parameters. Tied parameters count once."""
    return sum(weight.numel() for weight in model.parameters())
