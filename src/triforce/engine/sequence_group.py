"""SequenceGroup: sequences with one prompt that start together, and all work before their first token.

The first row begins with pages of the prefix cache (`cached_pages`), and continues with segments of the disk cache
(`restore_from_disk`). If the caller names a saved file, the row begins with that file's KV instead (`restore_batch`). A
prefill feeds the remaining tokens, and the other rows copy the KV of the first (`prefill_batch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from time import perf_counter
from traceback import clear_frames

from triforce.backends.current_device import is_out_of_memory
from triforce.disk_cache.entry_store import Use
from triforce.disk_cache.prefixes import DiskPrefixes, DiskText
from triforce.disk_cache.prompt_file import SavedCache
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch, SwappedSequence
from triforce.errors import CacheError, argument
from triforce.kvcache import PAGE, FullView
from triforce.kvcache.prefix_cache import PrefixCache, PrefixMatch
from triforce.ragged import common_prefix
from triforce.speculation import Grant, Tier, grant_all

OnPrefill = Callable[[int, int], None]
"""Called with the count of prompt tokens that are cached so far, and the count of all prompt tokens."""


class Status(Enum):
    """Stage of a group. The lists of the `Scheduler` follow from it. Only `Scheduler` and `EngineCore` change it."""

    WAITING = "in the queue, without rows or pages"
    PREFILLING = "its prompt is being prefilled"
    RUNNING = "in the batch of its mode"
    SWAPPED = "in the queue again, with its KV in host memory"
    FINISHED = "done, cancelled or failed"


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """Sequences with one prompt and one mode that start together: the `n` completions of a request, or a part of them.

    memory: a caller's full view to continue (see `SequenceBatch`). saved: a saved prompt to start from. on_read: called
    with the full view once the prompt is prefilled.
    """

    sequences: list[TokenSequence]
    mode: str
    memory: FullView | None = None
    saved: SavedCache | None = None
    on_prefill: OnPrefill | None = None
    on_read: Callable[[FullView], None] | None = None
    status: Status = Status.WAITING
    started: float | None = None
    """Time of its admission, by `perf_counter`."""
    steps: int = 0
    """Steps since its latest admission."""
    cached_prompt_tokens: int = 0
    """Tokens of the prompt whose KV came from other texts or from files."""
    tokens_without_windows: int = 0
    """Length of a cached prefix that is used only in part, because window pages were evicted; 0: there is none.

    Once prefill has passed the end of that prefix, the new window pages are shared with later prompts.
    """
    prefilled_tokens: int = 0
    """Tokens of its prompt that are cached so far, in the first row."""
    tokens_to_prefill: int = 0
    """While the group is being prefilled: its prompt tokens that are still to be prefilled, counted for one row as in
    `prompt_tokens`."""
    swapped: list[SwappedSequence] | None = None
    """KV and state of its unfinished sequences, while it is swapped out."""
    error: Exception | None = None
    """Error that ended the group early; None: there is none."""

    @property
    def unfinished(self) -> list[TokenSequence]:
        """Sequences that are not finished."""
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens to be prefilled: those of one row, as the KV is copied for the other rows."""
        return len(self.sequences[0].prompt) - 1 if not self.swapped else 0

    def common_tokens(self, other: SequenceGroup) -> int:
        """Return the length of the common prefix of two prompts whose KV may be shared; 0 if their first pages differ.

        The first page is compared on its own, because the scheduler calls this often and most prompts differ there.
        """
        sequence = self.sequences[0]
        other_sequence = other.sequences[0]
        if sequence.scope is None or sequence.scope != other_sequence.scope or self.memory or other.memory:
            return 0
        if sequence.prompt[:PAGE] != other_sequence.prompt[:PAGE]:
            return 0
        return common_prefix(sequence.prompt, other_sequence.prompt)

    def fail(self, error: Exception) -> None:
        """Set the error that ended the group. If the device ran out of memory, the error advises smaller settings."""
        if is_out_of_memory(error):
            clear_frames(error.__traceback__)  # frees the tensors of the pass
            _release_device_memory()
            error = CacheError(
                f"the device ran out of memory in this pass; use {argument('kv_offload', 'host')}, a smaller "
                f"{argument('kv_memory')} or {argument('context')}, or fewer texts at a time"
            )
        self.error = error

    def cached_pages(self, prefixes: PrefixCache) -> PrefixMatch:
        """Find cached pages of other texts that begin like the prompt."""
        sequence = self.sequences[0]
        scored = sequence.params.prompt_logprobs is not None  # the logits of every position are needed
        if self.swapped or self.memory or self.saved or scored or sequence.scope is None:
            return PrefixMatch()
        return prefixes.find(sequence.scope, sequence.prompt)

    def windows_restored(self, cached_tokens: int) -> bool:
        """Whether prefill has just passed `tokens_without_windows`. Returns True once, and resets that field."""
        reached = 0 < self.tokens_without_windows <= cached_tokens
        if reached:
            self.tokens_without_windows = 0
        return reached

    def prefill(
        self, batch: SequenceBatch, grant: Grant, disk: DiskPrefixes | None = None
    ) -> Iterator[tuple[int, int]]:
        """Prepare the batch for its next token.

        Yields (cached tokens, all tokens) after each restored segment, and after each pass or part of one.
        """
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
                self.cached_prompt_tokens = int(batch.top.cache.lengths_B[0])
                yield progress
        self.cached_prompt_tokens = int(batch.top.cache.lengths_B[0])
        for sequence in self.sequences:
            sequence.cached_prompt_tokens = self.cached_prompt_tokens
        for progress in prefill_batch(batch, grant):
            self._note_cost(batch)
            yield progress
        if self.on_read:
            self.on_read(batch.top.cache)

    def _note_cost(self, batch: SequenceBatch) -> None:
        """Record the prefill seconds per token.

        The disk cache gives up a later restore that takes longer than a prefill would.
        """
        seconds = float(batch.top.counters.prefill_seconds_B[0])
        fed = int(batch.top.cache.lengths_B[0]) - self.cached_prompt_tokens
        for sequence in self.sequences:
            if sequence.disk and fed > 0:
                sequence.disk.seconds_per_token = seconds / fed


