"""BPE by scores the slow way: of all pairs that make a token the one with the highest score, the leftmost of equals."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence


def encode_by_scores(text: str, ids: Mapping[str, int], scores: Sequence[float]) -> list[int]:
    """Ids of a text, blanks in it written as U+2581. A character without a token gives its bytes."""
    parts: list[str | None] = list(text)
    before, after = [*range(-1, len(text) - 1)], [*range(1, len(text)), -1]
    heap: list[tuple[float, int, int, str]] = []

    def consider(left: int, right: int) -> None:
        if left >= 0 and right >= 0:
            made = f"{parts[left]}{parts[right]}"
            if made in ids:
                heapq.heappush(heap, (-scores[ids[made]], left, right, made))

    for i in range(len(text) - 1):
        consider(i, i + 1)
    while heap:
        _, left, right, made = heapq.heappop(heap)
        if parts[left] is None or parts[right] is None or f"{parts[left]}{parts[right]}" != made:
            continue  # one of the two has become a part of something else
        parts[left], parts[right], after[left] = made, None, after[right]
        if after[right] >= 0:
            before[after[right]] = left
        consider(before[left], left)
        consider(left, after[left])
    return [i for part in parts if part is not None for i in _ids(part, ids)]


def _ids(part: str, ids: Mapping[str, int]) -> list[int]:
    return [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
