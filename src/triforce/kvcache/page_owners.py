"""Owners of the pages of a memory: which pages are free, and how many need each of the others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple


class PrefixPages(NamedTuple):
    """Pages of the beginning of a text, all of whose tokens are committed.

    window_pages: those of layers with a window, if these have pages of their own: as many, and 0 for what is gone.
    """

    pages: Sequence[int] = ()
    window_pages: Sequence[int] = ()


NO_PAGES = PrefixPages()


class PageOwners:
    """Pages 1 to `pages` of a memory, whose page 0 is scratch.

    A page may have several owners, rows and others, as nobody writes to it once it is full of what is committed.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages

    @cached_property
    def free(self) -> list[int]:
        """Pages that nobody owns. The list is made when somebody asks: a memory that has no room is refused before."""
        return list(range(1, self.pages + 1))

    @cached_property
    def owners(self) -> list[int]:
        """Count of those who need each page."""
        return [0] * (self.pages + 1)

    def find(self, wanted: int, after: int | None = None) -> list[int]:
        """Return so many of the free pages: consecutive ones where there are such, behind page `after` if possible."""
        candidates = self.free[: len(self.free) - wanted + 1]
        starts = [i for i, page in enumerate(candidates) if self.free[i + wanted - 1] - page == wanted - 1]
        following = [i for i in starts if after is not None and self.free[i] == after + 1]
        i = (following or starts or [0])[0]
        return self.free[i : i + wanted]

    def take(self, pages: Sequence[int]) -> None:
        """Give free pages their first owner."""
        taken = set(pages)
        self.free[:] = [page for page in self.free if page not in taken]
        self.own(pages)

    def own(self, pages: Sequence[int]) -> None:
        """Somebody more needs these pages."""
        for page in pages:
            self.owners[page] += 1

    def disown(self, pages: Sequence[int]) -> list[int]:
        """Somebody less; returns those that nobody needs: they are free."""
        for page in pages:
            self.owners[page] -= 1
        if free := [page for page in pages if not self.owners[page]]:
            self.free[:] = sorted(self.free + free)
        return free
