"""Shared by the commands that need the extra `serve`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from triforce.cli.engine_arguments import load
from triforce.errors import RequestError

if TYPE_CHECKING:
    from triforce.distributed.group import TPGroup
    from triforce.server.limits import Limits


@contextmanager
def extra(name: str = "serve") -> Iterator[None]:
    """Imports in here may fail. Raises RequestError saying how to get what is missing: the extra of that name."""
    try:
        yield
    except ImportError as error:
        raise RequestError(f"{error.name} is not installed; get it with: pip install 'triforce[{name}]'") from error


def follow(options: Namespace, ranks: TPGroup, limits: Limits) -> int:
    """Run a rank other than the first. Raises TriforceError."""
    from triforce.server.tp_mirror import follow

    follow(load(options, ranks), limits)
    return 0


def model_name(model: str | None) -> str:
    """A model is called what its hub or its folder calls it; where the folder lies is nobody's business."""
    if model is None:
        return "triforce"
    return Path(model).resolve().name if Path(model).is_dir() else model
