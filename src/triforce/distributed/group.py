"""TPGroup: ranks that share one model by tensor parallelism. Each has some heads, and some outputs of every matrix.

All ranks run the same program on the same text, so that each decides alike (tokens, counts, pages). They exchange
activations, and values that only one rank knows: see `socket_group`.

Shape suffixes: N rows, X features of all ranks.
"""

from __future__ import annotations

from typing import TypeVar

from triforce.arrays import Array

T = TypeVar("T")


class TPGroup:
    """Group of ranks, as one rank sees it; this class is the group of one rank, which never waits.

    A lost or late rank raises RankError on each other rank.
    """

    rank = 0
    """Index of this rank. Rank 0 decides for all."""
    count = 1
    exact = True
    """Whether each output is summed on one rank, as in one process. Otherwise partial sums of ranks are added."""

    def gather(self, part_NX: Array, width: int) -> Array:
        """Return the features of all ranks side by side, (N, width); each rank brings the features of its `span`."""
        return part_NX

    def add(self, x_NX: Array) -> Array:
        """Return the sum over all ranks, (N, X), the same bits on each."""
        return x_NX

    def inputs(self, part_NX: Array, width: int) -> Array:
        """Return the inputs of this rank's part of a matrix: if `exact`, all features (N, width), else `part_NX`."""
        return self.gather(part_NX, width) if self.exact else part_NX

    def outputs(self, part_NX: Array, width: int) -> Array:
        """Return the outputs of a matrix, (N, width): if `exact`, the ranks' parts side by side, else their sum."""
        return self.gather(part_NX, width) if self.exact else self.add(part_NX)

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0. The other ranks wait for rank 0 without a time limit."""
        return value

    def all_true(self, value: bool) -> bool:
        """Return whether the value of every rank is true. Ranks wait for each other without a time limit."""
        return value

    def compare(self, number: int, subject: str) -> None:
        """Raise RankError on each rank unless all ranks have the same number (32 bits). subject: what differs."""

    def barrier(self) -> None:
        """Wait until all ranks call this, without a time limit, because loading may take long."""


ALONE = TPGroup()


def required_group(ranks: object) -> TPGroup:
    """Return `ranks` as a group; None becomes the group of one rank. Raises TypeError for other types."""
    if ranks is None or isinstance(ranks, TPGroup):
        return ranks or ALONE
    raise TypeError(
        f"ranks is of type {type(ranks).__name__}; pass the group that triforce.distributed.spawn.join gives each "
        "process, or use --tp N on the command line"
    )


def span(size: int, ranks: TPGroup) -> slice:
    """Return this rank's part of `size` outputs; parts differ by one at most."""
    return slice(*(size * r // ranks.count for r in (ranks.rank, ranks.rank + 1)))


def spans(size: int, count: int) -> list[int]:
    """Return the number of outputs of each rank, of `size` in all."""
    return [size * (r + 1) // count - size * r // count for r in range(count)]
