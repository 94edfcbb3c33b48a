"""SequenceGroup: sequences with one prompt and one mode that start together, and where they are on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from traceback import clear_frames

import torch

from triforce.engine import batch_prefill
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch, SwappedSequence
from triforce.errors import CacheError
from triforce.kvcache import FullView
from triforce.kvcache.prefix_cache import PrefixCache
from triforce.kvcache.prompt_file import SavedCache
from triforce.speculation import Grant

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
    swapped: list[SwappedSequence] | None = None
    """KV and state of its unfinished sequences, while others have their room."""
    error: Exception | None = None
    """Reason why it ended before its time."""

    @property
    def unfinished(self) -> list[TokenSequence]:
        """Sequences that are not finished."""
        return [sequence for sequence in self.sequences if sequence.finish is None]

    def fail(self, error: Exception) -> None:
        """Note why it ended before its time. Where memory ran out, the note says what would need less."""
        if isinstance(error, torch.OutOfMemoryError):
            clear_frames(error.__traceback__)  # what the pass had made, which others need
            torch.cuda.empty_cache()
            error = CacheError(
                "the device ran out of memory in this pass; use --kv-offload host, a smaller --kv-memory or --context, "
                "or fewer texts at a time"
            )
        self.error = error

    def cached_pages(self, prefixes: PrefixCache) -> list[int]:
        """Pages of the pool that its prompt can begin with, as other texts begin alike."""
        first = self.sequences[0]
        scored = first.params.prompt_logprobs is not None  # every position is needed
        if self.swapped or self.memory or self.saved or scored:
            return []
        return prefixes.find(first.scope, first.prompt)

    def prefill(self, batch: SequenceBatch, grant: Grant) -> Iterator[tuple[int, int]]:
        """Do all that comes before the next token. Yields (tokens seen, tokens in all) after each pass."""
        if self.swapped:
            batch.swap_in(self.swapped)
            return
        if self.saved:
            batch_prefill.restore_batch(batch, self.saved)
        self.cached = int(batch.top.cache.lengths_B[0])
        yield from batch_prefill.prefill_batch(batch, grant)
        if self.on_read:
            self.on_read(batch.top.cache)
