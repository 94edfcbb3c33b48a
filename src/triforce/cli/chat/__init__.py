"""`triforce chat`: questions and answers, about a document if one is named.

On a terminal, lines may be commands, and Ctrl-C ends an answer; else each line of stdin is one question.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from triforce.cli import MISTAKE, tensor_parallel
from triforce.cli.answer_output import chat_sampling
from triforce.cli.chat.commands import LeaveChat, question, run_command
from triforce.cli.chat.conversation import Conversation
from triforce.cli.chat.dialogue import Dialogue, follow, remark
from triforce.cli.engine_arguments import load, sampling
from triforce.cli.text_files import decode_text, read_document, stdin_lines
from triforce.distributed.group import TPGroup
from triforce.errors import ModelError, RankError, RequestError, TriforceError, printable
from triforce.interface.quantities import counted


def run(options: Namespace) -> int:
    """Run in one process, or in several ranks that share the model; rank 0 handles Ctrl-C."""
    return tensor_parallel.run(options, chat, graceful=True)


def chat(options: Namespace, ranks: TPGroup) -> int:
    """Run one session, whose turns share a KV cache. Rank 0 reads, decides and prints. Raises ModelError."""
    session_inputs: Any = None
    if not ranks.rank:
        session_inputs = sampling(options), _document(options)
    sampling_values, document = ranks.broadcast(session_inputs)
    llm = load(options, ranks if ranks.count > 1 else None, Conversation(options.system).messages("?"))
    params = llm.sampling_params(chat=True, **sampling_values)
    if llm.tokenizer is None:
        raise ModelError("this model has no tokenizer; chat needs one with a chat template")
    from triforce.session import Session

    session = Session(llm)
    if ranks.rank:
        follow(session, params)
        return 0
    dialogue = Dialogue(session, llm.tokenizer, params, Conversation(options.system, document), options)
    dialogue.require(dialogue.conversation)
    on_terminal = sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty())
    banner = "" if options.quiet else _banner(dialogue, chat_sampling(llm.sampling_defaults, sampling_values))
    code = _chat_on_terminal(dialogue, banner) if on_terminal else _chat_from_stdin(dialogue)
    ranks.broadcast(None)
    return code


def _document(options: Namespace) -> str:
    """Return the text to talk about; empty without --file. Raises RequestError, also for a file without text."""
    if options.file is None:
        return ""
    if not (document := read_document(options.file, options)).strip():
        raise RequestError(f"{options.file} is empty; give a document with text in it, or leave out --file")
    return document


def _chat_on_terminal(dialogue: Dialogue, banner: str) -> int:
    """Run on a terminal. A mistake is printed, and the chat goes on. banner: printed first, unless it is empty."""
    from triforce.cli.chat import terminal

    dialogue.confirm = terminal.confirm
    if banner:
        remark(banner)
    with dialogue.interrupts:
        for text in terminal.questions():
            try:
                if text in terminal.WORDS_TO_LEAVE:
                    remark(terminal.LEAVE)
                if not run_command(dialogue, text):
                    dialogue.ask(question(text))
            except LeaveChat:
                break
            except RankError:
                raise
            except TriforceError as error:
                remark(f"triforce: error: {error}")
    return 0


def _chat_from_stdin(dialogue: Dialogue) -> int:
    """Ask each nonempty line of stdin as one question. Return MISTAKE if one of them could not be asked, else 0."""
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
