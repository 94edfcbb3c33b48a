"""ReadingHistory: the latest texts of each scope, which tell why a prompt was not found in the cache."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

from triforce.disk_cache.prefixes import MIN_TEXT_TOKENS, SEGMENT, DiskPrefixes
from triforce.kvcache import PAGE
from triforce.kvcache.views.full import TAIL
from triforce.ragged import Ints, ints

MAX_TEXTS = 4
"""Latest texts that are kept of a scope."""
MAX_SCOPES = 64
"""Latest scopes that are kept."""


class ReadingHistory:
    """Latest texts of each scope, for comparison with new prompts. disk: keeps the texts for other processes too."""

    def __init__(self, disk: DiskPrefixes | None = None) -> None:
        self._disk = disk
        self._texts: OrderedDict[str, deque[Ints]] = OrderedDict()

    def record(self, scope: str, text: Sequence[int]) -> None:
        """Record the tokens of a text: prompt and answer."""
        texts = self._latest(scope)
        texts.append(ints(list(text)))
        if self._disk and len(text) >= MIN_TEXT_TOKENS:
            self._disk.keep_latest(scope, [entry for entry in texts if len(entry) >= MIN_TEXT_TOKENS])

    def _latest(self, scope: str) -> deque[Ints]:
        if scope not in self._texts:
            self._texts[scope] = deque(self._disk.latest(scope) if self._disk else (), maxlen=MAX_TEXTS)
        self._texts.move_to_end(scope)
        if len(self._texts) > MAX_SCOPES:
            self._texts.popitem(last=False)
        return self._texts[scope]

    def reread_reason(self, scope: str, prompt: Sequence[int], cached: int, *, slow_disk: bool = False) -> str:
        """Return the reason why only `cached` tokens of a prompt were reused; "" if at most 272 were not reused.

        272 tokens are a segment of the disk cache and `TAIL`.

        slow_disk: the disk has more of the prompt, and is too slow to be used.
        """
        if len(prompt) - cached <= SEGMENT + TAIL:
            return ""
        if slow_disk:
            return f"after its first {cached:,} tokens the disk is slower than a new prefill"
        ids = ints(list(prompt))
        common = max((_common(ids, text) for text in self._latest(scope)), default=0)
        if common > cached + SEGMENT:
            return f"its first {common:,} tokens were prefilled before, but are no longer cached"
        if common >= PAGE:
            return f"from token {common + 1:,} on it differs from recent texts"
        return f"only its first {cached:,} tokens were cached" if cached else "no recent text begins like it"


def _common(a: Ints, b: Ints) -> int:
    """Return the length of the common prefix of two texts, in tokens."""
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if len(differing) else length
