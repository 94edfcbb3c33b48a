"""RequestRunner: runs the requests of one call of `LLM.generate` or `LLM.stream` on an engine.

The engine of one call is kept for the next one, so that a prompt which was read need not be read again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from time import perf_counter
from warnings import warn
from zlib import crc32

from triforce.backends import dispatch
from triforce.backends.kernel_api import pages_for
from triforce.disk_cache import prompt_file
from triforce.disk_cache.prefixes import DiskPrefixes, KVProfile
from triforce.disk_cache.write_queue import PATIENCE, DiskCache
from triforce.distributed.group import TPGroup
from triforce.engine.engine import Engine, Request
from triforce.engine.engine_core import EngineCore
from triforce.engine.model_loader import ModelPair
from triforce.engine.output_stream import OutputChunk
from triforce.engine.program_end import EndingGenerator
from triforce.engine.scheduling_limits import MAX_ITL, MOST_ROWS
from triforce.engine.sequence_group import OnPrefill
from triforce.engine.speculative_config import SpeculativeConfig
from triforce.engine.tier_builder import SharedKV
from triforce.errors import CacheError, CacheWarning, RequestError, argument
from triforce.interface.outputs import RequestOutput
from triforce.interface.user_paths import named_path
from triforce.kvcache import FullView, PagePool
from triforce.planner import CostModel

SPARE = 64, 1 / 16
"""Pages beyond those asked for, at least, and as a share of them: the next question about a document may be longer."""


class RequestRunner:
    """Starts engines, runs requests on one, and keeps it for the next.

    costs: what is known of passes; it is added to. disk: a disk cache, if there is one.
    """

    def __init__(
        self, pair: ModelPair, speculation: SpeculativeConfig, coupling: str, costs: CostModel, disk: DiskCache | None
    ) -> None:
        self._models, self._speculation, self._coupling, self.costs = pair.decoders, speculation, coupling, costs
        self._pair, self.disk, self._ranks = pair, disk, pair.target.decoder.ranks
        self._idle: Engine | None = None
        self.over = ""
        """Why no request runs any more; empty while they do."""

    def varied(self, speculation: SpeculativeConfig, coupling: str) -> RequestRunner:
        """Return a runner of the same models that speculates otherwise."""
        return RequestRunner(self._pair, speculation, coupling, self.costs, self.disk)

    def start(
        self, rows: int, pages: int, turn: int | None = None, max_itl: float = MAX_ITL, given: PagePool | None = None
    ) -> Engine:
        """Return a new engine (see `EngineCore`), with `rows` and `pages` of KV. given: a pool to use."""
        store = SharedKV(self._models, self._speculation, rows, pages, given)
        return Engine(EngineCore(store, self._coupling, self.costs, turn, max_itl, self._disk_prefixes(store)))

    def run(
        self,
        requests: Sequence[Request],
        on_prefill: OnPrefill | None,
        save: str | Path | None,
        load: str | Path | None,
        memory: FullView | None = None,
    ) -> Iterator[tuple[Request, OutputChunk | RequestOutput]]:
        """Run requests on one engine, and yield what comes of each: chunks of text, and at last its output.

        save, load: files for the KV of the first prompt, and of an earlier one (see `kvcache.prompt_file`). Closing the
        iterator, or dropping it, cancels all requests. Raises TriforceError, and whatever `on_prefill` raises.
        """
        files = named_path("save_cache", save), named_path("load_cache", load)
        return EndingGenerator(self._run(requests, on_prefill, *files, memory))

    def _run(
        self,
        requests: Sequence[Request],
        on_prefill: OnPrefill | None,
        save: Path | None,
        load: Path | None,
        memory: FullView | None,
    ) -> Generator[tuple[Request, OutputChunk | RequestOutput], None, None]:
        if self._ranks.count > 1 and (save or load):
            raise RequestError(
                f"a saved KV cache is of one process; leave out {argument('ranks')} and torchrun, or the file"
            )
        facts = [(r.prompt, r.mode, r.sequences[0].params, r.sequences[0].seed) for r in requests]
        compare(self._ranks, "requests", facts)
        context, reach = self._models.target.config.context, self._speculation.reach
        sizes = sorted(pages_for(each.capacity(context, reach)) for request in requests for each in request.sequences)
        rows, pages = min(len(sizes), MOST_ROWS), sum(sizes[-MOST_ROWS:])
        with self._engine(rows, pages, memory, kept=not (save or load or memory)) as engine:
            saved, on_read = self.prompt_files(save, load, engine.core.store.pool, requests[0].prompt)
            engine.submit(requests, memory, saved, on_prefill, on_read)
            try:
                while engine.busy:
                    if self.over:
                        raise RequestError(self.over)
                    if self._ranks.count > 1:
                        self._ranks.broadcast(None)  # rank 0 may have waited for the reader of its text
                    for request, event in engine.step():
                        if isinstance(event, Exception):
                            raise event
                        yield request, event
            finally:
                for request in requests:
                    engine.cancel(request)
                until = perf_counter() + PATIENCE
                engine.core.write_behind(lambda: bool(self.over) or perf_counter() > until)

    def _disk_prefixes(self, store: SharedKV) -> DiskPrefixes | None:
        if self.disk is None:
            return None
        draft = self._pair.draft
        drafter = f"{draft.fingerprint} {self._speculation.lower_tiers}" if draft else ""
        profile = KVProfile(self._pair.name, self._pair.cached_by, drafter, self._kernels(store.pool))
        return DiskPrefixes(self.disk, profile, store.pool, store.whole)

    def close(self, reason: str) -> None:
        """Give back all memory, and write what is queued for the disk; requests that run end with the reason."""
        self.over = reason
        self.clear()
        if self.disk:
            self.disk.close()

    def abandon(self, reason: str) -> None:
        """End requests with the reason, and leave all else to the process that was forked."""
        self.over = reason
        if self.disk:
            self.disk.close.detach()

    def clear(self) -> None:
        """Give back the memory of the kept engine, and forget what it has read."""
        if self._idle:
            self._idle.close()
        self._idle = None

    @contextmanager
    def _engine(self, rows: int, pages: int, memory: FullView | None, kept: bool) -> Iterator[Engine]:
        """Lend an engine. kept: the one that is kept, if it fits, which is kept again unless there was an error."""
        if not kept:
            with closing(self.start(rows, pages, given=memory.pool if memory else None)) as engine:
                yield engine
            return
        engine = self._take(rows, pages)
        try:
            yield engine
        except GeneratorExit:  # a stream that is closed between two steps
            self._idle = engine
            raise
        except BaseException:
            engine.close()
            raise
        self._idle = engine

    def _take(self, rows: int, pages: int) -> Engine:
        """Return the kept engine, if it is idle and large enough, or a new one."""
        if self._idle and self._idle.core.store.rows >= rows and self._idle.core.store.pages >= pages:
            engine, self._idle = self._idle, None
            return engine
        self.clear()
        # Where KV is offloaded, unused pages would take memory from pages that could stay.
        more = max(SPARE[0], int(pages * SPARE[1])) if self._speculation.offload.kind == "none" else 0
        try:
            return self.start(rows, pages + more)
        except CacheError:
            return self.start(rows, pages)

    def prompt_files(
        self, save: Path | None, load: Path | None, pool: PagePool, prompt: list[int]
    ) -> tuple[prompt_file.SavedCache | None, Callable[[FullView], None] | None]:
        """Return a saved prompt to start from, and a function that saves one; None for those not asked for."""
        if load is None and save is None:
            return None, None
        fingerprint = self.cache_fingerprint(pool)
        saved = None if load is None else prompt_file.SavedCache(load, fingerprint)
        return saved, None if save is None else self._saver(save, fingerprint, pool, prompt)

    def cache_fingerprint(self, pool: PagePool) -> prompt_file.CacheFingerprint:
        """Return the identity of what computes the pages of a pool."""
        return prompt_file.CacheFingerprint(self._pair.cached_by, self._kernels(pool))

    def _kernels(self, pool: PagePool) -> str:
        """Return whose bits a pool holds. A saved prompt may come to the disk cache, so both go by the same name."""
        return f"{dispatch.identity(self._models.target.model, pool.kv)}, {dispatch.build()}"

    def _saver(
        self, path: Path, fingerprint: prompt_file.CacheFingerprint, pool: PagePool, prompt: list[int]
    ) -> Callable[[FullView], None]:
        """Reserve disk space, and return a function that writes the file; if it fails, the text goes on without one."""
        reserved = prompt_file.reserve(path, prompt_file.size_of(pool, len(prompt) - 1))

        def save(full: FullView) -> None:
            reserved.close()
            try:
                prompt_file.save(path, fingerprint, full, 0, prompt)
            except CacheError as error:
                warn(str(error), CacheWarning, stacklevel=2)

        return save


def compare(ranks: TPGroup, what: str, facts: object) -> None:
    """Raise RankError unless all ranks bring the same facts: otherwise they would wait for each other in vain."""
    if ranks.count > 1:
        level = dispatch.native.level() if dispatch.native else "torch"
        ranks.compare(crc32(repr((level, facts)).encode()), what)
