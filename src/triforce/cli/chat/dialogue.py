"""Asks, shows what is answered, and sees to it that the conversation fits the context."""

from __future__ import annotations

import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from triforce.checkpoint.hub import model_name
from triforce.cli.answer_output import Painter, legend, passes_per_token, read_before, show
from triforce.cli.chat.conversation import Conversation, Turn
from triforce.cli.counts import counted
from triforce.cli.progress import Prefill, Tokenization
from triforce.errors import RankError, RequestError, TriforceError
from triforce.interface.outputs import RequestOutput
from triforce.interface.sampling_params import SamplingParams

if TYPE_CHECKING:
    from triforce.checkpoint.tokenizer import Tokenizer
    from triforce.engine.engine import OutputChunk
    from triforce.engine.sequence_group import OnPrefill
    from triforce.session import Session


class Interrupts:
    """Ctrl-C while it is entered: noted, however often, and looked at where an answer can end."""

    def __init__(self) -> None:
        self.noted = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = True


class _Enough(Exception):
    """The answer is not wanted any more, and its first token is not there yet."""


def answer(
    session: Session,
    ids: Sequence[int],
    params: SamplingParams,
    ended: Callable[[], bool],
    on_prefill: OnPrefill | None = None,
) -> Iterator[OutputChunk | RequestOutput]:
    """Answer as `Session.ask` does, until rank 0 finds it `ended`: between two chunks, or two prefill passes."""
    ranks = session.llm.ranks

    def read(done: int, total: int) -> None:
        if on_prefill:
            on_prefill(done, total)
        if ranks.broadcast(ended()):
            raise _Enough

    pieces = session.ask(ids, params, read)
    try:
        for piece in pieces:
            yield piece
            if ranks.broadcast(ended()):
                return
    except _Enough:
        return
    finally:
        pieces.close()


def follow(session: Session, params: SamplingParams) -> None:
    """Run a rank other than the first: the same answers, until there are no more questions."""
    unheard: list[int] | None = None
    while ids := session.llm.ranks.broadcast(unheard):
        try:
            for _ in answer(session, ids, params, lambda: False):
                pass
        except RankError:
            raise
        except TriforceError:  # rank 0 has it, too, and tells of it
            continue


ROOM = 8
"""Share of the context for an answer, one part in so many, if --max-tokens asks for as much."""

SHOWN = 40  # characters of a question that is dropped


class Dialogue:
    """A conversation with one session."""

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
        self.agrees: Callable[[str], bool] | None = None
        """Asks whoever sits at a terminal, if anybody does."""
        self._color = options.color
        self._quiet = options.quiet

    @property
    def context(self) -> int:
        """Tokens that the conversation and the next answer may have together."""
        return self.session.llm.target.config.context

    def require(self, conversation: Conversation) -> None:
        """Raise RequestError unless the model's template can lay it out and something can be asked about it."""
        from triforce.engine.inputs import more_context, require_size

        config = self.session.llm.target.config
        for text in (conversation.system, conversation.document):
            require_size(text, self.tokenizer, config)
        needed = len(self._laid_out(Conversation(conversation.system, conversation.document), "?"))
        if needed >= self.context:
            raise RequestError(
                f"the document and the system message are {needed:,} tokens, and the context is {self.context:,}; "
                f"give less, or {more_context(config)}"
            )
        self._laid_out(conversation, "?")

    def ask(self, question: str) -> None:
        """Take one turn. Raises RequestError for a question that cannot be asked, and changes nothing then."""
        ids = self._fitted(question)
        self.interrupts.noted = False
        text, output = self._listen(self.session.llm.ranks.broadcast(ids))
        if output is None and not text:
            remark("[stopped before the answer began: the question is not kept]")
            return
        self.conversation.turns.append(Turn(question, output.outputs[0].text if output else text))
        if mark := self._mark(output):
            remark(mark)
        if output and not self._quiet:
            remark(_statistics(output, self._color))

    def _listen(self, ids: list[int]) -> tuple[str, RequestOutput | None]:
        """Print an answer as it comes: its text, and all of it if it came to an end."""
        painter = Painter(self.tokenizer, ids) if self._color else None
        progress = Prefill(self._quiet)
        pieces = answer(self.session, ids, self.params, lambda: self.interrupts.noted, progress)
        return show(pieces, painter, progress)

    def _mark(self, output: RequestOutput | None) -> str:
        """Return the remark on an answer that was cut."""
        if output is None:
            return "[stopped; what was said is kept]"
        if output.outputs[0].finish_reason != "length":
            return ""
        if output.completion_tokens < self.params.max_tokens:
            return f"[cut: the context of {self.context:,} tokens is full]"
        return f"[cut at --max-tokens {self.params.max_tokens}]"

    def _fitted(self, question: str) -> list[int]:
        """Token ids that fit; what the oldest turns are dropped for is agreed. Raises RequestError."""
        room = min(self.params.max_tokens, self.context // ROOM)
        laid_out = [self._laid_out(self.conversation, question)]
        count = len(self.conversation.turns)
        while len(laid_out[-1]) + room > self.context and len(laid_out) <= count:
            laid_out.append(self._laid_out(self.conversation, question, after=len(laid_out)))
        whole = laid_out[0]
        dropped = len(laid_out) - 1
        needs = f"this takes {len(whole):,} tokens and {room:,} for the answer, and the context is {self.context:,}"
        if dropped and len(laid_out[-1]) < self.context and self._may_drop(needs, dropped):
            return laid_out[-1]
        if len(whole) >= self.context:
            advice = "/reset forgets all turns" if count else "ask less at a time, or give a shorter document"
            raise RequestError(f"{needs}; nothing was asked: {advice}")
        return whole

    def _laid_out(self, conversation: Conversation, question: str, after: int = 0) -> list[int]:
        """Return token ids of a conversation without its first turns, and of a question. Raises RequestError."""
        with Tokenization(self._quiet):
            return self.tokenizer.chat(conversation.messages(question, after=after))

    def _may_drop(self, needs: str, count: int) -> bool:
        """Forget the oldest turns, if that is agreed to."""
        said = self.conversation.turns
        if not (
            self.agrees and self.agrees(f"{needs}. Drop the oldest {counted(count, 'turn')} of {len(said)}? [y/n] ")
        ):
            return False
        first = " ".join(said[0].question.split())
        short = first if len(first) <= SHOWN else f"{first[:SHOWN]} ..."
        left = counted(len(said) - count, "turn")
        remark(f'[dropped {counted(count, "turn")}, from "{short}" on; {left} and all else stay]')
        del said[:count]
        return True


def _statistics(output: RequestOutput, color: bool) -> str:
    line = (
        f"[prompt {counted(output.prompt_tokens, 'token')}{read_before(output)} in {output.prefill_seconds:.2f} s; "
        f"{output.completion_tokens:,} new, {output.tokens_per_second:.1f} tokens/s, "
        f"{passes_per_token(output):.2f} full passes per token; seed {output.outputs[0].seed}]"
    )
    return f"{line} {legend(output.outputs[0].tiers)}" if color else line


def remark(line: str) -> None:
    """Print a remark of the chat itself to stderr: answers alone go to stdout."""
    print(line, file=sys.stderr, flush=True)
