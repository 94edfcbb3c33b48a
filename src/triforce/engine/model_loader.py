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

from triforce.arrays import DType, itemsize, to_host
from triforce.backends import dispatch
from triforce.backends.decoder import Decoder
from triforce.checkpoint.hf_config import model_config
from triforce.checkpoint.hub import FINETUNE, SHIPPED, draft_for, model_name, model_path
from triforce.checkpoint.model_families import FAMILIES
from triforce.checkpoint.model_files import ModelFiles, open_model
from triforce.checkpoint.tokenizer import Tokenizer
from triforce.checkpoint.weight_files import Archive, stamp
from triforce.checkpoint.weights import fingerprint, read_embedding, read_weights, weights_fingerprint
from triforce.distributed.group import ALONE, TPGroup
from triforce.eagle.eagle_draft import EagleHead
from triforce.eagle.head_files import is_eagle_head, read_eagle_head, target_fingerprint, with_head
from triforce.engine.program_end import native_work
from triforce.engine.tier_builder import ModelSet, SpeculativeConfig
from triforce.errors import ModelError, RequestError, argument, error_prefix
from triforce.installed import has_cuda
from triforce.interface.explain import BreakEvenPoint
from triforce.interface.quantities import require_name
from triforce.model import kv_rows
from triforce.model.config import ModelConfig
from triforce.model.expert_unions import ExpertUnions
from triforce.model.weights import Matrix, Weights
from triforce.planner.break_even import LearntSpeed, SelfSpeculationRoofline, balance_of, break_even_point
from triforce.planner.cost_model import CostModel, costs_path, kernel_level
from triforce.planner.pass_costs import TierWork

DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "bfloat16", "int8")
"""`auto` is the model's own dtype."""
WEIGHT_INPUTS = ("int16", "int8")
"""Numbers to which products with packed weights round their inputs, see `ModelConfig.int8_inputs`."""


def resolve_device(device: object) -> str:
    """Return the name of the device to run on: `cpu`, or that of a CUDA device with its index.

    device: a name, `auto`, or a torch.device. Raises ModelError for a device of another kind, and a missing one.
    """
    name = str(device)
    if name == "auto":
        name = "cuda" if has_cuda() else "cpu"
    if name == "cpu":
        return name
    asked = argument("device", device)
    alternatives = f"{argument('device', 'cpu')} or {argument('device', 'auto')}"
    if not name.startswith("cuda"):
        raise ModelError(f"{asked} cannot be used here; use {alternatives}")
    if not dispatch.has_torch():
        raise ModelError(
            f"{asked} needs torch, which is not installed; pip install 'triforce[gpu]', or use {alternatives}"
        )
    from triforce.backends.torch.devices import usable_device

    try:
        return usable_device(name)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"{asked} cannot be used here; use {alternatives}") from error


def resolve_dtype(dtype: object, device: str, config: ModelConfig) -> DType:
    """Return the name of the dtype of weights and KV.

    dtype: a name, `auto`, or a torch.dtype. Raises ModelError for a dtype that is not in `DTYPES`.
    """
    name = str(dtype).removeprefix("torch.")
    if name == "auto":
        return dispatch.best_dtype(config, device)
    if name not in DTYPES:
        raise ModelError(f"{argument('dtype', str(dtype))} is not supported; use one of auto, {', '.join(DTYPES)}")
    return name


def with_kv_dtype(config: ModelConfig, kv_dtype: str, dtype: DType) -> ModelConfig:
    """Return the config with KV of `kv_dtype`, one of `KV_DTYPES`. dtype: the model's. Raises RequestError."""
    if kv_dtype not in KV_DTYPES:
        raise RequestError(f"{argument('kv_dtype', kv_dtype)} is not known; choose from {', '.join(KV_DTYPES)}")
    if kv_dtype == "bfloat16" and dtype != "bfloat16":
        raise RequestError(
            f"KV cannot be bfloat16 where the model is {dtype}; use {argument('kv_dtype', 'auto')} or int8, or "
            f"{argument('dtype', 'bfloat16')}"
        )
    return replace(config, kv_int8=kv_dtype == "int8")


