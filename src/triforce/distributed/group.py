"""TPGroup: ranks that share one model by tensor parallelism. Each has some heads, and some outputs of every matrix.

All ranks run the same program on the same text, so that each decides alike (tokens, counts, pages). They exchange
activations, and what only one of them can know: see `torch_group`.

Shape suffixes: N rows, X features of all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class TPGroup:
    """All ranks as one of them sees them; here the only one, which never waits.

    A rank that is lost or late is a RankError on each of the others.
    """

    rank = 0
    """Index of this rank. Rank 0 speaks for all."""
    count = 1
    exact = True
    """Whether each output is summed up on one rank, as in one process. Otherwise sums of ranks are added up."""

    def gather(self, some_NX: Tensor, width: int) -> Tensor:
        """Return the features of all ranks side by side, (N, width); each brings those of its `span`."""
        return some_NX

    def add(self, x_NX: Tensor) -> Tensor:
        """Return the sum over all ranks, (N, X), the same bits on each."""
        return x_NX

    def inputs(self, some_NX: Tensor, width: int) -> Tensor:
        """Return what this rank's part of a matrix reads: all features, (N, width), or its own where ranks add up."""
        return self.gather(some_NX, width) if self.exact else some_NX

    def outputs(self, some_NX: Tensor, width: int) -> Tensor:
        """Return what the parts of a matrix give together, (N, width): side by side, or added up."""
        return self.gather(some_NX, width) if self.exact else self.add(some_NX)

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0, which may take any time to bring it."""
        return value

    def all_true(self, value: bool) -> bool:
        """Whether the value of every rank is true. Each may take any time to bring it."""
        return value

    def compare(self, number: int, what: str) -> None:
        """Raise RankError on each rank, saying that `what` differs, unless all bring the same number (32 bits)."""

    def barrier(self) -> None:
        """Wait until all ranks are here, however long they take to load."""


ALONE = TPGroup()


def required_group(ranks: object) -> TPGroup:
    """Return ranks that share a model; None is the only one of its own. Raises TypeError for what is no group."""
    if ranks is None or isinstance(ranks, TPGroup):
        return ranks or ALONE
    raise TypeError(
        f"ranks is of type {type(ranks).__name__}; pass the group that triforce.distributed.spawn.join gives each "
        "process, or use --tp N on the command line"
    )


def span(size: int, ranks: TPGroup) -> slice:
    """Return which of `size` outputs are this rank's; the parts differ by one at most."""
    return slice(*(size * r // ranks.count for r in (ranks.rank, ranks.rank + 1)))


def spans(size: int, count: int) -> list[int]:
    """Return how many of `size` outputs each rank has."""
    return [size * (r + 1) // count - size * r // count for r in range(count)]
