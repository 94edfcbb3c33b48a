"""A model from files: decoder, tokenizer, and the fingerprint that ties saved KV caches to it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from triforce.backends import dispatch
from triforce.backends.decoder import Decoder
from triforce.checkpoint.families import model_config, read_config
from triforce.checkpoint.hub import model_folder
from triforce.checkpoint.tokenizer import Tokenizer, same_tokenizer
from triforce.checkpoint.tokenizer_files import has_tokenizer
from triforce.checkpoint.weights import read_weights
from triforce.distributed.group import ALONE, TPGroup
from triforce.errors import ModelError
from triforce.model.config import ModelConfig
from triforce.model.weights import Weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BITS = {2: torch.int16, 4: torch.int32}  # sums of integers do not depend on their order
SAMPLE = 1024  # elements of each tensor that enter the fingerprint
PART = 1 << 18  # elements whose bits are added up at a time


@dataclass(frozen=True)
class Checkpoint:
    """One loaded model. `tokenizer` is None if the folder has none: token ids in, token ids out."""

    path: Path
    config: ModelConfig
    """With this rank's heads, if several share the model."""
    decoder: Decoder
    lower: Decoder
    """The same one, or one with weights rounded to int8, for tiers whose tokens are verified."""
    tokenizer: Tokenizer | None
    fingerprint: str
    """Hex digest: two models with the same one compute the same keys and values."""


def load(
    name_or_path: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    context: int | None = None,
    int8: bool = False,
    ranks: TPGroup = ALONE,
    beside: Checkpoint | None = None,
) -> Checkpoint:
    """Read a Hugging Face folder or hub name. No code of the repository is run.

    `device` "auto" is cuda where present; `dtype` "auto" is bfloat16, or float32 on a CPU for whose model there are no
    native kernels; `context` is in tokens (None: what the config says); `int8` is for `Checkpoint.lower`; `ranks`
    share the model, and this one reads its part; `beside` is a model whose tokenizer will do, where it is the same.
    Raises ModelError, or RequestError for int8 or for heads that cannot be shared, saying what is wrong and what to do.
    """
    place = resolve_device(device)
    folder = model_folder(name_or_path)
    hf = read_config(folder)
    tokenizer = _tokenizer(folder, hf.vocab_size, beside)
    vocab_size = tokenizer.vocab_size if tokenizer else hf.vocab_size
    config = model_config(hf, vocab_size=vocab_size, context=context, device=place)
    precision, own = resolve_dtype(dtype, place, config), config.shared(ranks.count)
    dispatch.claim_threads(config, precision, place)
    weights = read_weights(folder, config, rows=hf.vocab_size, device=place, dtype=precision, ranks=ranks)
    config, decoder = own, Decoder(own, weights, ranks=ranks)
    lower = Decoder(config, weights, int8=True, ranks=ranks) if int8 else decoder
    return Checkpoint(folder, config, decoder, lower, tokenizer, fingerprint(config, weights))


def _tokenizer(folder: Path, rows: int, beside: Checkpoint | None) -> Tokenizer | None:
    if beside and beside.tokenizer and beside.tokenizer.vocab_size <= rows and same_tokenizer(folder, beside.path):
        return beside.tokenizer
    return Tokenizer.load(folder, rows) if has_tokenizer(folder) else None


def fingerprint(config: ModelConfig, weights: Weights) -> str:
    """Digest of shapes, rotation, dtype, and of each weight a sample and the sum of its bits."""
    digest = hashlib.sha256()
    # The context bounds what a model may see, and changes what it computes only through the rotation.
    names = [f.name for f in fields(ModelConfig) if f.name not in ("rope", "context", "ranks")]
    rope, dtype = config.rope, weights.embedding_VC.dtype
    digest.update(repr(([getattr(config, name) for name in names], rope.scale, str(dtype))).encode())
    for tensor in (rope.inv_freq_F, *weights.tensors()):
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(_sample(tensor).float().cpu().numpy().tobytes())
        digest.update(str(_sum_of_bits(tensor)).encode())
    return digest.hexdigest()


def _sum_of_bits(tensor: Tensor) -> int:
    """By parts, as the sum of a whole would first take four times the tensor's memory."""
    bits = tensor.view(_BITS[tensor.itemsize]).flatten()
    parts = torch.split(bits, PART)
    return sum([int(part.sum(dtype=torch.int64)) for part in parts])


def _sample(tensor: Tensor) -> Tensor:
    n = tensor.numel()
    k = min(n, SAMPLE)
    return tensor.flatten()[torch.arange(k, device=tensor.device) * (n - 1) // max(k - 1, 1)]


def resolve_device(device: str | torch.device) -> torch.device:
    """Where to run. Raises ModelError where there is no such device."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ModelError(f"device {str(device)!r} cannot be used here; use --device cpu or --device auto") from error
    return torch.device(device)


def resolve_dtype(dtype: str | torch.dtype, device: torch.device, config: ModelConfig) -> torch.dtype:
    """How to hold weights and KV. Raises ModelError for what is not in `DTYPES`."""
    if dtype == "auto":
        return dispatch.best_dtype(config, device)
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in DTYPES.values():
        raise ModelError(f"dtype {str(dtype)!r} is not supported; use one of auto, {', '.join(DTYPES)}")
    return found
