"""`triforce bench acceptance`: by selection, budget, chunk size and full layers, on given texts."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triforce.cli.bench.common import about, load, show, sources, write
from triforce.errors import RequestError

if TYPE_CHECKING:
    from triforce.bench.acceptance.sweeps import SweepConfig


def run(options: Namespace) -> int:
    """Prints tables at the end; --docs writes the page and its pictures."""
    from triforce.bench.acceptance.report import markdown, tables
    from triforce.bench.acceptance.sweeps import measured

    docs = _folder(options.docs)
    llm = load(options)
    report = _about(options) | measured(llm, sources(llm, options.texts), plan(options))
    write(options.json, report)
    show(tables(report))
    if docs:
        from triforce.bench.acceptance.pictures import draw

        (docs / "acceptance.md").write_text(markdown(report), encoding="utf-8")
        draw(report, docs / "pictures")
    return 0


def plan(options: Namespace) -> SweepConfig:
    """What is asked for, the rest as usual or as in a quick look. Raises RequestError for what cannot be."""
    from triforce.bench.acceptance.sweeps import QUICK, SweepConfig

    start = QUICK if options.quick else SweepConfig()
    names = {"full_layer_counts": "full_layers"} | {
        name: name
        for name in (
            "context",
            "positions",
            "budget",
            "budgets",
            "chunks",
            "speculative_tokens",
            "temperature",
            "top_p",
        )
    }
    given = {field: value for name, field in names.items() if (value := getattr(options, name, None)) is not None}
    made = replace(start, **given)
    if min(made.context, made.positions, made.budget, *made.budgets, *made.chunks) < 1 or made.speculative_tokens < 1:
        raise RequestError("contexts, positions, budgets, chunks and gammas must be at least 1")
    return made


def _about(options: Namespace) -> dict[str, Any]:
    return about() | {"model": options.model or "the shipped pair"}


def _folder(name: str | None) -> Path | None:
    """Made now, rather than after the measurement."""
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
