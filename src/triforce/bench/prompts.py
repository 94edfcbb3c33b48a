"""Prompts of each workload, made from prose and code.

The rows of a batch share a document and differ in their ends. One saved prompt serves all of them, and still their
texts differ, at temperature 0 too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

from triforce.checkpoint.tokenizer import Tokenizer
from triforce.disk_cache.prompt_file import SavedCache
from triforce.engine.engine import EngineLender, Request
from triforce.engine.sequence_group import OnPrefill
from triforce.errors import CacheError, RequestError
from triforce.eval import Text
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams
from triforce.llm import LLM

END_TOKENS = 32
"""Tokens at the end of a prompt of plain text that are taken from elsewhere in it."""

CUE = 32
"""Tokens of a repeated passage at the end of a prompt, which determine the continuation."""

NAMES = (
    "Marlow", "Harper", "Winslow", "Barrett", "Clifton", "Preston", "Sheldon", "Merritt",
    "Langley", "Denton", "Ashford", "Colby", "Grantham", "Milton", "Norwood", "Kingsley",
)  # fmt: skip

NEEDLES = 8

Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Sources:
    """Texts that prompts are made from. Prompts raise RequestError if a kind of text is too short."""

    tokenizer: Tokenizer
    texts: Sequence[Text]

    @cached_property
    def prose(self) -> list[int]:
        return self._ids_of_kind("prose")

    @cached_property
    def code(self) -> list[int]:
        return self._ids_of_kind("code")

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special=False)

    def _ids_of_kind(self, kind: str) -> list[int]:
        return [i for text in self.texts if text.kind == kind for i in text.ids_N.tolist()]


def prompts(sources: Sources, workload: str, length: int, rows: int) -> list[list[int]]:
    """Return `rows` prompts of `length` tokens that differ in their ends only. Raises RequestError for short texts."""
    body, ends = MAKERS[workload](sources, length, rows)
    return [_truncated(workload, body, length - len(end)) + end for end in ends]


def _plain(ids: list[int], length: int, rows: int) -> tuple[list[int], list[list[int]]]:
    """Return the plain text, and for each row an end from elsewhere in it. The first row's end continues the text."""
    starts = [(length - END_TOKENS) // (row + 1) for row in range(rows)]
    return ids, [ids[start : start + END_TOKENS] for start in starts]


def _needle(sources: Sources, length: int, rows: int) -> tuple[list[int], list[list[int]]]:
    """Return a text with needles along the way, and for each row the start of the sentence of one of them."""
    facts = needles(sources.encode, sources.tokenizer.decode)[:NEEDLES]
    gap = max(1, (length - sum(len(cue + answer) for cue, answer in facts) - END_TOKENS) // NEEDLES)
    body: list[int] = []
    for n, (cue, answer) in enumerate(facts):
        body += sources.prose[n * gap : (n + 1) * gap] + cue + answer
    return body + sources.prose[NEEDLES * gap :], [facts[row % NEEDLES][0] for row in range(rows)]


def needles(encode: Encode, decode: Decode) -> list[tuple[list[int], list[int]]]:
    """Return a sentence with a number for each of `NAMES`, split into the tokens before the number and the rest."""
    needle_parts = []
    for name, number in zip(NAMES, numbers(), strict=True):
        sentence = encode(f"\nThe secret number of {name} is {number}.\n")
        number_start = next(i for i, token in enumerate(sentence) if has_digit(decode([token])))
        needle_parts.append((sentence[:number_start], sentence[number_start:]))
    return needle_parts


def numbers() -> list[int]:
    """Return distinct five-digit numbers, one for each of `NAMES`."""
    return Random(0).sample(range(10_000, 100_000), len(NAMES))


def has_digit(text: str) -> bool:
    """Return whether any character is a digit."""
    return any(character.isdigit() for character in text)


def _copy(sources: Sources, length: int, rows: int) -> tuple[list[int], list[list[int]]]:
    """Return a text, and ends that repeat a passage of its first half: as in editing, most of the rest is a copy."""
    starts = [copied_from(length, rows, row) for row in range(rows)]
    return sources.prose, [sources.prose[start : start + CUE] for start in starts]


def copied_from(length: int, rows: int, row: int) -> int:
    """Return the start in the text of the passage that a row of workload `copy` repeats."""
    return length // 8 + row * (length // 4 // rows)


def _summary(sources: Sources, length: int, rows: int) -> tuple[list[int], list[list[int]]]:
    """Return a text, and ends that ask for a summary. A small model does not follow it, but the shape is the same."""
    ends = [sources.encode(f"\n\nSUMMARY OF PART {row + 1}\n\nIn short, this is what happened:") for row in range(rows)]
    return sources.prose, ends


def _many_shot(sources: Sources, length: int, rows: int) -> tuple[list[int], list[list[int]]]:
    """Return sentences of the text with the same questions and answers; the ends have sentences without answers."""
    text = sources.tokenizer.decode(sources.prose[: 2 * length + 8192])
    sentences = [
        full_sentence
        for raw_sentence in re.split(r"(?<=[.!?])\s+", text)
        if len((full_sentence := " ".join(raw_sentence.split())).split()) >= 4
    ]
    open_sentences = sentences[:rows]
    shots = [_shot(sentence) for sentence in sentences[rows:]]
    return sources.encode("".join(shots)), [
        sources.encode(f"Sentence: {sentence}\nFirst:") for sentence in open_sentences
    ]


def _shot(sentence: str) -> str:
    words = sentence.split()
    return f"Sentence: {sentence}\nFirst: {words[0]}\nLast: {words[-1]}\nWords: {len(words)}\n\n"


Maker = Callable[[Sources, int, int], tuple[list[int], list[list[int]]]]

MAKERS: dict[str, Maker] = {
    "books": lambda sources, length, rows: _plain(sources.prose, length, rows),
    "code": lambda sources, length, rows: _plain(sources.code, length, rows),
    "needle": _needle, "copy": _copy, "summary": _summary, "many-shot": _many_shot,
}  # fmt: skip


def _truncated(workload: str, ids: list[int], length: int) -> list[int]:
    if not 0 < length <= len(ids):
        raise RequestError(
            f"the texts have {len(ids):,} tokens for workload {workload}, {length:,} are needed; "
            "give --texts a folder with more or longer ones (code: .py and the like), or smaller --contexts"
        )
    return ids[:length]


def generate_batch(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, mode: str, saved_prompt: SavedCache | None = None
) -> RequestOutput:
    """Generate a text for each prompt in one batch; return them as the choices of one output, with the batch's seconds.

    All rows are prefilled before the first token is sampled. The seed of row n is that of `params` plus n.
    """
    requests = [
        llm.request(prompt, replace(params, seed=(params.seed or 0) + n), mode) for n, prompt in enumerate(prompts)
    ]
    streams = [request.streams[0] for request in requests]
    batch_request = Request(llm.engines.parts, prompts[0], streams, mode, llm.coupling)
    engine = llm.open(len(prompts), sum(len(prompt) + params.max_tokens for prompt in prompts))
    try:
        engine.submit([batch_request], saved=saved_prompt)
        return engine.finish(batch_request)
    finally:
        engine.close()


def variant_of(llm: LLM, coupling: str | None = None, **speculation: Any) -> LLM:
    """Return an LLM of the same models with another coupling or other fields of `SpeculativeConfig`."""
    variant = object.__new__(type(llm))  # copying an LLM is refused: closing one copy would close both
    vars(variant).update(vars(llm))
    variant.coupling = coupling or llm.coupling
    variant.speculation = replace(llm.speculation, **speculation)
    variant.engines = EngineLender(
        replace(llm.engines.parts, speculation=variant.speculation, coupling=variant.coupling)
    )
    return variant


class PromptCache:
    """KV of prompts in files of a folder. A prompt is prefilled once, and loaded for every text that starts with it."""

    def __init__(self, llm: LLM, folder: Path, on_prefill: Callable[[], OnPrefill]) -> None:
        self.llm = llm
        self.folder = folder
        self.on_prefill = on_prefill

    def load(self, name: str, prompt: list[int]) -> tuple[SavedCache, float]:
        """Return a prompt's saved KV and the tokens/s of its prefill. Without saved KV of this prompt, prefill it."""
        kv_path = self.folder / f"{name}.kv"
        record_path = self.folder / f"{name}.json"
        key = crc32(repr(prompt).encode())
        if not self._is_loadable(kv_path) or _read_record(record_path)[0] != key:
            params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
            (output,) = self.llm.generate([prompt], params, mode="ar", save_cache=kv_path, on_prefill=self.on_prefill())
            record_path.write_text(json.dumps([key, (len(prompt) - 1) / output.prefill_seconds]), encoding="utf-8")
        return self._open(kv_path), _read_record(record_path)[1]

    def _open(self, kv_path: Path) -> SavedCache:
        pool = self.llm.open(1, 1).core.store.pool
        return self.llm.engines.parts.open_prompt(kv_path, pool)

    def _is_loadable(self, kv_path: Path) -> bool:
        """Return whether the file exists and is of this model and draft."""
        try:
            return kv_path.exists() and bool(self._open(kv_path))
        except CacheError:
            return False

    def drop(self, name: str) -> None:
        """Delete the saved prompt."""
        for suffix in ("kv", "json"):
            (self.folder / f"{name}.{suffix}").unlink(missing_ok=True)


def _read_record(record_path: Path) -> tuple[int, float]:
    """Return a saved prompt's checksum and its prefill's tokens/s; (-1, 0.0), which no prompt has, without a file."""
    try:
        key, rate = json.loads(record_path.read_text(encoding="utf-8"))
        return int(key), float(rate)
    except (OSError, ValueError, TypeError):
        return -1, 0.0
