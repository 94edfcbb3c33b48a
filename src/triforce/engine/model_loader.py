"""Model loading: a target model and an optional draft, from files onto a backend, checked against each other."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Protocol

import torch

from triforce.backends import dispatch
from triforce.backends.decoder import Decoder
from triforce.backends.kv_rows import kv_name
from triforce.checkpoint.hf_config import model_config
from triforce.checkpoint.hub import FINETUNE, SHIPPED, draft_for, model_name, model_path
from triforce.checkpoint.model_families import FAMILIES
from triforce.checkpoint.model_files import ModelFiles, open_model
from triforce.checkpoint.tokenizer import Tokenizer
from triforce.checkpoint.weight_files import Archive, stamp
from triforce.checkpoint.weights import fingerprint, of_weights, read_embedding, read_weights
from triforce.distributed.group import ALONE, TPGroup
from triforce.eagle.eagle_draft import EagleHead
from triforce.eagle.head_files import is_eagle_head, read_eagle_head, target_named, with_head
from triforce.engine.program_end import native_work
from triforce.engine.tier_builder import ModelSet, SpeculativeConfig
from triforce.errors import ModelError, RequestError, argument, placed
from triforce.interface.byte_size import require_name
from triforce.interface.explain import BreakEvenPoint
from triforce.model.config import ModelConfig
from triforce.model.expert_unions import ExpertUnions
from triforce.model.weights import Matrix, Weights
from triforce.planner.break_even import BreakEven, LearntSpeed, balance_of, break_even_point
from triforce.planner.cost_model import CostModel, costs_path, kernel_level
from triforce.planner.pass_costs import TierWork

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = ("auto", "bfloat16", "int8")
"""`auto` is the model's own dtype."""


def resolve_device(device: str | torch.device) -> torch.device:
    """Device to run on; a CUDA device has its index. Raises ModelError if there is no such device."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved).tolist()
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        asked = argument("device", device)
        alternatives = (argument("device", "cpu"), argument("device", "auto"))
        raise ModelError(f"{asked} cannot be used here; use {' or '.join(alternatives)}") from error
    if (
        resolved.type == "cuda" and resolved.index is None
    ):  # some functions of torch need an index, and the current device changes
        return torch.device("cuda", torch.cuda.current_device())
    return resolved


def resolve_dtype(dtype: str | torch.dtype, device: torch.device, config: ModelConfig) -> torch.dtype:
    """Dtype of weights and KV. Raises ModelError for a dtype that is not in `DTYPES`."""
    if dtype == "auto":
        return dispatch.best_dtype(config, device)
    resolved = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if resolved is None or resolved not in DTYPES.values():
        raise ModelError(f"{argument('dtype', str(dtype))} is not supported; use one of auto, {', '.join(DTYPES)}")
    return resolved


def with_kv_dtype(config: ModelConfig, kv_dtype: str, dtype: torch.dtype) -> ModelConfig:
    """Return the config with KV of `kv_dtype`, one of `KV_DTYPES`. dtype: the model's. Raises RequestError."""
    if kv_dtype not in KV_DTYPES:
        raise RequestError(f"{argument('kv_dtype', kv_dtype)} is not known; choose from {', '.join(KV_DTYPES)}")
    if kv_dtype == "bfloat16" and dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise RequestError(
            f"KV is {name}, as the model is; use {argument('kv_dtype', 'auto')} or int8, or "
            f"{argument('dtype', 'bfloat16')}"
        )
    return replace(config, kv_int8=kv_dtype == "int8")


@dataclass(frozen=True)
class ModelSource:
    """A model's files and how to read them, before any weight is read. config: of the whole model."""

    files: ModelFiles
    tokenizer: Tokenizer | None
    config: ModelConfig
    precision: torch.dtype
    device: torch.device

    def weights(self, device: torch.device, ranks: TPGroup = ALONE) -> Weights:
        """Return the weights on a device, with several ranks the part of this one. Raises ModelError."""
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
    """Return the files of a model and how to read them. Arguments and errors are those of `load`.

    beside: path and tokenizer of a model whose tokenizer is reused if it is the same.
    """
    device = resolve_device(device)
    files = open_model(name_or_path)
    tokenizer = _tokenizer(files, beside)
    vocab_size = tokenizer.vocab_size if tokenizer else files.config.vocab_size
    config = model_config(files.config, vocab_size=vocab_size, context=context, device=device)
    precision = resolve_dtype(dtype, device, config)
    return ModelSource(files, tokenizer, with_kv_dtype(config, kv_dtype, precision), precision, device)


