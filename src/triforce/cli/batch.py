"""`triforce batch`: answer a file of requests, without a server."""

from __future__ import annotations

import asyncio
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tqdm import tqdm

from triforce.checkpoint.hub import model_name
from triforce.cli import replicas
from triforce.cli.text_files import require_writable
from triforce.distributed.group import TPGroup
from triforce.errors import RequestError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from triforce.server.batch_file import Answers
    from triforce.server.engine_client import EngineClient

REFUSED = 1
"""The exit code where lines were refused."""


def run(options: Namespace) -> int:
    """Run in one process, in several ranks that share the model, or in the ranks of replicas."""
    return replicas.run(options, answer_all)


def answer_all(options: Namespace, ranks: TPGroup) -> int:
    """Answer what is not answered yet. Raises RequestError for files, before the model is loaded."""
    with replicas.extra():
        from triforce.server import batch_file

    if ranks.rank:
        return replicas.follow(options, ranks, batch_file.LIMITS)
    source = Path(options.file)
    if not source.name:
        raise RequestError(f"{source} is no file of requests; give one")
    output = Path(options.output or source.with_suffix(".out.jsonl"))
    with _opened(source) as file:
        lines = sum(bool(line.strip()) for line in file)
        file.seek(0)
        if output.exists() and output.samefile(source):
            raise RequestError(f"{output} is the input; name another file with -o")
        require_writable(str(output))
        name = options.name or model_name(options.model)
        hidden = options.quiet or None  # None: on terminals only
        bar = tqdm(desc="batch", total=lines, unit=" requests", leave=False, disable=hidden, file=sys.stderr)
        with bar, batch_file.Answers(output, bar.update) as answers:
            if replicas.wanted(options):
                replicas.answer(options, name, file, answers)
            else:
                _answer(options, ranks, name, file, answers)
    tally = answers.tally
    if not options.quiet:
        counts = f"{tally.answered} answered, {tally.refused} refused, {tally.skipped} there already: {output}"
        print(counts, file=sys.stderr)
    if not tally.refused:
        return 0
    (reason, times), *others = tally.reasons.most_common(2)
    which = f"The commonest reason, {times} times" if others else "The reason"
    print(f"{which}: {reason}\nWhat was refused is asked again when the command is run again.", file=sys.stderr)
    return REFUSED


def _answer(options: Namespace, ranks: TPGroup, name: str, source: BinaryIO, answers: Answers) -> None:
    """Answer with an engine of this process and the other ranks. Raises TriforceError."""
    with replicas.extra():
        from triforce.server import batch_file
        from triforce.server.app import create_app

    llm, engine = replicas.engine(options, ranks, batch_file.LIMITS, "batch")

    async def run() -> None:
        try:
            app = _unless_broken(create_app(llm, engine, name, limits=batch_file.LIMITS), engine)
            await batch_file.run(app, source, answers)
        finally:
            await engine.close()

    asyncio.run(run())


def _unless_broken(app: ASGIApp, engine: EngineClient) -> ASGIApp:
    """Raises what has ended the engine, instead of having each line answered with that."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)
        if engine.failure:
            raise engine.failure

    return checked


def _opened(source: Path) -> BinaryIO:
    try:
        return source.open("rb")
    except OSError as error:
        raise RequestError(f"{source} cannot be read ({error.strerror}); give a JSONL file of requests") from error
