"""The command `triforce`. The module of a command, and torch with it, is imported once the arguments have been read."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

from triforce.cli.parser import parse
from triforce.cli.progress import announce
from triforce.errors import RankError, TriforceError, as_option, escaped, wording

MISTAKE = 2
LOST = 3  # a rank that only says that another one is: `launch` looks for that one
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
PIPE_CLOSED = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code. A mistake of the user is one message on stderr and code 2."""
    return exit_code(partial(_run, argv))


def _run(argv: Sequence[str] | None) -> int:
    options = parse(argv)
    options.arguments = list(sys.argv[1:] if argv is None else argv)
    if getattr(options, "offline", False):
        os.environ["HF_HUB_OFFLINE"] = "1"  # the hub's client reads it when it is imported, and so do other processes
    announce(options)
    code: int = import_module(f"triforce.cli.{options.command.replace('-', '_')}").run(options)
    return code


def exit_code(command: Callable[[], int]) -> int:
    """Run `command`; return its exit code, or that of what it raised, after a message on stderr."""
    try:
        _speak_utf8()
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            with wording(as_option):
                code = command()
        sys.stdout.flush()
        return code
    except TriforceError as error:
        print(f"triforce: error: {error.worded(as_option)}", file=sys.stderr)
        return LOST if isinstance(error, RankError) else MISTAKE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return PIPE_CLOSED
    except OSError as error:  # stdout on a full disk, say
        _drop_output()
        print(f"triforce: error: {escaped(str(error))}", file=sys.stderr)
        return MISTAKE


def _speak_utf8() -> None:
    """Models write any character, and a locale without it must not end the text with an error.

    A stream that the shell has closed is replaced by nothing to read, and nowhere to write.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  it stays open as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")


def _show_warning(message: Warning | str, *_: object) -> None:
    print(f"triforce: warning: {escaped(str(message))}", file=sys.stderr)


def _drop_output() -> None:
    """The reader of stdout is gone; without this the interpreter would complain once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
