"""`triforce batch`: answer a file of requests, without a server."""

from __future__ import annotations

import asyncio
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from triforce.cli import replicas, together
from triforce.cli.common import load, require_writable
from triforce.cli.serving import extra, model_name
from triforce.errors import RequestError

if TYPE_CHECKING:
    from triforce.server.batch import Answers


def run(options: Namespace) -> int:
    """Answer what is not answered yet. What cannot be read or written is said before the model is loaded."""
    together.refuse("batch")
    with extra():
        from triforce.server import batch

    source, output = Path(options.file), Path(options.output or Path(options.file).with_suffix(".out.jsonl"))
    with _opened(source) as file:
        lines = sum(bool(line.strip()) for line in file)
        file.seek(0)
        if output.exists() and output.samefile(source):
            raise RequestError(f"{output} is the input; name another file with -o")
        require_writable(str(output))
        name = options.name or model_name(options.model)
        with _progress(lines) as bar, batch.Answers(output, bar.update) as answers:
            (replicas.answer if replicas.wanted(options) else _answer)(options, name, file, answers)
    tally = answers.tally
    print(
        f"{tally.answered} answered, {tally.refused} refused, {tally.skipped} there already: {output}", file=sys.stderr
    )
    return 0


def _answer(options: Namespace, name: str, source: BinaryIO, answers: Answers) -> None:
    """By an engine in this process. Raises TriforceError."""
    with extra():
        from triforce.server import batch
        from triforce.server.app import create_app
        from triforce.server.worker import Worker

    llm = load(options)
    engine = Worker(llm, batch.LIMITS)

    async def run() -> None:
        try:
            await batch.run(create_app(llm, engine, name, limits=batch.LIMITS), source, answers)
        finally:
            await engine.close()

    asyncio.run(run())


def _progress(lines: int) -> Any:
    """A bar on stderr, on terminals only."""
    from tqdm import tqdm

    return tqdm(desc="batch", total=lines, unit=" requests", leave=False, disable=None, file=sys.stderr)


def _opened(source: Path) -> BinaryIO:
    try:
        return source.open("rb")
    except OSError as error:
        raise RequestError(f"{source} cannot be read ({error.strerror}); give a JSONL file of requests") from error
