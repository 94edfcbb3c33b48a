"""Model files and their contents: a Hugging Face folder, or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

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
from triforce.checkpoint.stacked_experts import mxfp4_size, unstack_experts
from triforce.checkpoint.tokenizer import Tokenizer, configured_eos_ids, same_tokenizer
from triforce.checkpoint.tokenizer_files import has_tokenizer
from triforce.checkpoint.tokenizer_trial import require_usable
from triforce.checkpoint.weight_files import Archive, has_weights, open_archives, text_part
from triforce.checkpoint.weights import require_tensors
from triforce.model.config import ModelConfig
from triforce.model.weights import NUMBER_TYPES

SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""Metadata keys of a GGUF file by field of `SamplingParams`."""


class HFFolder:
    """A Hugging Face model folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def config(self) -> HFConfig:
        """The checked config. Raises ModelError."""
        return read_config(self.path)

    sampling_source = GENERATION
    """Source of the model's sampling defaults, for messages."""

    @property
    def has_tokenizer(self) -> bool:
        return has_tokenizer(self.path)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, without tokens that lack an embedding. Raises ModelError."""
        require_usable(self.path)
        return Tokenizer.load(self.path, self.config.vocab_size)

    def shares_tokenizer(self, other_path: Path) -> bool:
        """Return whether the model at `other_path` has the same tokenizer, byte for byte."""
        return same_tokenizer(self.path, other_path)

    def eos_ids(self) -> frozenset[int]:
        """Return the end-of-sequence ids of its configs. Raises ModelError."""
        return configured_eos_ids(self.path)

    def sampling_defaults(self) -> dict[str, Any]:
        """Return the model's own `SamplingParams` values. Raises ModelError."""
        return sampling_defaults(self.path)

    def archives(self, *, packed: bool) -> Mapping[str, Archive]:
        """Return the archive of each tensor by name. packed: MXFP4 weights stay packed. Raises ModelError."""
        config = self.config
        archives = open_archives(self.path)
        family = FAMILIES[config.model_type]
        experts = config.architecture.experts
        if family.text_field:
            archives = text_part(archives)
        archives = {
            name: archive for name, archive in archives.items() if not name.startswith(config.extra_layer_prefixes())
        }
        if not (family.stacked_experts and experts):
            return archives
        return unstack_experts(archives, config.num_hidden_layers, experts.count, packed=packed)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights with packed experts; 0 if no weight is packed: each then has the size of its dtype."""
        packed = self.packed_expert_weights
        return 2 * (self._model_config.parameters - packed) + mxfp4_size(packed) if packed else 0

    packing = "MXFP4"
    """Name of the packed format, for messages."""

    @property
    def packed_expert_weights(self) -> int:
        """Number of weights of experts that stay packed. Lower tiers have no copies of them."""
        experts = self._model_config.architecture.experts
        return experts.total * self._model_config.expert_weights if experts and self.config.mxfp4 else 0

    @property
    def _model_config(self) -> ModelConfig:
        hf = self.config
        return model_config(hf, vocab_size=hf.vocab_size, context=None)

    has_numbers = True
    """Whether some matrices are unpacked, so that lower tiers may read copies with fewer bits."""


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
        """Return the tokenizer. Raises ModelError."""
        gguf_tokenizer = read_gguf_tokenizer(self._file.metadata, str(self.path))
        return Tokenizer(gguf_tokenizer.files, gguf_tokenizer.eos_ids, self.config.vocab_size)

    def shares_tokenizer(self, other_path: Path) -> bool:
        return False

    def eos_ids(self) -> frozenset[int]:
        return self.tokenizer().eos_ids

    def sampling_defaults(self) -> dict[str, Any]:
        """Return the `SamplingParams` values in its metadata. Raises ModelError."""
        metadata = self._file.metadata
        return checked_sampling({name: metadata.get(key) for name, key in SAMPLING.items()}, self.path)

    def archives(self, *, packed: bool) -> Mapping[str, Archive]:
        """Return the archive of each tensor by name. packed: weights keep their types. Raises ModelError."""
        weights = GGUFWeights(self._file, self.config, packed=packed)
        return dict.fromkeys(weights.names(), weights)

    packing = "GGUF"
    packed_expert_weights = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(tensor.size for tensor in self._tensors.values())

    @property
    def has_numbers(self) -> bool:
        tensors = self._tensors
        read_tensors = (tensor for name, tensor in tensors.items() if name != EMBEDDING or HEAD not in tensors)
        return any(tensor.type in NUMBER_TYPES and len(tensor.shape) == 2 for tensor in read_tensors)

    @property
    def _tensors(self) -> dict[str, GGUFTensor]:
        """Return the tensors that are read, by name: all but those of extra layers."""
        extra_prefixes = self.config.extra_layer_prefixes(BLOCK)
        return {name: tensor for name, tensor in self._file.tensors.items() if not name.startswith(extra_prefixes)}


ModelFiles = HFFolder | GGUFModel


def require_sizes(files: ModelFiles) -> None:
    """Raise ModelError unless the tensors' shapes match the config. A folder without weights passes."""
    hf = files.config
    if not isinstance(files, HFFolder) or has_weights(files.path):
        config = model_config(hf, vocab_size=hf.vocab_size, context=None)
        names = FAMILIES[hf.model_type].names
        require_tensors(files.path, files.archives(packed=False), config, hf.vocab_size, names)


def open_model(name_or_path: str | Path, *, weights: bool = True) -> ModelFiles:
    """Return the files of a model: a folder, a GGUF file, a repository on the hub, or a known name. Raises ModelError.

    weights: whether weights are needed. If not, only the small files of a Hugging Face repository are downloaded.
    """
    path = model_path(name_or_path, weights=weights)
    return GGUFModel(path) if path.is_file() else HFFolder(path)
