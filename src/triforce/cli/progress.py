"""Progress on stderr before there is text: on terminals only. Imports nothing heavy."""

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
from triforce.interface.byte_size import cache_size_of


def announce(options: Namespace) -> None:
    """Set up what is told of models. Raises TriforceError for a disk cache that cannot be used."""
    _require_disk_cache(options)
    _report_models(options)


def _require_disk_cache(options: Namespace) -> None:
    folder, size = (getattr(options, name, None) for name in ("disk_cache", "disk_cache_size"))
    if folder:
        cache_size_of(str(size))
        require_usable(Path(folder), options.disk_cache_network)
    elif size is not None and (size != DISK_CACHE_SIZE or options.disk_cache_network):
        raise RequestError("--disk-cache-size and --disk-cache-network are of a disk cache; name its folder with "
                           "--disk-cache")  # fmt: skip


@contextmanager
def loading(options: Namespace) -> Iterator[None]:
    """Tell that a model is loaded, once all arguments were checked; and behind that where prompts are kept on disk.

    Other ranks leave it to the first. Torch is imported in here: that alone takes seconds.
    """
    told = not (getattr(options, "quiet", False) or spawn.MEETING in os.environ)
    if told:
        report_loading(options.model)
    yield
    folder = getattr(options, "disk_cache", None)
    if folder and told and not silent(options):
        from triforce.disk_cache.prefixes import MIN_TEXT_TOKENS

        kept = f"prompts and answers from {MIN_TEXT_TOKENS} tokens on are kept in {printable(folder)}"
        kept += f", up to {options.disk_cache_size}"
        print(f"{kept}; remove them with: triforce cache clear {printable(folder)}", file=sys.stderr, flush=True)


def silent(options: Namespace) -> bool:
    """Whether a command says nothing but errors: one that works in the background, where nobody is at a terminal."""
    return options.command == "watch" and not sys.stderr.isatty()


def report_loading(model: str | None) -> None:
    """Say on a terminal that a model is being loaded; None is the shipped pair."""
    if sys.stderr.isatty():
        print(f"loading {printable(model or 'the pair that comes with triforce')} ...", file=sys.stderr, flush=True)


def _report_models(options: Namespace) -> None:
    """Have what is chosen and fetched of a model told on stderr."""
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
    """Records on one line that a terminal only shows: names of files are a stranger's."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return escaped(super().format(record))


TELL_SECONDS = 1.0
"""Between two lines on a text that is being cut into tokens. One that takes less is told nothing of."""


class Tokenization:
    """Tells each second on a terminal for how long a text has been cut into tokens, while it is entered."""

    def __init__(self, quiet: bool = False) -> None:
        self._over = Event()
        self._thread = None if quiet or not sys.stderr.isatty() else Thread(target=self._tell, daemon=True)

    def __enter__(self) -> None:
        if self._thread:
            self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread:
            self._thread.join()

    def _tell(self) -> None:
        began = monotonic()
        line = ""
        while not self._over.wait(TELL_SECONDS):
            line = f"cutting the text into tokens: {monotonic() - began:.0f} s"
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
        if line:
            print(f"\r{' ' * len(line)}\r", end="", file=sys.stderr, flush=True)


BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} tokens, {rate_fmt}, {remaining} left"


class Prefill:
    """A progress bar with tokens/s and time left, called with the tokens done and all there are.

    It stays until `close`, as work goes on between the last token of a prompt and the first new one that is shown.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        from tqdm import tqdm

        if self._bar is None:
            how = {"leave": False, "disable": self._quiet or None, "file": sys.stderr, "bar_format": BAR}
            # What is done by now may have been read before, and says nothing of the pace.
            self._bar = tqdm(desc="prefill", total=total, unit=" tokens", initial=done, **how)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.set_description("prefill done, writing")

    def close(self) -> None:
        """Remove the bar, as text is about to be shown, or none will come."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Prefill:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
