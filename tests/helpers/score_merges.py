"""BPE by scores, the slow way: merge the pair whose token has the highest score, the leftmost of equals."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence


def encode_by_scores(text: str, ids: Mapping[str, int], scores: Sequence[float]) -> list[int]:
    """Return the ids of a text with blanks written as U+2581. A character without a token gives its bytes."""
    parts: list[str | None] = list(text)
    left_of = [*range(-1, len(text) - 1)]
    right_of = [*range(1, len(text)), -1]
    heap: list[tuple[float, int, int, str]] = []

    def consider(left_part: int, right: int) -> None:
        if left_part >= 0 and right >= 0:
            merged = f"{parts[left_part]}{parts[right]}"
            if merged in ids:
                heapq.heappush(heap, (-scores[ids[merged]], left_part, right, merged))

    for i in range(len(text) - 1):
        consider(i, i + 1)
    while heap:
        _, left_part, right, merged = heapq.heappop(heap)
        if parts[left_part] is None or parts[right] is None or f"{parts[left_part]}{parts[right]}" != merged:
            continue  # one of the two was merged before
        parts[left_part], parts[right], right_of[left_part] = merged, None, right_of[right]
        if right_of[right] >= 0:
            left_of[right_of[right]] = left_part
        consider(left_of[left_part], left_part)
        consider(left_part, right_of[left_part])
    return [i for part in parts if part is not None for i in _ids(part, ids)]


def _ids(part: str, ids: Mapping[str, int]) -> list[int]:
    return [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
