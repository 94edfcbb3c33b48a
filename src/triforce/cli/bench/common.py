"""What the parts of `triforce bench` share: the model, the texts, tables on a terminal, files of figures."""

from __future__ import annotations

import os
import platform
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triforce.cli.common import SPECULATION, read_texts
from triforce.cli.demo import BOOK
from triforce.cli.options import NO_DRAFT
from triforce.errors import RequestError
from triforce.imports import import_torch

if TYPE_CHECKING:
    from triforce.bench.prompts import Sources
    from triforce.eval import Table
    from triforce.llm import LLM

OWN_CODE = "triforce.py"
"""What the source of this package is called as a text."""


def load(options: Namespace) -> LLM:
    """The engine that the arguments describe, as far as they do: what is not given is as usual."""
    import_torch()
    from triforce.llm import LLM

    draft = None if options.draft == NO_DRAFT else options.draft
    asked = {name: getattr(options, name, None) for name in ("device", "dtype", *SPECULATION) if name != "mode"}
    return LLM(options.model, draft, **{name: value for name, value in asked.items() if value is not None})


def modes(llm: LLM, asked: Sequence[str] | None, usual: Iterable[str]) -> list[str]:
    """Those asked for, or the usual ones as far as these models can run them. Raises RequestError."""
    from triforce.engine.inputs import known
    from triforce.engine.modes import MODES, runnable

    if asked:
        return [known("mode", mode, MODES) for mode in asked]
    return [mode for mode in usual if mode in runnable(llm.models)]


def sources(llm: LLM, paths: Sequence[str] | None) -> Sources:
    """The texts in files and folders; without any, the book that comes with triforce, and its own source."""
    from triforce.bench.prompts import Sources
    from triforce.eval import tokenize

    if llm.tokenizer is None:
        raise RequestError("this model has no tokenizer, and the prompts are texts; add tokenizer.json to its folder")
    return Sources(llm.tokenizer, tokenize(llm, read_texts(paths) if paths else own_texts()))


def own_texts() -> dict[str, str]:
    """A book, and the Python files of this package one after another."""
    package = resources.files("triforce")
    files = sorted(Path(str(package)).rglob("*.py"))
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return {BOOK: (package / "assets" / BOOK).read_text(encoding="utf-8"), OWN_CODE: code}


def about() -> dict[str, Any]:
    """Where figures come from."""
    return {"machine": machine(), "command": "triforce " + " ".join(sys.argv[1:])}


def write(file: str | None, report: dict[str, Any]) -> None:
    """All figures, if they are wanted in a file."""
    if file:
        from triforce.bench.results_file import dumps

        Path(file).write_text(dumps(report), encoding="utf-8")


def show(tables: Iterable[Table]) -> None:
    """Tables in colour on a terminal that can show them, where `rich` is installed; else plain."""
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


def machine() -> str:
    """What the figures were measured on."""
    import torch

    model = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), "")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model or platform.machine()}, {cpus} cores, torch {torch.__version__}"


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
