"""Loading of a feature draft: from a folder to kernels, for the target whose hidden states it reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from triforce.backends.decoder import Decoder
from triforce.backends.feature_draft import FeatureDraft
from triforce.checkpoint.feature_draft_file import is_feature_draft, read_feature_draft, with_head
from triforce.checkpoint.hub import model_path
from triforce.engine.speculative_config import SpeculativeConfig
from triforce.errors import ModelError, RequestError

FINETUNE = "finetune:"
"""Before a draft's name: the target is a finetune of the model that it was trained for."""


@dataclass(frozen=True)
class FeatureCheckpoint:
    """A loaded feature draft. fingerprint: hex digest; with another one entries and guesses may differ."""

    path: Path
    draft: FeatureDraft
    fingerprint: str


def load_feature_draft(
    name_or_path: str | Path, target: Decoder, fingerprint: str, speculation: SpeculativeConfig
) -> FeatureCheckpoint | None:
    """Read the draft for a target of this fingerprint; None where it is a model of its own.

    Behind the word `FINETUNE` it may have been trained for another target of the same shape. Raises ModelError, or
    RequestError for settings that it cannot be had with.
    """
    name = str(name_or_path)
    path, finetune = model_path(name.removeprefix(FINETUNE)), name.startswith(FINETUNE)
    if not is_feature_draft(path):
        if finetune:
            raise RequestError(f"{path.name} is a model of its own, which drafts for any target; leave out {FINETUNE}")
        return None
    if target.ranks.count > 1:
        raise RequestError(f"{path.name} reads hidden states, which --tp cannot have yet; leave out one of the two")
    if speculation.offload.kind != "none":
        raise RequestError(
            f"{path.name} reads hidden states, which cannot be had with --kv-offload {speculation.offload.kind} yet; "
            "use --kv-offload none, or another --draft"
        )
    file = read_feature_draft(path, target.config, fingerprint, finetune=finetune)
    if int(file.weights.tokens_M[-1]) >= target.config.vocab_size:
        raise ModelError(f"{path} proposes tokens that the target does not have; it is a draft for another model")
    weights = file.weights
    if weights.head_MC is None:
        weights = with_head(weights, target.head_rows(weights.tokens_M))
    return FeatureCheckpoint(path, FeatureDraft(file.config, weights, target), file.fingerprint)
