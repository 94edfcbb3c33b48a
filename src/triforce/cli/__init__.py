"""The command `triforce`. A command's module, and torch with it, is imported after the arguments were parsed."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from time import perf_counter

from triforce.cli.parser import parse
from triforce.cli.progress import announce
from triforce.cli.streams import OutputError, prepare, require_stdout
from triforce.errors import (
    CacheWarning,
    RankError,
    RequestError,
    TriforceError,
    as_option,
    escaped,
    use_argument_format,
)

MISTAKE = 2
RANK_LOST = 3  # exit code of a rank that lost another rank: `launch` reports the rank that failed first
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
PIPE_CLOSED = 141  # 128 + SIGPIPE
WITHOUT_OUTPUT = ("batch", "watch")
"""Commands that may write nothing to stdout."""


def main(argv: Sequence[str] | None = None, began: float | None = None) -> int:
    """Run one command; return its exit code. A user's mistake gives one message on stderr and code 2.

    began: start of the process, before its imports, on the clock of `perf_counter`; None: now.
    """
    return exit_code(partial(_run, argv, perf_counter() if began is None else began))


def _run(argv: Sequence[str] | None, began: float) -> int:
    options = parse(argv)
    options.began = began
    if getattr(options, "offline", False):
        os.environ["HF_HUB_OFFLINE"] = "1"  # the hub's client reads it on import, here and in processes started later
    _require_folder()
    if options.command not in WITHOUT_OUTPUT:
        require_stdout()
    announce(options)
    code: int = import_module(f"triforce.cli.{options.command.replace('-', '_')}").run(options)
    return code


def exit_code(command: Callable[[], int]) -> int:
    """Run `command`; return its exit code. An exception becomes a message on stderr and its exit code."""
    prepare()
    with warnings.catch_warnings():
        warning_printer = _WarningPrinter()
        warnings.showwarning = warning_printer  # type: ignore[assignment]
        return _code(lambda: _flushed(command)) or warning_printer.code


def _flushed(command: Callable[[], int]) -> int:
    """Run `command` and flush stdout, also when `command` raises SystemExit, as the help does."""
    try:
        with use_argument_format(as_option):
            code = command()
    except SystemExit:
        sys.stdout.flush()
        raise
    except BaseException:
        with suppress(OSError, OutputError):  # the caller reports the first error
            sys.stdout.flush()
        raise
    sys.stdout.flush()
    return code


def _code(command: Callable[[], int]) -> int:
    try:
        return command()
    except TriforceError as error:
        print(f"triforce: error: {error.message_text(as_option)}", file=sys.stderr)
        return RANK_LOST if isinstance(error, RankError) else MISTAKE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return PIPE_CLOSED
    except OSError as error:
        print(f"triforce: error: {escaped(_os_error_text(error))}", file=sys.stderr)
        return MISTAKE


def _os_error_text(error: OSError) -> str:
    """Return the message of an OSError without its number."""
    if error.filename is None or error.strerror is None:
        return error.strerror or str(error)
    return (
        f"{os.fsdecode(error.filename)} cannot be read or written ({error.strerror}); remove the cause, or name another"
    )


class _WarningPrinter:
    """Prints each warning on one line, a CacheWarning as an error. code: exit code, MISTAKE after a CacheWarning."""

    def __init__(self) -> None:
        self.code = 0

    def __call__(self, message: Warning | str, category: type[Warning], *_: object) -> None:
        is_error = issubclass(category, CacheWarning)
        self.code = MISTAKE if is_error else self.code
        print(f"triforce: {'error' if is_error else 'warning'}: {escaped(str(message))}", file=sys.stderr)


def _require_folder() -> None:
    """Raise RequestError if the current folder was deleted: libraries that are loaded later would end the process."""
    try:
        os.getcwd()
    except OSError as error:
        raise RequestError("the current folder does not exist any more; change to one that does, with cd") from error