def with_weight_inputs(
    config: ModelConfig, weight_inputs: str, files: ModelFiles, dtype: DType, device: str
) -> ModelConfig:
    """Return the config with inputs of `weight_inputs`, one of `WEIGHT_INPUTS`.

    Raises RequestError for int8 where no product reads packed weights by native kernels.
    """
    if weight_inputs not in WEIGHT_INPUTS:
        names = ", ".join(WEIGHT_INPUTS)
        raise RequestError(f"{argument('weight_inputs', weight_inputs)} is not known; choose from {names}")
    int8 = weight_inputs == "int8"
    packed = files.weight_bytes and dispatch.keeps_packed(config, dtype, device)
    if int8 and not (packed and dispatch.suits_native(config.head_dim, dtype, device)):
        raise RequestError(
            f"{argument('weight_inputs', 'int8')} is for packed weights of a GGUF file on a CPU, and {files.path.name} "
            f"has none there; use {argument('weight_inputs', 'int16')}"
        )
    return replace(config, int8_inputs=int8)


@dataclass(frozen=True)
class ModelSource:
    """A model's files and how to read them, before any weight is read.

    config: that of the whole model, not of the part of one rank.
    """

    files: ModelFiles
    tokenizer: Tokenizer | None
    config: ModelConfig
    precision: DType
    device: str

    def weights(self, ranks: TPGroup = ALONE) -> Weights:
        """Return the weights on the host; of several ranks, each reads its part. Raises ModelError."""
        packed = dispatch.keeps_packed(self.config, self.precision, self.device)
        return read_weights(
            self.files.path, self.files.archives(packed=packed), self.config, rows=self.files.config.vocab_size,
            dtype=self.precision, ranks=ranks, names=FAMILIES[self.files.config.model_type].names,
        )  # fmt: skip


def locate_model(
    name_or_path: str | Path,
    *,
    device: object,
    dtype: object,
    kv_dtype: str,
    weight_inputs: str = "int16",
    context: int | None,
    shared_tokenizer: tuple[Path, Tokenizer | None] | None = None,
) -> ModelSource:
    """Return the files of a model and how to read them. Arguments and errors are those of `load`.

    shared_tokenizer: path and tokenizer of another model. The tokenizer is reused if this model has the same.
    """
    device_name = resolve_device(device)
    files = open_model(name_or_path)
    tokenizer = _tokenizer(files, shared_tokenizer)
    vocab_size = tokenizer.vocab_size if tokenizer else files.config.vocab_size
    config = model_config(files.config, vocab_size=vocab_size, context=context)
    precision = resolve_dtype(dtype, device_name, config)
    config = with_kv_dtype(config, kv_dtype, precision)
    config = with_weight_inputs(config, weight_inputs, files, precision, device_name)
    return ModelSource(files, tokenizer, config, precision, device_name)


def _tokenizer(files: ModelFiles, shared_tokenizer: tuple[Path, Tokenizer | None] | None) -> Tokenizer | None:
    path, tokenizer = shared_tokenizer or (None, None)
    if path and tokenizer and files.shares_tokenizer(path) and tokenizer.vocab_size <= files.config.vocab_size:
        return tokenizer
    return files.tokenizer() if files.has_tokenizer else None


@dataclass(frozen=True)
class EagleHeadCheckpoint:
    """A loaded EAGLE head. fingerprint: hex digest of all that determines its KV entries and its draft tokens."""

    path: Path
    head: EagleHead
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
    weights = read_weights(
        target.files.path, _archives(target), config, rows=hf.vocab_size, dtype=target.decoder.dtype,
        names=FAMILIES[hf.model_type].names,
    )  # fmt: skip
    return ranks.broadcast(fingerprint(config, weights))


def _whole_embedding(target: Target) -> Matrix | None:
    """Return the whole embedding if ranks share it, else None. With mapped files only rows in use take memory."""
    decoder = target.decoder
    if decoder.ranks.count == 1:
        return None
    return read_embedding(target.files.path, _archives(target), decoder.config, dtype=decoder.dtype)


def known_draft(model: str | Path, file: Path, speculation: SpeculativeConfig) -> str | Path | None:
    """Return the known draft for `model`; None if there is none for these settings. file: the weights of `model`."""
    draft = draft_for(model, file)
    reads_states = str(draft).startswith(FINETUNE)
    return None if reads_states and speculation.offload.kind != "none" else draft


def load_eagle_head(
    name_or_path: str | Path, target: Target, speculation: SpeculativeConfig
) -> EagleHeadCheckpoint | None:
    """Read an EAGLE head for a target; None if the draft is a model of its own. Each rank loads the whole head.

    If `name_or_path` begins with `FINETUNE`, the head may have been trained for another target of the same shape, of
    which this one is a finetune. Raises ModelError, or RequestError for settings that exclude EAGLE heads.
    """
    decoder = target.decoder
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
    named = target_fingerprint(path) is not None and not finetune
    identity = weights_fingerprint(_whole_fingerprint(target)) if named else ""
    file = read_eagle_head(path, decoder.config, identity, finetune=finetune)
    if int(file.weights.tokens_M[-1]) >= decoder.config.vocab_size:
        raise ModelError(f"{path} proposes tokens that the target does not have; it is a draft for another model")
    weights = file.weights
    if weights.head_MC is None:
        weights = with_head(weights, to_host(decoder.head_rows(weights.tokens_M)))
    head = EagleHead(file.config, weights, decoder, _whole_embedding(target))
    return EagleHeadCheckpoint(path, head, file.fingerprint)


