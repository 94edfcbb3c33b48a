"""GGUF models in transformers, with float32 numbers of the format's own library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.smollm2 import config_of, tensor


def dequantised(file: Path, **config: Any) -> LlamaForCausalLM:
    """Return the Llama of a file with tied embeddings; `config` has the fields that the file lacks."""
    reader = GGUFReader(file)
    values = config_of({name: field.contents() for name, field in reader.fields.items()} | config)
    state = dict(tensor(entry, values) for entry in reader.tensors)
    return LlamaForCausalLM.from_pretrained(None, config=LlamaConfig(**values), state_dict=state, dtype=torch.float32)


@torch.no_grad()
def greedy_like(model: LlamaForCausalLM, prompt: Sequence[int], text: Sequence[int], vocab_size: int) -> list[int]:
    """Return the greedy token after the prompt and each prefix of `text`: `text` itself, if it is greedy.

    vocab_size: ids from there on are padding.
    """
    logits_1TV = model(torch.tensor([[*prompt, *text]])).logits
    best_ids: list[int] = logits_1TV[0, len(prompt) - 1 : -1, :vocab_size].argmax(-1).tolist()
    return best_ids
