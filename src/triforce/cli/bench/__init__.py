"""`triforce bench`: one module for each part. The comparison with other engines exists in a checkout only."""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module

from triforce.cli.bench.checkout import find_checkout
from triforce.cli.text_files import require_writable
from triforce.errors import RequestError

OF_CHECKOUT = {"compare": "benchmarks.compare.command"}
"""Parts that are not in the package, and their modules in a checkout."""


def run(options: Namespace) -> int:
    """Run one part. --json writes all figures, with the commit, which is read before the measurements.

    Raises RequestError outside a checkout for a part of `OF_CHECKOUT`.
    """
    module = OF_CHECKOUT.get(options.bench)
    if module and not find_checkout(module):
        raise RequestError(
            f"bench {options.bench} needs a checkout of the repository; run `make install` in it, then "
            "use its .venv/bin/triforce"
        )
    from triforce.backends.dispatch import require_torch
    from triforce.bench import results_file

    require_torch("benchmarks")
    require_writable(options.json, "--json")
    results_file.commit()
    code: int = import_module(module or f"triforce.cli.bench.{options.bench}").run(options)
    return code
