"""A conversation, as a chat template takes it and as a file keeps it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from triforce.errors import RequestError
from triforce.user_files import decode, read_file
from triforce.whole_file import whole_file

MARK = "triforce_chat"
VERSION = 1

Message = dict[str, str]


class Turn(NamedTuple):
    """A question, and what was answered: all of it, or as far as it came."""

    question: str
    answer: str


@dataclass
class Conversation:
    """The system's message and the document stay when turns go."""

    system: str = ""
    document: str = ""
    turns: list[Turn] = field(default_factory=list)

    def messages(self, question: str | None = None, after: int = 0) -> list[Message]:
        """Return messages for a chat template, the document before the first question; turns from `after` on."""
        said = [text for turn in self.turns[after:] for text in turn] + ([] if question is None else [question])
        if said and self.document:
            said[0] = f"{self.document}\n\n{said[0]}"
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + _in_turn(said)

    def save(self, file: Path, model: str) -> None:
        """Write it, whole or not at all, where nothing else stands. Raises RequestError."""
        said = _in_turn([text for turn in self.turns for text in turn])
        whole = {MARK: VERSION, "model": model, "system": self.system, "document": self.document, "messages": said}
        try:
            if file.exists():
                load(file, "it would be lost: name another file")
            with whole_file(file) as partial:
                partial.write_text(json.dumps(whole, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise RequestError(f"{file} cannot be written ({error.strerror}); name a file in another folder") from error


def load(file: Path, advice: str = "give a file that /save wrote") -> Conversation:
    """The conversation in a file. Raises RequestError if it holds anything else."""
    try:
        found = json.loads(decode(read_file(file, advice, pipes=False)))
    except (ValueError, RecursionError):
        found = None
    if not (isinstance(found, dict) and found.get(MARK) == VERSION and _whole(found)):
        raise RequestError(f"{file} holds no conversation of triforce; {advice}")
    said = [message["content"] for message in found["messages"]]
    turns = [Turn(*pair) for pair in zip(said[::2], said[1::2], strict=True)]
    return Conversation(found["system"], found["document"], turns)


def _whole(found: dict[str, Any]) -> bool:
    """Whether all parts are there and are what they should be: questions and answers in turn."""
    said = found.get("messages")
    if not (isinstance(said, list) and len(said) % 2 == 0 and all(isinstance(each, dict) for each in said)):
        return False
    texts = [found.get("system"), found.get("document"), *(each.get("content") for each in said)]
    return all(isinstance(text, str) for text in texts) and said == _in_turn([each["content"] for each in said])


def _in_turn(said: list[str]) -> list[Message]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]
