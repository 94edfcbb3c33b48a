"""The two Llamas, random or started from another's embedding."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.pair.config import Shape


def build(shape: Shape, vocab: int, seed: int) -> LlamaForCausalLM:
    """A Llama with the weights that `seed` draws; outputs of each block start at zero, so that depth costs nothing."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(llama_config(shape, vocab))
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(weight)
    return model


def llama_config(shape: Shape, vocab: int) -> LlamaConfig:
    """The configuration in Hugging Face's terms; id 0 both begins and ends a text."""
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=shape.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )


@torch.no_grad()
def borrow_embedding(model: LlamaForCausalLM, teacher: LlamaForCausalLM) -> None:
    """Starts the embedding of `model` as the leading principal directions of the wider one of `teacher`."""
    wide, narrow = teacher.get_input_embeddings().weight, model.get_input_embeddings().weight
    _, _, directions = torch.linalg.svd(wide.float(), full_matrices=False)
    narrow.copy_(wide.float() @ directions[: narrow.shape[1]].T)


def trunk_parameters(model: LlamaForCausalLM) -> list[torch.nn.Parameter]:
    """The matrices inside the blocks, which Muon updates; AdamW updates all others."""
    return [weight for name, weight in model.named_parameters() if ".layers." in name and weight.ndim == 2]


def count(model: LlamaForCausalLM) -> int:
    """Number of parameters, tied ones once."""
    return sum(weight.numel() for weight in model.parameters())
