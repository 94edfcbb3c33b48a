"""Commands of the chat: lines that begin with a slash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from triforce.cli.chat import conversation
from triforce.cli.chat.dialogue import Dialogue, remark
from triforce.errors import RequestError, printable, suggest
from triforce.interface.quantities import counted, user_path


class LeaveChat(Exception):
    """The chat is over."""


class Command(NamedTuple):
    """A command of the chat. takes: the argument behind its name; in brackets if it may be left out."""

    takes: str
    summary: str
    run: Callable[[Dialogue, str], None]


def run_command(dialogue: Dialogue, line: str) -> bool:
    """Run a line that is a command; return whether it is one. Raises RequestError, or LeaveChat.

    Of a line that begins with two slashes, the text behind the first one is a question. Several lines are always a
    question.
    """
    if not line.startswith("/") or line.startswith("//") or "\n" in line:
        return False
    typed, _, argument_text = line.partition(" ")
    name = ALIASES.get(typed, typed)
    if name in FOREIGN_COMMANDS:
        raise RequestError(f"{name} is not a command: {FOREIGN_COMMANDS[name]}; see /help")
    if name not in COMMANDS:
        raise RequestError(f"{name} is not a command{suggest(name, COMMANDS)}; see /help, or ask it as /{name}")
    command = COMMANDS[name]
    argument = argument_text.strip()
    if argument and not command.takes:
        raise RequestError(f"{name} takes nothing; {argument!r} was not understood")
    if not argument and command.takes.isalpha():
        raise RequestError(f"{name} needs more: {name} {command.takes}")
    command.run(dialogue, argument)
    return True


def question(line: str) -> str:
    """Return the question in a line that is no command, without the slash that escapes another."""
    return line[1:] if line.startswith("//") and "\n" not in line else line


def _help(dialogue: Dialogue, argument: str) -> None:
    for name, command in COMMANDS.items():
        remark(f"{f'{name} {command.takes}':<15} {command.summary}")
    remark(KEYS)


def _exit(dialogue: Dialogue, argument: str) -> None:
    raise LeaveChat


def _reset(dialogue: Dialogue, argument: str) -> None:
    dialogue.conversation.turns.clear()
    remark("[all turns are forgotten; the document and the system message stay]")


def _system(dialogue: Dialogue, text: str) -> None:
    if not text:
        remark(f"[the system message: {dialogue.conversation.system or 'none'}]")
        return
    changed_conversation = replace(dialogue.conversation, system=text)
    dialogue.require(changed_conversation)
    dialogue.conversation = changed_conversation
    remark("[the system message is set; all is read again with the next question]")


def _save(dialogue: Dialogue, file: str) -> None:
    dialogue.conversation.save(user_path(file), dialogue.model)
    remark(f"[saved to {printable(file)}: {_counts(dialogue)}]")


def _load(dialogue: Dialogue, file: str) -> None:
    loaded_conversation = conversation.load(user_path(file))
    dialogue.require(loaded_conversation)
    dialogue.conversation = loaded_conversation
    remark(f"[loaded from {printable(file)}, in the place of what was here: {_counts(dialogue)}]")


def _counts(dialogue: Dialogue) -> str:
    conversation = dialogue.conversation
    document = f", a document of {counted(len(conversation.document), 'character')}" if conversation.document else ""
    return f"{counted(len(conversation.turns), 'turn')}{document}{', a system message' if conversation.system else ''}"


COMMANDS = {
    "/help": Command("", "show this list, as /? does", _help),
    "/exit": Command("", "leave, as Ctrl-D does; so do /bye, /quit and /q", _exit),
    "/reset": Command("", "forget all turns, as /clear does; the document and the system message stay", _reset),
    "/system": Command("[TEXT]", "set the system message, or show it", _system),
    "/save": Command("FILE", "write the conversation to a file, document and all", _save),
    "/load": Command("FILE", "go on with a conversation from such a file", _load),
}

ALIASES = {"/?": "/help", "/bye": "/exit", "/quit": "/exit", "/q": "/exit", "/clear": "/reset"}
"""Commands of other chats, and the command here that does the same."""

FOREIGN_COMMANDS = {
    "/set": "options of the command set how answers are sampled, such as: triforce chat MODEL --temperature "
    "0.5; /system TEXT sets the system message",
    "/show": "for a model's properties: triforce info MODEL",
    "/model": "a chat is with one model; for another: triforce chat MODEL",
}
"""Commands of other chats that have no counterpart here, and what to use instead."""

KEYS = """\
//...           ask a question that begins with a slash; several lines are always a question
Alt-Enter       a new line (Esc, then Enter, where Alt does nothing); lines that are pasted stay together
Up, Down        what was asked before, in this chat: nothing of it is written to disk
Ctrl-C          ends an answer, and the chat goes on; at the prompt it clears what was typed
Ctrl-D          leave"""
