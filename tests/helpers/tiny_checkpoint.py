"""Tiny random checkpoints and tokenizers, written as their publishers write them.

Without torch and transformers (`make test-core`) there are models of Llama only, by `numpy_checkpoint`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.helpers.numpy_checkpoint import CoreTokenizer, RandomLlama
from triforce.checkpoint.tokenizer import Tokenizer
from triforce.checkpoint.tokenizer_files import from_transformers

if TYPE_CHECKING:
    import transformers

HAS_TRANSFORMERS = find_spec("torch") is not None and find_spec("transformers") is not None
SIZES = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)


def tiny_model(family: str = "Llama", **changes: Any) -> transformers.PreTrainedModel:
    """Return a random transformers model, float32, with all weights (norms and biases too) far from neutral values."""
    if not HAS_TRANSFORMERS:
        if family != "Llama":
            pytest.skip("transformers is not installed")
        return RandomLlama(**(SIZES | changes))
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SIZES | changes))
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    for name, weight in model.named_parameters():
        weight.data = (1.0 if "norm" in name else 0.0) + torch.randn_like(weight) * 0.15
    return model


def save(model: transformers.PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def edit(file: Path, **changes: Any) -> None:
    """Set fields of a JSON file; `...` removes one."""
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def tiny_tokenizer(vocab_size: int = 300, **options: Any) -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level BPE trained on three lines, with special tokens <s> and </s>."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["the cat sat on the mat", "naïve café — 東京 🙂", "the hat and the cat"], trainer)
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    if not HAS_TRANSFORMERS:
        return CoreTokenizer(core, **special_tokens, **options)
    import transformers

    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special_tokens, **options)


def ours(hf: Any, ends: Iterable[int] = (), rows: int | None = None) -> Tokenizer:
    """Return a transformers tokenizer as one of ours."""
    return Tokenizer(from_transformers(hf), frozenset(ends), rows)


def tiny_pair(folder: Path, positions: int, **tokenizer: Any) -> Path:
    """Write a folder with a target and a draft that share a tokenizer."""
    for name, layers in (("target", 2), ("draft", 1)):
        sizes = {"vocab_size": 300, "max_position_embeddings": positions, "num_hidden_layers": layers}
        save(tiny_model(**sizes, eos_token_id=1), folder / name)
        tiny_tokenizer(**tokenizer).save_pretrained(folder / name)
    return folder