@dataclass(frozen=True)
class ModelProfile:
    """Facts that determine the costs of passes: a model, its draft, a device and the settings of speculation.

    draft_paths: path of the draft; none, or one. ranks: number of ranks that share the model.
    """

    files: ModelFiles
    config: ModelConfig
    dtype: DType
    device: str
    speculation: SpeculativeConfig
    draft_paths: Sequence[Path] = ()
    ranks: int = 1

    @property
    def costs_file(self) -> Path | None:
        """File with the measured costs of passes; each set of weights, types and settings has its own."""
        settings = self.speculation
        offload = self.speculation.offload
        names = [stamp(path) for path in (self.files.path, *self.draft_paths)]
        names += [kv_rows.kv_dtype(self.config, self.dtype), settings.lower_tiers, f"{self.ranks} ranks"]
        names += ["int8 inputs"] * self.config.int8_inputs
        return costs_path([*names, *([] if offload.kind == "none" else [repr(offload)])], self.device, self.dtype)

    @property
    def packed(self) -> bool:
        """Whether weights stay packed, as in the file."""
        return bool(self.files.weight_bytes) and dispatch.keeps_packed(self.config, self.dtype, self.device)

    @property
    def reads_quantized(self) -> bool:
        """Whether matrix products read quantized weights as they are, without unpacked copies."""
        return self.packed and not self.files.has_numbers

    @property
    def weight_size(self) -> float:
        """Mean bytes of one weight."""
        return self.files.weight_bytes / self.config.unsharded.parameters if self.packed else itemsize(self.dtype)

    def tier_work(self, unions: ExpertUnions | None = None) -> dict[str, TierWork]:
        """Return the work of a pass of each of the target's tiers.

        unions: the distinct experts that the tokens of a pass read together, as learnt; None: nothing was learnt.
        """
        bits = self.speculation.lower_bits
        weight_size = self.weight_size
        copied = bits > 0 and (self.files.has_numbers or not self.packed)
        weights = weight_size, bits / 8 if copied else weight_size
        return TierWork.of_target(self.config, weights, itemsize(self.dtype), bits > 0, unions)

    def break_even(self) -> BreakEvenPoint:
        """Return the context from which on speculation pays: by the file of costs, or else by a roofline."""
        config = self.config
        budget = self.speculation.retrieval.budget.of(self.config.context)
        balance, source = balance_of(self.reads_quantized, config, self.dtype, self.device)
        kv_element_bytes = config.kv_bytes(itemsize(self.dtype)) / config.kv_size
        roofline = SelfSpeculationRoofline(config, budget, self.weight_size, kv_element_bytes, balance)
        learnt = CostModel(self.costs_file, self.tier_work(), kernel_level(self.device))
        return break_even_point(roofline, source, LearntSpeed(learnt, budget))


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model. Without a tokenizer in its folder only token ids can be used."""

    files: ModelFiles
    """Opened files of the model."""
    config: ModelConfig
    """Shape and arithmetic. With several ranks, heads are those of this rank."""
    decoder: Decoder
    """The model on its device: ids to logits."""
    lower_decoder: Decoder
    """The decoder for lower tiers: `decoder` itself, or one with weights of fewer bits or with int8 inputs."""
    tokenizer: Tokenizer | None
    """None in a folder without a tokenizer."""
    fingerprint: str
    """Hex digest: models with equal digests compute the same keys and values."""

    @property
    def kv_dtype(self) -> str:
        """Name of the type of keys and values."""
        return kv_rows.kv_dtype(self.config, self.decoder.dtype)

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
        eagle_head = self.eagle_head.head if self.eagle_head else None
        draft = self.draft.lower_decoder if self.draft else None
        return ModelSet(self.target.decoder, draft, self.target.lower_decoder, eagle_head)

    @property
    def kv_fingerprint(self) -> str:
        """Fingerprints of all models that write to the target's page pool.

        Pools with equal fingerprints may share KV.
        """
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
        """Return the profile of these models with the settings `speculation`."""
        target = self.target
        decoder = self.target.decoder
        draft_paths = [checkpoint.path for checkpoint in (self.draft, self.eagle_head) if checkpoint]
        placement = decoder.dtype, decoder.device
        return ModelProfile(target.files, target.config, *placement, speculation, draft_paths, decoder.ranks.count)

    def cost_model(self, profile: ModelProfile) -> CostModel:
        """Return the cost model of these models, which reads and writes the profile's file of costs."""
        decoder = self.target.decoder
        number_size = itemsize(profile.dtype)
        works = profile.tier_work(decoder.unions)
        if self.draft:
            works["draft"] = TierWork.of(self.draft.config, number_size, number_size, sequential=True)
        if self.eagle_head:
            eagle_head = self.eagle_head.head
            size = eagle_head.weight_size
            works["draft"] = TierWork(1, size * eagle_head.weights_read, 0.0, size, number_size, sequential=True)
        return CostModel(profile.costs_file if decoder.ranks.rank == 0 else None, works, kernel_level(decoder.device))


