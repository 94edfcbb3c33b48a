"""Many texts at a time: they wait, are read, are decoded together, and leave. Knows tokens, not text.

Rows of a mode are one batch, and all batches have their KV in one store. Groups are admitted in the order in which they
came, once the store has the pages for all that they may become, and none is overtaken. Where turns are limited, one
that has had its turn is put aside for those who wait, and waits again behind them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

from triforce.engine.modes import MODES
from triforce.engine.prefill_pacer import LEAST, LEAST_ON_GPU, MAX_ITL, PrefillPacer
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.sequence_group import SequenceGroup, Status
from triforce.engine.speculative_config import SpeculativeConfig
from triforce.engine.tier_builder import ModelSet, SharedKV
from triforce.errors import CacheError, RankError
from triforce.kvcache.pool import pages_for
from triforce.kvcache.prefix_cache import PrefixCache
from triforce.kvcache.views.full import TAIL
from triforce.planner import CostModel, Findings


class StepOutput(NamedTuple):
    """A sequence, and how many tokens it took in a step: its last ones."""

    sequence: TokenSequence
    tokens: int


class EngineCore:
    """`store` bounds rows and pages. `costs` is what is known of passes and of layers to search; it is added to.

    `turn`: steps after which a group makes room for those who wait; None: it never does. `max_itl`: seconds between two
    steps, at most, where prompts are read between them.
    """

    def __init__(
        self,
        models: ModelSet,
        speculation: SpeculativeConfig,
        coupling: str,
        store: SharedKV,
        costs: CostModel,
        turn: int | None = None,
        max_itl: float = MAX_ITL,
    ) -> None:
        self.store, self._turn = store, turn
        self._models, self._speculation, self._coupling, self._costs = models, speculation, coupling, costs
        self._waiting: deque[SequenceGroup] = deque()
        self._reading: tuple[SequenceGroup, SequenceBatch, Iterator[tuple[int, int]]] | None = None
        least = LEAST if models.target.device.type == "cpu" else LEAST_ON_GPU
        self._pacer = PrefillPacer(max_itl, models.target.ranks, least, strict=speculation.strict)
        self._groups: list[SequenceGroup] = []
        """Those that are being decoded, in the batches of their modes."""
        self._batches: dict[str, SequenceBatch] = {}
        self._prefixes = PrefixCache(store.pool, store.whole)

    def submit(self, groups: Sequence[SequenceGroup]) -> None:
        """Let groups wait for their turns. Raises CacheError, and takes none, if one's would never come."""
        for group in groups:
            texts, pages = len(group.left), self._pages(group)
            if texts > self.store.rows or pages > self.store.pages:
                raise CacheError(
                    f"it takes {texts} of {self.store.rows} rows and {pages} of {self.store.pages} pages of KV. "
                    "Use a shorter prompt or a smaller max_tokens"
                )
        self._waiting.extend(groups)

    def cancel(self, group: SequenceGroup) -> None:
        """Nobody wants it any more: what it holds is given back. Harmless when it is done."""
        match group.status:
            case Status.WAITING | Status.SWAPPED if group in self._waiting:
                self._waiting.remove(group)
                group.swapped = None
            case Status.PREFILLING:
                self._stop_reading()
            case Status.RUNNING:
                self._groups.remove(group)
                self._drop(group.mode, group.sequences)
        group.status = Status.FINISHED

    def swap_out(self, group: SequenceGroup) -> None:
        """Copy what it holds to host memory, and let it wait again behind all others. Only one that is decoded can be.

        Its text will be the same. A group that goes on with a memory of its owner's keeps it.
        """
        if group.status is Status.RUNNING and not group.memory:
            group.swapped = [self._batches[group.mode].swap_out(sequence) for sequence in group.left]
            self._groups.remove(group)
            self._drop(group.mode, group.sequences)
            self._waiting.append(group)
            group.status = Status.SWAPPED

    def close(self) -> None:
        """Cancel all there are, and forget what was read."""
        while self.groups:
            self.cancel(self.groups[-1])
        self._prefixes.clear()

    @property
    def groups(self) -> list[SequenceGroup]:
        """All that are not done, in the order in which they came."""
        return [*self._groups, *([self._reading[0]] if self._reading else []), *self._waiting]

    @property
    def kv_tokens(self) -> int:
        """Tokens whose K and V are held for rows."""
        batches = [*self._batches.values(), *([self._reading[1]] if self._reading else [])]
        return sum(int(batch.top.cache.lengths_B.sum()) for batch in batches)

    def step(self) -> list[StepOutput]:
        """Read some of the prompts, and make one proposal for each row. Returns what each sequence took of it.

        One that has reached its end has left. What fails has its `error`, and no others; but what breaks a pass of
        several ranks is raised.
        """
        self._pacer.begin(running=bool(self._batches))
        while self._admit():
            self._read()
            if not self._pacer.more():
                break
        self._make_way()
        outputs: list[StepOutput] = []
        seconds = 0.0
        for mode, batch in list(self._batches.items()):
            started = perf_counter()
            try:
                taken = batch.step()
            except Exception as error:
                self._fail(mode, error)
                continue
            seconds += perf_counter() - started
            outputs += [
                StepOutput(sequence, count) for sequence, count in zip(batch.sequences, taken, strict=True) if count
            ]
            self._leave(mode, [sequence for sequence in batch.sequences if sequence.finish])
        self._pacer.stepped(seconds)
        for group in self._groups:
            group.steps += 1
        return outputs

    def finish(self, sequence: TokenSequence, surplus: int) -> None:
        """End a sequence before its last `surplus` tokens, as a stop string ends there. It may have left already."""
        sequence.cut(surplus)
        for mode, batch in list(self._batches.items()):
            if sequence in batch.sequences:
                self._leave(mode, [sequence])

    def _admit(self) -> bool:
        """Whether there is something to read; the next in the queue, if it fits."""
        while self._reading is None and self._waiting:
            group, pool = self._waiting[0], self.store.pool
            begun = group.shared(self._prefixes)
            pool.own(begun)  # so that they do not go to make room
            if fits := self._fits(group, len(begun)):
                self._waiting.popleft()
                self._begin(group, begun)
            pool.disown(begun)
            if not fits:
                break
        return self._reading is not None

    def _fits(self, group: SequenceGroup, begun: int) -> bool:
        rows = sum(len(batch.sequences) for batch in self._batches.values())
        return rows + len(group.left) <= self.store.rows and self._prefixes.make_room(self._pages(group) - begun)

    def _make_way(self) -> None:
        """Swap out one that has had its turn, if others wait for room and the host has room for it."""
        if self._turn is None or self._admit() or not self._waiting:
            return
        _, *others = self._waiting
        swapped = sum(self._pages(group) for group in others if group.status is Status.SWAPPED)
        for group in self._groups:
            if group.steps >= self._turn and not group.memory and swapped + self._pages(group) <= self.store.pages:
                return self.swap_out(group)

    def _begin(self, group: SequenceGroup, begun: list[int]) -> None:
        group.started, group.steps = group.started or perf_counter(), 0
        build, how, batch = MODES[group.mode], (self._speculation, self._coupling), None
        try:
            costs = self._costs if group.mode == "auto" else None
            batch = SequenceBatch(
                self._models, build, *how, group.left, group.memory, costs, self._findings, self.store, begun
            )
        except RankError:
            raise
        except Exception as error:
            group.fail(error)
        if self._models.target.ranks.all_true(batch is not None) and batch:
            self._reading = group, batch, group.read(batch, self._pacer.grant)
            group.status = Status.PREFILLING
            return
        group.status = Status.FINISHED
        if batch:
            batch.keep([])
            group.error = CacheError(
                "one of the processes that share the model has no room for its KV; see --kv-offload and --max-num-seqs"
            )

    @property
    def _findings(self) -> Findings | None:
        """What is known of layers to search, if any may be; under other couplings a text depends on no other one."""
        if self._speculation.retrieval.searched_layers is not None:
            return None
        return self._costs.layers if self._coupling == "seeded" else {}

    def _close(self, batch: SequenceBatch) -> None:
        """Its texts are done: what they told is kept."""
        if batch.controller:
            batch.controller.close(batch.prefix)
        if batch.controller or (batch.search and batch.search.changed):
            self._costs.save()

    def _pages(self, group: SequenceGroup) -> int:
        """Pages that it takes from the store: enough to come to its end."""
        context, reach = self._models.target.config.context, self._speculation.reach
        return 0 if group.memory else sum(pages_for(sequence.capacity(context, reach)) for sequence in group.left)

    def _read(self) -> None:
        """One pass over the prompts of the group whose turn it is."""
        assert self._reading
        group, batch, passes = self._reading
        try:
            progress = next(passes, None)
            self._pacer.passed()
            if progress and group.on_prefill:
                group.on_prefill(*progress)
        except Exception as error:
            self._require_alone(error)
            group.fail(error)
            return self._stop_reading()
        if progress:
            return
        self._reading, group.swapped = None, None
        self._note(batch, group.sequences[:1])
        self._groups.append(group)
        group.status = Status.RUNNING
        if group.mode in self._batches:
            self._batches[group.mode].join(batch)
        else:
            self._batches[group.mode] = batch

    def _note(self, batch: SequenceBatch, sequences: list[TokenSequence]) -> None:
        """What these rows have seen may serve others."""
        pool = batch.top.cache.pool
        for b, sequence in enumerate(batch.sequences):
            if sequence in sequences and batch.memory is None:
                # Strictly, what was read as a prompt is to be shared, and what was decoded is not: its bits differ.
                seen = max(0, len(sequence.prompt) - 1 - TAIL) if self._speculation.strict else pool.lengths_B[b]
                whole = int(seen) // self.store.whole * self.store.whole
                self._prefixes.note(sequence.scope, batch.prefix.ids_BS[b, :whole], pool.tables[b])

    def _stop_reading(self) -> None:
        assert self._reading
        group, batch, _ = self._reading
        batch.keep([])
        self._reading, group.status = None, Status.FINISHED

    def _fail(self, mode: str, error: Exception) -> None:
        """A pass went wrong: nobody knows what its rows hold now, nor what their beginnings do."""
        self._require_alone(error)
        self._prefixes.clear()
        for group in [group for group in self._groups if group.mode == mode]:
            group.fail(error)
            self.cancel(group)

    def _require_alone(self, error: Exception) -> None:
        """Raise it if several ranks are in that pass: others may have come through, or wait in it."""
        if self._models.target.ranks.count > 1:
            raise error

    def _leave(self, mode: str, done: list[TokenSequence]) -> None:
        """These rows are at their end: what they have seen may serve others."""
        self._note(self._batches[mode], done)
        self._drop(mode, done)
        for group in [group for group in self._groups if not group.left]:
            self._groups.remove(group)
            group.status = Status.FINISHED

    def _drop(self, mode: str, sequences: list[TokenSequence]) -> None:
        """Some rows of a batch leave, if they are still there."""
        batch = self._batches.get(mode)
        rows = [b for b, sequence in enumerate(batch.sequences) if sequence not in sequences] if batch else []
        if batch and not rows:
            self._close(batch)
        if batch and len(rows) < len(batch.sequences):
            batch.keep(rows)
        if batch and not rows:
            del self._batches[mode]
