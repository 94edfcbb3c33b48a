"""SocketGroup: ranks that are processes and exchange arrays and values over sockets.

Ranks wait for two reasons. In a forward pass all ranks compute the same: a rank that does not answer within `PATIENCE`
is treated as failed. Between two passes rank 0 may wait for users, and other ranks for rank 0. Messages are numbered,
so that ranks that have diverged end with an error and do not wait.

After an error a rank closes its connections, by which the other ranks notice it.

Shape suffixes as in group.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from triforce.arrays import Array, dtype_name, float32, on_device_of, rounded, to_host
from triforce.distributed.broadcast_values import dump, load
from triforce.distributed.group import TPGroup, spans
from triforce.distributed.meeting import meet
from triforce.distributed.rank_link import LENGTH_OFFSET, LinkError, MessageHeader, RankLink, UnexpectedHeader, wait_for
from triforce.errors import RankError

T = TypeVar("T")

PATIENCE = 30.0
"""Seconds that a rank waits for another one in a forward pass. A dead rank is noticed at once."""
RESTART = "Start again; --tp 1 needs no other rank"


class SocketGroup(TPGroup):
    """Rank of a group of processes. meeting: the URL of `triforce.distributed.meeting`. exact: see `TPGroup`.

    The constructor waits for all ranks. It and every call raise RankError where another rank is missing.
    """

    def __init__(self, rank: int, count: int, meeting: str, exact: bool = True, patience: float = PATIENCE) -> None:
        self.rank = rank
        self.count = count
        self.exact = exact
        self._patience = patience
        self._broadcasts = self._votes = self._exchanges = 0
        self._links = [RankLink(*connected) for connected in sorted(meet(rank, count, meeting).items())]

    def gather(self, part_NX: Array, width: int) -> Array:
        own_NX = np.ascontiguousarray(to_host(part_NX))
        all_NX = np.empty((len(own_NX), width), own_NX.dtype)
        ends = [0, *accumulate(spans(width, self.count))]
        spans_NX = [all_NX[:, start:end] for start, end in pairwise(ends)]
        # Other ranks' features of several rows are not adjacent in memory: they are received apart.
        one_row = len(all_NX) == 1
        parts_NX = [span_NX if one_row else np.empty(span_NX.shape, all_NX.dtype) for span_NX in spans_NX]
        parts_NX[self.rank] = own_NX
        self._exchange("gather", parts_NX, self._patience)
        for span_NX, rank_NX in zip(spans_NX, parts_NX, strict=True):
            if rank_NX is not span_NX:
                span_NX[:] = rank_NX
        return on_device_of(all_NX, part_NX)

    def add(self, x_NX: Array) -> Array:
        own_NX = np.ascontiguousarray(to_host(x_NX))
        parts_NX = [np.empty_like(own_NX) for _ in range(self.count)]
        parts_NX[self.rank] = own_NX
        self._exchange("add", parts_NX, self._patience)
        sum_NX = reduce(np.add, map(float32, parts_NX))  # in the same order on each rank
        return on_device_of(rounded(sum_NX, dtype_name(own_NX)), x_NX)

    def broadcast(self, value: T) -> T:
        self._broadcasts += 1
        if self.rank:
            received: T = load(self._receive_broadcast(self._links[0]))
            return received
        data = dump(value)
        header = self._header("broadcast", len(data)).pack()
        for link in self._links:
            link.send(header, data)
        self._complete(self._links, None)
        return value

    def _receive_broadcast(self, link: RankLink) -> bytearray:
        link.expect(self._header("broadcast", 0).pack()[:LENGTH_OFFSET])
        self._complete([link], None)
        data = bytearray(link.received_header.length)
        link.expect_content(memoryview(data))
        self._complete([link], None)
        return data

    def all_true(self, value: bool) -> bool:
        self._votes += 1
        votes = [np.zeros(1, np.bool_) for _ in range(self.count)]
        votes[self.rank][0] = value
        self._exchange("vote", votes, None)
        return all(bool(vote[0]) for vote in votes)

    def compare(self, number: int, subject: str) -> None:
        numbers = [np.zeros(1, np.int64) for _ in range(self.count)]
        numbers[self.rank][0] = number
        self._exchange("compare", numbers, self._patience)
        if differing_ranks := [rank for rank in range(self.count) if numbers[rank] != numbers[0]]:
            names = ", ".join(map(str, differing_ranks))
            raise RankError(
                f"{subject} of rank {names} differ from those of rank 0, so the ranks would compute different texts; "
                "all ranks need the same files, versions and kind of processor. Start again"
            )

    def barrier(self) -> None:
        self._exchange("barrier", [np.zeros(0, np.uint8)] * self.count, None)

    def leave(self) -> None:
        """Leave the group, as the last call: ranks that still wait for this rank get an error."""
        for link in self._links:
            link.close()

    def _exchange(self, operation: str, parts: Sequence[NDArray[Any]], patience: float | None) -> None:
        """Send this rank's part to all others, and receive theirs into `parts`, which has a part of each rank."""
        self._exchanges += 1
        own_bytes = _bytes(parts[self.rank])
        header = self._header(operation, len(own_bytes)).pack()
        for link in self._links:
            content = _bytes(parts[link.rank])
            link.send(header, own_bytes)
            link.expect(self._header(operation, len(content)).pack(), content)
        self._complete(self._links, patience)

    def _header(self, operation: str, length: int) -> MessageHeader:
        return MessageHeader(operation.encode(), self._broadcasts, self._votes, self._exchanges, length)

    def _complete(self, links: Sequence[RankLink], patience: float | None) -> None:
        """Wait until the links' messages are complete. patience: seconds without progress; None: there is no limit."""
        try:
            waiting = [link for link in links if not link.advance()]
            while waiting:
                ready = wait_for(waiting, patience)
                if not ready:
                    raise LinkError(f"rank {waiting[0].rank} is silent")
                finished = [link for link in ready if link.advance()]
                waiting = [link for link in waiting if link not in finished]
        except LinkError as error:
            self.leave()
            raise RankError(
                f"another rank has ended, or did not answer for {self._patience:g} seconds ({error}). {RESTART}"
            ) from error
        except UnexpectedHeader as error:
            self.leave()
            raise self._divergence(error.header) from error
        except BaseException:  # such as Ctrl-C in the middle of a message
            self.leave()
            raise

    def _divergence(self, header: MessageHeader) -> RankError:
        """Return the error for a message that came where this rank expects another one."""
        return RankError(
            f"ranks have diverged: one rank has made {header.broadcasts} broadcasts and {header.votes} votes, rank "
            f"{self.rank} {self._broadcasts} and {self._votes} (message {header.exchanges}, {header}; expected "
            f"{self._exchanges}). That is a fault of triforce, please report it. {RESTART}"
        )


def _bytes(array: NDArray[Any]) -> memoryview:
    """Return the memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data
