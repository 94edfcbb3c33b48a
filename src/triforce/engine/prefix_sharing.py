"""Beginnings of texts that later prompts may have in common with them: in pages that stay, and in the disk cache."""

from __future__ import annotations

from collections.abc import Sequence

from triforce.disk_cache.prefixes import Pages
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.tier_builder import SharedKV
from triforce.kvcache import PAGE, PagePool
from triforce.kvcache.pool import PrefixPages
from triforce.kvcache.prefix_cache import PrefixCache
from triforce.kvcache.views.full import TAIL


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
            prefixes.note(sequence.scope, text, pool.tables[b], pool.windows.tables[b] if pool.windows else ())
        if sequence.disk:
            held = prefixes.locate(sequence.scope, text) if batch.memory is None else _pages_of(pool, b)
            sequence.disk.keep(text, held, midway)


def _pages_of(pool: PagePool, b: int) -> Pages:
    """Return what finds pages in the tables of a row that stays its owner's, which gives those of windows back."""
    kept, windows = list(pool.tables[b]), pool.windows

    def pages(start: int, stop: int) -> PrefixPages:
        some = slice(start // PAGE, stop // PAGE)
        return PrefixPages(kept[some], windows.tables[b][some] if windows else ())

    return pages
