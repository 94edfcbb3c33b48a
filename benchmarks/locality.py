"""Locality of retrieval: how long a selection stays good, layer by layer.

python -m benchmarks.locality --quick
"""

from __future__ import annotations

import sys
from argparse import Namespace
from time import perf_counter

from benchmarks import study
from benchmarks.acceptance.measure import locality
from benchmarks.acceptance.report import locality_table
from benchmarks.acceptance.sweeps import add_walk, sweep, workloads
from benchmarks.acceptance.teacher_forcing import Walk
from triforce.cli.bench.setup import load, show, sources


def measure(options: Namespace) -> None:
    """Print a table at the end."""
    plan = sweep(options)
    llm = load(options)
    texts = sources(llm, options.texts)
    started = perf_counter()
    works = [work for work in workloads(texts, plan.size) if work.name == "prose"]
    rows = [row for work in works for row in locality(Walk(llm.models, work, plan.params), plan.usual)]
    report = plan.about() | {"locality": rows, "seconds": perf_counter() - started}
    study.write(options, report)
    show([locality_table(report)])


main = study.command("locality", __doc__, add_walk, measure)

if __name__ == "__main__":
    sys.exit(main())
