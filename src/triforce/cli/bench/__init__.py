"""`triforce bench`: speed, the certificate, kernels, the start, a file for each; other engines, in a checkout."""

from __future__ import annotations

import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import triforce
from triforce.cli.text_files import require_writable
from triforce.errors import RequestError

OF_CHECKOUT = {"compare": "benchmarks.compare.command"}
"""Modules of parts that are not in the package."""


def run(options: Namespace) -> int:
    """Run one of the parts; --json writes all figures, with the commit as it is before they are measured.

    Raises RequestError for a part of a checkout where this is none.
    """
    module = OF_CHECKOUT.get(options.bench)
    if module:
        _find_checkout(options.bench, module)
    from triforce.bench import results_file

    require_writable(options.json, "--json")
    results_file.commit()
    code: int = import_module(module or f"triforce.cli.bench.{options.bench}").run(options)
    return code


def _find_checkout(part: str, module: str) -> None:
    """Let the modules beside `src` be imported. Raises RequestError after an installation from a wheel."""
    root = Path(str(triforce.__file__)).parents[2]
    if not root.joinpath(*module.split(".")).with_suffix(".py").is_file():
        raise RequestError(
            f"bench {part} needs a checkout of the repository; run `make install` in one, and its .venv/bin/triforce"
        )
    if sys.path[0] != str(root):
        sys.path.insert(0, str(root))
