"""Jobs that start together: what is read before their first tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from traceback import clear_frames

import torch

from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch, SwappedSequence
from triforce.errors import CacheError
from triforce.kvcache import FullView
from triforce.kvcache.prefix_cache import PrefixCache
from triforce.kvcache.prompt_file import SavedCache
from triforce.speculation import Grant

OnPrefill = Callable[[int, int], None]
"""Told of the prompt tokens read so far, and of all there are."""


class Status(Enum):
    """Where a group is on its way; `EngineCore` alone moves it on."""

    WAITING = "waiting for its turn; it holds nothing"
    PREFILLING = "its prompt is being read"
    RUNNING = "each step makes its texts longer"
    SWAPPED = "waiting again; what it held of KV is in host memory"
    FINISHED = "done, cancelled or failed"


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """Jobs with one prompt and one mode that start together. Jobs of other groups may be of other modes.

    `memory` is an exact view to go on with (see `SequenceBatch`), `earlier` a saved prompt to start from. `on_read`
    gets the exact view once all prompts have been read.
    """

    sequences: list[TokenSequence]
    mode: str
    memory: FullView | None = None
    earlier: SavedCache | None = None
    on_prefill: OnPrefill | None = None
    on_read: Callable[[FullView], None] | None = None
    status: Status = Status.WAITING
    started: float | None = None
    """When it was admitted, by `perf_counter`."""
    steps: int = 0
    """Steps since its turn came."""
    cached: int = 0
    """Tokens of the prompt that need not be read, as others have read them."""
    swapped: list[SwappedSequence] | None = None
    """What the rows of its jobs that are not done hold, while others have their room."""
    error: Exception | None = None
    """What ended it before its time."""

    @property
    def left(self) -> list[TokenSequence]:
        """Jobs that are not done."""
        return [sequence for sequence in self.sequences if sequence.finish is None]

    def fail(self, error: Exception) -> None:
        """It has ended before its time; of memory that ran out it is said what would need less."""
        if isinstance(error, torch.OutOfMemoryError):
            clear_frames(error.__traceback__)  # what the pass had made, which others need
            torch.cuda.empty_cache()
            error = CacheError(
                "the device ran out of memory in this pass; use --kv-offload host, a smaller --kv-memory or --context, "
                "or fewer texts at a time"
            )
        self.error = error

    def shared(self, prefixes: PrefixCache) -> list[int]:
        """Pages that it can begin with."""
        first = self.sequences[0]
        scored = first.params.prompt_logprobs is not None  # every position is needed
        if self.swapped or self.memory or self.earlier or scored:
            return []
        return prefixes.find(first.scope, first.prompt)

    def read(self, batch: SequenceBatch, grant: Grant) -> Iterator[tuple[int, int]]:
        """All that comes before the next token, as `SequenceBatch.prefill` yields it."""
        if self.swapped:
            batch.swap_in(self.swapped)
            return
        if self.earlier:
            batch.restore(self.earlier)
        self.cached = int(batch.top.cache.lengths_B[0])
        yield from batch.prefill(grant)
        if self.on_read:
            self.on_read(batch.top.cache)
