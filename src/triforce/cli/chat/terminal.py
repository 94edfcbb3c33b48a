"""Questions from a terminal: editable text of one or several lines, with a history."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from triforce.cli.chat.dialogue import remark

LEAVE = "[Ctrl-D or /exit leaves the chat]"
WORDS_TO_LEAVE = ("exit", "quit", "bye", "exit()", "quit()")
"""Questions before which LEAVE is printed: other programs end on these words; here they are asked."""


def questions() -> Iterator[str]:
    """Yield the nonempty texts typed, until Ctrl-D."""
    prompt_session = PromptSession[str](
        output=create_output(always_prefer_tty=True),
        key_bindings=_keys(),
        multiline=True,
        prompt_continuation=". ",
    )
    while True:
        try:
            text = prompt_session.prompt("> ", handle_sigint=False).strip()
        except EOFError:
            return
        if text:
            yield text


def confirm(question: str) -> bool:
    """Whether the user answers yes. Ctrl-C and Ctrl-D count as no."""
    prompt_session = PromptSession[str](output=create_output(always_prefer_tty=True))
    try:
        return prompt_session.prompt(question, handle_sigint=False).strip().lower() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        return False


def _keys() -> KeyBindings:
    keys = KeyBindings()
    in_prompt = has_focus(DEFAULT_BUFFER)

    @keys.add("enter", filter=in_prompt)
    def ask(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=in_prompt)
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline()

    @keys.add("c-c", filter=in_prompt)
    def clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            run_in_terminal(partial(remark, LEAVE))

    return keys
