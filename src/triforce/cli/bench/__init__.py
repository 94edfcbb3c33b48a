"""`triforce bench`: one module for each part. The comparison with other engines exists in a checkout only."""

from __future__ import annotations

import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import triforce
from triforce.cli.text_files import require_writable
from triforce.errors import RequestError

OF_CHECKOUT = {"compare": "benchmarks.compare.command"}
"""Parts that are not in the package, and their modules in a checkout."""


def run(options: Namespace) -> int:
    """Run one part. --json writes all figures, with the commit, which is read before the measurements.

    Raises RequestError outside a checkout for a part of `OF_CHECKOUT`.
    """
    module = OF_CHECKOUT.get(options.bench)
    if module:
        _find_checkout(options.bench, module)
    from triforce.backends.dispatch import require_torch
    from triforce.bench import results_file

    require_torch("benchmarks")
    require_writable(options.json, "--json")
    results_file.commit()
    code: int = import_module(module or f"triforce.cli.bench.{options.bench}").run(options)
    return code


def _find_checkout(part: str, module: str) -> None:
    """Make the modules beside `src` importable. Raises RequestError if triforce was installed from a wheel."""
    root = Path(str(triforce.__file__)).parents[2]
    if not root.joinpath(*module.split(".")).with_suffix(".py").is_file():
        raise RequestError(
            f"bench {part} needs a checkout of the repository; run `make install` in it, then "
            "use its .venv/bin/triforce"
        )
    if sys.path[0] != str(root):
        sys.path.insert(0, str(root))
