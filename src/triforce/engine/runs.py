"""Calls of `LLM.generate` and `LLM.stream`: requests go to an engine, and what comes of them is passed on.

The engine of one call is kept for the next one, so a prompt that was read is there for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from warnings import warn
from zlib import crc32

from triforce.backends import dispatch
from triforce.distributed.group import TPGroup
from triforce.engine.engine import Engine, Request
from triforce.engine.engine_core import EngineCore
from triforce.engine.output_stream import OutputChunk
from triforce.engine.prefill_pacer import MAX_ITL
from triforce.engine.sequence_group import OnPrefill
from triforce.engine.speculative_config import SpeculativeConfig
from triforce.engine.tier_builder import ModelSet, SharedKV
from triforce.errors import CacheError, RequestError
from triforce.interface.outputs import RequestOutput
from triforce.kvcache import FullView, PagePool, prompt_file
from triforce.kvcache.pool import pages_for
from triforce.planner import CostModel

MOST_ROWS = 8
"""Rows decoded together; others wait until one of these is done."""
ROOM = 64, 1 / 16
"""Pages beyond those asked for, at least, and as a share of them: the next question about a document may be longer."""


@dataclass(frozen=True, slots=True)
class PromptCachePaths:
    """Where to keep the KV cache of a prompt, and where to find an earlier one (see `kvcache.prompt_file`)."""

    save: str | Path | None = None
    load: str | Path | None = None


class Runs:
    """What starts engines, and keeps one. `costs` are added to; `fingerprint` is the target's, for saved prompts."""

    def __init__(
        self, models: ModelSet, speculation: SpeculativeConfig, coupling: str, costs: CostModel, fingerprint: str
    ) -> None:
        self._models, self._speculation, self._coupling, self.costs = models, speculation, coupling, costs
        self._ranks, self._fingerprint = models.target.ranks, fingerprint
        self._idle: Engine | None = None

    def start(
        self, rows: int, pages: int, turn: int | None = None, max_itl: float = MAX_ITL, given: PagePool | None = None
    ) -> Engine:
        """Start an engine of its own; see `engine.Engine`. `given` is a pool that is there already."""
        store = SharedKV(self._models, self._speculation, rows, pages, given)
        return Engine(EngineCore(self._models, self._speculation, self._coupling, store, self.costs, turn, max_itl))

    def run(
        self,
        requests: Sequence[Request],
        files: PromptCachePaths,
        on_prefill: OnPrefill | None,
        memory: FullView | None = None,
    ) -> Iterator[tuple[Request, OutputChunk | RequestOutput]]:
        """All of them on one engine, whose KV has room for as many texts as are made at a time."""
        if self._ranks.count > 1 and (files.save or files.load):
            raise RequestError("a saved KV cache is of one process; leave out --tp and torchrun, or the file")
        compare(
            self._ranks, "requests", [(r.prompt, r.mode, r.sequences[0].params, r.sequences[0].seed) for r in requests]
        )
        context, reach = self._models.target.config.context, self._speculation.reach
        sizes = sorted(
            pages_for(sequence.capacity(context, reach)) for request in requests for sequence in request.sequences
        )
        rows, pages = min(len(sizes), MOST_ROWS), sum(sizes[-MOST_ROWS:])
        with self._engine(rows, pages, files, memory) as texts:
            earlier, on_read = self.prompt_files(files, texts.engine.store.pool, requests[0].prompt)
            texts.submit(requests, memory, earlier, on_prefill, on_read)
            try:
                while texts.busy:
                    self._ranks.broadcast(None)  # rank 0 may have waited for whoever reads its text
                    for request, event in texts.step():
                        if isinstance(event, Exception):
                            raise event
                        yield request, event
            finally:
                for request in requests:
                    texts.cancel(request)

    def clear(self) -> None:
        """Give the memory of the kept engine back, and forget what it has read."""
        if self._idle:
            self._idle.close()
        self._idle = None

    def _engine(
        self, rows: int, pages: int, files: PromptCachePaths, memory: FullView | None
    ) -> AbstractContextManager[Engine]:
        """The kept one, or one of its own for a text whose KV somebody else keeps."""
        if not (files.save or files.load or memory):
            return self._kept(rows, pages)
        return closing(self.start(rows, pages, given=memory.pool if memory else None))

    @contextmanager
    def _kept(self, rows: int, pages: int) -> Iterator[Engine]:
        """The engine that is kept, if it is idle and large enough, or a new one; after an error it is not kept."""
        texts = self._take(rows, pages)
        try:
            yield texts
        except GeneratorExit:  # a stream that nobody reads on, between two steps
            self._idle = texts
            raise
        except BaseException:
            texts.close()
            raise
        self._idle = texts

    def _take(self, rows: int, pages: int) -> Engine:
        if self._idle and self._idle.engine.store.rows >= rows and self._idle.engine.store.pages >= pages:
            texts, self._idle = self._idle, None
            return texts
        self.clear()
        # Where KV is offloaded, pages that nobody needs would take memory from pages that could stay.
        more = max(ROOM[0], int(pages * ROOM[1])) if self._speculation.offload.kind == "none" else 0
        try:
            return self.start(rows, pages + more)
        except CacheError:
            return self.start(rows, pages)

    def prompt_files(
        self, files: PromptCachePaths, pool: PagePool, prompt: list[int]
    ) -> tuple[prompt_file.SavedCache | None, Callable[[FullView], None] | None]:
        """A saved prompt to start from, and what saves one that has been read."""
        if files.load is None and files.save is None:
            return None, None
        maker = prompt_file.CacheFingerprint(self._fingerprint, dispatch.identity(self._models.target.model, pool.kv))
        earlier = None if files.load is None else prompt_file.SavedCache(Path(files.load), maker)
        return earlier, None if files.save is None else self._saving(Path(files.save), maker, pool, prompt)

    def _saving(
        self, path: Path, maker: prompt_file.CacheFingerprint, pool: PagePool, prompt: list[int]
    ) -> Callable[[FullView], None]:
        """Hold room for the file, and return what writes it; should that fail later, the text goes on without it."""
        room = prompt_file.Reservation(path, prompt_file.size_of(pool.config, pool.dtype, len(prompt) - 1))

        def save(full: FullView) -> None:
            room.release()
            try:
                prompt_file.save(path, maker, full, 0, prompt)
            except CacheError as error:
                warn(str(error), RuntimeWarning, stacklevel=2)

        return save


def compare(ranks: TPGroup, what: str, facts: object) -> None:
    """Raise RankError unless all ranks bring the same: they would wait for each other in vain."""
    if ranks.count > 1:
        level = dispatch.native_loader.native.level() if dispatch.native_loader.native else "torch"
        ranks.compare(crc32(repr((level, facts)).encode()), what)
