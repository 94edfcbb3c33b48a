"""`triforce bench kernels`: each kernel against the bandwidth of the memory, or the passes of a model."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from triforce.bench import kernels, shapes
from triforce.bench.shapes import FAMILY_SHAPES
from triforce.cli.bench import pass_table
from triforce.cli.bench.setup import about, machine, write
from triforce.engine.inputs import known
from triforce.errors import RequestError

CONTEXTS = (32_768, 131_072)
SHAPES = ("30m", "llama-3.2-1b")
OF_MODELS = ("widths", "prompts", "engines", "python")
"""Options that only a model has."""


def run(options: Namespace) -> int:
    """Print a line for each row as it is measured, and at the end a line of JSON. Raises TriforceError."""
    if options.model:
        return pass_table.run(options)
    if model_options := [name for name in OF_MODELS if getattr(options, name)]:
        raise RequestError(f"--{model_options[0]} is for a model; name one as MODEL, or leave it out")
    contexts = options.contexts or CONTEXTS
    if min(contexts) < 2:
        raise RequestError(f"--contexts {min(contexts)}: give at least 2 tokens")
    names = [known("shape", name, [*shapes.SHAPES, *FAMILY_SHAPES]) for name in options.shapes or SHAPES]
    rows = []
    print(machine())
    for row in kernels.rows(contexts, names):
        rows.append(row)
        print(_line(row), flush=True)
    print(json.dumps({"machine": machine(), "rows": rows}))
    write(options.json, about() | {"rows": rows})
    return 0


def _line(row: dict[str, Any]) -> str:
    name = " ".join(str(row[key]) for key in ("kernel", "shape") if key in row)
    axes_text = " ".join(
        f"{key} {row[key]:,}" for key in ("context", "width", "vocabulary", "temperature") if key in row
    )
    microseconds_text = f"{row['seconds'] * 1e6:>10,.1f} us" if "seconds" in row else ""
    bandwidth_text = f"{row['gb_per_second']:>7.1f} GB/s" if "gb_per_second" in row else ""
    flops_text = f" {row['gflop_per_second']:,.0f} GFLOP/s" if "gflop_per_second" in row else ""
    union_text = f", {row['union']:.1f} times the experts of one token" if "union" in row else ""
    share_text = f", {row['fraction']:.0%} of the machine's limit" if "fraction" in row else ""
    return f"{name:<28} {axes_text:<34} {microseconds_text} {bandwidth_text}{flops_text}{share_text}{union_text}"
