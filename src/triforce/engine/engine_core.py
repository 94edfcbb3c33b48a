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

from triforce.engine.batch import Batch
from triforce.engine.config import SpeculativeConfig
from triforce.engine.modes import MODES
from triforce.engine.prefill_pacer import LEAST, LEAST_ON_GPU, MAX_ITL, PrefillPacer
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_group import SequenceGroup, Status
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
        setting: SpeculativeConfig,
        coupling: str,
        store: SharedKV,
        costs: CostModel,
        turn: int | None = None,
        max_itl: float = MAX_ITL,
    ) -> None:
        self.store, self._turn = store, turn
        self._models, self._setting, self._coupling, self._costs = models, setting, coupling, costs
        self._waiting: deque[SequenceGroup] = deque()
        self._reading: tuple[SequenceGroup, Batch, Iterator[tuple[int, int]]] | None = None
        least = LEAST if models.target.device.type == "cpu" else LEAST_ON_GPU
        self._pacer = PrefillPacer(max_itl, models.target.ranks, least, strict=setting.strict)
        self._groups: list[SequenceGroup] = []
        """Those that are being decoded, in the batches of their modes."""
        self._batches: dict[str, Batch] = {}
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
                group.aside = None
            case Status.PREFILLING:
                self._stop_reading()
            case Status.RUNNING:
                self._groups.remove(group)
                self._drop(group.mode, group.jobs)
        group.status = Status.FINISHED

    def put_aside(self, group: SequenceGroup) -> None:
        """Copy what it holds to host memory, and let it wait again behind all others. Only one that is decoded can be.

        Its text will be the same. A group that goes on with a memory of its owner's keeps it.
        """
        if group.status is Status.RUNNING and not group.memory:
            group.aside = [self._batches[group.mode].aside(job) for job in group.left]
            self._groups.remove(group)
            self._drop(group.mode, group.jobs)
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
            outputs += [StepOutput(job, count) for job, count in zip(batch.jobs, taken, strict=True) if count]
            self._leave(mode, [job for job in batch.jobs if job.finish])
        self._pacer.stepped(seconds)
        for group in self._groups:
            group.steps += 1
        return outputs

    def finish(self, job: TokenSequence, surplus: int) -> None:
        """End a sequence before its last `surplus` tokens, as a stop string ends there. It may have left already."""
        job.cut(surplus)
        for mode, batch in list(self._batches.items()):
            if job in batch.jobs:
                self._leave(mode, [job])

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
        rows = sum(len(batch.jobs) for batch in self._batches.values())
        return rows + len(group.left) <= self.store.rows and self._prefixes.make_room(self._pages(group) - begun)

    def _make_way(self) -> None:
        """Put aside one that has had its turn, if others wait for room and what lies aside then would fit the store."""
        if self._turn is None or self._admit() or not self._waiting:
            return
        _, *others = self._waiting
        aside = sum(self._pages(group) for group in others if group.status is Status.SWAPPED)
        for group in self._groups:
            if group.steps >= self._turn and not group.memory and aside + self._pages(group) <= self.store.pages:
                return self.put_aside(group)

    def _begin(self, group: SequenceGroup, begun: list[int]) -> None:
        group.started, group.steps = group.started or perf_counter(), 0
        ladder, how, batch = MODES[group.mode], (self._setting, self._coupling), None
        try:
            costs = self._costs if group.mode == "auto" else None
            batch = Batch(
                self._models, ladder, *how, group.left, group.memory, costs, self._findings, self.store, begun
            )
        except RankError:
            raise
        except Exception as error:
            group.fail(error)
        if self._models.target.ranks.unanimous(batch is not None) and batch:
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
        if self._setting.retrieval.searched_layers is not None:
            return None
        return self._costs.layers if self._coupling == "seeded" else {}

    def _close(self, batch: Batch) -> None:
        """Its texts are done: what they told is kept."""
        if batch.pilot:
            batch.pilot.close(batch.prefix)
        if batch.pilot or (batch.search and batch.search.news):
            self._costs.save()

    def _pages(self, group: SequenceGroup) -> int:
        """Pages that it takes from the store: enough to come to its end."""
        context, reach = self._models.target.config.context, self._setting.reach
        return 0 if group.memory else sum(pages_for(job.capacity(context, reach)) for job in group.left)

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
        self._reading, group.aside = None, None
        self._note(batch, group.jobs[:1])
        self._groups.append(group)
        group.status = Status.RUNNING
        if group.mode in self._batches:
            self._batches[group.mode].join(batch)
        else:
            self._batches[group.mode] = batch

    def _note(self, batch: Batch, jobs: list[TokenSequence]) -> None:
        """What these rows have seen may serve others."""
        pool = batch.top.cache.pool
        for b, job in enumerate(batch.jobs):
            if job in jobs and batch.memory is None:
                # Strictly, what was read as a prompt is to be shared, and what was decoded is not: its bits differ.
                seen = max(0, len(job.prompt) - 1 - TAIL) if self._setting.strict else pool.lengths_B[b]
                whole = int(seen) // self.store.whole * self.store.whole
                self._prefixes.note(job.scope, batch.prefix.ids_BS[b, :whole], pool.tables[b])

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

    def _drop(self, mode: str, jobs: list[TokenSequence]) -> None:
        """Some rows of a batch leave, if they are still there."""
        batch = self._batches.get(mode)
        rows = [b for b, job in enumerate(batch.jobs) if job not in jobs] if batch else []
        if batch and not rows:
            self._close(batch)
        if batch and len(rows) < len(batch.jobs):
            batch.keep(rows)
        if batch and not rows:
            del self._batches[mode]