def _tokenizer(files: ModelFiles, beside: tuple[Path, Tokenizer | None] | None) -> Tokenizer | None:
    path, tokenizer = beside or (None, None)
    if path and tokenizer and files.shares_tokenizer(path) and tokenizer.vocab_size <= files.config.vocab_size:
        return tokenizer
    return files.tokenizer() if files.has_tokenizer else None


@dataclass(frozen=True)
class EagleHeadCheckpoint:
    """A loaded EAGLE head. fingerprint: hex digest of all that determines its entries and draft tokens."""

    path: Path
    draft: EagleHead
    fingerprint: str


class Target(Protocol):
    """A loaded target. Several ranks may share it."""

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
    """Return the fingerprint that the target has in one process. If ranks share it, rank 0 reads all weights again."""
    ranks = target.decoder.ranks
    hf = target.files.config
    if ranks.count == 1:
        return target.fingerprint
    if ranks.rank:
        return ranks.broadcast("")
    config = target.decoder.config.unsharded
    dtype = target.decoder.dtype
    weights = read_weights(
        target.files.path, _archives(target), config, rows=hf.vocab_size, device=torch.device("cpu"), dtype=dtype,
        names=FAMILIES[hf.model_type].names,
    )  # fmt: skip
    return ranks.broadcast(fingerprint(config, weights))


def _whole_embedding(target: Target) -> Matrix | None:
    """Return the whole embedding if ranks share it, else None. With mapped files only rows in use take memory."""
    decoder = target.decoder
    if decoder.ranks.count == 1:
        return None
    path = target.files.path
    return read_embedding(path, _archives(target), decoder.config, device=decoder.device, dtype=decoder.dtype)


def known_draft(model: str | Path, file: Path, speculation: SpeculativeConfig) -> str | Path | None:
    """Return the draft that is known to fit a model in a file; None if there is none for these settings."""
    draft = draft_for(model, file)
    reads_states = str(draft).startswith(FINETUNE)
    return None if reads_states and speculation.offload.kind != "none" else draft


def load_eagle_head(
    name_or_path: str | Path, checkpoint: Target, speculation: SpeculativeConfig
) -> EagleHeadCheckpoint | None:
    """Read an EAGLE head for a target; None if the draft is a model of its own. Each rank loads all of it.

    With the prefix `FINETUNE` it may have been trained for another target of the same shape. Raises ModelError, or
    RequestError for settings that exclude it.
    """
    target = checkpoint.decoder
    name = str(name_or_path)
    path = model_path(name.removeprefix(FINETUNE))
    finetune = name.startswith(FINETUNE)
    if not is_eagle_head(path):
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
    file = read_eagle_head(path, target.config, identity, finetune=finetune)
    if int(file.weights.tokens_M[-1]) >= target.config.vocab_size:
        raise ModelError(f"{path} proposes tokens that the target does not have; it is a draft for another model")
    weights = file.weights
    if weights.head_MC is None:
        weights = with_head(weights, target.head_rows(weights.tokens_M))
    draft = EagleHead(file.config, weights, target, _whole_embedding(checkpoint))
    return EagleHeadCheckpoint(path, draft, file.fingerprint)


