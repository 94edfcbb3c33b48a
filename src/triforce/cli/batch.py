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

from triforce.cli import replicas
from triforce.cli.asked_prompt import names_model
from triforce.cli.engine_arguments import PLACEMENT, load, served_name
from triforce.cli.options import STANDARD_STREAM
from triforce.cli.streams import require_stdout
from triforce.cli.text_files import count_lines, open_lines, require_writable
from triforce.distributed.group import TPGroup
from triforce.errors import RequestError, escaped, printable
from triforce.interface.quantities import counted
from triforce.server.batch import Answers, Comparison, Tally, compare, earlier_answers, sole_writer

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from triforce.server.engine_client import EngineClient

REFUSED = 1
"""Exit code if lines were refused."""


def run(options: Namespace) -> int:
    """Run in one process, in several ranks that share the model, or in the ranks of replicas."""
    return replicas.run(options, answer_all)


def answer_all(options: Namespace, ranks: TPGroup) -> int:
    """Answer the lines that have no answer yet.

    Raises RequestError for an invalid file before the model is loaded or anything is written.
    """
    if ranks.rank:
        from triforce.server import batch

        return replicas.follow(options, ranks, batch.LIMITS)
    _require_order(options)
    name = served_name(options)
    output = _output(options)
    with open_lines(options.file) as file, sole_writer(output):
        source_name = "stdin" if options.file == STANDARD_STREAM else options.file
        lines = count_lines(file, source_name)
        file.seek(0)
        if not lines:
            raise RequestError(f"{source_name} holds no requests; give a JSONL file, one request a line")
        bar_disabled = options.quiet or None  # None: on terminals only
        bar = tqdm(desc="batch", total=lines, unit=" requests", leave=False, disable=bar_disabled, file=sys.stderr)
        earlier = earlier_answers(output)
        # Without answers to compare with, the identity comes from the loaded model.
        identity_needed = bool(earlier.digests) or ranks.count > 1 or bool(replicas.replica_count(options))
        identity = _model_identity(options) if identity_needed else ""
        comparison = compare(earlier, file, identity)
        file.seek(0)
        _require_current_answers(options, comparison, len(earlier.digests), output)

        def answers(model: str) -> Answers:
            return Answers(output, model, bar.update, earlier, comparison.stale)

        with bar:
            if not (comparison.stale or comparison.unanswered_count):
                with answers(identity):  # on entry, lines that are no answers are dropped
                    tally = Tally(skipped=lines)
            elif replicas.replica_count(options):
                with answers(identity) as open_answers:
                    replicas.answer(options, name, file, open_answers)
                tally = open_answers.tally
            else:
                tally = _answer(options, ranks, name, file, identity, answers)
    return _report_tally(options, tally, output)


def _require_current_answers(options: Namespace, comparison: Comparison, count: int, output: Path | None) -> None:
    """Raise RequestError for stale answers without --again; print how many answers have no digest."""
    if comparison.stale and not options.again:
        stale_count = f"{len(comparison.stale)} of the {count} answers in {output}"
        raise RequestError(f"{stale_count} belong to other requests, another model or other settings; replace "
                           "them with --again, or name another file with -o")  # fmt: skip
    if comparison.undigested_count and not options.quiet:
        digest_note = "has no digest, and is kept"
        if comparison.undigested_count > 1:
            digest_note = "have no digest, and are kept"
        counts = counted(comparison.undigested_count, "answer")
        print(f"{counts} in {printable(output)} {digest_note}", file=sys.stderr)


def _model_identity(options: Namespace) -> str:
    """Return a text that names the model and each setting on which answers depend. Raises TriforceError."""
    from triforce.engine.text_fingerprint import model_fingerprint

    placement = {name: getattr(options, name) for name in PLACEMENT}
    if replicas.replica_count(options) and options.model and not Path(options.model).exists():
        return f"{options.model} {placement} {options.coupling}"  # the files may be on other machines only
    return model_fingerprint(options.model, coupling=options.coupling, **placement)


def _require_order(options: Namespace) -> None:
    """Raise RequestError if the MODEL stands before the FILE."""
    file = options.file
    model = options.model
    model_comes_first = names_model(file) and (file.endswith(".gguf") or not Path(file).is_file())
    if model_comes_first and model and Path(model).is_file() and not model.endswith(".gguf"):
        raise RequestError(f"FILE comes first, and MODEL behind it: triforce batch {model} {file}")


def _output(options: Namespace) -> Path | None:
    """Return the file that answers go to; None is stdout. Raises RequestError."""
    source = Path(options.file)
    if not source.name and options.file != STANDARD_STREAM:
        raise RequestError(f"{source} is no file of requests; give one")
    output_name = options.output or (
        STANDARD_STREAM if options.file == STANDARD_STREAM else str(source.with_suffix(".out.jsonl"))
    )
    if output_name == STANDARD_STREAM:
        if options.again:
            raise RequestError("--again needs a file of answers, and these go to stdout; leave it out, or name a file")
        require_stdout()
        return None
    require_writable(output_name, "-o")
    output = Path(output_name)
    if output.exists() and os.path.exists(source) and output.samefile(source):
        raise RequestError(f"{output} is the input; name another file with -o")
    return output


def _report_tally(options: Namespace, tally: Tally, output: Path | None) -> int:
    """Print how many lines were answered, refused and skipped; return the exit code."""
    if not options.quiet:
        counts = f"{tally.answered} answered, {tally.refused} refused, {tally.skipped} skipped"
        print(f"{counts}: {printable(output or 'on stdout')}", file=sys.stderr)
    if not tally.refused:
        return 0
    retry_note = "The answers hold each reason. Correct the lines and run the command again: it retries refused lines."
    if output is None:
        retry_note = (
            "Answers on stdout are not kept: a second run answers all lines. With -o OUT it retries refused lines only."
        )
    print(f"{escaped(tally.commonest())}\n{retry_note}", file=sys.stderr)
    if not options.model:
        print("No MODEL is given, so the shipped pair answers. To name one: triforce batch FILE MODEL", file=sys.stderr)
    return REFUSED


def _answer(
    options: Namespace, ranks: TPGroup, name: str, source: BinaryIO, identity: str, answers: Callable[[str], Answers]
) -> Tally:
    """Answer with an engine of this process and the other ranks; return the tally. Raises TriforceError.

    identity: the model's identity; if empty, the loaded model gives it. answers: makes the output for an identity.
    """
    from triforce.engine.text_fingerprint import loaded_fingerprint
    from triforce.server import batch
    from triforce.server.app import create_app
    from triforce.server.engine_thread import Worker

    llm = load(options, ranks if ranks.count > 1 else None)
    engine = Worker(llm, batch.LIMITS)
    output = answers(identity or loaded_fingerprint(llm.target, options.coupling))

    async def run() -> None:
        try:
            app = _raising_engine_failure(create_app(llm, engine, name, limits=batch.LIMITS, any_model=False), engine)
            with output:
                await batch.run(app, source, output)
        finally:
            await engine.close()

    asyncio.run(run())
    return output.tally


def _raising_engine_failure(app: ASGIApp, engine: EngineClient) -> ASGIApp:
    """Wrap `app` so that a failure of the engine is raised. Else every line would be answered with the failure."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)
        if engine.failure:
            raise engine.failure

    return checked
