"""ModelPair: a target model and perhaps a draft, from files and checked against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from time import perf_counter

from triforce.checkpoint.known_drafts import SHIPPED, draft_for
from triforce.distributed.group import TPGroup
from triforce.engine.model_loader import Checkpoint, load
from triforce.engine.speculative_config import SpeculativeConfig
from triforce.engine.tier_builder import ModelSet
from triforce.errors import ModelError, RequestError
from triforce.model.config import ModelConfig
from triforce.planner import CostModel
from triforce.planner.cost_model import costs_path


@dataclass(frozen=True)
class ModelPair:
    """The target, and the draft if there is one."""

    target: Checkpoint
    draft: Checkpoint | None
    load_seconds: float

    @property
    def decoders(self) -> ModelSet:
        """The models as tiers run them."""
        return ModelSet(self.target.decoder, self.draft.lower if self.draft else None, self.target.lower)

    @property
    def fingerprints(self) -> list[str]:
        """The fingerprint of each model, the target's first."""
        return [each.fingerprint for each in (self.target, self.draft) if each]

    @property
    def facts(self) -> tuple[object, ...]:
        """Facts that must be the same on all ranks that share the target."""
        config = [getattr(self.target.config, f.name) for f in fields(ModelConfig) if f.name != "rope"]
        return config, self.target.decoder.dtype, self.fingerprints[1:]

    def cost_model(self, lower_tiers: str, offload: Sequence[str]) -> CostModel:
        """Return what is known of passes of these models on this machine, with settings named by these words."""
        decoder = self.target.decoder
        count, rank = decoder.ranks.count, decoder.ranks.rank
        names = [*self.fingerprints, lower_tiers, *([f"{count} ranks"] if count > 1 else []), *offload]
        return CostModel(costs_path(names, decoder.device, decoder.dtype) if rank == 0 else None)


def load_pair(
    model: str | Path | None,
    draft: str | Path | None,
    speculation: SpeculativeConfig,
    *,
    device: str,
    dtype: str,
    context: int | None,
    ranks: TPGroup,
) -> ModelPair:
    """Read a target and a draft for such speculation; see `LLM`. Raises ModelError or RequestError."""
    model = SHIPPED[0] if model is None else model
    began = perf_counter()
    read = partial(load, device=device, dtype=dtype, int8=speculation.int8)
    target = read(model, context=context, ranks=ranks)
    _require_layers(speculation.retrieval.searched_layers, target.config.layers)
    draft = draft_for(model) if draft == "auto" else draft
    drafter = read(draft, beside=target) if draft is not None else None
    pair = ModelPair(target, drafter, perf_counter() - began)
    if drafter:
        _require_same_vocabulary(target, drafter)
    return pair


def _require_layers(asked: frozenset[int] | None, layers: int) -> None:
    if unknown := sorted(layer for layer in asked or () if layer >= layers):
        raise RequestError(f"searched_layers names layer {unknown[0]}; the model's are 0 to {layers - 1}")


def _require_same_vocabulary(target: Checkpoint, draft: Checkpoint) -> None:
    names = (str(target.path), str(draft.path))
    if target.tokenizer and draft.tokenizer:
        target.tokenizer.require_same_vocabulary(draft.tokenizer, names)
    elif target.config.vocab_size != draft.config.vocab_size:
        raise ModelError(
            f"{names[0]} has {target.config.vocab_size} tokens and {names[1]} {draft.config.vocab_size}; "
            "use a draft model with the target's own tokenizer"
        )
