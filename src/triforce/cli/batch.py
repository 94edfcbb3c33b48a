"""`triforce batch`: answer a file of requests, without a server."""

from __future__ import annotations

import asyncio
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tqdm import tqdm

from triforce.backends.torch_import import import_torch
from triforce.cli import replicas
from triforce.cli.asked_prompt import names_model
from triforce.cli.counts import counted
from triforce.cli.engine_arguments import PLACEMENT, load, served_name
from triforce.cli.options import STANDARD
from triforce.cli.streams import require_stdout
from triforce.cli.text_files import count_lines, open_lines, require_writable
from triforce.distributed.group import TPGroup
from triforce.errors import RequestError, escaped, printable
from triforce.server.batch import Answers, Comparison, Tally, compare, earlier_answers, sole_writer

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from triforce.server.engine_client import EngineClient

REFUSED = 1
"""The exit code where lines were refused."""


def run(options: Namespace) -> int:
    """Run in one process, in several ranks that share the model, or in the ranks of replicas."""
    return replicas.run(options, answer_all)


def answer_all(options: Namespace, ranks: TPGroup) -> int:
    """Answer what is not answered yet. Raises RequestError for files, before the model is loaded or a file written."""
    if ranks.rank:
        with replicas.extra():
            from triforce.server import batch

        return replicas.follow(options, ranks, batch.LIMITS)
    _require_order(options)
    name = served_name(options)
    output = _output(options)
    with open_lines(options.file) as file, sole_writer(output):
        named = "stdin" if options.file == STANDARD else options.file
        lines = count_lines(file, named)
        file.seek(0)
        if not lines:
            raise RequestError(f"{named} holds no requests; give a JSONL file, one request a line")
        hidden = options.quiet or None  # None: on terminals only
        bar = tqdm(desc="batch", total=lines, unit=" requests", leave=False, disable=hidden, file=sys.stderr)
        earlier = earlier_answers(output)
        # Where there is nothing to compare, the model that is loaded tells its identity.
        early = bool(earlier.digests) or ranks.count > 1 or bool(replicas.wanted(options))
        identity = _model_identity(options) if early else ""
        comparison = compare(earlier, file, identity)
        file.seek(0)
        _require_same(options, comparison, len(earlier.digests), output)

        def answers(model: str) -> Answers:
            return Answers(output, model, bar.update, earlier, comparison.stale)

        with bar:
            if not (comparison.stale or comparison.unanswered_count):
                with answers(identity):  # which drops what is no answer
                    tally = Tally(skipped=lines)
            elif replicas.wanted(options):
                with answers(identity) as opened:
                    replicas.answer(options, name, file, opened)
                tally = opened.tally
            else:
                tally = _answer(options, ranks, name, file, identity, answers)
    return _told(options, tally, output)


def _require_same(options: Namespace, comparison: Comparison, count: int, output: Path | None) -> None:
    """Raise RequestError for stale answers that are not to be replaced; tell of those without a digest."""
    if comparison.stale and not options.again:
        stale = f"{len(comparison.stale)} of the {count} answers in {output}"
        raise RequestError(f"{stale} are of other requests, of another model or of other settings; answer them anew "
                           "with --again, or name another file with -o")  # fmt: skip
    if comparison.undigested_count and not options.quiet:
        digest_note = "has no digest, and is kept"
        if comparison.undigested_count > 1:
            digest_note = "have no digest, and are kept"
        counts = counted(comparison.undigested_count, "answer")
        print(f"{counts} in {printable(output)} {digest_note}", file=sys.stderr)


def _model_identity(options: Namespace) -> str:
    """Return the identity of what changes texts beside the requests. Raises TriforceError."""
    import_torch()
    from triforce.engine.text_fingerprint import model_fingerprint

    placement = {name: getattr(options, name) for name in PLACEMENT}
    if replicas.wanted(options) and options.model and not Path(options.model).exists():
        return f"{options.model} {placement} {options.coupling}"  # it may be on other machines only
    return model_fingerprint(options.model, coupling=options.coupling, **placement)


def _require_order(options: Namespace) -> None:
    """Raise RequestError where the MODEL stands before the FILE."""
    first = options.file
    second = options.model
    model_first = names_model(first) and (first.endswith(".gguf") or not Path(first).is_file())
    if model_first and second and Path(second).is_file() and not second.endswith(".gguf"):
        raise RequestError(f"FILE comes first, and MODEL behind it: triforce batch {second} {first}")


def _output(options: Namespace) -> Path | None:
    """The file that answers go to; None is stdout. Raises RequestError."""
    source = Path(options.file)
    if not source.name and options.file != STANDARD:
        raise RequestError(f"{source} is no file of requests; give one")
    named = options.output or (STANDARD if options.file == STANDARD else str(source.with_suffix(".out.jsonl")))
    if named == STANDARD:
        if options.again:
            raise RequestError("--again is of a file of answers, and these go to stdout; leave it out, or name a file")
        require_stdout()
        return None
    require_writable(named, "-o")
    output = Path(named)
    if output.exists() and os.path.exists(source) and output.samefile(source):
        raise RequestError(f"{output} is the input; name another file with -o")
    return output


def _told(options: Namespace, tally: Tally, output: Path | None) -> int:
    """Tell what became of the lines, and return the exit code."""
    if not options.quiet:
        counts = f"{tally.answered} answered, {tally.refused} refused, {tally.skipped} there already"
        print(f"{counts}: {printable(output or 'on stdout')}", file=sys.stderr)
    if not tally.refused:
        return 0
    again = "What was refused is asked again when the command is run again."
    if output is None:
        again = (
            "Nothing is kept of answers on stdout: the command asks all again, and with -o OUT what was refused alone."
        )
    print(f"{escaped(tally.commonest())}\n{again}", file=sys.stderr)
    return REFUSED


def _answer(
    options: Namespace, ranks: TPGroup, name: str, source: BinaryIO, identity: str, answers: Callable[[str], Answers]
) -> Tally:
    """Answer with an engine of this process and the other ranks; return the tally. Raises TriforceError.

    identity: that of the model, or nothing where the one that is loaded tells it. answers: makes the output for it.
    """
    with replicas.extra():
        from triforce.engine.text_fingerprint import loaded_fingerprint
        from triforce.server import batch
        from triforce.server.app import create_app
        from triforce.server.engine_thread import Worker

    llm = load(options, ranks if ranks.count > 1 else None)
    engine = Worker(llm, batch.LIMITS)
    output = answers(identity or loaded_fingerprint(llm.target, options.coupling))

    async def run() -> None:
        try:
            app = _unless_broken(create_app(llm, engine, name, limits=batch.LIMITS), engine)
            with output:
                await batch.run(app, source, output)
        finally:
            await engine.close()

    asyncio.run(run())
    return output.tally


def _unless_broken(app: ASGIApp, engine: EngineClient) -> ASGIApp:
    """Raises what has ended the engine, instead of having each line answered with that."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)
        if engine.failure:
            raise engine.failure

    return checked
