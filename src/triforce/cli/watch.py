"""`triforce watch`: reads the texts of a folder into a disk cache in the background, and again what changes.

On a terminal it tells how far it is; elsewhere it is silent.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from triforce.cli.chat.conversation import Conversation
from triforce.cli.engine_arguments import load
from triforce.cli.progress import Prefill, Tokenization, silent
from triforce.cli.text_files import tell_left_out
from triforce.disk_cache import documents as disk_cache_documents
from triforce.disk_cache.documents import SkippedFiles, Stamp, TextFile, WatchedFolder, files_of, joined, stamps
from triforce.disk_cache.folder import LOG
from triforce.errors import ModelError, RequestError, escaped
from triforce.interface.outputs import RequestOutput
from triforce.ragged import common_prefix

if TYPE_CHECKING:
    from triforce.llm import LLM

LOWEST = 19
"""Niceness: whoever else wants the processor has it."""
POLL_SECONDS = 2.0
"""Between two looks at the folder."""


def run(options: Namespace) -> int:
    """Read a folder, then what changes in it, until Ctrl-C. Raises TriforceError."""
    folder = Path(options.folder).resolve()
    files_of(folder)  # a mistake is found before a model is loaded
    os.nice(LOWEST)
    watcher = Watcher(load(options), folder, options.each, silent(options))
    watcher.read()
    while not options.once:
        watcher.tell("waiting for changes; Ctrl-C ends this")
        watcher.wait()
        try:
            watcher.read()
        except RequestError as error:  # it may be mended by the next change
            watcher.tell(f"triforce: error: {error}")
    return 0


class _Changed(Exception):
    """The folder is no longer what is being read."""


class Watcher:
    """The documents of a folder, and a model with a disk cache that reads them. each: every file is a document.

    silent: nothing is told. Raises ModelError for a model without a tokenizer.
    """

    def __init__(self, llm: LLM, folder: Path, each: bool, silent: bool) -> None:
        if llm.tokenizer is None:
            raise ModelError("this model has no tokenizer, and texts are to be read; put one into the model's folder")
        assert llm.engines.parts.disk, "there is an option that must be given"
        self._llm = llm
        self._tokenizer = llm.tokenizer
        self._cache = llm.engines.parts.disk.store.folder
        self._folder = folder
        self._each = each
        self._silent = silent
        self._stamps = self._now()
        self._secret = self._cache.secret
        self._done: set[tuple[str, ...]] = set()  # digests of the files of documents that are read
        self._left_out = ""  # what is said of that
        self._look = 0.0  # when to look at the folder again

    def tell(self, line: str) -> None:
        """Say something on a terminal, on one line that it only shows: names of files are a stranger's."""
        if not self._silent:
            print(escaped(line), file=sys.stderr, flush=True)

    def read(self) -> None:
        """Read what was not read yet, and begin anew where the folder changes meanwhile. Raises RequestError."""
        while True:
            self._stamps = self._now()
            self._look = perf_counter() + POLL_SECONDS
            known = [
                each.files for each in disk_cache_documents.watched_folders(self._cache) if each.path == self._folder
            ]
            left_out = SkippedFiles()
            files = files_of(self._folder, known[0] if known else (), left_out)
            if left_out.summary != self._left_out:
                tell_left_out(self._folder, left_out)
                self._left_out = left_out.summary
            self._note(files)
            try:
                for name, parts, text in self._documents(files):
                    self._read_document(name, parts, text)
                return
            except _Changed:
                self.tell("the folder has changed; what was read of it is kept")
                self._settle()

    def wait(self) -> None:
        """Return once the folder has changed, and changes no more, or the disk cache was deleted and is made anew."""
        while self._now() == self._stamps and not self._lost():
            time.sleep(POLL_SECONDS)
        self._settle()

    def _lost(self) -> bool:
        """Whether the disk cache was deleted. It is made anew, if that is possible, and nothing counts as read."""
        with suppress(OSError):
            self._cache.renew()
        if self._cache.secret == self._secret:
            return False
        self._secret = self._cache.secret
        self._done.clear()
        self.tell("the disk cache was deleted and is made anew; all is read again")
        return True

    def _now(self) -> dict[str, Stamp]:
        """Return the files of the folder; none while it is away."""
        try:
            return stamps(self._folder)
        except RequestError:
            return {}

    def _settle(self) -> None:
        seen = self._stamps
        while seen != (now := self._now()):
            seen = now
            time.sleep(POLL_SECONDS)

    def _note(self, files: Sequence[TextFile]) -> None:
        """Write down in which order files are read, for whoever asks about them."""
        try:
            order = [(file.name, file.digest) for file in files]
            disk_cache_documents.record_folder(self._cache, WatchedFolder(self._folder, self._each, order))
        except OSError as error:
            LOG.warning("disk cache: the manifest is not kept: %s", error)

    def _documents(self, files: Sequence[TextFile]) -> Iterator[tuple[str, tuple[str, ...], str]]:
        """Yield the name of each document, the digests of its files, and its text."""
        if not self._each:
            yield self._folder.name, tuple(file.name + file.digest for file in files), joined(files)
        else:
            yield from ((file.name, (file.digest,), file.text) for file in files)

    def _read_document(self, name: str, parts: tuple[str, ...], text: str) -> None:
        """Read a document, if that was not done before. Raises RequestError for a folder that is too long."""
        if parts in self._done:
            return
        ids = self._ids(text)
        context = self._llm.target.config.context
        if len(ids) >= context:
            too_long = f"{name} has {len(ids):,} tokens, and the context is {context:,}"
            if not self._each:
                raise RequestError(f"{too_long}; name a smaller folder, or add --each to read every file for itself")
            self.tell(f"{too_long}: it is left out")
        elif output := self._prefill(ids):
            self.tell(f"{name}: {output.prompt_tokens:,} tokens, {output.cached_tokens:,} of them read before")
        self._done.add(parts)

    def _prefill(self, ids: list[int]) -> RequestOutput | None:
        """Read a prompt, and tell how far that is."""
        output = None
        with Prefill(self._silent) as progress:

            def report(done: int, total: int) -> None:
                progress(done, total)
                if perf_counter() > self._look:
                    self._look = perf_counter() + POLL_SECONDS
                    if self._now() != self._stamps:
                        raise _Changed

            params = self._llm.sampling_params(max_tokens=1)
            for piece in self._llm.stream(ids, params, on_prefill=report):
                output = piece if isinstance(piece, RequestOutput) else None
        return output

    def _ids(self, text: str) -> list[int]:
        """Return how every question about a text begins, by the model's chat template; without one, the text."""
        with Tokenization(self._silent):
            if not self._tokenizer.chats:
                return self._llm.encode(text)
            one, other = (self._tokenizer.chat(Conversation(document=text).messages(word)) for word in ("What", "Is"))
        return one[: common_prefix(one, other)]
