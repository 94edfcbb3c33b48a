"""`triforce bench quality`: what eviction costs."""

from __future__ import annotations

from argparse import Namespace
from functools import partial

from tqdm import tqdm

from triforce.cli.bench.common import about, load, show, sources, write
from triforce.cli.progress import Prefill


def run(options: Namespace) -> int:
    """Prints a table at the end."""
    from triforce.bench.quality import QualityConfig, rows, tables

    plan = QualityConfig(options.contexts, options.budgets, options.questions, options.tokens)
    llm = load(options)
    made = rows(llm, sources(llm, options.texts), plan, partial(Prefill, options.quiet))
    found = list(tqdm(made, desc="quality", disable=options.quiet or None, leave=False))
    write(options.json, about() | {"model": options.model or "the shipped pair", "rows": found})
    show(tables(found))
    return 0
