"""ModelSource: a model's files and how they are to be read, before any weight is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from triforce.backends import dispatch
from triforce.checkpoint.hf_config import model_config
from triforce.checkpoint.model_families import FAMILIES
from triforce.checkpoint.model_files import ModelFiles, open_model
from triforce.checkpoint.tokenizer import Tokenizer
from triforce.checkpoint.weights import read_weights
from triforce.distributed.group import ALONE, TPGroup
from triforce.engine.precision import resolve_device, resolve_dtype, with_kv_dtype
from triforce.model.config import ModelConfig
from triforce.model.weights import Weights


@dataclass(frozen=True)
class ModelSource:
    """A model's files and how they are to be read, before any weight is. config: the whole model's."""

    files: ModelFiles
    tokenizer: Tokenizer | None
    config: ModelConfig
    precision: torch.dtype
    device: torch.device

    def weights(self, device: torch.device, ranks: TPGroup = ALONE) -> Weights:
        """Return the weights, or the part of one of several ranks, on a device. Raises ModelError."""
        packed = dispatch.keeps_packed(self.config, self.precision, self.device)
        return read_weights(
            self.files.path, self.files.archives(packed=packed), self.config, rows=self.files.config.vocab_size,
            device=device, dtype=self.precision, ranks=ranks, names=FAMILIES[self.files.config.model_type].names,
        )  # fmt: skip


def located(
    name_or_path: str | Path,
    *,
    device: str | torch.device,
    dtype: str | torch.dtype,
    kv_dtype: str,
    context: int | None,
    beside: tuple[Path, Tokenizer | None] | None = None,
) -> ModelSource:
    """Return where a model is and how it is to be read; raises as `load` does, whose arguments these are.

    beside: the path and the tokenizer of a model whose tokenizer is used where it is the same.
    """
    device = resolve_device(device)
    files = open_model(name_or_path)
    tokenizer = _tokenizer(files, beside)
    vocab_size = tokenizer.vocab_size if tokenizer else files.config.vocab_size
    config = model_config(files.config, vocab_size=vocab_size, context=context, device=device)
    precision = resolve_dtype(dtype, device, config)
    return ModelSource(files, tokenizer, with_kv_dtype(config, kv_dtype, precision), precision, device)


def _tokenizer(files: ModelFiles, beside: tuple[Path, Tokenizer | None] | None) -> Tokenizer | None:
    path, known = beside or (None, None)
    if path and known and files.shares_tokenizer(path) and known.vocab_size <= files.config.vocab_size:
        return known
    return files.tokenizer() if files.has_tokenizer else None
