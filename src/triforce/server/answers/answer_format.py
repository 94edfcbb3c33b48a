"""AnswerFormat: how the models of a chat template structure answers, by calls, thoughts, marks and end tokens."""

from __future__ import annotations

from triforce.checkpoint.tokenizer import Tokenizer
from triforce.server.answers.answer_parts import AnswerParser, RestoredAnswer, TextParser, ThinkingParser
from triforce.server.answers.families import call_format
from triforce.server.answers.marks import Marks
from triforce.server.answers.thoughts import ThoughtSplitter, thought_marks
from triforce.server.tools import ToolChoice


class AnswerFormat:
    """The structure of answers of one model.

    Attributes:

    - calls: the format of calls; None if the template has an unknown one.
    - marks: all marks, in the tokens of the model.
    - end_ids: tokens that end an answer, beside the model's own.
    - has_thoughts: whether answers may have thoughts between marks.
    """

    def __init__(self, template: str, tokenizer: Tokenizer) -> None:
        self.calls = call_format(template)
        self._thought_marks = thought_marks(template)
        self.has_thoughts = self._thought_marks is not None
        call_marks = self.calls.marks if self.calls else ()
        thought_tokens = self._thought_marks.tokens if self._thought_marks else ()
        self.marks = Marks([*call_marks, *thought_tokens], tokenizer)
        self.end_ids = tuple(tokenizer.ids_of_names(self.calls.ends if self.calls else ()).values())

    def parser(
        self,
        tools: ToolChoice | None,
        prompt_end: str,
        *,
        has_grammar: bool,
        thoughts_are_text: bool,
        is_continued: bool = False,
    ) -> AnswerParser:
        """Return a parser for one answer.

        prompt_end: the last characters of the prompt, which may hold the mark with which thoughts begin. has_grammar:
        whether a grammar constrains the answer; it leaves no room for thoughts. thoughts_are_text: whether thoughts
        stay in the text. is_continued: whether the answer continues a turn, which is a part of `prompt_end`.
        """
        splitter = ThoughtSplitter()
        if self._thought_marks and not has_grammar and not thoughts_are_text:
            opening = self._thought_marks.opening
            shown = self.marks.shown(opening), self.marks.shown(self._thought_marks.closing)
            is_open = prompt_end.rstrip().endswith(opening.rstrip()) or (
                is_continued and prompt_end.rfind(opening) > prompt_end.rfind(self._thought_marks.closing)
            )
            splitter = ThoughtSplitter(shown, open_at_start=is_open)
        if self.calls is None:
            parser: AnswerParser = ThinkingParser(splitter, TextParser())
        elif tools is None:
            parser = self.calls.parser(self.marks, (), splitter, prompt_end=prompt_end)
        else:
            is_forced = tools.forced is not None
            parser = self.calls.parser(
                self.marks,
                tools.functions,
                splitter,
                several=tools.several,
                forced=is_forced,
                bare=not is_forced and tools.output_format is None,
                prompt_end=prompt_end,
            )
        return RestoredAnswer(parser, self.marks, thoughts_are_text=thoughts_are_text)
