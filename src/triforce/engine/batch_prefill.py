"""Prefill of a batch: every prompt but its last token goes through every tier, row by row.

A row whose prompt another row has is copied from it, and a saved prompt is read from its file.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

import numpy as np
import torch

from triforce.engine.sequence_batch import SequenceBatch
from triforce.kvcache.prompt_file import SavedCache
from triforce.speculation import Grant, Tier, grant_all


@torch.no_grad()
def restore_batch(batch: SequenceBatch, saved: SavedCache) -> None:
    """Start from a saved prompt, as far as the prompts begin like it. Raises CacheError."""
    started = perf_counter()
    for b, sequence in enumerate(batch.sequences):
        if _source(batch, b) is None and sequence.params.prompt_logprobs is None:  # these need every position scored
            saved.restore(batch.top.cache, b, sequence.prompt)
    _add_seconds(batch, started)


@torch.no_grad()
def prefill_batch(batch: SequenceBatch, grant: Grant = grant_all) -> Iterator[tuple[int, int]]:
    """Feed every prompt but its last token. Yields (tokens seen, tokens in all) of the full view after each pass.

    grant: how many tokens a pass may have.
    """
    sizes = [len(sequence.prompt) - 1 for sequence in batch.sequences]
    started = perf_counter()
    if batch.search:  # what is known already: a controller goes by it, and it had best stay in memory
        batch.search_layers(batch.search, max(sizes) + 1, 0, np.ones(len(sizes), bool))
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
    sequence, seen = batch.sequences[b], int(batch.top.cache.lengths_B[b])
    length = len(sequence.prompt) - 1
    for tier in batch.tiers:
        if tier is not batch.top:
            yield from (seen for _ in tier.prefill(batch.prefix, b, length, grant=grant))
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
