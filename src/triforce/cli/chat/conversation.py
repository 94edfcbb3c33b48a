"""A conversation, as messages for a chat template and as a file."""

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
    """A question and its answer, whole or as far as it was made."""

    question: str
    answer: str


@dataclass
class Conversation:
    """A system message, a document and turns. Turns can be dropped; the other two stay."""

    system: str = ""
    document: str = ""
    turns: list[Turn] = field(default_factory=list)

    def messages(self, question: str | None = None, first_turn: int = 0) -> list[Message]:
        """Return messages for a chat template: turns from `first_turn` on, then `question`.

        The document precedes the first question in its message.
        """
        texts = [text for turn in self.turns[first_turn:] for text in turn] + ([] if question is None else [question])
        if texts and self.document:
            texts[0] = f"{self.document}\n\n{texts[0]}"
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + _alternating(texts)

    def save(self, file: Path, model: str) -> None:
        """Write the conversation, whole or not at all. Other files than conversations are kept. Raises RequestError."""
        messages = _alternating([text for turn in self.turns for text in turn])
        record = {MARK: VERSION, "model": model, "system": self.system, "document": self.document, "messages": messages}
        try:
            if file.exists():
                load(file, "it would be lost: name another file")
            with whole_file(file) as partial:
                partial.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise RequestError(f"{file} cannot be written ({error.strerror}); name a file in another folder") from error


def load(file: Path, advice: str = "give a file that /save wrote") -> Conversation:
    """Return the conversation in a file. Raises RequestError if the file holds anything else."""
    try:
        record = json.loads(decode(read_file(file, advice, pipes=False)))
    except (ValueError, RecursionError):
        record = None
    if not (isinstance(record, dict) and record.get(MARK) == VERSION and _is_complete(record)):
        raise RequestError(f"{file} holds no conversation of triforce; {advice}")
    texts = [message["content"] for message in record["messages"]]
    turns = [Turn(*pair) for pair in zip(texts[::2], texts[1::2], strict=True)]
    return Conversation(record["system"], record["document"], turns)


def _is_complete(record: dict[str, Any]) -> bool:
    """Whether a record has all parts of the right types, with questions and answers in turn."""
    messages = record.get("messages")
    if not (
        isinstance(messages, list) and len(messages) % 2 == 0 and all(isinstance(message, dict) for message in messages)
    ):
        return False
    texts = [record.get("system"), record.get("document"), *(message.get("content") for message in messages)]
    return all(isinstance(text, str) for text in texts) and messages == _alternating(
        [message["content"] for message in messages]
    )


def _alternating(texts: list[str]) -> list[Message]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
