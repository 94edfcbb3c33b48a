"""`triforce bench locality`: how long a selection stays good, layer by layer."""

from __future__ import annotations

from argparse import Namespace

from triforce.cli.bench.acceptance import plan
from triforce.cli.bench.common import about, load, show, sources, write


def run(options: Namespace) -> int:
    """Prints a table at the end."""
    from triforce.bench.acceptance.report import locality_table
    from triforce.bench.acceptance.sweeps import localities

    llm = load(options)
    report = about() | localities(llm, sources(llm, options.texts), plan(options))
    write(options.json, report)
    show([locality_table(report)])
    return 0
