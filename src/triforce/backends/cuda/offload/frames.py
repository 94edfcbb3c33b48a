"""Frames of offloaded KV pages on the device: each layer has some for pages that are being written, and a working set.

The former are the same for all KV heads (seats), and given by the host. Behind them are frames for pages of single KV
heads that were looked at last: choosing and finding those waits for no host. Frame 0 is scratch: what has no frame is
"there".

Shape suffixes as in kernel_api.py; L layers, P pages, S frames behind the seats, N pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from triforce.backends.kernel_api import PAGE
from triforce.errors import CacheError, argument


class WriteSlots:
    """Seats 1 to `count` for pages 1 to `pages`, each in all layers alike.

    A page is `fresh` from when it is written until the store has it as it is; others lose their seat when it is wanted.
    """

    def __init__(self, pages: int, count: int) -> None:
        self.seat_P = np.zeros(pages + 1, np.int64)
        self.stored_P = np.zeros(pages + 1, np.bool_)
        self._fresh: set[int] = set()
        self._free = list(range(count, 0, -1))
        self._lru: OrderedDict[int, None] = OrderedDict()
        """Pages that have seats, as they were last written."""

    def leaving(self, table: Sequence[int], length: int) -> list[int]:
        """The fresh pages of a row that are full of committed tokens: they are stored from now on."""
        left, last = [], length // PAGE
        while last and table[last - 1] in self._fresh:
            last -= 1
            left.append(table[last])
        self.store(left)
        return left

    def fresh(self, pages: Iterable[int]) -> list[int]:
        """Return those of some pages that the store does not hold as they are."""
        return [page for page in pages if page in self._fresh]

    @property
    def known(self) -> list[int]:
        """All pages that hold something, ascending."""
        return (self.stored_P | (self.seat_P > 0)).nonzero()[0].tolist()

    def store(self, pages: Sequence[int]) -> None:
        """The store has them as they are."""
        self._fresh.difference_update(pages)
        self.stored_P[list(pages)] = True

    def making_room(self, pages: Sequence[int]) -> list[int]:
        """Return the pages that must `leave` so that these can be written. Raises CacheError if that is not enough.

        Those that have not been written to for longest; of what the store has not as it is, the less the better.
        """
        wanted = sum(not self.seat_P[page] for page in pages) - len(self._free)
        if wanted <= 0:
            return []
        others = [page for page in self._lru if page not in set(pages)]
        if len(others) < wanted:
            raise CacheError(
                f"too many texts are being written at once for {argument('kv_memory')}; give more, or fewer texts"
            )
        return sorted(others, key=self._fresh.__contains__)[:wanted]

    def write(self, pages: Sequence[int]) -> list[int]:
        """Seat pages that are about to be written; return those that had no seat."""
        new = [page for page in pages if not self.seat_P[page]]
        for page in pages:
            self.seat_P[page] = self.seat_P[page] or self._free.pop()
            self._lru[page] = None
            self._lru.move_to_end(page)
        self._fresh.update(pages)
        return new

    def leave(self, pages: Iterable[int]) -> None:
        """Take the seats of these pages."""
        for page in pages:
            if seat := int(self.seat_P[page]):
                self._free.append(seat)
                self.seat_P[page] = 0
                del self._lru[page]
            self._fresh.discard(page)

    def forget(self, pages: Sequence[int]) -> None:
        """Forget what these pages hold."""
        self.leave(pages)
        self.stored_P[list(pages)] = False


class WorkingSet:
    def __init__(self, layers: int, heads: int, pages: int, seats: int, frames: int, device: torch.device) -> None:
        self._seats = seats
        self.frames_LGP = torch.zeros(layers, heads, pages + 1, dtype=torch.int32, device=device)
        """Of each page; 0: none."""
        # Column 0 is nobody's: what need not be noted is noted there.
        self._pages_LGS = torch.zeros(layers, heads, frames + 1, dtype=torch.int64, device=device)
        self._wanted_LGS = torch.zeros_like(self._pages_LGS)
        self._now = torch.zeros((), dtype=torch.int64, device=device)

    def seat(self, pages_N: Tensor, seats_N: Tensor) -> None:
        """Give these pages these seats and no other frames; 0: none at all."""
        self.frames_LGP[:, :, pages_N] = seats_N.int()

    def clear(self, layer: int) -> None:
        """The frames of a layer behind its seats hold nothing any more."""
        self.frames_LGP[layer].masked_fill_(self.frames_LGP[layer] > self._seats, 0)
        self._pages_LGS[layer] = self._wanted_LGS[layer] = 0

    def take(self, layers: slice, wanted_LGN: Tensor) -> tuple[Tensor, Tensor]:
        """Give frames to pages of some layers (0: nothing wanted), at most as many as there are behind the seats.

        Those that were wanted longest ago go. Returns pages and frames (L, G, N) of what must be carried there, 0 where
        there is nothing to do.
        """
        frames_LGP, pages_LGS, used_LGS = (x[layers] for x in (self.frames_LGP, self._pages_LGS, self._wanted_LGS))
        self._now += 1
        held_LGN = frames_LGP.gather(2, wanted_LGN).long()
        used_LGS.scatter_(2, (held_LGN - self._seats).clamp_min(0), self._now.expand(held_LGN.shape))
        new_LGN = (wanted_LGN > 0) & (held_LGN == 0)
        oldest_LGS = used_LGS[..., 1:].argsort(2) + 1
        turn_LGN = (new_LGN.cumsum(2) - 1).clamp(0, oldest_LGS.shape[2] - 1)
        at_LGN, new_pages_LGN = oldest_LGS.gather(2, turn_LGN) * new_LGN, wanted_LGN * new_LGN
        gone_LGN = pages_LGS.gather(2, at_LGN)
        # A page may have been forgotten since, or have another frame now.
        gone_LGN = gone_LGN * (frames_LGP.gather(2, gone_LGN) == at_LGN + self._seats)
        to_LGN = (at_LGN + self._seats) * new_LGN
        frames_LGP.scatter_(2, gone_LGN, 0)
        frames_LGP.scatter_(2, new_pages_LGN, to_LGN.int())
        pages_LGS.scatter_(2, at_LGN, new_pages_LGN)
        used_LGS.scatter_(2, at_LGN, self._now.expand(at_LGN.shape))
        return new_pages_LGN, to_LGN
