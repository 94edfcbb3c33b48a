"""`triforce models`: kept files of models that were fetched by one of triforce's own names."""

from __future__ import annotations

from argparse import Namespace

from triforce.checkpoint.model_sources import cached_models, models_folder, remove
from triforce.errors import printable


def run(options: Namespace) -> int:
    """List the kept models, or remove one."""
    if options.models == "remove":
        print(f"removed {printable(remove(options.name))}")
        return 0
    kept_files = cached_models()
    for model, file in kept_files:
        print(f"{model.name:<12} {file.stat().st_size / 1e6:>6,.0f} MB  {model.licence:<12} {printable(file)}")
    if not kept_files:
        print(f"nothing is kept in {printable(models_folder())}")
    return 0
