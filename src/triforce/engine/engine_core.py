"""EngineCore: prefills groups, decodes sequences together, lets them leave. It knows tokens, not text.

Sequences of a mode are one batch, and all batches have their KV in one store. The `Scheduler` decides which group is
prefilled next, and which is swapped out; a `PrefillPacer`, how many tokens of a prompt are read between two steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

from triforce.engine.modes import MODES
from triforce.engine.prefill_pacer import LEAST, LEAST_ON_GPU, MAX_ITL, PrefillPacer
from triforce.engine.running_batches import RunningBatches
from triforce.engine.scheduler import Scheduler
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.sequence_group import SequenceGroup, Status
from triforce.engine.tier_builder import SharedKV
from triforce.errors import CacheError, RankError
from triforce.kvcache.prefix_cache import PrefixCache
from triforce.planner import CostModel, Findings


class StepOutput(NamedTuple):
    """A sequence, and how many tokens it took in a step: its last ones."""

    sequence: TokenSequence
    tokens: int


class PrefillTask(NamedTuple):
    """A group on its way to its first tokens. passes: yields tokens seen, and tokens in all, after each pass."""

    group: SequenceGroup
    batch: SequenceBatch
    passes: Iterator[tuple[int, int]]


class EngineCore:
    """Runs the models for groups of sequences: `submit` them, then `step` until they are finished.

    store: the KV, which bounds rows and pages. costs: what is known of passes and of layers to search; it is added to.
    turn: steps after which a group makes room for those that wait; None: it never does. max_itl: seconds between two
    steps, at most, where prompts are read between them.
    """

    def __init__(
        self,
        store: SharedKV,
        coupling: str,
        costs: CostModel,
        turn: int | None = None,
        max_itl: float = MAX_ITL,
    ) -> None:
        self.store, self._coupling, self._costs = store, coupling, costs
        self._target = store.models.target
        least = LEAST if self._target.device.type == "cpu" else LEAST_ON_GPU
        self._pacer = PrefillPacer(max_itl, self._target.ranks, least, strict=store.speculation.strict)
        self.prefixes = PrefixCache(store.pool, store.whole)
        self.scheduler = Scheduler(store, self.prefixes, turn)
        self.batches = RunningBatches(store, self.prefixes, costs)
        self.prefilling: PrefillTask | None = None

    def submit(self, groups: Sequence[SequenceGroup]) -> None:
        """Let groups wait for their turns. Raises CacheError, and takes none, if the turn of one would never come."""
        self.scheduler.add(groups)

    def cancel(self, group: SequenceGroup) -> None:
        """Stop a group, and give back what it holds. Harmless when it is finished."""
        if group.status is Status.PREFILLING:
            self._stop_prefill()
        elif group.status is Status.RUNNING:
            self.batches.drop(group.mode, group.sequences)
        self.scheduler.remove(group)

    def swap_out(self, group: SequenceGroup) -> None:
        """Copy what a running group holds to host memory, and let it wait again behind all others.

        Its text will be the same. A group that goes on with a memory of its owner's keeps it.
        """
        if group.status is Status.RUNNING and not group.memory:
            group.swapped = self.batches.swap_out(group.mode, group.unfinished)
            self.scheduler.requeue(group)

    def close(self) -> None:
        """Cancel all groups, and forget what was read."""
        while self.groups:
            self.cancel(self.groups[-1])
        self.prefixes.clear()

    @property
    def groups(self) -> list[SequenceGroup]:
        """All groups that are not finished, in the order in which they came."""
        return list(self.scheduler.groups)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose K and V are held for rows."""
        batches = [*self.batches.of_mode.values(), *([self.prefilling.batch] if self.prefilling else [])]
        return sum(int(batch.top.cache.lengths_B.sum()) for batch in batches)

    def step(self) -> list[StepOutput]:
        """Read some of the prompts, then make one proposal for each row. Returns what each sequence took of it.

        Sequences at their ends have left. A group that fails has its `error`, and no other group does; but what breaks
        a pass of several ranks is raised.
        """
        self._pacer.begin(running=bool(self.batches.of_mode))
        while self._admit():
            self._prefill_once()
            if not self._pacer.more():
                break
        self._make_way()
        return self._decode()

    def finish(self, sequence: TokenSequence, surplus: int) -> None:
        """End a sequence before its last `surplus` tokens, as a stop string ends there. It may have left already."""
        sequence.cut(surplus)
        for mode, batch in list(self.batches.of_mode.items()):
            if sequence in batch.sequences:
                self._leave(mode, [sequence])

    def _admit(self) -> bool:
        """Begin with the next group, if it fits and no other is being prefilled. Returns whether there is one now."""
        while self.prefilling is None and (admitted := self.scheduler.admit()):
            group, pages = admitted
            self._begin(group, pages)
            self.store.pool.disown(pages)
        return self.prefilling is not None

    def _make_way(self) -> None:
        """Swap out a group that has had its turn, if others wait for room."""
        if self.scheduler.turn is not None and not self._admit() and (group := self.scheduler.to_swap_out()):
            self.swap_out(group)

    def _begin(self, group: SequenceGroup, pages: list[int]) -> None:
        """Make the batch of a group, on all ranks or on none. pages: of its prompt's beginning."""
        group.started, group.steps = group.started or perf_counter(), 0
        batch = None
        try:
            batch = self._batch(group, pages)
        except RankError:
            raise
        except Exception as error:
            group.fail(error)
        if self._target.ranks.all_true(batch is not None) and batch:
            self.prefilling = PrefillTask(group, batch, group.prefill(batch, self._pacer.grant))
            group.status = Status.PREFILLING
            return
        self.scheduler.remove(group)
        if batch:
            batch.keep([])
            group.error = CacheError(
                "one of the processes that share the model has no room for its KV; see --kv-offload and --max-num-seqs"
            )

    def _batch(self, group: SequenceGroup, pages: list[int]) -> SequenceBatch:
        store, costs = self.store, self._costs if group.mode == "auto" else None
        how = store.models, MODES[group.mode], store.speculation, self._coupling
        return SequenceBatch(*how, group.unfinished, group.memory, costs, self._findings, store, pages)

    @property
    def _findings(self) -> Findings | None:
        """Known layers to search, if any may be; under couplings other than `seeded`, texts must not share them."""
        if self.store.speculation.retrieval.searched_layers is not None:
            return None
        return self._costs.layers if self._coupling == "seeded" else {}

    def _prefill_once(self) -> None:
        """Make one pass over the prompts of the group that is being prefilled."""
        assert self.prefilling
        group, batch, passes = self.prefilling
        try:
            progress = next(passes, None)
            self._pacer.passed()
            if progress and group.on_prefill:
                group.on_prefill(*progress)
        except Exception as error:
            self._raise_if_shared(error)
            group.fail(error)
            return self.cancel(group)
        if not progress:
            self.prefilling, group.swapped, group.status = None, None, Status.RUNNING
            self.batches.join(group, batch)

    def _stop_prefill(self) -> None:
        assert self.prefilling
        self.prefilling.batch.keep([])
        self.prefilling = None

    def _decode(self) -> list[StepOutput]:
        """One step of each batch. Returns what each sequence took of it."""
        outputs: list[StepOutput] = []
        seconds = 0.0
        for mode, batch in list(self.batches.of_mode.items()):
            started = perf_counter()
            try:
                taken = batch.step()
            except Exception as error:
                self._fail(mode, error)
                continue
            seconds += perf_counter() - started
            outputs += [StepOutput(one, count) for one, count in zip(batch.sequences, taken, strict=True) if count]
            self._leave(mode, [sequence for sequence in batch.sequences if sequence.finish])
        self._pacer.stepped(seconds)
        for group in self.scheduler.running:
            group.steps += 1
        return outputs

    def _fail(self, mode: str, error: Exception) -> None:
        """Cancel the groups of a mode whose pass failed: what its rows hold, and what they share, is unknown."""
        self._raise_if_shared(error)
        self.prefixes.clear()
        for group in [group for group in self.scheduler.running if group.mode == mode]:
            group.fail(error)
            self.cancel(group)

    def _raise_if_shared(self, error: Exception) -> None:
        """Raise it if several ranks are in that pass: others may have come through, or wait in it."""
        if self._target.ranks.count > 1:
            raise error

    def _leave(self, mode: str, finished: list[TokenSequence]) -> None:
        """Let finished sequences leave their batch, and groups without others leave the queue."""
        self.batches.finish(mode, finished)
        for group in [group for group in self.scheduler.running if not group.unfinished]:
            self.scheduler.remove(group)
