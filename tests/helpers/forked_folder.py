"""Folders that a fork of this process writes, so that no fuzz case copies its imports.

If transformers' models are imported already, this process writes the folders.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.helpers.forked_case import compute_alone


def made_apart(make: Callable[[Path], object]) -> Path:
    """Return a folder that such a call has written. This process removes it at its end; forks do not."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-whole-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if "transformers.modeling_utils" in sys.modules:
        make(folder)
        return folder
    child = os.fork()
    if not child:
        try:
            compute_alone()
            make(folder)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    return folder
