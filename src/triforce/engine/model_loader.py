"""Model loading: weights from files onto a backend, the tokenizer, and the fingerprint for saved prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from triforce.backends import dispatch
from triforce.backends.decoder import Decoder
from triforce.checkpoint.families import model_config, read_config
from triforce.checkpoint.fingerprint import fingerprint
from triforce.checkpoint.hub import model_folder
from triforce.checkpoint.tokenizer import Tokenizer, same_tokenizer
from triforce.checkpoint.tokenizer_files import has_tokenizer
from triforce.checkpoint.weights import read_weights
from triforce.distributed.group import ALONE, TPGroup
from triforce.errors import ModelError
from triforce.model.config import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model. Without a tokenizer in its folder there are token ids only."""

    path: Path
    config: ModelConfig
    """Its heads are those of this rank, if several share the model."""
    decoder: Decoder
    lower: Decoder
    """The same decoder, or one with weights rounded to int8, for tiers whose tokens are verified."""
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

    device: "auto" is cuda where present. dtype: "auto" is bfloat16, or float32 on a CPU for whose model there are no
    native kernels. context: positions, in tokens; None is what the config says. int8: for `Checkpoint.lower`. ranks:
    those that share the model, of which this one reads its part. beside: a model whose tokenizer is used where it is
    the same. Raises ModelError, or RequestError for int8 or for heads that cannot be shared, with advice.
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


def resolve_device(device: str | torch.device) -> torch.device:
    """Device to run on. Raises ModelError where there is no such device."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ModelError(f"device {str(device)!r} cannot be used here; use --device cpu or --device auto") from error
    return torch.device(device)


def resolve_dtype(dtype: str | torch.dtype, device: torch.device, config: ModelConfig) -> torch.dtype:
    """Type of weights and KV. Raises ModelError for what is not in `DTYPES`."""
    if dtype == "auto":
        return dispatch.best_dtype(config, device)
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in DTYPES.values():
        raise ModelError(f"dtype {str(dtype)!r} is not supported; use one of auto, {', '.join(DTYPES)}")
    return found
