"""EngineCore: prefills groups, decodes sequences together, and removes finished ones. It handles tokens, not text.

The running sequences of a mode are one batch, and all batches have their KV in one `SharedKV`, the store. The
`Scheduler` decides which prompt is prefilled next, and which group is swapped out. A `PrefillPacer` decides how many
prompt tokens are prefilled between two steps. No pass mixes prefill with decoding.

A page is free once neither a row nor the prefix cache references it. Rows drop their pages when their sequence leaves
the batch; the prefix cache drops pages when the scheduler needs room for a new group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

from triforce.arrays import is_gpu
from triforce.backends.kernel_api import PAGE
from triforce.disk_cache.prefixes import DiskPrefixes, PageLookup
from triforce.engine import MAX_ITL
from triforce.engine.prefill_pacer import MIN_PASS_TOKENS, MIN_PASS_TOKENS_ON_GPU, PacedPasses, PrefillPacer
from triforce.engine.scheduler import Scheduler
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.sequence_group import SequenceGroup, Status
from triforce.engine.tier_builder import MODES, SharedKV
from triforce.errors import CacheError, RankError, argument
from triforce.kvcache import PagePool
from triforce.kvcache.pool import PrefixPages
from triforce.kvcache.prefix_cache import PrefixCache
from triforce.kvcache.views.full import TAIL
from triforce.planner import CostModel


class PrefillTask(NamedTuple):
    """A group that is being prefilled. passes: yields (cached tokens, all tokens) after each part of a pass."""

    group: SequenceGroup
    batch: SequenceBatch
    pace: PacedPasses
    passes: Iterator[tuple[int, int]]


def share_prefixes(
    batch: SequenceBatch,
    sequences: Sequence[TokenSequence],
    store: SharedKV,
    prefixes: PrefixCache,
    midway: bool = False,
) -> None:
    """Share the KV of these sequences with later prompts that begin alike.

    midway: leave the KV of layers with a window out of the disk's queue, because the prefill of `sequences` goes on and
    a later call queues it. During a prefill it is False only where that prefill has just restored evicted windows.
    """
    pool = batch.top.cache.pool
    for b, sequence in enumerate(batch.sequences):
        if sequence not in sequences or sequence.scope is None:
            continue
        # Under `strict` only KV of prompts is shared: the KV of decoded tokens differs from a prefill in its last bits.
        shared_tokens = int(pool.lengths_B[b])
        shared_tokens = (
            max(0, min(shared_tokens, len(sequence.prompt) - 1 - TAIL)) if store.speculation.strict else shared_tokens
        )
        text = batch.prefix.ids_BS[b, : shared_tokens // store.prefix_unit * store.prefix_unit].copy()
        if batch.memory is None:
            prefixes.insert(sequence.scope, text, pool.tables[b], pool.windows.tables[b] if pool.windows else ())
        if sequence.disk:
            locate_pages = prefixes.locate(sequence.scope, text) if batch.memory is None else _pages_of(pool, b)
            sequence.disk.keep(text, locate_pages, midway)


def _pages_of(pool: PagePool, b: int) -> PageLookup:
    """Return a function that finds pages of row b of a caller's view, in a copy of the row's page table."""
    page_table = list(pool.tables[b])
    windows = pool.windows

    def pages(start: int, stop: int) -> PrefixPages:
        page_range = slice(start // PAGE, stop // PAGE)
        return PrefixPages(page_table[page_range], windows.tables[b][page_range] if windows else ())

    return pages


class EngineCore:
    """Runs the models for groups of sequences: `submit` them, then `step` until they are finished.

    store: KV of all groups, which bounds their rows and pages. costs: measured costs of passes, and findings about
    searched layers (`planner.searched_layers`); the core adds to both. turn: steps after which a running group is
    swapped out for waiting groups; None: never. max_itl: largest inter-token latency, in seconds, that prefill between
    two steps may cause. disk: the disk cache of this KV.
    """

    def __init__(
        self,
        store: SharedKV,
        coupling: str,
        costs: CostModel,
        turn: int | None = None,
        max_itl: float = MAX_ITL,
        disk: DiskPrefixes | None = None,
    ) -> None:
        self.store = store
        self._coupling = coupling
        self._costs = costs
        self.disk = disk
        self._target = store.models.target
        min_tokens = MIN_PASS_TOKENS_ON_GPU if is_gpu(self._target.device) else MIN_PASS_TOKENS
        self._pacer = PrefillPacer(max_itl, self._target.ranks, min_tokens, strict=store.speculation.strict)
        self.prefixes = PrefixCache(store.pool, store.prefix_unit)
        self.scheduler = Scheduler(store, self.prefixes, turn)
        self._step_seconds = 0.0  # of the latest step of all texts
        self.batches: dict[str, SequenceBatch] = {}
        """Batches of running sequences by mode. No batch is empty."""
        self.prefilling: dict[SequenceGroup, PrefillTask] = {}

    def submit(self, groups: Sequence[SequenceGroup]) -> None:
        """Queue groups. Raises CacheError, and queues none, if one can never fit."""
        self.scheduler.add(groups)

    def cancel(self, group: SequenceGroup) -> None:
        """Stop a group, and free its rows. Unless it failed, the prefix cache keeps its KV. No effect once it ended."""
        if group.status is Status.PREFILLING:
            batch = self.prefilling.pop(group).batch
            if not group.error:
                share_prefixes(batch, group.sequences[:1], self.store, self.prefixes)
            batch.keep([])
        elif group.status is Status.RUNNING:
            if not group.error and (running := self.batches.get(group.mode)):
                share_prefixes(running, group.unfinished, self.store, self.prefixes)
            self._drop(group.mode, group.sequences)
        self.scheduler.remove(group)

    def swap_out(self, group: SequenceGroup) -> None:
        """Copy the state of a running group to host memory, free its rows, and queue it behind all others.

        The texts of the group do not change. A group that continues a caller's view is not swapped out.
        """
        if group.status is Status.RUNNING and not group.memory:
            group.swapped = [self.batches[group.mode].swap_out(sequence) for sequence in group.unfinished]
            self._drop(group.mode, group.unfinished)
            self.scheduler.requeue(group)

    def close(self) -> None:
        """Cancel all groups, and forget all shared prefixes."""
        while self.scheduler.groups:
            self.cancel(self.scheduler.groups[-1])
        self._forget()

    def write_behind(self, stop: Callable[[], object]) -> None:
        """Hand pending segments to the thread of the disk cache, until `stop` returns true. For an idle engine."""
        if self.disk:
            self.disk.write_all(stop)

    @property
    def kv_tokens(self) -> int:
        """Number of tokens whose K and V are cached for rows."""
        prefilled = (task.batch for task in self.prefilling.values())
        return sum(int(batch.top.cache.lengths_B.sum()) for batch in [*self.batches.values(), *prefilled])

    def step(self) -> list[tuple[TokenSequence, int]]:
        """Prefill parts of prompts, then verify once for each row. Returns (sequence, count of new tokens) pairs.

        Finished sequences have left their batch. An error in a pass is set as the `error` of its groups, and other
        groups go on. Where several ranks share the model, the error is raised.
        """
        self._pacer.begin(running=bool(self.batches), step_seconds=self._step_seconds)
        if any(group.status is not Status.RUNNING for group in self.scheduler.groups):
            self._prefill_prompts()
        outputs = self._decode()
        if self.disk:
            self.disk.write_between_steps()
        return outputs

    def _prefill_prompts(self) -> None:
        """Prefill parts of prompts while there is time.

        If no prompt can be prefilled now, a group that has had its turn is swapped out.
        """
        while self._admit():
            self._prefill_once(self.prefilling[self.scheduler.next_to_prefill()])
            if not self._pacer.has_time():
                break
        if self.scheduler.turn is not None and not self._admit() and (group := self.scheduler.to_swap_out()):
            self.swap_out(group)

    def finish(self, sequence: TokenSequence, surplus: int) -> None:
        """End a sequence at a stop string, without its last `surplus` tokens. It may have left its batch already."""
        sequence.cut(surplus)
        for mode, batch in list(self.batches.items()):
            if sequence in batch.sequences:
                self._leave(mode, [sequence])

    def _admit(self) -> bool:
        """Begin the groups that the scheduler admits. Returns whether there are prompts to prefill."""
        while admitted := self.scheduler.admit():
            group, prefix = admitted
            self._begin(group, prefix)
            self.store.pool.decref(*prefix)
        return bool(self.prefilling)

    def _begin(self, group: SequenceGroup, prefix: PrefixPages) -> None:
        """Make the batch of a group, on all ranks or on no rank."""
        group.started = group.started or perf_counter()
        group.steps = 0
        batch = None
        try:
            batch = self._batch(group, prefix)
        except RankError:
            raise
        except Exception as error:
            group.fail(error)
        if self._target.ranks.all_true(batch is not None) and batch:
            pace = PacedPasses(self._pacer)
            self.prefilling[group] = PrefillTask(group, batch, pace, group.prefill(batch, pace.grant, self.disk))
            group.status = Status.PREFILLING
            group.tokens_to_prefill = max(0, group.prompt_tokens - len(prefix.pages) * PAGE)
            return
        self.scheduler.remove(group)
        if batch:
            batch.keep([])
            group.error = CacheError(
                f"the KV of this request does not fit on one of the ranks; see {argument('kv_offload')} and "
                "--max-num-seqs"
            )

    def _batch(self, group: SequenceGroup, prefix: PrefixPages) -> SequenceBatch:
        store = self.store
        costs = self._costs if group.mode == "auto" else None
        findings = None
        if store.speculation.retrieval.searched_layers is None:
            # Under couplings other than `seeded`, the choice of searched layers changes a text. With shared findings a
            # text would depend on earlier ones, so each batch begins without findings.
            findings = self._costs.findings if self._coupling == "seeded" else {}
        setting = store.models, MODES[group.mode], store.speculation, self._coupling
        return SequenceBatch(*setting, group.unfinished, group.memory, costs, findings, store, prefix)

    def _prefill_once(self, task: PrefillTask) -> None:
        """Prefill one part of a group. When its prefill ends, the sequences of the group join the batch of its mode."""
        group, batch, pace, passes = task
        pass_succeeded = False
        started = perf_counter()
        try:
            progress = next(passes, None)
            pace.record(perf_counter() - started)
            disk = group.sequences[0].disk
            cached_tokens = int(batch.top.cache.lengths_B[0])
            has_progress = cached_tokens > group.prefilled_tokens
            group.prefilled_tokens = cached_tokens
            group.tokens_to_prefill = max(0, group.prompt_tokens - cached_tokens) if progress else 0
            windows_restored = group.windows_restored(cached_tokens)
            is_awaited = has_progress and self.scheduler.is_awaited(group)
            if windows_restored or (disk and disk.has_unsaved(cached_tokens)) or is_awaited:
                share_prefixes(batch, group.sequences[:1], self.store, self.prefixes, midway=not windows_restored)
            pass_succeeded = True
            if progress and group.on_prefill:
                group.on_prefill(*progress)
        except Exception as error:
            self._raise_if_shared(error)
            if pass_succeeded:  # `on_prefill` raised: the KV prefilled so far is valid, and stays shared
                self.cancel(group)
            group.fail(error)
            return self.cancel(group)
        if not progress:
            pace.end()
            del self.prefilling[group]
            group.swapped = None
            group.status = Status.RUNNING
            share_prefixes(batch, group.sequences[:1], self.store, self.prefixes)
            if group.mode in self.batches:
                self.batches[group.mode].join(batch)
            else:
                self.batches[group.mode] = batch

    def _decode(self) -> list[tuple[TokenSequence, int]]:
        """Run one step of each batch. Returns each sequence with its number of new tokens."""
        outputs = list[tuple[TokenSequence, int]]()
        seconds = 0.0
        for mode, batch in list(self.batches.items()):
            try:
                batch.catch_up(PacedPasses(self._pacer))
                started = perf_counter()
                accepted = batch.step()
            except Exception as error:
                self._fail(mode, error)
                continue
            seconds += perf_counter() - started
            outputs += [(member, count) for member, count in zip(batch.sequences, accepted, strict=True) if count]
            if finished := [sequence for sequence in batch.sequences if sequence.finish_reason]:
                self._leave(mode, finished)
        self._step_seconds = seconds
        for group in self.scheduler.groups:
            group.steps += group.status is Status.RUNNING
        return outputs

    def _fail(self, mode: str, error: Exception) -> None:
        """Cancel the groups of a mode whose pass failed. Drop all shared prefixes, whose KV may be wrong now."""
        self._raise_if_shared(error)
        self._forget()
        for group in [group for group in self.scheduler.running if group.mode == mode]:
            group.fail(error)
            self.cancel(group)

    def _raise_if_shared(self, error: Exception) -> None:
        """Raise `error` if several ranks run the pass: other ranks may have finished it, or wait in it."""
        if self._target.ranks.count > 1:
            raise error

    def _leave(self, mode: str, finished: list[TokenSequence]) -> None:
        """Remove finished sequences from their batch, and groups without unfinished ones from the scheduler."""
        share_prefixes(self.batches[mode], finished, self.store, self.prefixes)
        self._drop(mode, finished)
        for group in [group for group in self.scheduler.running if not group.unfinished]:
            self.scheduler.remove(group)

    def _drop(self, mode: str, sequences: Sequence[TokenSequence]) -> None:
        """Remove sequences from the batch of a mode, if they are in it, and free their rows."""
        if not (batch := self.batches.get(mode)):
            return
        rows = [b for b, sequence in enumerate(batch.sequences) if sequence not in sequences]
        if not rows and batch.controller:
            batch.controller.close(batch.prefix)
        if not rows and (batch.controller or (batch.search and batch.search.changed)):
            self._costs.save()
        if len(rows) < len(batch.sequences):
            batch.keep(rows)
        if not rows:
            del self.batches[mode]

    def _forget(self) -> None:
        """Forget all shared prefixes in memory. Files of the disk cache stay."""
        self.prefixes.close()
        if self.disk:
            self.disk.drop_pending()
