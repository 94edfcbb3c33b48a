"""`triforce bench`: speed, the certificate, other engines, kernels, the start. A file for each part."""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module

from triforce.cli.text_files import require_writable


def run(options: Namespace) -> int:
    """Run one of the parts; --json writes all figures, with the commit as it is before they are measured."""
    from triforce.bench import results_file

    require_writable(options.json, "--json")
    results_file.commit()
    code: int = import_module(f"triforce.cli.bench.{options.bench}").run(options)
    return code