@native_work()
def load_pair(
    model: str | Path | None,
    draft: str | Path | None,
    speculation: SpeculativeConfig,
    *,
    device: str,
    dtype: str,
    kv_dtype: str,
    weight_inputs: str,
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
    target = read(model, weight_inputs=weight_inputs, context=context, ranks=ranks)
    layers = target.config.layers
    if unknown := sorted(layer for layer in speculation.retrieval.searched_layers or () if layer >= layers):
        raise RequestError(f"{argument('searched_layers')} names layer {unknown[0]}; the model's are 0 to {layers - 1}")
    draft = known_draft(model, target.files.path, speculation) if draft == "auto" else draft
    draft_checkpoint: Checkpoint | None = None
    eagle_head: EagleHeadCheckpoint | None = None
    if draft is not None:
        eagle_head = load_eagle_head(draft, target, speculation)
        draft_checkpoint = None if eagle_head else read(draft, target=target)
    seconds = perf_counter() - began
    if draft_checkpoint:
        names = (str(target.path), str(draft_checkpoint.path))
        if target.tokenizer and draft_checkpoint.tokenizer:
            target.tokenizer.require_same_vocabulary(draft_checkpoint.tokenizer, names)
        elif target.config.vocab_size != draft_checkpoint.config.vocab_size:
            raise ModelError(
                f"{names[0]} has {target.config.vocab_size} tokens and {names[1]} "
                f"{draft_checkpoint.config.vocab_size}; use a draft model with the target's own tokenizer"
            )
    draft_name = None if draft is None else model_name(draft)
    return ModelPair(target, draft_checkpoint, eagle_head, seconds, name, draft_name)


def load(
    name_or_path: str | Path,
    *,
    device: object = "auto",
    dtype: object = "auto",
    kv_dtype: str = "auto",
    weight_inputs: str = "int16",
    context: int | None = None,
    bits: int = 0,
    ranks: TPGroup = ALONE,
    target: Checkpoint | None = None,
) -> Checkpoint:
    """Read a Hugging Face folder, a GGUF file or a hub name. No code of the repository is run.

    device: "auto" is cuda where present. dtype: "auto" is bfloat16, but float16 on a GPU before Ampere, and float32 on
    a CPU without native kernels for the model. context: positions, in tokens; None: those of the config. bits: bits of
    the weights of `Checkpoint.lower_decoder`; 0: those of `decoder`. ranks: the ranks that share the model; this one
    reads its part. target: for a draft, the target, whose tokenizer is reused if the draft has the same. Raises
    ModelError. Raises RequestError, with advice, for unsupported `bits`, for heads that ranks cannot share, and for
    features that a family does not support yet.
    """
    shared_tokenizer = (target.path, target.tokenizer) if target else None
    source = locate_model(
        name_or_path, device=device, dtype=dtype, kv_dtype=kv_dtype, weight_inputs=weight_inputs, context=context,
        shared_tokenizer=shared_tokenizer,
    )  # fmt: skip
    config = source.config.shard(ranks.count)
    if target:
        _require_no_windows(source.config, source.files.path)
    dispatch.claim_threads(source.config, source.precision, source.device)
    weights = source.weights(ranks)
    config = replace(config, attention_sink_logits_LH=weights.attention_sink_logits_LH)
    identity = fingerprint(config, weights)
    trim_heap()  # frees the memory of checksums before the weights are packed into new memory
    with error_prefix(str(source.files.path)):
        decoder = Decoder(config, weights, source.device, ranks=ranks)
        # Quantized weights stay as they are for lower tiers, so a second decoder of them would be the same.
        lower = Decoder(config, weights, source.device, bits, ranks) if bits and weights.has_numbers else decoder
        if target:  # tiers of the target itself keep int16: int8 costs them more acceptance than it saves
            lower = lower.with_int8_inputs()
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
