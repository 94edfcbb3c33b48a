"""Messages of gpt-oss (harmony): each has a header with a channel, and perhaps the function that it calls.

    <|channel|>analysis<|message|>THOUGHTS<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
    <|constrain|>json<|message|>{...}<|call|>

The channel analysis holds thoughts, commentary calls and text before them, final the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from triforce.interface.grammar import Grammar
from triforce.server.answers.answer_parts import AnswerParser, AnswerPart, Call, Thoughts
from triforce.server.answers.call_format import CallableFunction, CallFormat
from triforce.server.answers.call_parser import CallBlock
from triforce.server.answers.json_calls import NAME, ObjectEnd, read_arguments
from triforce.server.answers.marks import Marks
from triforce.server.answers.thoughts import ThoughtSplitter
from triforce.structured_output.compiler import schema_grammar

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
FINAL = f"{CHANNEL}final{MESSAGE}"
_RECIPIENT = re.compile(r"to=(\S+)")
_FUNCTIONS = "functions."
MAX_HEADER = 512
"""Maximal length of a message's header in characters; what is longer is text."""


class HarmonyFormat(CallFormat):
    marks = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)
    ends = (CALL, RETURN)
    answer_opening = FINAL
    list_texts = ("", "", f"{CALL}{START}assistant")

    def fits(self, template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    def openings(self, marks: Marks, functions: Mapping[str, CallableFunction]) -> dict[str, Callable[[], CallBlock]]:
        raise NotImplementedError("messages have headers, see HarmonyParser")

    def rules_of_call(self, marks: Marks, function: CallableFunction, index: int) -> list[str]:
        head = f"{CHANNEL}commentary to={_FUNCTIONS}{function.name} {CONSTRAIN}json{MESSAGE}"
        return [
            f"call_{index}: {marks.terms(head)} arguments_{index}",
            f"arguments_{index}: {schema_grammar(function.closed_parameters)}",
        ]

    def grammar(
        self, marks: Marks, functions: Sequence[CallableFunction], several: bool, answer: Grammar | None = None
    ) -> Grammar:
        """Return a grammar of one call, as a model ends its turn behind a call."""
        grammar = super().grammar(marks, functions, False, answer)
        if answer is None:
            return grammar
        head, _, rules = grammar.source.partition("| answer")
        return Grammar("lark", f"{head}| {marks.terms(FINAL)} answer{rules}", grammar.token_ids)

    def parser(
        self,
        marks: Marks,
        functions: Sequence[CallableFunction],
        thoughts: ThoughtSplitter,
        *,
        several: bool = True,
        forced: bool = False,
        bare: bool = False,
        prompt_end: str = "",
    ) -> AnswerParser:
        return HarmonyParser(marks, calls=bool(functions), several=several, opens_in=prompt_end)


class HarmonyParser:
    """Separates the messages of an answer.

    calls: whether messages to functions are calls; else they are thoughts. several: whether text and calls may follow
    a call. opens_in: end of the prompt, which may hold the header of the first message.
    """

    def __init__(self, marks: Marks, *, calls: bool, several: bool, opens_in: str = "") -> None:
        self.is_cut = False
        self._calls = calls
        self._several = several
        self._marks = marks
        self._shown = {name: marks.shown(name) for name in HarmonyFormat.marks}
        self._pattern = re.compile("|".join(map(re.escape, self._shown.values())))
        self._text = ""
        self._header: str | None = ""  # of the message that begins; None in its content
        self._channel = "final"
        self._recipient = ""
        self._arguments = ""
        self._has_ended = False
        _, start, open_text = opens_in.rpartition(START)
        header, message, _ = open_text.rpartition(MESSAGE)
        if start and message:
            self._header = header.replace(CHANNEL, self._shown[CHANNEL])
            self._begin_content()

    def add(self, text: str, is_final: bool) -> list[AnswerPart]:
        self._text += text
        parts: list[AnswerPart] = []
        while not self._has_ended and (match := self._pattern.search(self._text)):
            self._take(self._text[: match.start()], parts)
            self._text = self._text[match.end() :]
            self._read_mark(match[0], parts)
        if self._has_ended:
            self._text = ""
        elif is_final or self._has_tokens:
            self._take(self._text, parts)
            self._text = ""
        if is_final and self._header is not None and self._shown[CHANNEL] in self._header:
            self._take_text_of_header(parts)
        if is_final:
            self.is_cut = self._recipient != "" and not self._end_message(parts, is_final=True)
        return parts

    @property
    def _has_tokens(self) -> bool:
        """Whether marks are tokens, so that no part of a mark is in the text."""
        return all(len(shown) == 1 for shown in self._shown.values())

    def _take(self, text: str, parts: list[AnswerPart]) -> None:
        """Take text of the current header or message."""
        if self._header is not None:
            self._header += text
            if len(self._header) > MAX_HEADER or (text.strip() and not self._may_be_header()):
                text = self._header
                self._header = None
                self._channel = "final"
                self._recipient = ""
            else:
                return
        if self._recipient:
            self._arguments += text
        elif text:
            parts.append(Thoughts(text) if self._channel == "analysis" else text)

    def _take_text_of_header(self, parts: list[AnswerPart]) -> None:
        """Take what follows the name of a channel as its text: some models leave the mark between them out."""
        header = self._header or ""
        words = header.partition(self._shown[CHANNEL])[2].split(maxsplit=1)
        if len(words) == 2 and words[0] in ("final", "analysis") and "to=" not in words[1]:
            parts.append(Thoughts(words[1]) if words[0] == "analysis" else words[1])

    def _may_be_header(self) -> bool:
        """Whether text in front of a channel can belong to a header: a role or a recipient."""
        words = (self._header or "").split()
        return self._shown[CHANNEL] in (self._header or "") or all(
            word.startswith("to=") or "to=".startswith(word) or "assistant".startswith(word) for word in words
        )

    def _read_mark(self, mark: str, parts: list[AnswerPart]) -> None:
        if mark == self._shown[MESSAGE] and self._header is not None:
            self._begin_content()
        elif mark in (self._shown[CHANNEL], self._shown[CONSTRAIN]) and self._header is not None:
            self._header += f"{mark} "
        else:
            self._end_message(parts)
            self._header = f"{mark} " if mark == self._shown[CHANNEL] else ""

    def _begin_content(self) -> None:
        header = self._header or ""
        _, _, behind_channel = header.partition(self._shown[CHANNEL])
        words = behind_channel.replace(self._shown[CONSTRAIN], " ").split()
        self._channel = next((word for word in words if not word.startswith("to=")), "final")
        recipient = _RECIPIENT.search(header.replace(self._shown[CHANNEL], " ").replace(self._shown[CONSTRAIN], " "))
        name = recipient[1].removeprefix(_FUNCTIONS) if recipient else ""
        is_call = self._calls and bool(NAME.fullmatch(name)) and name != "assistant"
        if recipient and not is_call:
            self._channel = "analysis"
        self._recipient = name if is_call else ""
        self._arguments = ""
        self._header = None

    def _end_message(self, parts: list[AnswerPart], is_final: bool = False) -> bool:
        """End the current message; a complete call becomes a part. Returns False for a call that is cut."""
        if not self._recipient:
            return True
        raw = self._marks.restored_json(self._arguments).strip()
        end = ObjectEnd(0).find(raw) if raw.startswith("{") else None
        arguments = read_arguments(raw[:end] if end else raw)
        name = self._recipient
        self._recipient = ""
        if arguments is None:
            if is_final:
                return False
            parts.append(raw)
            return True
        parts.append(Call(name, arguments))
        self._has_ended = not self._several
        return True