def _release_device_memory() -> None:
    from triforce.backends.torch.devices import release_unused_memory

    release_unused_memory()


def restore_batch(batch: SequenceBatch, saved: SavedCache) -> None:
    """Restore, for each prompt, the prefix that it shares with the saved prompt. Raises CacheError."""
    started = perf_counter()
    for b, sequence in enumerate(batch.sequences):
        if (
            _source(batch, b) is None and sequence.params.prompt_logprobs is None
        ):  # prompt logprobs need every position fed
            saved.restore(batch.top.cache, b, sequence.prompt)
    _add_seconds(batch, started)


def restore_from_disk(batch: SequenceBatch) -> Iterator[tuple[int, int]]:
    """Restore segments of the first prompt from the disk cache. Yields (cached tokens, all tokens) after each."""
    first_sequence = batch.sequences[0]
    started = perf_counter()
    if first_sequence.disk and first_sequence.params.prompt_logprobs is None:
        for cached_tokens in first_sequence.disk.restore(batch.top.cache, 0, first_sequence.prompt):
            _add_seconds(batch, started)
            yield cached_tokens, sum(len(sequence.prompt) - 1 for sequence in batch.sequences)
            started = perf_counter()


def prefill_batch(batch: SequenceBatch, grant: Grant = grant_all) -> Iterator[tuple[int, int]]:
    """Feed every prompt without its last token.

    Yields (cached tokens of the full view, all tokens) after each pass or part. The first step feeds the last token
    together with draft tokens: the logits of the last token judge the first of them. grant: returns the tokens that a
    pass may have.
    """
    sizes = [len(sequence.prompt) - 1 for sequence in batch.sequences]
    started = perf_counter()
    if batch.search:
        # Findings of earlier texts name searched layers. From now on the controller counts the cost of a search in
        # them, and offload keeps their pages resident.
        batch.search_layers(batch.search, max(sizes) + 1, 0)
    for b in range(len(batch.sequences)):
        source = _source(batch, b)
        for cached_tokens in _feed(batch, b, grant) if source is None else _fork(batch, source, b):
            _add_seconds(batch, started)
            yield sum(sizes[:b]) + cached_tokens, sum(sizes)
            started = perf_counter()


def _source(batch: SequenceBatch, b: int) -> int | None:
    """Return the first row before b with a prefill that b can copy; None: there is none."""
    return next((a for a in range(b) if batch.sequences[b].can_copy_prefill(batch.sequences[a])), None)


def _feed(batch: SequenceBatch, b: int, grant: Grant) -> Iterator[int]:
    sequence = batch.sequences[b]
    cached_tokens = int(batch.top.cache.lengths_B[b])
    length = len(sequence.prompt) - 1
    for tier in batch.prefilled_lower_tiers:
        yield from (cached_tokens for _ in tier.prefill(batch.prefix, b, length, grant=grant))
    hook = sequence.prompt_logits_hook() if sequence.params.prompt_logprobs is not None else None
    yield from batch.top.prefill(batch.prefix, b, length, hook, grant=grant)


def _fork(batch: SequenceBatch, source: int, b: int) -> Iterator[int]:
    for tier in batch.tiers:
        if isinstance(tier, Tier):
            tier.cache.fork(source, b)
    batch.sequences[b].prompt_logprobs = batch.sequences[source].prompt_logprobs
    yield len(batch.sequences[b].prompt) - 1


def _add_seconds(batch: SequenceBatch, started: float) -> None:
    for sequence in batch.sequences:
        sequence.prefill_seconds += perf_counter() - started
