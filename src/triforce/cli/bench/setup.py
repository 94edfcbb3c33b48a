"""The model and the texts that a part of `triforce bench` measures, and the output of its figures."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triforce.bench.results_file import machine, measured_roofline, provenance
from triforce.cli.engine_arguments import SPECULATION
from triforce.cli.options import draft_named
from triforce.cli.progress import loading
from triforce.cli.text_files import BOOK, read_texts, sample_book, write_text
from triforce.errors import RequestError

if TYPE_CHECKING:
    from triforce.bench.prompts import Sources
    from triforce.checkpoint.tokenizer import Tokenizer
    from triforce.llm import LLM
    from triforce.tables import Table

OWN_CODE = "triforce.py"
"""Name of the text that is the package's own source."""


def load(options: Namespace) -> LLM:
    """Return the engine that the arguments describe; a setting that is missing or None has the engine's default."""
    draft = draft_named(options)
    settings = {
        name: getattr(options, name, None)
        for name in ("device", "dtype", "kv_dtype", "weight_inputs", *SPECULATION)
        if name != "mode"
    }
    with loading(options):
        from triforce.llm import LLM

        return LLM(options.model, draft, **{name: value for name, value in settings.items() if value is not None})


def require_temperatures(temperatures: Iterable[float]) -> None:
    """Raise RequestError for a temperature below 0, or one that is not finite."""
    for temperature in temperatures:
        if not 0 <= temperature < math.inf:
            raise RequestError(f"--temperatures {temperature}: give finite numbers of at least 0 (0 is greedy)")


def modes(llm: LLM, requested_modes: Sequence[str] | None, default_modes: Iterable[str]) -> list[str]:
    """Return the requested modes, or the default modes that these models can run. Raises RequestError."""
    from triforce.engine.inputs import known
    from triforce.engine.tier_builder import MODES

    if requested_modes:
        return [known("mode", mode, MODES) for mode in requested_modes]
    return [mode for mode in default_modes if mode in llm.modes]


def sources(llm: LLM, paths: Sequence[str] | None) -> Sources:
    """Return texts of files and folders, or the sample book and the package's source. Raises RequestError."""
    if llm.tokenizer is None:
        raise RequestError("this model has no tokenizer, and the prompts are texts; add tokenizer.json to its folder")
    return sources_of(llm.tokenizer, paths)


def sources_of(tokenizer: Tokenizer, paths: Sequence[str] | None) -> Sources:
    """Return the same texts for a tokenizer without a model. Raises RequestError."""
    from triforce.bench.prompts import Sources
    from triforce.eval import encode_texts

    return Sources(tokenizer, encode_texts(tokenizer, read_texts(paths) if paths else own_texts()))


def make_folder(option: str, folder: Path) -> None:
    """Make the folder that `option` names. Raises RequestError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{option} {folder} cannot be made ({error.strerror}); name a folder of yours") from error


def own_texts() -> dict[str, str]:
    """Return the sample book, and the Python files of this package one after another."""
    package = resources.files("triforce")
    files = sorted(Path(str(package)).rglob("*.py"))
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return {BOOK: sample_book(), OWN_CODE: code}


__all__ = ["about", "machine", "measured_roofline", "show", "write"]


def about(command: str | None = None, device: str = "cpu") -> dict[str, Any]:
    """Return provenance of figures: `command` (None: this process's), and the machine and software."""
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
    rich_table = Rich(title=table.title, caption=escape(table.note), caption_justify="left")
    for n, name in enumerate(table.header):
        rich_table.add_column(escape(name), justify="right" if n else "left")
    for row in table.rows:
        rich_table.add_row(*map(escape, row))
    Console().print(rich_table)
    return True
