"""Modules of a checkout that no wheel has: the comparison with other engines."""

from __future__ import annotations

import sys
from pathlib import Path

import triforce


def find_checkout(module: str) -> bool:
    """Make the modules beside `src` importable. Returns whether `module` is there: it is not in a wheel."""
    root = Path(str(triforce.__file__)).parents[2]
    if not root.joinpath(*module.split(".")).with_suffix(".py").is_file():
        return False
    if sys.path[0] != str(root):
        sys.path.insert(0, str(root))
    return True
