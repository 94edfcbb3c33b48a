"""The command `triforce`. The module of a command, and torch with it, is imported once the arguments have been read."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module

from triforce.cli.parser import parse
from triforce.cli.progress import announce
from triforce.cli.streams import OutputError, prepare, require_stdout
from triforce.errors import CacheWarning, RankError, RequestError, TriforceError, as_option, escaped, wording

MISTAKE = 2
LOST = 3  # a rank that only says that another one is: `launch` looks for that one
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
PIPE_CLOSED = 141  # 128 + SIGPIPE
WITHOUT_OUTPUT = ("batch", "watch")
"""Commands that may write nothing to stdout."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code. A mistake of the user is one message on stderr and code 2."""
    return exit_code(partial(_run, argv))


def _run(argv: Sequence[str] | None) -> int:
    options = parse(argv)
    options.arguments = list(sys.argv[1:] if argv is None else argv)
    if getattr(options, "offline", False):
        os.environ["HF_HUB_OFFLINE"] = "1"  # the hub's client reads it when it is imported, and so do other processes
    _require_folder()
    if options.command not in WITHOUT_OUTPUT:
        require_stdout()
    announce(options)
    code: int = import_module(f"triforce.cli.{options.command.replace('-', '_')}").run(options)
    return code


def exit_code(command: Callable[[], int]) -> int:
    """Run `command`; return its exit code, or that of what it raised, after a message on stderr."""
    prepare()
    with warnings.catch_warnings():
        told = _Warnings()
        warnings.showwarning = told  # type: ignore[assignment]
        return _code(lambda: _flushed(command)) or told.code


def _flushed(command: Callable[[], int]) -> int:
    """Run `command`, and write what it has printed, also where it ends by SystemExit, as the help does."""
    try:
        with wording(as_option):
            code = command()
    except SystemExit:
        sys.stdout.flush()
        raise
    except BaseException:
        with suppress(OSError, OutputError):  # what has ended the command is told
            sys.stdout.flush()
        raise
    sys.stdout.flush()
    return code


def _code(command: Callable[[], int]) -> int:
    try:
        return command()
    except TriforceError as error:
        print(f"triforce: error: {error.worded(as_option)}", file=sys.stderr)
        return LOST if isinstance(error, RankError) else MISTAKE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return PIPE_CLOSED
    except OSError as error:
        print(f"triforce: error: {escaped(_told(error))}", file=sys.stderr)
        return MISTAKE


def _told(error: OSError) -> str:
    """Return what an error of the system says, without its number."""
    if error.filename is None or error.strerror is None:
        return error.strerror or str(error)
    return f"{os.fsdecode(error.filename)} cannot be read or written ({error.strerror}); name another, or mend that"


class _Warnings:
    """Shows warnings on a line each. code: the exit code that they are good for."""

    def __init__(self) -> None:
        self.code = 0

    def __call__(self, message: Warning | str, category: type[Warning], *_: object) -> None:
        lost = issubclass(category, CacheWarning)
        self.code = MISTAKE if lost else self.code
        print(f"triforce: {'error' if lost else 'warning'}: {escaped(str(message))}", file=sys.stderr)


def _require_folder() -> None:
    """Raise RequestError where the current folder was deleted: libraries that are loaded later end the process then."""
    try:
        os.getcwd()
    except OSError as error:
        raise RequestError("the current folder does not exist any more; change to one that does, with cd") from error
