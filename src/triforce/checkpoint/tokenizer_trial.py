"""Trial of an untrusted tokenizer in a separate process, before its use in this one.

Damaged or hostile files can crash or stall the libraries that read them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from triforce.checkpoint.hub import SHIPPED
from triforce.checkpoint.passed_trials import require_pass
from triforce.checkpoint.tokenizer import Tokenizer
from triforce.checkpoint.tokenizer_files import CORE, read_tokenizer
from triforce.errors import ModelError, RequestError, unreadable
from triforce.sandbox import TrialError, TrialLimitError, TrialLimits

READ_WITH_CORE = (CORE, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
READ_WITH_TRANSFORMERS = ("*.json", "*.model", "*.txt", "*.tiktoken")
MOST_BYTES = 1 << 28
"""Largest size of a tokenizer's files in bytes. The largest vocabularies take an eighth of it."""
STACK_BYTES = 8 << 20
TEXTS = (
    "", "a", "Hello world! It's 12,345.67 miles - isn't it?\n\n\tdef f(x): return {x: [1]}  # <b>&amp;</b>",
    "na\u00efve cafe\u0301 \u6771\u4eac\u90fd \uac01 \U0001f642\U0001f469\u200d\U0001f467 \u0634\u0645 \u0928",
    "\x00\x1d\u2003\u2026\ue000\ufffd\U0010fffd", " " * 500, "x" * 2000, "ab " * 500,
    "".join(map(chr, range(1, 0x250))),
)  # fmt: skip
"""Texts to encode: words, numbers, code, other scripts, characters that no vocabulary has, and repetitions."""
MOST_IDS = 1000
"""Number of tokens to decode."""


def require_usable(folder: Path) -> None:
    """Raise ModelError for an unusable tokenizer. Shipped ones and ones that have passed before are not tried."""
    if folder.resolve() in [shipped.resolve() for shipped in SHIPPED]:
        return
    has_core = (folder / CORE).exists()
    names = READ_WITH_CORE if has_core else READ_WITH_TRANSFORMERS
    files = sorted({file for name in names for file in folder.glob(name) if file.is_file()})
    try:
        size = sum(file.stat().st_size for file in files)
        if size > MOST_BYTES:
            raise ModelError(f"the tokenizer in {folder} has {size:,} bytes, more than {MOST_BYTES:,}; correct it")
        sha256 = _digest(files)
    except OSError as error:
        raise unreadable(error.filename or folder, error) from error
    limits = TrialLimits(3 + (size >> 23), (256 << 20) + 24 * size, STACK_BYTES)
    if not has_core:  # transformers and its imports
        limits = TrialLimits(limits.cpu_seconds + 30, limits.memory_bytes + (8 << 30), STACK_BYTES)
    readers = ("tokenizers",) if has_core else ("tokenizers", "transformers")
    try:
        require_pass(f"{__name__}:trial", str(folder), sha256, readers, limits)
    except TrialLimitError as error:
        raise ModelError(f"the tokenizer in {folder} cannot be used ({error}); download it again") from error
    except TrialError as error:
        raise ModelError(str(error)) from error


def trial(folder: str) -> None:
    """Encode and decode sample texts with the tokenizer in a folder. Raises ModelError."""
    try:
        tokenizer = Tokenizer(read_tokenizer(Path(folder)), frozenset())
        ids = [i for text in TEXTS for special in (True, False) for i in tokenizer.encode(text, special)]
        step = max(tokenizer.vocab_size // MOST_IDS, 1)
        for sampled_ids in (
            ids[-MOST_IDS:],
            range(0, tokenizer.vocab_size, step),
            sorted(tokenizer.special_ids)[:MOST_IDS],
        ):
            tokenizer.decode(list(sampled_ids))
            stream = tokenizer.stream()
            for i in sampled_ids:
                stream.step(i)
                tokenizer.bytes_of(i)
            stream.flush()
    except (ModelError, MemoryError):
        raise
    except BaseException as error:  # a Rust panic is no Exception
        cause = error.__cause__ if isinstance(error, RequestError) and error.__cause__ else error
        reason = " ".join(str(cause).split())[:300] or type(cause).__name__
        raise ModelError(f"the tokenizer in {folder} cannot be used ({reason}); download it again") from None


def _digest(files: list[Path]) -> str:
    """Return the hex sha256 of files' names and contents."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(f"{file.name} {hashlib.file_digest(opened, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
