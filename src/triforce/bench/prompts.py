"""Prompts of each workload, made of texts: prose, and code.

The rows of a batch have the same document and another end each, so that one saved prompt serves them all, and yet each
text goes its own way, at temperature 0 too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random

from triforce.checkpoint.tokenizer import Tokenizer
from triforce.errors import RequestError
from triforce.eval import Text

END = 32
"""Tokens at the end of a prompt of plain text that come from another place of it."""

CUE = 32
"""Tokens of a repeated passage that the prompt ends with, so that it is clear what comes."""

NAMES = (
    "Marlow", "Harper", "Winslow", "Barrett", "Clifton", "Preston", "Sheldon", "Merritt",
    "Langley", "Denton", "Ashford", "Colby", "Grantham", "Milton", "Norwood", "Kingsley",
)  # fmt: skip

NEEDLES = 8

Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Sources:
    """Texts that prompts are made of. Raises RequestError where there are too few of a kind."""

    tokenizer: Tokenizer
    texts: Sequence[Text]

    @cached_property
    def prose(self) -> list[int]:
        return self._of("prose")

    @cached_property
    def code(self) -> list[int]:
        return self._of("code")

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special=False)

    def _of(self, kind: str) -> list[int]:
        return [i for text in self.texts if text.kind == kind for i in text.ids_N.tolist()]


def prompts(sources: Sources, workload: str, length: int, rows: int) -> list[list[int]]:
    """Return `rows` prompts of `length` tokens each, which differ in their last tokens only. Raises RequestError."""
    body, ends = MAKERS[workload](sources, length, rows)
    return [_cut(workload, body, length - len(end)) + end for end in ends]


def _plain(ids: list[int], length: int, rows: int) -> tuple[list[int], list[list[int]]]:
    """The text as it stands, and then a few tokens of it from elsewhere; the first row's go on where it was."""
    starts = [(length - END) // (row + 1) for row in range(rows)]
    return ids, [ids[start : start + END] for start in starts]


def _needle(sources: Sources, length: int, rows: int) -> tuple[list[int], list[list[int]]]:
    """Numbers are told along the way, and each row asks for one of them."""
    facts = needles(sources.encode, sources.tokenizer.decode)[:NEEDLES]
    gap = max(1, (length - sum(len(cue + answer) for cue, answer in facts) - END) // NEEDLES)
    body: list[int] = []
    for n, (cue, answer) in enumerate(facts):
        body += sources.prose[n * gap : (n + 1) * gap] + cue + answer
    return body + sources.prose[NEEDLES * gap :], [facts[row % NEEDLES][0] for row in range(rows)]


def needles(encode: Encode, decode: Decode) -> list[tuple[list[int], list[int]]]:
    """Return a sentence with a number for each of `NAMES`: its tokens before the number, and those from there on."""
    made = []
    for name, number in zip(NAMES, numbers(), strict=True):
        sentence = encode(f"\nThe secret number of {name} is {number}.\n")
        first = next(i for i, token in enumerate(sentence) if has_digit(decode([token])))
        made.append((sentence[:first], sentence[first:]))
    return made


def numbers() -> list[int]:
    """Return five-digit numbers, one for each of `NAMES`."""
    return Random(0).sample(range(10_000, 100_000), len(NAMES))


def has_digit(text: str) -> bool:
    """Whether any character is a digit."""
    return any(character.isdigit() for character in text)


def _copy(sources: Sources, length: int, rows: int) -> tuple[list[int], list[list[int]]]:
    """A passage of the first half comes again: as when a text is edited, most of what follows has been there."""
    starts = [copied_from(length, rows, row) for row in range(rows)]
    return sources.prose, [sources.prose[start : start + CUE] for start in starts]


def copied_from(length: int, rows: int, row: int) -> int:
    """Return where in the text the passage of a row of workload `copy` starts."""
    return length // 8 + row * (length // 4 // rows)


def _summary(sources: Sources, length: int, rows: int) -> tuple[list[int], list[list[int]]]:
    """The end asks what it was all about. No instruction is followed by a small model, but the shape is the same."""
    ends = [sources.encode(f"\n\nSUMMARY OF PART {row + 1}\n\nIn short, this is what happened:") for row in range(rows)]
    return sources.prose, ends


def _many_shot(sources: Sources, length: int, rows: int) -> tuple[list[int], list[list[int]]]:
    """Sentences of the text, each with the same few questions and their answers; the last ones are left open."""
    text = sources.tokenizer.decode(sources.prose[: 2 * length + 8192])
    sentences = [s for found in re.split(r"(?<=[.!?])\s+", text) if len((s := " ".join(found.split())).split()) >= 4]
    last, shots = sentences[:rows], [_shot(sentence) for sentence in sentences[rows:]]
    return sources.encode("".join(shots)), [sources.encode(f"Sentence: {sentence}\nFirst:") for sentence in last]


def _shot(sentence: str) -> str:
    words = sentence.split()
    return f"Sentence: {sentence}\nFirst: {words[0]}\nLast: {words[-1]}\nWords: {len(words)}\n\n"


Maker = Callable[[Sources, int, int], tuple[list[int], list[list[int]]]]

MAKERS: dict[str, Maker] = {
    "books": lambda sources, length, rows: _plain(sources.prose, length, rows),
    "code": lambda sources, length, rows: _plain(sources.code, length, rows),
    "needle": _needle, "copy": _copy, "summary": _summary, "many-shot": _many_shot,
}  # fmt: skip


def _cut(workload: str, ids: list[int], length: int) -> list[int]:
    if not 0 < length <= len(ids):
        raise RequestError(
            f"the texts have {len(ids):,} tokens for workload {workload}, {length:,} are needed; "
            "give --texts a folder with more or longer ones (code: .py and the like), or smaller --contexts"
        )
    return ids[:length]
