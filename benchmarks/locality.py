"""Locality of retrieval: how long a selection stays good, layer by layer.

python -m benchmarks.locality --quick
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from benchmarks import study
from benchmarks.acceptance.arguments import add_walk, sweep
from benchmarks.acceptance.report import locality_table
from benchmarks.acceptance.sweeps import localities
from triforce.cli.bench.report import about, show, write
from triforce.cli.bench.setup import load, sources
from triforce.cli.text_files import require_writable


def main(arguments: Sequence[str] | None = None) -> int:
    return study.run("locality", __doc__, add_walk, measure, arguments)


def measure(options: Namespace) -> int:
    """Print a table at the end."""
    require_writable(options.json)
    plan = sweep(options)
    llm = load(options)
    report = about(options.command) | localities(llm, sources(llm, options.texts), plan)
    write(options.json, report)
    show([locality_table(report)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
