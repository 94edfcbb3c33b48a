"""ReadingHistory: why a prompt was read again. It tells positions and counts, and never text."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

from triforce.disk_cache.prefixes import LEAST, SEGMENT, DiskPrefixes
from triforce.kvcache import PAGE
from triforce.kvcache.views.full import TAIL
from triforce.ragged import Ints, ints

TEXTS, SCOPES = 4, 64
"""Texts that are remembered of a scope, and scopes: the latest."""


class ReadingHistory:
    """Latest texts of each scope, which new prompts are compared with. disk: keeps them for other processes, too."""

    def __init__(self, disk: DiskPrefixes | None = None) -> None:
        self._disk = disk
        self._texts: OrderedDict[str, deque[Ints]] = OrderedDict()

    def note(self, scope: str, text: Sequence[int]) -> None:
        """Remember a text, prompt and answer."""
        texts = self._latest(scope)
        texts.append(ints(list(text)))
        if self._disk and len(text) >= LEAST:
            self._disk.keep_latest(scope, [each for each in texts if len(each) >= LEAST])

    def _latest(self, scope: str) -> deque[Ints]:
        if scope not in self._texts:
            self._texts[scope] = deque(self._disk.latest(scope) if self._disk else (), maxlen=TEXTS)
        self._texts.move_to_end(scope)
        if len(self._texts) > SCOPES:
            self._texts.popitem(last=False)
        return self._texts[scope]

    def why(self, scope: str, prompt: Sequence[int], cached: int, *, slow_disk: bool = False) -> str:
        """Return why no more than `cached` tokens of a prompt were read before; "" where a segment at most was read.

        slow_disk: more of it is kept on disk, which was given up.
        """
        if len(prompt) - cached <= SEGMENT + TAIL:
            return ""
        if slow_disk:
            return f"behind its first {cached:,} tokens the disk is slower than reading again"
        ids = ints(list(prompt))
        common = max((_common(ids, text) for text in self._latest(scope)), default=0)
        if common > cached + SEGMENT:
            return f"its first {common:,} tokens were read before, but no longer kept"
        if common >= PAGE:
            return f"it differs from token {common + 1:,} on from what was read before"
        return "no more of it was kept" if cached else "nothing that was read lately begins like it"


def _common(a: Ints, b: Ints) -> int:
    """Return how many tokens two texts have in common at their start."""
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if len(differing) else length
