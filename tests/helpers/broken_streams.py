"""Commands with streams that are closed, full or without a reader, each in a process of its own.

`python -m tests.helpers.broken_streams` reads a case per line and prints its outcome. One process imports all that a
model needs and forks for each case, as an interpreter for each would take minutes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

SECONDS = 120
LEFT_AT_EXIT = 120
"""Exit code of the interpreter if it cannot flush stdout at its end."""
STREAMS = ("stdin", "stdout", "stderr")


class Came(NamedTuple):
    """Exit code of a command, and its output on streams that work."""

    code: int
    out: str
    err: str


def run_case(case: dict[str, Any], folder: Path) -> Came:
    """Run the arguments of a case.

    broken: how each stream is. largest: bytes that a file may have. stands_in: whether a command that prints at once
    takes the place of one that takes a minute.
    """
    files = {name: folder / name for name in STREAMS}
    files["stdin"].write_text(case.get("stdin", ""))
    for name in STREAMS[1:]:
        files[name].write_bytes(b"")
    process = os.fork()
    if not process:
        os._exit(_child(case, folder, files))  # no buffer of the parent is written again
    _, status = os.waitpid(process, 0)
    out, err = (files[name].read_text(errors="replace") for name in STREAMS[1:])
    return Came(os.waitstatus_to_exitcode(status), out, err)


def _child(case: dict[str, Any], folder: Path, files: dict[str, Path]) -> int:
    """Run a command as the interpreter does; return its exit code."""
    signal.alarm(SECONDS)
    broken: dict[str, str] = case.get("broken", {})
    for descriptor, name in enumerate(STREAMS):
        _open(descriptor, broken.get(name, ""), files[name])
    os.chdir(folder)
    for descriptor, name in enumerate(STREAMS):
        closed = broken.get(name) == "closed"
        stream = None if closed else open(descriptor, "w" if descriptor else "r", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if "largest" in case:
        resource.setrlimit(resource.RLIMIT_FSIZE, (case["largest"], case["largest"]))
    sys.argv = ["triforce", *case["line"]]
    if case.get("stands_in"):
        import_module(f"triforce.cli.{case['line'][0].replace('-', '_')}").run = _printing  # type: ignore[attr-defined]
    from triforce.__main__ import main

    try:
        code = main()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
    except Exception:
        return LEFT_AT_EXIT
    sys.stderr.flush()
    return code


def _open(descriptor: int, broken: str, file: Path) -> None:
    """Put a descriptor in a state: whole, full, closed, or without a reader."""
    if broken == "closed":
        os.close(descriptor)
        return
    if broken == "unread":
        reader, opened = os.pipe()
        os.close(reader)
    else:
        flags = os.O_WRONLY | os.O_APPEND if descriptor else os.O_RDONLY
        opened = os.open("/dev/full" if broken == "full" else file, flags)
    os.dup2(opened, descriptor)
    os.close(opened)


def _printing(options: Namespace) -> int:
    print("figures\n" * 3)
    print("progress", file=sys.stderr)
    return 0


def main() -> None:
    """Answer one case per line: `folder`, and the other arguments of `run_case`."""
    import torch  # noqa: F401

    import triforce.eval
    import triforce.llm
    import triforce.server.app
    import triforce.session
    import triforce.training.trainer  # noqa: F401

    for line in sys.stdin:
        case = json.loads(line)
        print(json.dumps(run_case(case, Path(case["folder"]))), flush=True)


if __name__ == "__main__":
    main()
