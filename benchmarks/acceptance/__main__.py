"""Acceptance of retrieval by selection policy, budget, chunk size and layers seen in full.

python -m benchmarks.acceptance --json benchmarks/results/acceptance.json --docs docs
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from benchmarks import study
from benchmarks.acceptance.report import markdown, tables
from benchmarks.acceptance.sweeps import add_walk, measured, sweep
from triforce.cli.bench.setup import about, load, show, sources, write
from triforce.cli.options import several
from triforce.errors import RequestError


def add_arguments(parser: ArgumentParser) -> None:
    add_walk(parser)
    add = parser.add_argument
    add("--budgets", type=several(int), metavar="N,...", help="tokens that retrieval sees (256 to 4096)")
    add("--chunks", type=several(int), metavar="N,...", help="tokens selected together (8 to 64)")
    add("--full-layer-counts", type=several(int), metavar="N,...", help="first layers that it sees in full (0 to 2)")
    add("--docs", metavar="FOLDER", help="write acceptance.md and pictures/ there; needs matplotlib")


def measure(options: Namespace) -> None:
    """Print tables at the end; with --docs, write the page and its pictures."""
    docs = _folder(options.docs)
    plan = sweep(options)
    llm = load(options)
    where = about(options.command) | {"model": options.model or "the shipped pair"}
    report = where | measured(llm, sources(llm, options.texts), plan)
    write(options.json, report)
    show(table for table, _ in tables(report))
    if docs:
        from benchmarks.pictures import draw_acceptance

        (docs / "acceptance.md").write_text(markdown(report), encoding="utf-8")
        draw_acceptance(report, docs / "pictures")


def _folder(name: str | None) -> Path | None:
    """The folder of the page, made now rather than after the measurement. Raises RequestError."""
    if name is None:
        return None
    try:
        (Path(name) / "pictures").mkdir(parents=True, exist_ok=True)
        import matplotlib  # noqa: F401
    except OSError as error:
        raise RequestError(f"--docs {name} cannot be made ({error.strerror}); name a folder") from error
    except ImportError as error:
        raise RequestError("--docs draws pictures with matplotlib: pip install 'triforce[bench]'") from error
    return Path(name)


main = study.command("acceptance", __doc__, add_arguments, measure)

if __name__ == "__main__":
    sys.exit(main())
