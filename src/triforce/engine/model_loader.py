"""Model loading: a target model and perhaps a draft, from files onto a backend, checked against each other."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from triforce.backends import dispatch
from triforce.backends.decoder import Decoder
from triforce.backends.kv_rows import kv_name
from triforce.checkpoint.hub import SHIPPED, model_name
from triforce.checkpoint.model_files import ModelFiles
from triforce.checkpoint.tokenizer import Tokenizer
from triforce.checkpoint.weights import fingerprint
from triforce.distributed.group import ALONE, TPGroup
from triforce.engine.feature_loader import FeatureCheckpoint, known_draft, load_feature_draft
from triforce.engine.model_profile import ModelProfile
from triforce.engine.model_source import located
from triforce.engine.program_end import native_work
from triforce.engine.speculative_config import SpeculativeConfig
from triforce.engine.tier_builder import ModelSet
from triforce.errors import ModelError, RequestError, argument, placed
from triforce.interface.user_paths import require_name
from triforce.model.config import ModelConfig
from triforce.planner import CostModel
from triforce.planner.cost_model import kernel_level
from triforce.planner.pass_costs import TierWork


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model. Without a tokenizer in its folder there are token ids only."""

    files: ModelFiles
    config: ModelConfig
    """Its heads are those of this rank, if several share the model."""
    decoder: Decoder
    lower: Decoder
    """The same decoder, or one with weights of fewer bits, for tiers whose tokens are verified."""
    tokenizer: Tokenizer | None
    fingerprint: str
    """Hex digest: two models with the same one compute the same keys and values."""

    @property
    def kv_dtype(self) -> str:
        """Name of the type of keys and values."""
        return kv_name(self.config, self.decoder.dtype)

    @property
    def path(self) -> Path:
        """The folder or the file that it was read from."""
        return self.files.path


@dataclass(frozen=True)
class ModelPair:
    """The target, and the draft if there is one: a model, or one that reads hidden states."""

    target: Checkpoint
    draft: Checkpoint | None
    features: FeatureCheckpoint | None
    load_seconds: float
    name: str
    """What people call the target."""
    draft_name: str | None
    """What they call the draft."""

    @property
    def decoders(self) -> ModelSet:
        """The models as tiers run them."""
        features = self.features.draft if self.features else None
        return ModelSet(self.target.decoder, self.draft.lower if self.draft else None, self.target.lower, features)

    @property
    def cached_by(self) -> str:
        """Fingerprints of all that computes the pages of the target's pool: another gives other bits or shapes."""
        return " ".join(each.fingerprint for each in (self.target, self.features) if each)

    @property
    def fingerprints(self) -> list[str]:
        """The fingerprint of each model, the target's first."""
        return [each.fingerprint for each in (self.target, self.draft, self.features) if each]

    @property
    def facts(self) -> tuple[object, ...]:
        """Facts that must be the same on all ranks that share the target."""
        names = [f.name for f in fields(ModelConfig) if f.name not in ("rope", "attention_sink_logits_LH")]
        config = [getattr(self.target.config, name) for name in names]
        return config, self.target.decoder.dtype, self.fingerprints[1:]

    def profile(self, speculation: SpeculativeConfig) -> ModelProfile:
        """Return where is kept what passes of these models teach on this machine, with such settings."""
        target, decoder = self.target, self.target.decoder
        drafts = [each.path for each in (self.draft, self.features) if each]
        where = decoder.dtype, decoder.device
        return ModelProfile(target.files, target.config, *where, speculation, drafts, decoder.ranks.count)

    def cost_model(self, profile: ModelProfile) -> CostModel:
        """Return what is known of passes of these models, by their profile."""
        decoder, number = self.target.decoder, profile.dtype.itemsize
        works = profile.works(decoder.unions)
        if self.draft:
            works["draft"] = TierWork.of(self.draft.config, number, number, sequential=True)
        if self.features:
            features = self.features.draft
            size = features.weight_size
            works["draft"] = TierWork(1, size * features.weights_read, 0.0, size, number, sequential=True)
        return CostModel(profile.path if decoder.ranks.rank == 0 else None, works, kernel_level(decoder.device))


