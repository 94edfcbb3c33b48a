"""Progress on stderr until the first text, on terminals only. Imports nothing heavy."""

from __future__ import annotations

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any

from triforce.cli.options import DISK_CACHE_SIZE
from triforce.disk_cache.folder_checks import require_usable
from triforce.distributed import spawn
from triforce.errors import RequestError, escaped, printable
from triforce.interface.quantities import cache_size_of


def announce(options: Namespace) -> None:
    """Set up messages about models. Raises TriforceError for a disk cache that cannot be used."""
    _require_disk_cache(options)
    _report_models(options)


def _require_disk_cache(options: Namespace) -> None:
    folder, size = (getattr(options, name, None) for name in ("disk_cache", "disk_cache_size"))
    if folder:
        cache_size_of(str(size))
        require_usable(Path(folder), options.disk_cache_network)
    elif size is not None and (size != DISK_CACHE_SIZE or options.disk_cache_network):
        raise RequestError("--disk-cache-size and --disk-cache-network set up a disk cache; name its folder with "
                           "--disk-cache")  # fmt: skip


@contextmanager
def loading(options: Namespace) -> Iterator[None]:
    """Print, once all arguments were checked, that a model is being loaded, and afterwards where the disk cache is.

    Only rank 0 prints. Torch is imported inside the block: that alone takes seconds. Downloads have their own bars.
    """
    prints_remarks = not (getattr(options, "quiet", False) or spawn.MEETING in os.environ)
    if prints_remarks:
        report_loading(options.model)
    with Seconds("loading", quiet=not (prints_remarks and sys.stderr.isatty() and _is_local(options.model))):
        yield
    folder = getattr(options, "disk_cache", None)
    if folder and prints_remarks and not silent(options):
        from triforce.disk_cache.prefixes import MIN_TEXT_TOKENS

        cache_note = f"prompts and answers from {MIN_TEXT_TOKENS} tokens on are kept in {printable(folder)}"
        cache_note += f", up to {options.disk_cache_size}"
        print(f"{cache_note}; remove them with: triforce cache clear {printable(folder)}", file=sys.stderr, flush=True)


def _is_local(model: str | None) -> bool:
    """Return whether nothing of a model has to be downloaded."""
    from triforce.checkpoint.hub import local_path

    return model is None or local_path(model) is not None


def silent(options: Namespace) -> bool:
    """Whether a command prints errors only: `watch`, a background command, when stderr is no terminal."""
    return options.command == "watch" and not sys.stderr.isatty()


def report_loading(model: str | None) -> None:
    """Print on a terminal that a model is being loaded; None is the shipped pair."""
    if sys.stderr.isatty():
        print(f"loading {printable(model or 'the pair that comes with triforce')} ...", file=sys.stderr, flush=True)


def _report_models(options: Namespace) -> None:
    """Log to stderr which model is chosen, and which files are fetched."""
    quiet = getattr(options, "quiet", False) or silent(options)
    if quiet:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    log = logging.getLogger("triforce.models")
    handler = logging.StreamHandler()
    handler.setFormatter(EscapedFormatter())
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(logging.WARNING if quiet or spawn.MEETING in os.environ else logging.INFO)


class EscapedFormatter(logging.Formatter):
    """Log records on one line, with control characters escaped: names of files are untrusted."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one escaped line."""
        return escaped(super().format(record))


PROGRESS_SECONDS = 1.0
"""Seconds between two progress lines of a task. A task that takes less prints nothing."""


class Seconds:
    """Context manager that prints each second, on a terminal, how long a task has taken so far."""

    def __init__(self, task: str, quiet: bool = False) -> None:
        self._task = task
        self._ended = Event()
        self._thread = None if quiet or not sys.stderr.isatty() else Thread(target=self._print_seconds, daemon=True)

    def __enter__(self) -> None:
        if self._thread:
            self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread:
            self._thread.join()

    def _print_seconds(self) -> None:
        began = monotonic()
        line = ""
        while not self._ended.wait(PROGRESS_SECONDS):
            line = f"{self._task}: {monotonic() - began:.0f} s"
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
        if line:
            print(f"\r{' ' * len(line)}\r", end="", file=sys.stderr, flush=True)


BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} tokens, {rate_fmt}, {remaining} left"


class Prefill:
    """A progress bar of a prefill, with tokens/s and time left. Call it with the tokens done and their total.

    The bar stays until `close`, as work goes on between the last prompt token and the first new token that is shown.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        from tqdm import tqdm

        if self._bar is None:
            bar_options = {"leave": False, "disable": self._quiet or None, "file": sys.stderr, "bar_format": BAR}
            # Tokens that are done by now may come from a cache, and say nothing of the pace.
            self._bar = tqdm(desc="prefill", total=total, unit=" tokens", initial=done, **bar_options)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.set_description("prefill done, writing")

    def close(self) -> None:
        """Remove the bar, before text is shown or when none will come."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Prefill:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
