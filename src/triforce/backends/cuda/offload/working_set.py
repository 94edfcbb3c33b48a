"""Frames of offloaded KV pages, kept on the device: choosing and finding them waits for no host.

Each layer has frames for pages that are being written, the same for all KV heads (seats), and behind them frames for
pages of single KV heads that were looked at last. Frame 0 is scratch: what has no frame is "there".

Shape suffixes as in kernel_api.py; L layers, P pages, S frames behind the seats, N pages.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