@native_work()
def load_pair(
    model: str | Path | None,
    draft: str | Path | None,
    speculation: SpeculativeConfig,
    *,
    device: str,
    dtype: str,
    kv_dtype: str,
    context: int | None,
    ranks: TPGroup,
) -> ModelPair:
    """Read a target and a draft for such speculation; see `LLM`. Raises ModelError or RequestError."""
    require_name("model", model)
    require_name("draft", draft)
    draft = None if draft == "none" else draft
    name, model = model_name(model), SHIPPED[0] if model is None else model
    began = perf_counter()
    read = partial(load, device=device, dtype=dtype, kv_dtype=kv_dtype, bits=speculation.lower_bits)
    target = read(model, context=context, ranks=ranks)
    layers = target.config.layers
    if unknown := sorted(layer for layer in speculation.retrieval.searched_layers or () if layer >= layers):
        raise RequestError(f"{argument('searched_layers')} names layer {unknown[0]}; the model's are 0 to {layers - 1}")
    draft = known_draft(model, target.files.path, speculation) if draft == "auto" else draft
    drafter: Checkpoint | None = None
    features: FeatureCheckpoint | None = None
    if draft is not None:
        features = load_feature_draft(draft, target, speculation)
        drafter = None if features else read(draft, beside=target)
    seconds = perf_counter() - began
    if drafter:
        names = (str(target.path), str(drafter.path))
        if target.tokenizer and drafter.tokenizer:
            target.tokenizer.require_same_vocabulary(drafter.tokenizer, names)
        elif target.config.vocab_size != drafter.config.vocab_size:
            raise ModelError(
                f"{names[0]} has {target.config.vocab_size} tokens and {names[1]} {drafter.config.vocab_size}; "
                "use a draft model with the target's own tokenizer"
            )
    draft_name = None if draft is None else model_name(draft)
    return ModelPair(target, drafter, features, seconds, name, draft_name)


def load(
    name_or_path: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    kv_dtype: str = "auto",
    context: int | None = None,
    bits: int = 0,
    ranks: TPGroup = ALONE,
    beside: Checkpoint | None = None,
) -> Checkpoint:
    """Read a Hugging Face folder, a GGUF file or a hub name. No code of the repository is run.

    device: "auto" is cuda where present. dtype: "auto" is bfloat16, or float32 on a CPU for whose model there are no
    native kernels. context: positions, in tokens; None is what the config says. bits: those of `Checkpoint.lower`.
    ranks: those that share the model, of which this one reads its part. beside: a model whose tokenizer is used where
    it is the same: that of a draft's target. Raises ModelError, or RequestError for bits, for heads that cannot be
    shared, or for what a family cannot do yet, with advice.
    """
    known = (beside.path, beside.tokenizer) if beside else None
    source = located(name_or_path, device=device, dtype=dtype, kv_dtype=kv_dtype, context=context, beside=known)
    config = source.config.shared(ranks.count)
    if beside:
        _require_no_windows(source.config, source.files.path)
    dispatch.claim_threads(source.config, source.precision, source.device)
    weights = source.weights(source.device, ranks)
    config = replace(config, attention_sink_logits_LH=weights.attention_sink_logits_LH)
    identity = fingerprint(config, weights)
    trim_heap()  # of what sums took, before the weights are packed into memory of their own
    with placed(str(source.files.path)):
        decoder = Decoder(config, weights, ranks=ranks)
        # Weights of few bits are as they are in lower tiers, too: a second model of them would be the same.
        lower = Decoder(config, weights, bits, ranks) if bits and weights.has_numbers else decoder
    return Checkpoint(source.files, config, decoder, lower, source.tokenizer, identity)


def _require_no_windows(config: ModelConfig, path: Path) -> None:
    """Raises RequestError for a draft whose layers have windows."""
    if window := max(config.windows):
        layers = sum(map(bool, config.windows))
        raise RequestError(
            f"{path}: {layers} of {config.layers} layers have a window of {window:,} tokens, and such a model cannot "
            "draft yet; use another draft model"
        )


def trim_heap() -> None:
    """Give free memory of the C heap, which allocators keep, back to the system where its library can (glibc)."""
    if not sys.is_finalizing():
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
