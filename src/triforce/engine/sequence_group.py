"""SequenceGroup: sequences with one prompt that start together, and all that comes before their first token.

A prompt comes from other rows of the batch that begin alike, from a saved file (`restore_batch`), from the disk cache
(`restore_from_disk`), and what is left is fed (`prefill_batch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from time import perf_counter
from traceback import clear_frames

import torch

from triforce.disk_cache.entry_store import Use
from triforce.disk_cache.prefixes import DiskPrefixes, DiskText
from triforce.disk_cache.prompt_file import SavedCache
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch, SwappedSequence
from triforce.errors import CacheError, argument
from triforce.kvcache import PAGE, FullView, StreamingView
from triforce.kvcache.prefix_cache import PrefixCache, PrefixMatch
from triforce.ragged import common_prefix
from triforce.speculation import Grant, Proposer, Tier, grant_all

OnPrefill = Callable[[int, int], None]
"""Gets the prompt tokens read so far, and their total."""


class Status(Enum):
    """Stage of a group. The lists of the `Scheduler` follow from it; it and `EngineCore` alone change it."""

    WAITING = "waiting for its turn; it holds nothing"
    PREFILLING = "its prompt is being read"
    RUNNING = "each step makes its texts longer"
    SWAPPED = "waiting again; what it held of KV is in host memory"
    FINISHED = "done, cancelled or failed"


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """Sequences with one prompt and one mode that start together. Other groups may have other modes.

    memory: a full view to go on with (see `SequenceBatch`). saved: a saved prompt to start from. on_read: gets the full
    view once all prompts have been read.
    """

    sequences: list[TokenSequence]
    mode: str
    memory: FullView | None = None
    saved: SavedCache | None = None
    on_prefill: OnPrefill | None = None
    on_read: Callable[[FullView], None] | None = None
    status: Status = Status.WAITING
    started: float | None = None
    """When it was admitted, by `perf_counter`."""
    steps: int = 0
    """Steps since its turn came."""
    cached: int = 0
    """Tokens of the prompt that were read before, for another text."""
    lost: int = 0
    """Tokens that were, too, but for windows that are gone: behind these others will begin, so they are kept there."""
    tokens_read: int = 0
    """Tokens of its first prompt that were read, or found, so far."""
    left: int = 0
    """Tokens of all its prompts that are left to be read, once the reading began."""
    swapped: list[SwappedSequence] | None = None
    """KV and state of its unfinished sequences, while others have their room."""
    error: Exception | None = None
    """Reason why it ended before its time."""

    @property
    def unfinished(self) -> list[TokenSequence]:
        """Sequences that are not finished."""
        return [sequence for sequence in self.sequences if sequence.finish is None]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompts that are to be read: those of a prompt that another one has are copied."""
        return len(self.sequences[0].prompt) - 1 if not self.swapped else 0

    def shares(self, other: SequenceGroup) -> int:
        """Return how many tokens the prompts of both begin with, where one may have the KV of the other; 0 in a page.

        It is asked of each prompt that waits whenever a part of one was read: most differ in their first page.
        """
        mine = self.sequences[0]
        its = other.sequences[0]
        if mine.scope is None or mine.scope != its.scope or self.memory or other.memory:
            return 0
        if mine.prompt[:PAGE] != its.prompt[:PAGE]:
            return 0
        return common_prefix(mine.prompt, its.prompt)

    def fail(self, error: Exception) -> None:
        """Note why it ended before its time. Where memory ran out, the note says what would need less."""
        if isinstance(error, torch.OutOfMemoryError):
            clear_frames(error.__traceback__)  # what the pass had made, which others need
            torch.cuda.empty_cache()
            error = CacheError(
                f"the device ran out of memory in this pass; use {argument('kv_offload', 'host')}, a smaller "
                f"{argument('kv_memory')} or {argument('context')}, or fewer texts at a time"
            )
        self.error = error

    def cached_pages(self, prefixes: PrefixCache) -> PrefixMatch:
        """Find pages of the pool that its prompt can begin with, as other texts begin alike."""
        first = self.sequences[0]
        scored = first.params.prompt_logprobs is not None  # every position is needed
        if self.swapped or self.memory or self.saved or scored or first.scope is None:
            return PrefixMatch()
        return prefixes.find(first.scope, first.prompt)

    def regained(self, seen: int) -> bool:
        """Return whether the tokens that were lost are among so many that are read now: True once."""
        found = 0 < self.lost <= seen
        self.lost = self.lost * (seen < self.lost)
        return found

    def prefill(
        self, batch: SequenceBatch, grant: Grant, disk: DiskPrefixes | None = None
    ) -> Iterator[tuple[int, int]]:
        """Do all that comes before the next token. Yields (tokens seen, tokens in all) after each pass or reading."""
        if self.swapped:
            batch.swap_in(self.swapped)
            return
        use = Use()
        for sequence in self.sequences:
            if disk and sequence.scope is not None:
                sequence.disk = DiskText(disk, sequence.scope, use, len(sequence.prompt))
        if self.saved:
            restore_batch(batch, self.saved)
        else:
            for progress in restore_from_disk(batch):
                self.cached = int(batch.top.cache.lengths_B[0])
                yield progress
        self.cached = int(batch.top.cache.lengths_B[0])
        for sequence in self.sequences:
            sequence.cached = self.cached
        for progress in prefill_batch(batch, grant):
            self._note_cost(batch)
            yield progress
        if self.on_read:
            self.on_read(batch.top.cache)

    def _note_cost(self, batch: SequenceBatch) -> None:
        """Note what a token of the prompt costs to read, for those who may have it from disk."""
        seconds = float(batch.top.counters.prefill_seconds_B[0])
        fed = int(batch.top.cache.lengths_B[0]) - self.cached
        for sequence in self.sequences:
            if sequence.disk and fed > 0:
                sequence.disk.cost = seconds / fed


