"""EngineCore: prefills groups, decodes sequences together, lets them leave. It knows tokens, not text.

Sequences of a mode are one batch, and all batches have their KV in one store. The `Scheduler` decides which prompt is
read next, and which group is swapped out; a `PrefillPacer`, how many tokens of prompts are read between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

from triforce.backends.kernel_api import PAGE
from triforce.disk_cache.prefixes import DiskPrefixes, Pages
from triforce.engine import MAX_ITL
from triforce.engine.scheduler import LEAST, LEAST_ON_GPU, PacedPrompt, PrefillPacer, Scheduler
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
    """A group on its way to its first tokens. passes: yields tokens seen, and tokens in all, after parts of passes."""

    group: SequenceGroup
    batch: SequenceBatch
    pace: PacedPrompt
    passes: Iterator[tuple[int, int]]


def share_prefixes(
    batch: SequenceBatch,
    sequences: Sequence[TokenSequence],
    store: SharedKV,
    prefixes: PrefixCache,
    midway: bool = False,
) -> None:
    """Let later prompts begin with what the rows of these sequences have seen. midway: they go on reading theirs."""
    pool = batch.top.cache.pool
    for b, sequence in enumerate(batch.sequences):
        if sequence not in sequences or sequence.scope is None:
            continue
        # Strictly, what was read as a prompt is to be shared, and what was decoded is not: its bits differ.
        seen = int(pool.lengths_B[b])
        seen = max(0, min(seen, len(sequence.prompt) - 1 - TAIL)) if store.speculation.strict else seen
        text = batch.prefix.ids_BS[b, : seen // store.whole * store.whole].copy()
        if batch.memory is None:
            prefixes.insert(sequence.scope, text, pool.tables[b], pool.windows.tables[b] if pool.windows else ())
        if sequence.disk:
            held = prefixes.locate(sequence.scope, text) if batch.memory is None else _pages_of(pool, b)
            sequence.disk.keep(text, held, midway)


def _pages_of(pool: PagePool, b: int) -> Pages:
    """Return what finds pages in the tables of a row that stays its owner's, which gives those of windows back."""
    kept = list(pool.tables[b])
    windows = pool.windows

    def pages(start: int, stop: int) -> PrefixPages:
        some = slice(start // PAGE, stop // PAGE)
        return PrefixPages(kept[some], windows.tables[b][some] if windows else ())

    return pages


class EngineCore:
    """Runs the models for groups of sequences: `submit` them, then `step` until they are finished.

    store: the KV, which bounds rows and pages. costs: what is known of passes and of layers to search; it is added to.
    turn: steps after which a group makes room for those that wait; None: it never does. max_itl: seconds between two
    steps, at most, where prompts are read between them. disk: the disk cache of this KV.
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
        least = LEAST if self._target.device.type == "cpu" else LEAST_ON_GPU
        self._pacer = PrefillPacer(max_itl, self._target.ranks, least, strict=store.speculation.strict)
        self.prefixes = PrefixCache(store.pool, store.whole)
        self.scheduler = Scheduler(store, self.prefixes, turn)
        self._step_seconds = 0.0  # that the latest step of all texts took
        self.batches: dict[str, SequenceBatch] = {}
        """Running sequences by mode; none is empty."""
        self.prefilling: dict[SequenceGroup, PrefillTask] = {}

    def submit(self, groups: Sequence[SequenceGroup]) -> None:
        """Let groups wait for their turns. Raises CacheError, and takes none, if the turn of one would never come."""
        self.scheduler.add(groups)

    def cancel(self, group: SequenceGroup) -> None:
        """Stop a group, and give back what it holds; what it has seen stays, unless it failed. Harmless at its end."""
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
        """Copy what a running group holds to host memory, and let it wait again behind all others.

        Its text will be the same. A group that goes on with a memory of its owner's keeps it.
        """
        if group.status is Status.RUNNING and not group.memory:
            group.swapped = [self.batches[group.mode].swap_out(sequence) for sequence in group.unfinished]
            self._drop(group.mode, group.unfinished)
            self.scheduler.requeue(group)

    def close(self) -> None:
        """Cancel all groups, and forget what was read."""
        while self.scheduler.groups:
            self.cancel(self.scheduler.groups[-1])
        self._forget()

    def write_behind(self, stop: Callable[[], object]) -> None:
        """Hand what the disk cache is to keep to its thread, until `stop` says so. For when nothing else is to do."""
        if self.disk:
            self.disk.write_all(stop)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose K and V are held for rows."""
        reading = (task.batch for task in self.prefilling.values())
        return sum(int(batch.top.cache.lengths_B.sum()) for batch in [*self.batches.values(), *reading])

    def step(self) -> list[tuple[TokenSequence, int]]:
        """Read some of the prompts, then make one proposal for each row. Returns how many tokens each sequence took.

        Sequences at their ends have left. A group that fails has its `error`, and no other group does; but what breaks
        a pass of several ranks is raised.
        """
        if any(group.status is not Status.RUNNING for group in self.scheduler.groups):
            self._read_prompts()
        outputs = self._decode()
        if self.disk:
            self.disk.write_between_steps()
        return outputs

    def _read_prompts(self) -> None:
        """Read some of the prompts that wait, as long as there is time; make room where a group has had its turn."""
        self._pacer.begin(running=bool(self.batches), step_seconds=self._step_seconds)
        while self._admit():
            self._prefill_once(self.prefilling[self.scheduler.next_to_read()])
            if not self._pacer.more():
                break
        if self.scheduler.turn is not None and not self._admit() and (group := self.scheduler.to_swap_out()):
            self.swap_out(group)

    def finish(self, sequence: TokenSequence, surplus: int) -> None:
        """End a sequence before its last `surplus` tokens, as a stop string ends there. It may have left already."""
        sequence.cut(surplus)
        for mode, batch in list(self.batches.items()):
            if sequence in batch.sequences:
                self._leave(mode, [sequence])

    def _admit(self) -> bool:
        """Begin with groups that the scheduler admits. Returns whether there are prompts to read."""
        while admitted := self.scheduler.admit():
            self._begin(*admitted)
            self.store.pool.decref(*admitted[1])
        return bool(self.prefilling)

    def _begin(self, group: SequenceGroup, prefix: PrefixPages) -> None:
        """Make the batch of a group, on all ranks or on none."""
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
            pace = PacedPrompt(self._pacer)
            self.prefilling[group] = PrefillTask(group, batch, pace, group.prefill(batch, pace.grant, self.disk))
            group.status, group.left = Status.PREFILLING, max(0, group.prompt_tokens - len(prefix.pages) * PAGE)
            return
        self.scheduler.remove(group)
        if batch:
            batch.keep([])
            group.error = CacheError(
                f"one of the processes that share the model has no room for its KV; see {argument('kv_offload')} and "
                "--max-num-seqs"
            )

    def _batch(self, group: SequenceGroup, prefix: PrefixPages) -> SequenceBatch:
        store = self.store
        costs = self._costs if group.mode == "auto" else None
        findings = None
        if store.speculation.retrieval.searched_layers is None:  # couplings other than `seeded` must not share them
            findings = self._costs.layers if self._coupling == "seeded" else {}
        how = store.models, MODES[group.mode], store.speculation, self._coupling
        return SequenceBatch(*how, group.unfinished, group.memory, costs, findings, store, prefix)

    def _prefill_once(self, task: PrefillTask) -> None:
        """Read a part of the prompts of a group."""
        (group, batch, pace, passes), read, started = task, False, perf_counter()
        try:
            progress = next(passes, None)
            pace.took(perf_counter() - started)
            disk = group.sequences[0].disk
            seen = int(batch.top.cache.lengths_B[0])
            more = seen > group.tokens_read
            group.tokens_read = seen
            group.left = progress[1] - progress[0] if progress else 0
            awaited = more and self.scheduler.awaited(group)
            if (kept := group.regained(seen)) or (disk and disk.has_unsaved(seen)) or awaited:
                share_prefixes(batch, group.sequences[:1], self.store, self.prefixes, midway=not kept)
            read = True
            if progress and group.on_prefill:
                group.on_prefill(*progress)
        except Exception as error:
            self._raise_if_shared(error)
            if read:  # whoever raises in `on_prefill` gives the text up, and what was read of it stays
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
        """One step of each batch. Returns how many tokens each sequence took of it."""
        outputs = list[tuple[TokenSequence, int]]()
        seconds = 0.0
        for mode, batch in list(self.batches.items()):
            started = perf_counter()
            try:
                accepted = batch.step()
            except Exception as error:
                self._fail(mode, error)
                continue
            seconds += perf_counter() - started
            outputs += [(one, count) for one, count in zip(batch.sequences, accepted, strict=True) if count]
            if finished := [sequence for sequence in batch.sequences if sequence.finish]:
                self._leave(mode, finished)
        self._step_seconds = seconds
        for group in self.scheduler.groups:
            group.steps += group.status is Status.RUNNING
        return outputs

    def _fail(self, mode: str, error: Exception) -> None:
        """Cancel the groups of a mode whose pass failed: what its rows hold, and what they share, is unknown."""
        self._raise_if_shared(error)
        self._forget()
        for group in [group for group in self.scheduler.running if group.mode == mode]:
            group.fail(error)
            self.cancel(group)

    def _raise_if_shared(self, error: Exception) -> None:
        """Raise it if several ranks are in that pass: others may have come through, or wait in it."""
        if self._target.ranks.count > 1:
            raise error

    def _leave(self, mode: str, finished: list[TokenSequence]) -> None:
        """Let finished sequences leave their batch, and groups without others leave the queue."""
        share_prefixes(self.batches[mode], finished, self.store, self.prefixes)
        self._drop(mode, finished)
        for group in [group for group in self.scheduler.running if not group.unfinished]:
            self.scheduler.remove(group)

    def _drop(self, mode: str, sequences: Sequence[TokenSequence]) -> None:
        """Let sequences leave, if they are still there: what they hold is given back."""
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
        """Forget what was read, in memory; on disk stays what is there."""
        self.prefixes.close()
        if self.disk:
            self.disk.drop_pending()
