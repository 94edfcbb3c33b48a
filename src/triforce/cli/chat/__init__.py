"""`triforce chat`: questions and answers, about a document if one is given.

On a terminal with commands, and Ctrl-C for an answer that is too long; else each line of stdin is one question.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from triforce.cli import MISTAKE, tensor_parallel
from triforce.cli.answer_output import of_chats
from triforce.cli.chat.commands import Leave, question, run_command
from triforce.cli.chat.conversation import Conversation
from triforce.cli.chat.dialogue import Dialogue, follow, remark
from triforce.cli.counts import counted
from triforce.cli.engine_arguments import load, sampling
from triforce.cli.text_files import decode_text, read_document, stdin_lines
from triforce.distributed.group import TPGroup
from triforce.errors import ModelError, RankError, RequestError, TriforceError, printable


def run(options: Namespace) -> int:
    """Run in one process, or in several ranks that share the model; Ctrl-C is for the first of them."""
    return tensor_parallel.run(options, chat, graceful=True)


def chat(options: Namespace, ranks: TPGroup) -> int:
    """Run one session, whose turns share a KV cache. Rank 0 reads, decides and prints. Raises ModelError."""
    read: Any = None
    if not ranks.rank:
        read = sampling(options), _document(options)
    given, document = ranks.broadcast(read)
    llm = load(options, ranks if ranks.count > 1 else None, Conversation(options.system).messages("?"))
    params = llm.sampling_params(chat=True, **given)
    if llm.tokenizer is None:
        raise ModelError("this model has no tokenizer; chat needs one with a chat template")
    from triforce.session import Session

    session = Session(llm)
    if ranks.rank:
        follow(session, params)
        return 0
    dialogue = Dialogue(session, llm.tokenizer, params, Conversation(options.system, document), options)
    dialogue.require(dialogue.conversation)
    attended = sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty())
    said = "" if options.quiet else _banner(dialogue, of_chats(llm.sampling_defaults, given))
    code = _attend(dialogue, said) if attended else _read(dialogue)
    ranks.broadcast(None)
    return code


def _document(options: Namespace) -> str:
    """The text to talk about; empty without one. Raises RequestError, for a file without text too."""
    if options.file is None:
        return ""
    if not (document := read_document(options.file, options)).strip():
        raise RequestError(f"{options.file} is empty; give a document with text in it, or leave out --file")
    return document


def _attend(dialogue: Dialogue, banner: str) -> int:
    """Run with somebody at a terminal: mistakes are told, and remedies offered. banner: said first, if anything."""
    from triforce.cli.chat import terminal

    dialogue.agrees = terminal.agrees
    if banner:
        remark(banner)
    with dialogue.interrupts:
        for text in terminal.questions():
            try:
                if text in terminal.WORDS_TO_LEAVE:
                    remark(terminal.LEAVE)
                if not run_command(dialogue, text):
                    dialogue.ask(question(text))
            except Leave:
                break
            except RankError:
                raise
            except TriforceError as error:
                remark(f"triforce: error: {error}")
    return 0


def _read(dialogue: Dialogue) -> int:
    """Each line of stdin that says something is one question. Code 2 if one of them could not be asked."""
    code = 0
    for line in stdin_lines():
        try:
            if text := decode_text(line, "stdin").strip():
                dialogue.ask(text)
        except RequestError as error:
            remark(f"triforce: error: {error}")
            code = MISTAKE
    return code


def _banner(dialogue: Dialogue, sampling: str) -> str:
    length = len(dialogue.conversation.document)
    document = f", a document of {counted(length, 'character')}" if length else ""
    return (
        f"triforce chat with {printable(dialogue.model)}: a context of {dialogue.context:,} tokens{document}\n"
        f"answers of {min(dialogue.params.max_tokens, dialogue.context):,} tokens at most (--max-tokens); "
        f"sampling: {sampling}\n"
        "/help lists the commands; Alt-Enter begins a new line; Ctrl-D or /exit leaves"
    )
