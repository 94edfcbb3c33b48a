"""Turns of a chat: asks, prints answers, and keeps the conversation within the context."""

from __future__ import annotations

import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from triforce.checkpoint.hub import model_name
from triforce.cli.answer_output import Painter, cached_note, legend, passes_per_token, show
from triforce.cli.chat.conversation import Conversation, Turn
from triforce.cli.progress import Prefill, Seconds
from triforce.errors import RankError, RequestError, TriforceError
from triforce.interface.outputs import RequestOutput
from triforce.interface.quantities import counted
from triforce.interface.sampling_params import SamplingParams

if TYPE_CHECKING:
    from triforce.checkpoint.tokenizer import Tokenizer
    from triforce.engine.engine import OutputChunk
    from triforce.engine.sequence_group import OnPrefill
    from triforce.session import Session


class Interrupts:
    """Context manager that records Ctrl-C in `pending`. An answer checks `pending` at points where it can end."""

    def __init__(self) -> None:
        self.pending = False
        self._earlier_handler: Any = None

    def __enter__(self) -> Interrupts:
        self._earlier_handler = signal.signal(signal.SIGINT, self._record)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._earlier_handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.pending = True


class _AnswerStopped(Exception):
    """The answer was stopped before its first token."""


def answer(
    session: Session,
    ids: Sequence[int],
    params: SamplingParams,
    stop_requested: Callable[[], bool],
    on_prefill: OnPrefill | None = None,
) -> Iterator[OutputChunk | RequestOutput]:
    """Answer as `Session.ask` does, until `stop_requested` is true on rank 0.

    The check is made between two chunks and between two prefill passes.
    """
    ranks = session.llm.ranks

    def check_stop(done: int, total: int) -> None:
        if on_prefill:
            on_prefill(done, total)
        if ranks.broadcast(stop_requested()):
            raise _AnswerStopped

    chunks = session.ask(ids, params, check_stop)
    try:
        for chunk in chunks:
            yield chunk
            if ranks.broadcast(stop_requested()):
                return
    except _AnswerStopped:
        return
    finally:
        chunks.close()


def follow(session: Session, params: SamplingParams) -> None:
    """Run a rank other than 0: the same answers, until there are no more questions."""
    placeholder_ids: list[int] | None = None
    while ids := session.llm.ranks.broadcast(placeholder_ids):
        try:
            for _ in answer(session, ids, params, lambda: False):
                pass
        except RankError:
            raise
        except TriforceError:  # rank 0 raises the same error, and reports it
            continue


ANSWER_SHARE = 8
"""The context divided by this is the room that an answer gets, unless --max-tokens asks for less."""

SHOWN_CHARACTERS = 40  # of a question that is dropped


