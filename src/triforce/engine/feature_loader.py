"""Loading of a feature draft: from a folder to kernels, for the target whose hidden states it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from triforce.backends import dispatch
from triforce.backends.decoder import Decoder
from triforce.checkpoint.hub import FINETUNE, draft_for, model_path
from triforce.checkpoint.model_families import FAMILIES
from triforce.checkpoint.model_files import ModelFiles
from triforce.checkpoint.weight_files import Archive
from triforce.checkpoint.weights import fingerprint, of_weights, read_embedding, read_weights
from triforce.eagle.eagle_draft import FeatureDraft
from triforce.eagle.head_files import is_feature_draft, read_feature_draft, target_named, with_head
from triforce.engine.speculative_config import SpeculativeConfig
from triforce.errors import ModelError, RequestError, argument
from triforce.model.weights import Matrix


@dataclass(frozen=True)
class FeatureCheckpoint:
    """A loaded feature draft. fingerprint: hex digest; with another one entries and guesses may differ."""

    path: Path
    draft: FeatureDraft
    fingerprint: str


class Target(Protocol):
    """A loaded target, which ranks may share."""

    @property
    def files(self) -> ModelFiles: ...

    @property
    def decoder(self) -> Decoder: ...

    @property
    def fingerprint(self) -> str: ...


def _archives(target: Target) -> Mapping[str, Archive]:
    decoder = target.decoder
    return target.files.archives(packed=dispatch.keeps_packed(decoder.config, decoder.dtype, decoder.device))


def _whole_fingerprint(target: Target) -> str:
    """Return the fingerprint that a target has in one process. Where ranks share it, rank 0 reads all of it again."""
    ranks, hf = target.decoder.ranks, target.files.config
    if ranks.count == 1:
        return target.fingerprint
    if ranks.rank:
        return ranks.broadcast("")
    config, dtype = target.decoder.config.whole, target.decoder.dtype
    weights = read_weights(
        target.files.path, _archives(target), config, rows=hf.vocab_size, device=torch.device("cpu"), dtype=dtype,
        names=FAMILIES[hf.model_type].names,
    )  # fmt: skip
    return ranks.broadcast(fingerprint(config, weights))


def _whole_embedding(target: Target) -> Matrix | None:
    """Return the embedding of all tokens, where ranks share it: of mapped files only rows that are read take memory."""
    decoder = target.decoder
    if decoder.ranks.count == 1:
        return None
    path = target.files.path
    return read_embedding(path, _archives(target), decoder.config, device=decoder.device, dtype=decoder.dtype)


def known_draft(model: str | Path, file: Path, speculation: SpeculativeConfig) -> str | Path | None:
    """Return the draft that is known to fit a model in a file, if it can be had with these settings."""
    found = draft_for(model, file)
    reads_states = str(found).startswith(FINETUNE)
    return None if reads_states and speculation.offload.kind != "none" else found


def load_feature_draft(
    name_or_path: str | Path, checkpoint: Target, speculation: SpeculativeConfig
) -> FeatureCheckpoint | None:
    """Read the draft for a target; None where it is a model of its own. Each rank has it whole.

    Behind the word `FINETUNE` it may have been trained for another target of the same shape. Raises ModelError, or
    RequestError for settings that it cannot be had with.
    """
    target = checkpoint.decoder
    name = str(name_or_path)
    path, finetune = model_path(name.removeprefix(FINETUNE)), name.startswith(FINETUNE)
    if not is_feature_draft(path):
        if finetune:
            raise RequestError(f"{path.name} is a model of its own, which drafts for any target; leave out {FINETUNE}")
        return None
    if speculation.offload.kind != "none":
        raise RequestError(
            f"{path.name} reads hidden states, which cannot be had with "
            f"{argument('kv_offload', speculation.offload.kind)} yet; use {argument('kv_offload', 'none')}, or another "
            f"{argument('draft')}"
        )
    named = target_named(path) is not None and not finetune
    identity = of_weights(_whole_fingerprint(checkpoint)) if named else ""
    file = read_feature_draft(path, target.config, identity, finetune=finetune)
    if int(file.weights.tokens_M[-1]) >= target.config.vocab_size:
        raise ModelError(f"{path} proposes tokens that the target does not have; it is a draft for another model")
    weights = file.weights
    if weights.head_MC is None:
        weights = with_head(weights, target.head_rows(weights.tokens_M))
    draft = FeatureDraft(file.config, weights, target, _whole_embedding(checkpoint))
    return FeatureCheckpoint(path, draft, file.fingerprint)
