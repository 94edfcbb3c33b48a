"""Processes that share one model: each of these *ranks* has some heads, and some outputs of every other matrix.

All of them run the same program on the same text, so that what is decided (tokens, counts, pages) is decided on each of
them alike. What they tell each other are activations, and what only one of them can know: see `processes`.

Shape suffixes: N rows, X features of all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class TPGroup(Protocol):
    """The processes, seen from one of them. Whatever is lost or late is a RankError, on each of them."""

    @property
    def rank(self) -> int:
        """Which of them this is. Rank 0 speaks for all."""

    @property
    def count(self) -> int: ...

    @property
    def exact(self) -> bool:
        """Whether each output is summed up on one rank, as in one process. Else sums of ranks are added up."""

    def gather(self, some_NX: Tensor, width: int) -> Tensor:
        """The features of all ranks side by side, (N, width); each brings those of its `span`."""

    def add(self, x_NX: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each."""

    def agree(self, value: T) -> T:
        """What rank 0 passes in. It may take its time: nobody loses patience."""

    def unanimous(self, well: bool) -> bool:
        """Whether all ranks say so. Each may take its time."""

    def compare(self, number: int, what: str) -> None:
        """Raise RankError on each rank, saying `what` differs, unless all of them bring the same number (32 bits)."""

    def meet(self) -> None:
        """Wait until all are here, however long they took to load."""


class SingleProcess:
    """One process. It never waits, and agrees with itself."""

    rank, count, exact = 0, 1, True

    def gather(self, some_NX: Tensor, width: int) -> Tensor:
        return some_NX

    def add(self, x_NX: Tensor) -> Tensor:
        return x_NX

    def agree(self, value: T) -> T:
        return value

    def unanimous(self, well: bool) -> bool:
        return well

    def compare(self, number: int, what: str) -> None:
        pass

    def meet(self) -> None:
        pass


ALONE = SingleProcess()


def span(size: int, ranks: TPGroup) -> slice:
    """Which of `size` outputs are this rank's; the parts differ by one at most."""
    return slice(*(size * r // ranks.count for r in (ranks.rank, ranks.rank + 1)))


def spans(size: int, count: int) -> list[int]:
    """How many outputs each rank has."""
    return [size * (r + 1) // count - size * r // count for r in range(count)]