class Dialogue:
    """A conversation in one session."""

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        params: SamplingParams,
        conversation: Conversation,
        options: Namespace,
    ) -> None:
        self.session = session
        self.tokenizer = tokenizer
        self.params = params
        self.conversation = conversation
        self.model = model_name(options.model)
        self.interrupts = Interrupts()
        self.confirm: Callable[[str], bool] | None = None
        """Asks the user a yes-or-no question; None without a terminal."""
        self._color = options.color
        self._quiet = options.quiet

    @property
    def context(self) -> int:
        """Tokens that the conversation and the next answer may have together."""
        return self.session.llm.target.config.context

    def require(self, conversation: Conversation) -> None:
        """Raise RequestError unless the template accepts the conversation and the context has room for a question."""
        from triforce.engine.inputs import more_context, require_size

        config = self.session.llm.target.config
        for text in (conversation.system, conversation.document):
            require_size(text, self.tokenizer, config)
        needed_tokens = len(self._encode(Conversation(conversation.system, conversation.document), "?"))
        if needed_tokens >= self.context:
            raise RequestError(
                f"the document and the system message are {needed_tokens:,} tokens, and the context is "
                f"{self.context:,}; give less, or {more_context(config)}"
            )
        self._encode(conversation, "?")

    def ask(self, question: str) -> None:
        """Take one turn. Raises RequestError for a question that cannot be asked; the conversation then stays."""
        ids = self._fit_context(question)
        self.interrupts.pending = False
        text, output = self._print_answer(self.session.llm.ranks.broadcast(ids))
        if output is None and not text:
            remark("[stopped before the answer began: the question is not kept]")
            return
        self.conversation.turns.append(Turn(question, output.outputs[0].text if output else text))
        if mark := self._cut_remark(output):
            remark(mark)
        if output and not self._quiet:
            remark(_statistics(output, self._color))

    def _print_answer(self, ids: list[int]) -> tuple[str, RequestOutput | None]:
        """Print an answer as it comes. Return its text, and the output; None if the answer was stopped."""
        painter = Painter(self.tokenizer, ids) if self._color else None
        progress = Prefill(self._quiet)
        chunks = answer(self.session, ids, self.params, lambda: self.interrupts.pending, progress)
        return show(chunks, painter, progress)

    def _cut_remark(self, output: RequestOutput | None) -> str:
        """Return the remark on an answer that was stopped or cut; empty for others."""
        if output is None:
            return "[stopped; what was said is kept]"
        if output.outputs[0].finish_reason != "length":
            return ""
        if output.completion_tokens < self.params.max_tokens:
            return f"[cut: the context of {self.context:,} tokens is full]"
        return f"[cut at --max-tokens {self.params.max_tokens}]"

    def _fit_context(self, question: str) -> list[int]:
        """Return token ids that fit the context. The oldest turns are dropped only if the user confirms.

        Raises RequestError.
        """
        answer_tokens = min(self.params.max_tokens, self.context // ANSWER_SHARE)
        candidates = [self._encode(self.conversation, question)]
        turn_count = len(self.conversation.turns)
        while len(candidates[-1]) + answer_tokens > self.context and len(candidates) <= turn_count:
            candidates.append(self._encode(self.conversation, question, first_turn=len(candidates)))
        full_ids = candidates[0]
        dropped_turns = len(candidates) - 1
        size_note = (
            f"this takes {len(full_ids):,} tokens and {answer_tokens:,} for the answer, and the context is "
            f"{self.context:,}"
        )
        if dropped_turns and len(candidates[-1]) < self.context and self._drop_turns(size_note, dropped_turns):
            return candidates[-1]
        if len(full_ids) >= self.context:
            advice = "ask less at a time, or give a shorter document"
            if turn_count:
                advice = "/reset forgets all turns" if self.confirm else "begin another chat, or raise --context"
            raise RequestError(f"{size_note}; nothing was asked: {advice}")
        return full_ids

    def _encode(self, conversation: Conversation, question: str, first_turn: int = 0) -> list[int]:
        """Return token ids of a conversation from `first_turn` on, and of a question. Raises RequestError."""
        with Seconds("tokenizing the text", self._quiet):
            return self.tokenizer.chat(conversation.messages(question, first_turn=first_turn))

    def _drop_turns(self, size_note: str, dropped_count: int) -> bool:
        """Drop the oldest turns if the user confirms; return whether that was done."""
        turns = self.conversation.turns
        if not (
            self.confirm
            and self.confirm(f"{size_note}. Drop the oldest {counted(dropped_count, 'turn')} of {len(turns)}? [y/n] ")
        ):
            return False
        question = " ".join(turns[0].question.split())
        shown_text = question if len(question) <= SHOWN_CHARACTERS else f"{question[:SHOWN_CHARACTERS]} ..."
        kept_turns = counted(len(turns) - dropped_count, "turn")
        remark(f'[dropped {counted(dropped_count, "turn")}, from "{shown_text}" on; {kept_turns} and all else stay]')
        del turns[:dropped_count]
        return True


def _statistics(output: RequestOutput, color: bool) -> str:
    line = (
        f"[prompt {counted(output.prompt_tokens, 'token')}{cached_note(output)} in {output.prefill_seconds:.2f} s; "
        f"{output.completion_tokens:,} new, {output.tokens_per_second:.1f} tokens/s, "
        f"{passes_per_token(output):.2f} full passes per token; seed {output.outputs[0].seed}]"
    )
    return f"{line} {legend(output.outputs[0].tiers)}" if color else line


def remark(line: str) -> None:
    """Print a remark of the chat to stderr: only answers go to stdout."""
    print(line, file=sys.stderr, flush=True)