@torch.no_grad()
def restore_batch(batch: SequenceBatch, saved: SavedCache) -> None:
    """Start from a saved prompt, as far as the prompts begin like it. Raises CacheError."""
    started = perf_counter()
    for b, sequence in enumerate(batch.sequences):
        if _source(batch, b) is None and sequence.params.prompt_logprobs is None:  # these need every position scored
            saved.restore(batch.top.cache, b, sequence.prompt)
    _add_seconds(batch, started)


def restore_from_disk(batch: SequenceBatch) -> Iterator[tuple[int, int]]:
    """Start from what the disk cache has of the first prompt. Yields (tokens seen, tokens in all) of each segment."""
    first = batch.sequences[0]
    started = perf_counter()
    if first.disk and first.params.prompt_logprobs is None:
        for seen in first.disk.restore(batch.top.cache, 0, first.prompt):
            _add_seconds(batch, started)
            yield seen, sum(len(sequence.prompt) - 1 for sequence in batch.sequences)
            started = perf_counter()


@torch.no_grad()
def prefill_batch(batch: SequenceBatch, grant: Grant = grant_all) -> Iterator[tuple[int, int]]:
    """Feed every prompt but its last token. Yields (tokens seen, tokens in all) of the full view after each pass.

    grant: how many tokens a pass may have.
    """
    sizes = [len(sequence.prompt) - 1 for sequence in batch.sequences]
    started = perf_counter()
    if batch.search:  # what is known already: a controller goes by it, and it had best stay in memory
        batch.search_layers(batch.search, max(sizes) + 1, 0)
    for b in range(len(batch.sequences)):
        source = _source(batch, b)
        for seen in _feed(batch, b, grant) if source is None else _fork(batch, source, b):
            _add_seconds(batch, started)
            yield sum(sizes[:b]) + seen, sum(sizes)
            started = perf_counter()


def _source(batch: SequenceBatch, b: int) -> int | None:
    """The first row that the prefill of row b can be copied from, if there is one."""
    return next((a for a in range(b) if batch.sequences[b].can_copy_prefill(batch.sequences[a])), None)


def _feed(batch: SequenceBatch, b: int, grant: Grant) -> Iterator[int]:
    sequence = batch.sequences[b]
    seen = int(batch.top.cache.lengths_B[b])
    length = len(sequence.prompt) - 1
    for tier in batch.tiers:
        if tier is not batch.top:
            yield from (seen for _ in _feed_lower(batch, tier, b, length, grant))
    hook = sequence.prompt_logits_hook() if sequence.params.prompt_logprobs is not None else None
    yield from batch.top.prefill(batch.prefix, b, length, hook, grant=grant)


def _feed_lower(batch: SequenceBatch, tier: Proposer, b: int, length: int, grant: Grant) -> Iterator[int]:
    """Feed a tier below the full one. What a draft sees comes from the disk cache, and goes to it, if there is one."""
    sequence = batch.sequences[b]
    if sequence.disk and isinstance(tier, Tier) and isinstance(view := tier.cache, StreamingView):
        sequence.disk.restore_draft(view, b, sequence.prompt)
        if (stop := sequence.disk.draft_stop(sequence.prompt)) > view.lengths_B[b]:
            yield from tier.prefill(batch.prefix, b, stop, grant=grant)
            sequence.disk.keep_draft(view, b, sequence.prompt)
    yield from tier.prefill(batch.prefix, b, length, grant=grant)


def _fork(batch: SequenceBatch, source: int, b: int) -> Iterator[int]:
    for tier in batch.tiers:
        if isinstance(tier, Tier):
            tier.cache.fork(source, b)
    batch.sequences[b].prompt_logprobs = batch.sequences[source].prompt_logprobs
    yield len(batch.sequences[b].prompt) - 1


def _add_seconds(batch: SequenceBatch, started: float) -> None:
    for sequence in batch.sequences:
        sequence.prefill_seconds += perf_counter() - started
