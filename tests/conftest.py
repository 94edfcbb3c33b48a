"""Tests leave nothing behind in the user's own folders. Without a CUDA device Triton's kernels are interpreted.

In an environment without torch or transformers (`make test-core`), test files that import these are skipped by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator
from importlib.util import find_spec

import pytest

from triforce.installed import has_cuda

if not has_cuda():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton, which looks only then
if find_spec("torch"):
    import torch

    torch.set_num_threads(1)
else:
    collect_ignore = ["backends/cpu"]
    """Room in which native kernels are compared with torch."""
MISSING = re.compile(r"No module named '(torch|transformers|array_api_compat|triton|nbclient|matplotlib|rich)\b")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file of tests whose imports need an extra that is not installed."""
    report = yield
    missing_module = MISSING.search(str(report.longrepr)) if report.failed else None
    if missing_module:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 1, f"{missing_module[1]} is not installed")
    return report


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What mode auto learns about the machine is kept with the tests' other files; commands inherit it."""
    old_home = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if old_home is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = old_home


@pytest.fixture(autouse=True, scope="session")
def own_priority() -> Iterator[None]:
    """Commands that run within a test process do not lower its priority, which a process cannot raise again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "nice", lambda increment: 0, raising=False)
        yield
