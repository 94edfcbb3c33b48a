"""What the commands share: from arguments to an engine and a prompt, and from an answer to a terminal."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triforce.cli.options import DEFAULTS, NO_DRAFT
from triforce.cli.progress import Prefill
from triforce.errors import RequestError
from triforce.imports import import_torch
from triforce.interface.grammar import Grammar
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.interface.stats import TierStats

if TYPE_CHECKING:
    from triforce.checkpoint.tokenizer import Tokenizer
    from triforce.distributed.group import TPGroup
    from triforce.engine.output_stream import OutputChunk
    from triforce.llm import LLM

PLACEMENT = ("device", "dtype", "context")
KV = ("kv_offload", "kv_memory", "kv_resident_layers")
SPECULATION = (
    "mode", "coupling", "draft_tokens", "speculative_tokens", "retrieval_budget", "retrieval_chunk",
    "retrieval_policy", "retrieval_refresh", "searched_layers", "lower_tiers",
    *KV,
)  # fmt: skip
PLANS = 4  # those of mode auto that are listed, the most used ones
COLORS = {"ngram": 35, "draft": 32, "streaming": 33, "retrieval": 36, "full": 31}  # by tier; ANSI foregrounds


def load(options: Namespace, ranks: TPGroup | None = None) -> LLM:
    """The engine that the arguments describe; `ranks` share it."""
    import_torch()
    from triforce.llm import LLM

    return LLM(**settings(options) | ({"ranks": ranks} if ranks else {}))


def settings(options: Namespace) -> dict[str, Any]:
    """What LLM takes, as the arguments have it."""
    draft = None if options.draft == NO_DRAFT else options.draft
    return {"model": options.model, "draft": draft} | {name: getattr(options, name) for name in PLACEMENT + SPECULATION}


def sampling(options: Namespace) -> dict[str, Any]:
    """The sampling parameters in the arguments, for `LLM.sampling_params`.

    Raises RequestError naming the one that is out of range.
    """
    values = {name: value for name in DEFAULTS if (value := getattr(options, name, None)) is not None}
    if options.json_schema:
        values["grammar"] = Grammar.json(read_text(options.json_schema))
    values |= {"logit_bias": dict(options.logit_bias) or None, "stop_token_ids": options.stop_token_id}
    SamplingParams(**values)
    return values


def read_text(file: str) -> str:
    """The text in a file, or on stdin for "-", byte for byte. Raises RequestError."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise RequestError(f"{file} cannot be read ({error.strerror}); give a text file") from error
    return decode_text(data, "stdin" if file == "-" else file)


def read_texts(paths: Sequence[str]) -> dict[str, str]:
    """Texts by file name, of files and of those in folders. Raises RequestError."""
    texts = {file.name: read_text(str(file)) for path in paths for file in _files(Path(path))}
    if not texts:
        raise RequestError(f"there is no file in {', '.join(paths)}; give --texts some UTF-8 texts")
    return texts


def _files(path: Path) -> list[Path]:
    """The files of a folder, not of those in it; or a file itself."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))


def decode_text(data: bytes, source: str) -> str:
    """UTF-8 bytes as text. Raises RequestError saying where `source` is something else."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{source} is not UTF-8 text (byte 0x{data[error.start]:02x} at offset {error.start}); "
            "convert it first, for example with iconv -t UTF-8"
        ) from error


def require_writable(file: str | None) -> None:
    """Raise RequestError if figures cannot be written to `file`: before the minutes of measuring, not after them."""
    path = Path(file or "eval.json").absolute()
    if file and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise RequestError(f"{file} cannot be written; name a file in a folder that exists")


class Painter:
    """Colours each character by the tier that proposed its token. Pieces of text hold the tokens of a whole pass."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int]) -> None:
        self._stream = tokenizer.stream(after=prompt) if tokenizer else None
        self._origins: list[str] = []  # of the characters to come: text may be held back, never reordered

    def __call__(self, piece: OutputChunk) -> str:
        for token, origin in zip(piece.token_ids, piece.origins, strict=True):
            self._origins += [origin] * len(self._stream.step(token) if self._stream else "")
        text = piece.text
        origins, self._origins = self._origins[: len(text)], self._origins[len(text) :]
        origins += piece.origins[-1:] * (len(text) - len(origins))  # the flush at the end belongs to the last token
        runs = groupby(zip(text, origins, strict=True), key=lambda pair: pair[1])
        return "".join(paint("".join(character for character, _ in run), origin) for origin, run in runs)


def paint(text: str, tier: str) -> str:
    """`text` in the colour of a tier."""
    return f"\033[{COLORS.get(tier, 0)}m{text}\033[0m"


def write(piece: OutputChunk, painter: Painter | None) -> None:
    """Print a piece of a stream; the next one follows it."""
    print(painter(piece) if painter else piece.text, end="", flush=True)


def show(pieces: Iterable[OutputChunk | RequestOutput], painter: Painter | None, progress: Prefill) -> RequestOutput:
    """Print a stream as it comes, in the place of `progress`, and return the answer that ends it."""
    output = None
    with progress:
        for piece in pieces:
            progress.close()
            if isinstance(piece, RequestOutput):
                output = piece
            else:
                write(piece, painter)
    print(flush=True)
    assert output is not None, "a stream ends with the whole answer"
    return output


def legend(tiers: Sequence[TierStats]) -> str:
    """The tiers' names, each in its colour."""
    return "proposed by: " + " ".join(paint(tier.name, tier.name) for tier in tiers)


def passes_per_token(output: RequestOutput) -> float:
    """Passes of the full tier for each new token; 1 in plain decoding."""
    return output.tiers[-1].passes / max(output.completion_tokens, 1)


def report(output: RequestOutput) -> str:
    """The statistics of one request, for people."""
    ends = ", ".join(completion.finish_reason for completion in output.outputs)
    lines = [
        f"prompt {output.prompt_tokens:,} tokens in {output.prefill_seconds:.2f} s; "
        f"new {output.completion_tokens:,} tokens in {output.decode_seconds:.2f} s: "
        f"{output.tokens_per_second:.1f} tokens/s",
        f"mode {output.mode}, coupling {output.coupling}, exactness {output.exactness}, "
        f"seed {output.outputs[0].seed}, ended by {ends}",
        f"{'tier':<10} {'proposed':>9} {'accepted':>9} {'':>6} {'passes':>7} {'seconds':>8}",
    ]
    for tier in output.tiers:
        share = "" if tier.acceptance is None else f"{tier.acceptance:.0%}"
        lines.append(
            f"{tier.name:<10} {tier.proposed:>9,} {tier.accepted:>9,} {share:>6} {tier.passes:>7,} {tier.seconds:>8.2f}"
        )
    lines.append(f"full passes per new token: {passes_per_token(output):.2f}")
    if output.mode == "auto" and output.coupling != "seeded":
        lines.append(f"in mode auto the text of a seed depends on the clock under {output.coupling}: its law does not")
    plans = sorted(output.outputs[0].plans.items(), key=lambda plan: -plan[1])[:PLANS]
    lines += [f"plan       {proposals:>9,} proposals of {plan}" for plan, proposals in plans]
    return "\n".join(lines)
