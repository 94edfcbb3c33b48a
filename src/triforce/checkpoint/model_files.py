"""A model's files, and what is in them: a Hugging Face folder, or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from triforce.checkpoint.gguf.config import EMBEDDING, HEAD, read_gguf_config
from triforce.checkpoint.gguf.file import GGUFFile, GGUFTensor
from triforce.checkpoint.gguf.tokenizer import read_gguf_tokenizer
from triforce.checkpoint.gguf.weights import BLOCK, GGUFWeights
from triforce.checkpoint.hf_config import (
    GENERATION,
    HFConfig,
    checked_sampling,
    model_config,
    read_config,
    sampling_defaults,
)
from triforce.checkpoint.hub import model_path
from triforce.checkpoint.model_families import FAMILIES
from triforce.checkpoint.stacked_experts import mxfp4_size, unstacked
from triforce.checkpoint.tokenizer import Tokenizer, configured_eos_ids, same_tokenizer
from triforce.checkpoint.tokenizer_files import has_tokenizer
from triforce.checkpoint.tokenizer_trial import require_usable
from triforce.checkpoint.weight_files import Archive, has_weights, open_archives, text_part
from triforce.checkpoint.weights import require_tensors
from triforce.model.config import ModelConfig
from triforce.model.weights import PLAIN

SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""By field of `SamplingParams`: its key in the metadata of a GGUF file."""


class HFFolder:
    """A folder of Hugging Face's kind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def config(self) -> HFConfig:
        """The checked config. Raises ModelError."""
        return read_config(self.path)

    sampling_source = GENERATION
    """Where its makers name values of sampling."""

    @property
    def has_tokenizer(self) -> bool:
        return has_tokenizer(self.path)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, without tokens that the model has no embedding for. Raises ModelError."""
        require_usable(self.path)
        return Tokenizer.load(self.path, self.config.vocab_size)

    def shares_tokenizer(self, other: Path) -> bool:
        """Whether the model at `other` has the same tokenizer, byte for byte."""
        return same_tokenizer(self.path, other)

    def eos_ids(self) -> frozenset[int]:
        """The end-of-sequence ids that its configs name. Raises ModelError."""
        return configured_eos_ids(self.path)

    def sampling_defaults(self) -> dict[str, Any]:
        """Values of `SamplingParams` that the model's makers advise. Raises ModelError."""
        return sampling_defaults(self.path)

    def archives(self, *, packed: bool) -> Mapping[str, Archive]:
        """Each tensor name, and the file that holds it. packed: MXFP4 stays codes. Raises ModelError."""
        config = self.config
        archives = open_archives(self.path)
        family = FAMILIES[config.model_type]
        experts = config.architecture.experts
        if family.text:
            archives = text_part(archives)
        archives = {name: each for name, each in archives.items() if not name.startswith(config.extra())}
        if not (family.stacked_experts and experts):
            return archives
        return unstacked(archives, config.num_hidden_layers, experts.count, narrow=packed)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights as they are packed; 0 where they are numbers, which have the size of their type."""
        packed = self.packed_experts
        return 2 * (self._whole.parameters - packed) + mxfp4_size(packed) if packed else 0

    packing = "MXFP4"
    """What packed weights are called."""

    @property
    def packed_experts(self) -> int:
        """Weights of experts that stay packed, of which lower tiers have no copies."""
        experts = self._whole.architecture.experts
        return experts.total * self._whole.expert_weights if experts and self.config.mxfp4 else 0

    @property
    def _whole(self) -> ModelConfig:
        hf = self.config
        return model_config(hf, vocab_size=hf.vocab_size, context=None, device=torch.device("cpu"))

    has_numbers = True
    """Whether some stay numbers in products, of which lower tiers may read copies of fewer bits."""


class GGUFModel:
    """A GGUF file, or a set of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path)

    @cached_property
    def config(self) -> HFConfig:
        """The checked config. Raises ModelError."""
        return read_gguf_config(self._file)

    has_tokenizer = True
    sampling_source = "its metadata"

    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ModelError."""
        found = read_gguf_tokenizer(self._file.metadata, str(self.path))
        return Tokenizer(found.files, found.eos_ids, self.config.vocab_size)

    def shares_tokenizer(self, other: Path) -> bool:
        return False

    def eos_ids(self) -> frozenset[int]:
        return self.tokenizer().eos_ids

    def sampling_defaults(self) -> dict[str, Any]:
        """Values of `SamplingParams` that its metadata name. Raises ModelError."""
        given = self._file.metadata
        return checked_sampling({name: given.get(key) for name, key in SAMPLING.items()}, self.path)

    def archives(self, *, packed: bool) -> Mapping[str, Archive]:
        """Each tensor name, and the file that holds it. packed: weights keep their types. Raises ModelError."""
        weights = GGUFWeights(self._file, self.config, packed=packed)
        return dict.fromkeys(weights.names(), weights)

    packing = "GGUF"
    packed_experts = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are packed."""
        return sum(tensor.size for tensor in self._tensors.values())

    @property
    def has_numbers(self) -> bool:
        tensors = self._tensors
        read = (tensor for name, tensor in tensors.items() if name != EMBEDDING or HEAD not in tensors)
        return any(tensor.type in PLAIN and len(tensor.shape) == 2 for tensor in read)

    @property
    def _tensors(self) -> dict[str, GGUFTensor]:
        """Return the tensors that are read, by name."""
        extra = self.config.extra(BLOCK)
        return {name: each for name, each in self._file.tensors.items() if not name.startswith(extra)}


ModelFiles = HFFolder | GGUFModel


def require_sizes(files: ModelFiles) -> None:
    """Raise ModelError unless the sizes of a config are those of its tensors; a folder without weights has none."""
    hf = files.config
    if not isinstance(files, HFFolder) or has_weights(files.path):
        config = model_config(hf, vocab_size=hf.vocab_size, context=None, device=torch.device("cpu"))
        names = FAMILIES[hf.model_type].names
        require_tensors(files.path, files.archives(packed=False), config, hf.vocab_size, names)


def open_model(name_or_path: str | Path, *, weights: bool = True) -> ModelFiles:
    """The files of a model: of a folder, a GGUF file, a repository of the hub, or a name of ours. Raises ModelError.

    weights: whether they are needed; without, a repository whose configs say all is not fetched whole.
    """
    path = model_path(name_or_path, weights=weights)
    return GGUFModel(path) if path.is_file() else HFFolder(path)
