"""RunningBatches: one batch for each mode. Groups join once they are prefilled; sequences leave between two steps."""

from __future__ import annotations

from collections.abc import Sequence

from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch, SwappedSequence
from triforce.engine.sequence_group import SequenceGroup
from triforce.engine.tier_builder import SharedKV
from triforce.kvcache.prefix_cache import PrefixCache
from triforce.kvcache.views.full import TAIL
from triforce.planner import CostModel


class RunningBatches:
    """Batches by mode, none of them empty. What their rows have seen goes to `prefixes`, what plans cost to `costs`."""

    def __init__(self, store: SharedKV, prefixes: PrefixCache, costs: CostModel) -> None:
        self._store, self._prefixes, self._costs = store, prefixes, costs
        self.of_mode: dict[str, SequenceBatch] = {}

    def join(self, group: SequenceGroup, batch: SequenceBatch) -> None:
        """Decode the rows of a group that has been prefilled with the others of its mode from now on."""
        self._share_prefixes(batch, group.sequences[:1])
        if group.mode in self.of_mode:
            self.of_mode[group.mode].join(batch)
        else:
            self.of_mode[group.mode] = batch

    def finish(self, mode: str, sequences: Sequence[TokenSequence]) -> None:
        """Let finished sequences leave; what they have seen may serve others."""
        self._share_prefixes(self.of_mode[mode], sequences)
        self.drop(mode, sequences)

    def swap_out(self, mode: str, sequences: Sequence[TokenSequence]) -> list[SwappedSequence]:
        """Let sequences leave, and return what they held, in host memory."""
        held = [self.of_mode[mode].swap_out(sequence) for sequence in sequences]
        self.drop(mode, sequences)
        return held

    def drop(self, mode: str, sequences: Sequence[TokenSequence]) -> None:
        """Let sequences leave, if they are still there: what they hold is given back."""
        batch = self.of_mode.get(mode)
        rows = [b for b, sequence in enumerate(batch.sequences) if sequence not in sequences] if batch else []
        if batch and not rows:
            self._save_costs(batch)
        if batch and len(rows) < len(batch.sequences):
            batch.keep(rows)
        if batch and not rows:
            del self.of_mode[mode]

    def _share_prefixes(self, batch: SequenceBatch, sequences: Sequence[TokenSequence]) -> None:
        """Let later prompts begin with what the rows of these sequences have seen."""
        pool, speculation = batch.top.cache.pool, self._store.speculation
        for b, sequence in enumerate(batch.sequences):
            if sequence in sequences and batch.memory is None:
                # Strictly, what was read as a prompt is to be shared, and what was decoded is not: its bits differ.
                seen = max(0, len(sequence.prompt) - 1 - TAIL) if speculation.strict else pool.lengths_B[b]
                whole = int(seen) // self._store.whole * self._store.whole
                self._prefixes.note(sequence.scope, batch.prefix.ids_BS[b, :whole], pool.tables[b])

    def _save_costs(self, batch: SequenceBatch) -> None:
        """Keep what the passes of a batch cost, as all its sequences are finished."""
        if batch.controller:
            batch.controller.close(batch.prefix)
        if batch.controller or (batch.search and batch.search.changed):
            self._costs.save()
