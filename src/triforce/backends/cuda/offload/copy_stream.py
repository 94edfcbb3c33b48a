"""Copies beside the computation: on a CUDA device a queue of their own; elsewhere each is done when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

Copies = Iterable[tuple[Tensor, Tensor]]
"""Each from the second to the first, contiguous and alike."""
Mark = torch.cuda.Event | None
"""A point that the computation or the copy stream comes to."""


class CopyStream:
    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, copies: Copies) -> None:
        """Behind the stream's earlier copies, and what it waits for."""
        queue: AbstractContextManager[object] = torch.cuda.stream(self._stream) if self._stream else nullcontext()
        with queue:
            for to, source in copies:
                to.copy_(source, non_blocking=True)

    def reached(self) -> Mark:
        """All that the stream has been asked for so far."""
        return self._stream.record_event() if self._stream else None

    def computed(self) -> Mark:
        """All that has been computed so far."""
        return torch.cuda.current_stream(self._device).record_event() if self._stream else None

    def after(self, mark: Mark) -> None:
        """Let later copies wait for this event."""
        if self._stream and mark:
            self._stream.wait_event(mark)

    def hold(self, mark: Mark) -> None:
        """Let later computation wait for this event."""
        if mark:
            torch.cuda.current_stream(self._device).wait_event(mark)


class Buffers:
    """Places that layers take in turns: while one is computed with, the next one is filled.

    Each use is `fill`, `use`, `leave`, in this order; no more places than there are may be between the first and the
    last.
    """

    def __init__(self, stream: CopyStream, places: Sequence[int]) -> None:
        self._stream = stream
        self._ready: dict[int, Mark] = dict.fromkeys(places)
        self._free: dict[int, Mark] = dict.fromkeys(places)

    def fill(self, copies: Callable[[int], Copies]) -> int:
        """Take the place that was filled longest ago and fill it anew, once it is free; returns it."""
        place = next(iter(self._free))
        self._stream.after(self._free.pop(place))
        self._stream.copy(copies(place))
        self._ready[place] = self._stream.reached()
        self._free[place] = None
        return place

    def use(self, place: int) -> None:
        """Let later computation see the buffer filled."""
        self._stream.hold(self._ready[place])

    def leave(self, place: int, copies: Copies = ()) -> None:
        """Free the buffer when all work so far is done, and these copies from it."""
        mark = self._stream.computed()
        if copies := list(copies):
            self._stream.after(mark)
            self._stream.copy(copies)
            mark = self._stream.reached()
        self._free[place] = mark
