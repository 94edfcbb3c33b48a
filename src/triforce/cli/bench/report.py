"""The figures of a part of `triforce bench`: where they come from, in a file, and as tables on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from triforce.bench.results_file import machine, measured, provenance
from triforce.cli.text_files import write_text

if TYPE_CHECKING:
    import torch

    from triforce.eval import Table

__all__ = ["about", "machine", "measured", "show", "write"]


def about(command: str | None = None, device: torch.device | None = None) -> dict[str, Any]:
    """Return the command of figures, that of this process if None, and what they were measured on and with."""
    return {"command": command or "triforce " + " ".join(sys.argv[1:])} | provenance(device)


def write(file: str | None, report: dict[str, Any]) -> None:
    """Write all figures to a file, if one is named."""
    if file:
        from triforce.bench.results_file import dumps

        write_text(file, dumps(report))


def show(tables: Iterable[Table]) -> None:
    """Print tables: in colour on a terminal where `rich` is installed, else plain."""
    for table in tables:
        if not (sys.stdout.isatty() and _rich(table)):
            print(f"\n{table.plain()}")


def _rich(table: Table) -> bool:
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table as Rich
    except ImportError:
        return False
    made = Rich(title=table.title, caption=escape(table.note), caption_justify="left")
    for n, name in enumerate(table.header):
        made.add_column(escape(name), justify="right" if n else "left")
    for row in table.rows:
        made.add_row(*map(escape, row))
    Console().print(made)
    return True
