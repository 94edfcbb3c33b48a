"""`triforce chat`: questions and answers, about a document if one is given.

On a terminal with commands, and Ctrl-C for an answer that is too long; else each line of stdin is one question.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from triforce.cli import MISTAKE, tensor_parallel
from triforce.cli.chat.answer import follow
from triforce.cli.chat.commands import Leave, heed, question
from triforce.cli.chat.conversation import Conversation
from triforce.cli.chat.talk import Talk, tell
from triforce.cli.common import decode_text, load, read_text, sampling
from triforce.errors import ModelError, RankError, RequestError, TriforceError

if TYPE_CHECKING:
    from triforce.checkpoint.tokenizer import Tokenizer
    from triforce.distributed.group import TPGroup
    from triforce.llm import LLM


def run(options: Namespace) -> int:
    """In one process, or in several that share the model; Ctrl-C is for the first of them."""
    return tensor_parallel.run(options, chat, winds_down=True)


def chat(options: Namespace, ranks: TPGroup) -> int:
    """One session: what the turns have in common stays in its KV cache. Rank 0 reads, decides and prints."""
    asked: Any = None if ranks.rank else (sampling(options), _document(options))
    given, document = ranks.broadcast(asked)
    llm = load(options, ranks if ranks.count > 1 else None)
    params = llm.sampling_params(**given)
    tokenizer = _tokenizer(llm)
    from triforce.session import Session

    session = Session(llm)
    if ranks.rank:
        follow(session, params)
        return 0
    talk = Talk(session, tokenizer, params, Conversation(options.system, document), options)
    talk.require(talk.conversation)
    attended = sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty())
    code = _attend(talk, options.quiet) if attended else _read(talk)
    ranks.broadcast(None)
    return code


def _attend(talk: Talk, quiet: bool) -> int:
    """Somebody sits at a terminal: mistakes are told, and what can be done about them is asked."""
    from triforce.cli.chat import terminal

    talk.agrees = terminal.agrees
    if not quiet:
        tell(_banner(talk))
    with talk.interrupts:
        for text in terminal.questions():
            try:
                if not heed(talk, text):
                    talk.ask(question(text))
            except Leave:
                break
            except RankError:
                raise
            except TriforceError as error:
                tell(f"triforce: error: {error}")
    return 0


def _read(talk: Talk) -> int:
    """Each line of stdin that says something is one question. Code 2 if one of them could not be asked."""
    code = 0
    for line in iter(sys.stdin.buffer.readline, b""):
        if text := decode_text(line, "stdin").strip():
            try:
                talk.ask(text)
            except RequestError as error:
                tell(f"triforce: error: {error}")
                code = MISTAKE
    return code


def _banner(talk: Talk) -> str:
    document = f", a document of {len(talk.conversation.document):,} characters" if talk.conversation.document else ""
    return (
        f"triforce chat with {talk.model}: a context of {talk.context:,} tokens{document}\n"
        "/help lists the commands; Alt-Enter begins a new line; Ctrl-D or /exit leaves"
    )


def _document(options: Namespace) -> str:
    return read_text(options.file) if options.file else ""


def _tokenizer(llm: LLM) -> Tokenizer:
    """The model's tokenizer. Raises ModelError if there is none."""
    if llm.tokenizer is None:
        raise ModelError("this model has no tokenizer; chat needs one with a chat template")
    return llm.tokenizer