@dataclass(frozen=True)
class ModelProfile:
    """Profile of a model with a draft on a device, for these settings. ranks: number of ranks that share the model.

    drafts: path of the draft; none, or one.
    """

    files: ModelFiles
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    speculation: SpeculativeConfig
    drafts: Sequence[Path] = ()
    ranks: int = 1

    @property
    def path(self) -> Path | None:
        """Path of the file of costs: it differs for other weights, types or settings."""
        settings = self.speculation
        offload = self.speculation.offload
        names = [stamp(path) for path in (self.files.path, *self.drafts)]
        names += [kv_name(self.config, self.dtype), settings.lower_tiers, f"{self.ranks} ranks"]
        return costs_path([*names, *([] if offload.kind == "none" else [repr(offload)])], self.device, self.dtype)

    @property
    def packed(self) -> bool:
        """Whether weights stay packed, as in the file."""
        return bool(self.files.weight_bytes) and dispatch.keeps_packed(self.config, self.dtype, self.device)

    @property
    def coded(self) -> bool:
        """Whether products read quantized weights, without unpacked copies."""
        return self.packed and not self.files.has_numbers

    @property
    def weight_size(self) -> float:
        """Mean bytes of one weight."""
        return self.files.weight_bytes / self.config.unsharded.parameters if self.packed else self.dtype.itemsize

    def works(self, unions: ExpertUnions | None = None) -> dict[str, TierWork]:
        """Return the work of the target's tiers. unions: of its experts, if it has any and something is known."""
        bits = self.speculation.lower_bits
        weight_size = self.weight_size
        copied = bits > 0 and (self.files.has_numbers or not self.packed)
        weights = weight_size, bits / 8 if copied else weight_size
        return TierWork.of_target(self.config, weights, self.dtype.itemsize, bits > 0, unions)

    def break_even(self) -> BreakEvenPoint:
        """Return the context from which on speculation pays: by the file of costs, or else by a roofline."""
        config = self.config
        budget = self.speculation.retrieval.budget.of(self.config.context)
        balance, source = balance_of(self.coded, config, self.dtype, self.device)
        number = config.kv_bytes(self.dtype.itemsize) / config.kv_size
        even = BreakEven(config, budget, self.weight_size, number, balance)
        learnt = CostModel(self.path, self.works(), kernel_level(self.device))
        return break_even_point(even, source, LearntSpeed(learnt, budget))


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model. Without a tokenizer in its folder only token ids can be used."""

    files: ModelFiles
    config: ModelConfig
    """With several ranks, heads are those of this rank."""
    decoder: Decoder
    lower: Decoder
    """The same decoder, or one with weights of fewer bits, for lower tiers, whose tokens are verified."""
    tokenizer: Tokenizer | None
    fingerprint: str
    """Hex digest: models with equal digests compute the same keys and values."""

    @property
    def kv_dtype(self) -> str:
        """Name of the type of keys and values."""
        return kv_name(self.config, self.decoder.dtype)

    @property
    def path(self) -> Path:
        """The folder or the file of the model."""
        return self.files.path


@dataclass(frozen=True)
class ModelPair:
    """The target, and the draft if there is one: a model, or an EAGLE head, which reads hidden states."""

    target: Checkpoint
    draft: Checkpoint | None
    eagle_head: EagleHeadCheckpoint | None
    load_seconds: float
    name: str
    """Display name of the target."""
    draft_name: str | None
    """Display name of the draft."""

    @property
    def decoders(self) -> ModelSet:
        """The models that the tiers run."""
        eagle_head = self.eagle_head.draft if self.eagle_head else None
        return ModelSet(self.target.decoder, self.draft.lower if self.draft else None, self.target.lower, eagle_head)

    @property
    def cached_by(self) -> str:
        """Fingerprints of all models that write to the pages of the target's pool: others give other bits or shapes."""
        return " ".join(checkpoint.fingerprint for checkpoint in (self.target, self.eagle_head) if checkpoint)

    @property
    def fingerprints(self) -> list[str]:
        """The fingerprints of the models, the target's first."""
        return [checkpoint.fingerprint for checkpoint in (self.target, self.draft, self.eagle_head) if checkpoint]

    @property
    def facts(self) -> tuple[object, ...]:
        """Facts that must be the same on all ranks that share the target."""
        names = [f.name for f in fields(ModelConfig) if f.name not in ("rope", "attention_sink_logits_LH")]
        config = [getattr(self.target.config, name) for name in names]
        return config, self.target.decoder.dtype, self.fingerprints[1:]

    def profile(self, speculation: SpeculativeConfig) -> ModelProfile:
        """Return the profile of these models with `speculation`, whose file keeps the costs of passes."""
        target = self.target
        decoder = self.target.decoder
        drafts = [checkpoint.path for checkpoint in (self.draft, self.eagle_head) if checkpoint]
        where = decoder.dtype, decoder.device
        return ModelProfile(target.files, target.config, *where, speculation, drafts, decoder.ranks.count)

    def cost_model(self, profile: ModelProfile) -> CostModel:
        """Return the cost model of these models, by their profile."""
        decoder = self.target.decoder
        number = profile.dtype.itemsize
        works = profile.works(decoder.unions)
        if self.draft:
            works["draft"] = TierWork.of(self.draft.config, number, number, sequential=True)
        if self.eagle_head:
            eagle_head = self.eagle_head.draft
            size = eagle_head.weight_size
            works["draft"] = TierWork(1, size * eagle_head.weights_read, 0.0, size, number, sequential=True)
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
    """Read a target and a draft for `speculation`; see `LLM`. Raises ModelError or RequestError."""
    require_name("model", model)
    require_name("draft", draft)
    draft = None if draft == "none" else draft
    name = model_name(model)
    model = SHIPPED[0] if model is None else model
    began = perf_counter()
    read = partial(load, device=device, dtype=dtype, kv_dtype=kv_dtype, bits=speculation.lower_bits)
    target = read(model, context=context, ranks=ranks)
    layers = target.config.layers
    if unknown := sorted(layer for layer in speculation.retrieval.searched_layers or () if layer >= layers):
        raise RequestError(f"{argument('searched_layers')} names layer {unknown[0]}; the model's are 0 to {layers - 1}")
    draft = known_draft(model, target.files.path, speculation) if draft == "auto" else draft
    drafter: Checkpoint | None = None
    eagle_head: EagleHeadCheckpoint | None = None
    if draft is not None:
        eagle_head = load_eagle_head(draft, target, speculation)
        drafter = None if eagle_head else read(draft, beside=target)
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
    return ModelPair(target, drafter, eagle_head, seconds, name, draft_name)


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

    device: "auto" is cuda where present. dtype: "auto" is bfloat16, or float32 on a CPU without native kernels for the
    model. context: positions, in tokens; None: those of the config. bits: of `Checkpoint.lower`. ranks: share the
    model; this rank reads its part. beside: for a draft its target, whose tokenizer is reused if it is the same. Raises
    ModelError, or RequestError with advice for bits, for heads that cannot be shared, or for features that a family
    does not support yet.
    """
    tokenizer_source = (beside.path, beside.tokenizer) if beside else None
    source = located(
        name_or_path, device=device, dtype=dtype, kv_dtype=kv_dtype, context=context, beside=tokenizer_source
    )
    config = source.config.shard(ranks.count)
    if beside:
        _require_no_windows(source.config, source.files.path)
    dispatch.claim_threads(source.config, source.precision, source.device)
    weights = source.weights(source.device, ranks)
    config = replace(config, attention_sink_logits_LH=weights.attention_sink_logits_LH)
    identity = fingerprint(config, weights)
    trim_heap()  # frees the memory of checksums before the weights are packed into new memory
    with placed(str(source.files.path)):
        decoder = Decoder(config, weights, ranks=ranks)
        # Lower tiers read quantized weights as they are, so a second decoder of them would be the same.
        lower = Decoder(config, weights, bits, ranks) if bits and weights.has_numbers else decoder
    return Checkpoint(source.files, config, decoder, lower, source.tokenizer, identity)


def _require_no_windows(config: ModelConfig, path: Path) -> None:
    """Raise RequestError for a draft whose layers have windows."""
    if window := max(config.windows):
        layers = sum(map(bool, config.windows))
        raise RequestError(
            f"{path}: {layers} of {config.layers} layers have a window of {window:,} tokens, and such a model cannot "
            "draft yet; use another draft model"
        )


def trim_heap() -> None:
    """Return free memory of the C heap to the system, if the C library can (glibc)."""
    if not sys.is_finalizing():
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
