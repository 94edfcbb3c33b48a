"""`triforce watch`: reads the texts of a folder into a disk cache in the background, and rereads changed ones.

On a terminal the command prints its progress; elsewhere it is silent.
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
from triforce.cli.progress import Prefill, Seconds, silent
from triforce.cli.text_files import tell_left_out
from triforce.disk_cache import documents as disk_cache_documents
from triforce.disk_cache.documents import SkippedFiles, Stamp, TextFile, WatchedFolder, files_of, joined, stamps
from triforce.disk_cache.folder import LOG
from triforce.errors import ModelError, RequestError, escaped
from triforce.interface.outputs import RequestOutput
from triforce.ragged import common_prefix

if TYPE_CHECKING:
    from triforce.llm import LLM

LOWEST_PRIORITY = 19
"""Niceness: every other process has precedence on the processor."""
POLL_SECONDS = 2.0
"""Seconds between two scans of the folder."""


def run(options: Namespace) -> int:
    """Read a folder, then each change in it, until Ctrl-C. Raises TriforceError."""
    folder = Path(options.folder).resolve()
    files_of(folder)  # raises for a mistake before a model is loaded
    os.nice(LOWEST_PRIORITY)
    watcher = Watcher(load(options), folder, options.each, silent(options))
    watcher.read()
    while not options.once:
        watcher.report("waiting for changes; Ctrl-C ends this")
        watcher.wait()
        try:
            watcher.read()
        except RequestError as error:  # the next change may mend it
            watcher.report(f"triforce: error: {error}")
    return 0


class _FolderChanged(Exception):
    """The folder has changed since its files were listed."""


class Watcher:
    """The documents of a folder, and a model that reads them into a disk cache.

    per_file: every file is a document of its own; else all files together are one. silent: print nothing. Raises
    ModelError for a model without a tokenizer.
    """

    def __init__(self, llm: LLM, folder: Path, per_file: bool, silent: bool) -> None:
        if llm.tokenizer is None:
            raise ModelError("this model has no tokenizer, and texts are to be read; put one into the model's folder")
        assert llm.engines.parts.disk, "--disk-cache is required"
        self._llm = llm
        self._tokenizer = llm.tokenizer
        self._cache = llm.engines.parts.disk.store.folder
        self._folder = folder
        self._per_file = per_file
        self._silent = silent
        self._stamps = self._current_stamps()
        self._secret = self._cache.secret
        self._finished_digests: set[tuple[str, ...]] = set()  # digests of the files of each document that was read
        self._left_out_text = ""  # the last remark on files that are left out
        self._next_check = 0.0  # perf_counter time of the next scan of the folder

    def report(self, line: str) -> None:
        """Print a line to stderr, control characters escaped: names of files are untrusted."""
        if not self._silent:
            print(escaped(line), file=sys.stderr, flush=True)

    def read(self) -> None:
        """Read the documents that were not read yet, and start over if the folder changes. Raises RequestError."""
        while True:
            self._stamps = self._current_stamps()
            self._next_check = perf_counter() + POLL_SECONDS
            file_lists = [
                manifest.files
                for manifest in disk_cache_documents.watched_folders(self._cache)
                if manifest.path == self._folder
            ]
            left_out = SkippedFiles()
            files = files_of(self._folder, file_lists[0] if file_lists else (), left_out)
            if left_out.summary != self._left_out_text:
                tell_left_out(self._folder, left_out)
                self._left_out_text = left_out.summary
            self._write_manifest(files)
            try:
                for name, digests, text in self._documents(files):
                    self._read_document(name, digests, text)
                return
            except _FolderChanged:
                self.report("the folder has changed; what was read of it is kept")
                self._wait_until_stable()

    def wait(self) -> None:
        """Return once the folder has changed and is stable again, or the disk cache was deleted and made anew."""
        while self._current_stamps() == self._stamps and not self._renew_deleted_cache():
            time.sleep(POLL_SECONDS)
        self._wait_until_stable()

    def _renew_deleted_cache(self) -> bool:
        """Whether the disk cache was deleted and is made anew; then every document counts as unread.

        If it cannot be made anew, the answer is False.
        """
        with suppress(OSError):
            self._cache.renew()
        if self._cache.secret == self._secret:
            return False
        self._secret = self._cache.secret
        self._finished_digests.clear()
        self.report("the disk cache was deleted and is made anew; all is read again")
        return True

    def _current_stamps(self) -> dict[str, Stamp]:
        """Return the stamps of the folder's files; none while the folder is missing."""
        try:
            return stamps(self._folder)
        except RequestError:
            return {}

    def _wait_until_stable(self) -> None:
        earlier_stamps = self._stamps
        while earlier_stamps != (stamps_now := self._current_stamps()):
            earlier_stamps = stamps_now
            time.sleep(POLL_SECONDS)

    def _write_manifest(self, files: Sequence[TextFile]) -> None:
        """Write the manifest: the order in which files are read, for commands that ask about the folder."""
        try:
            order = [(file.name, file.digest) for file in files]
            disk_cache_documents.record_folder(self._cache, WatchedFolder(self._folder, self._per_file, order))
        except OSError as error:
            LOG.warning("disk cache: the manifest is not kept: %s", error)

    def _documents(self, files: Sequence[TextFile]) -> Iterator[tuple[str, tuple[str, ...], str]]:
        """Yield the name of each document, the digests of its files, and its text."""
        if not self._per_file:
            yield self._folder.name, tuple(file.name + file.digest for file in files), joined(files)
        else:
            yield from ((file.name, (file.digest,), file.text) for file in files)

    def _read_document(self, name: str, digests: tuple[str, ...], text: str) -> None:
        """Read a document unless it was read before. Raises RequestError for a folder longer than the context."""
        if digests in self._finished_digests:
            return
        ids = self._prompt_ids(text)
        context = self._llm.target.config.context
        if len(ids) >= context:
            too_long = f"{name} has {len(ids):,} tokens, and the context is {context:,}"
            if not self._per_file:
                raise RequestError(
                    f"{too_long}; name a smaller folder, or add --each to read every file as a document of its own"
                )
            print(escaped(f"{too_long}: it is left out"), file=sys.stderr, flush=True)
        elif output := self._prefill(ids):
            self.report(f"{name}: {output.prompt_tokens:,} tokens, {output.cached_tokens:,} of them cached")
        self._finished_digests.add(digests)

    def _prefill(self, ids: list[int]) -> RequestOutput | None:
        """Prefill a prompt with a progress bar; return its output. Raises _FolderChanged if the folder changes."""
        output = None
        with Prefill(self._silent) as progress:

            def report(done: int, total: int) -> None:
                progress(done, total)
                if perf_counter() > self._next_check:
                    self._next_check = perf_counter() + POLL_SECONDS
                    if self._current_stamps() != self._stamps:
                        raise _FolderChanged

            params = self._llm.sampling_params(max_tokens=1)
            for chunk in self._llm.stream(ids, params, on_prefill=report):
                output = chunk if isinstance(chunk, RequestOutput) else None
        return output

    def _prompt_ids(self, text: str) -> list[int]:
        """Return the token ids with which every question about a text begins, by the model's chat template.

        Without a template, these are the text's.
        """
        with Seconds("tokenizing the text", self._silent):
            if not self._tokenizer.chats:
                return self._llm.encode(text)
            first_ids, second_ids = (
                self._tokenizer.chat(Conversation(document=text).messages(word)) for word in ("What", "Is")
            )
        return first_ids[: common_prefix(first_ids, second_ids)]
