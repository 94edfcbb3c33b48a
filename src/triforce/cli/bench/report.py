"""The figures of a part of `triforce bench`: where they come from, in a file, and as tables on a terminal."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triforce.bench.roofline import Roofline
    from triforce.eval import Table


def about(command: str | None = None) -> dict[str, Any]:
    """Return `machine` and `command`, the source of figures; the command is that of this process if None."""
    return {"machine": machine(), "command": command or "triforce " + " ".join(sys.argv[1:])}


def write(file: str | None, report: dict[str, Any]) -> None:
    """Write all figures to a file, if one is named."""
    if file:
        from triforce.bench.results_file import dumps

        Path(file).write_text(dumps(report), encoding="utf-8")


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


@cache
def machine() -> str:
    """Describe this machine: processor, cores, level of the kernels, torch, and what it reads and computes a second."""
    import torch

    from triforce.backends import native_loader

    model = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), "")
    level = native_loader.native.level() if native_loader.native else "torch"
    return (
        f"{model or platform.machine()}, {native_loader.usable_cpus()} cores, kernels {level}, "
        f"torch {torch.__version__}, {measured()}"
    )


@cache
def measured() -> Roofline:
    """Return what this machine reads and computes a second, measured once."""
    from triforce.bench import roofline

    return roofline.measure()


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
