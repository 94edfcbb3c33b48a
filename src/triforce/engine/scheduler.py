"""Scheduler: which group is prefilled next, which is swapped out for those that wait. It and the pacer run no model.

First come, first served: a group is admitted once there are rows and pages of KV for all that it may become, and none
is overtaken. Where turns are limited, a group that has had its turn is swapped out, and waits again behind the others.

`PrefillPacer`: how many prompt tokens are read between two steps of running texts, by the time there is. Chunked
prefill beside decoding is that of Agrawal et al. 2024 (Sarathi-Serve, arXiv 2403.02310). A chunk is sized by a bound on
the inter-token latency (ITL) here, whatever the model's speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from triforce.backends.kernel_api import pages_for
from triforce.distributed.group import TPGroup
from triforce.engine.sequence_group import SequenceGroup, Status
from triforce.engine.tier_builder import SharedKV
from triforce.errors import CacheError
from triforce.kvcache.page_owners import PrefixPages
from triforce.kvcache.prefix_cache import PrefixCache

MAX_ITL = 0.2
"""Seconds."""
UNKNOWN = 64
"""Tokens of the first pass of a tier, whose speed is not known yet."""
LEAST, LEAST_ON_GPU = 16, 128
"""Tokens of a pass at least, which its size is a multiple of: fewer cost no less, and on a GPU would be captured."""


class Scheduler:
    """All groups that are not finished, in the order in which they came or were swapped out.

    The status of each says where it is: running ones are ahead of the one that is prefilled, and that of those that
    wait. store: bounds rows and pages. prefixes: what prompts may begin with. turn: steps after which a group makes
    room for others; None: it never does.
    """

    def __init__(self, store: SharedKV, prefixes: PrefixCache, turn: int | None) -> None:
        self._store, self._prefixes, self.turn = store, prefixes, turn
        self.groups: list[SequenceGroup] = []

    @property
    def running(self) -> list[SequenceGroup]:
        """Groups whose texts grow with each step."""
        return [group for group in self.groups if group.status is Status.RUNNING]

    @property
    def waiting(self) -> list[SequenceGroup]:
        """Groups that wait for room, in the order in which they will be admitted."""
        return [group for group in self.groups if group.status in (Status.WAITING, Status.SWAPPED)]

    def add(self, groups: Sequence[SequenceGroup]) -> None:
        """Let groups wait for their turns. Raises CacheError, and takes none, if the turn of one would never come."""
        for group in groups:
            texts, pages = len(group.unfinished), self.pages(group)
            if texts > self._store.rows or pages > self._store.pages:
                raise CacheError(
                    f"it takes {texts} of {self._store.rows} rows and {pages} of {self._store.pages} pages of KV. "
                    "Use a shorter prompt or a smaller max_tokens"
                )
        self.groups += groups

    def remove(self, group: SequenceGroup) -> None:
        """Forget a group: it is finished. Harmless for one that is not here."""
        if group in self.groups:
            self.groups.remove(group)
        group.status, group.swapped = Status.FINISHED, None

    def requeue(self, group: SequenceGroup) -> None:
        """Let a group that was swapped out wait behind all others."""
        self.groups.remove(group)
        self.groups.append(group)
        group.status = Status.SWAPPED

    def admit(self) -> tuple[SequenceGroup, PrefixPages] | None:
        """Return the group to be prefilled next, and pages that it can begin with; None if it does not fit yet.

        The caller owns those pages, so that they stay, until it disowns them.
        """
        if not (waiting := self.waiting):
            return None
        group, pool = waiting[0], self._store.pool
        prefix, group.lost = group.cached_pages(self._prefixes)
        pool.own(*prefix)  # so that they are not evicted to make room
        rows = sum(len(each.unfinished) for each in [*self.running, group])
        fits = rows <= self._store.rows and self._windows_fit(group)
        if fits and self._prefixes.make_room(self.pages(group) - len(prefix.pages)):
            return group, prefix
        pool.disown(*prefix)
        return None

    def _windows_fit(self, group: SequenceGroup) -> bool:
        """Whether layers with a window have pages left for a group, if these are pages of their own."""
        if group.memory or (windows := self._store.pool.windows) is None:
            return True
        pages = sum(map(windows.room, self._capacities(group)))
        return windows.store.promised + pages <= windows.store.pages

    def to_swap_out(self) -> SequenceGroup | None:
        """Return the first running group that has had its turn, if others wait and the host has room for its KV.

        The host holds at most as many pages as the store, those of the group whose turn is next apart.
        """
        if self.turn is None or not (waiting := self.waiting):
            return None
        swapped = sum(self.pages(group) for group in waiting[1:] if group.status is Status.SWAPPED)
        for group in self.running:
            if group.steps >= self.turn and not group.memory and swapped + self.pages(group) <= self._store.pages:
                return group
        return None

    def pages(self, group: SequenceGroup) -> int:
        """Pages of the store that a group takes: enough to come to its end."""
        return 0 if group.memory else sum(map(pages_for, self._capacities(group)))

    def _capacities(self, group: SequenceGroup) -> list[int]:
        """Tokens of KV that each text of a group may come to."""
        context, reach = self._store.models.target.config.context, self._store.speculation.reach
        return [one.capacity(context, reach) for one in group.unfinished]


class PrefillPacer:
    """Grants passes of prefill their sizes, by the time that tokens took so far. Rank 0 measures for all.

    max_itl: seconds that may pass between two steps. least: tokens of a pass at least. strict: sizes of passes may not
    depend on the clock.
    """

    def __init__(self, max_itl: float, ranks: TPGroup, least: int = LEAST, *, strict: bool = False) -> None:
        self._max_itl, self._ranks, self._least, self._strict = max_itl, ranks, least, strict
        self._rates: dict[str, float] = {}
        """Seconds that a token took in the latest pass of each tier."""
        self._step = 0.0
        self._texts_wait, self._until = False, 0.0
        self._granted: tuple[str, int, float] | None = None

    def begin(self, running: bool) -> None:
        """Start to count the time between two steps. running: texts wait for their next step meanwhile."""
        self._texts_wait = running and not self._strict
        self._until = perf_counter() + self._max_itl - self._step
        self._granted = None  # a pass that broke took no time that tells anything

    def grant(self, tier: str, tokens: int) -> int:
        """Grant a pass of `tier` all tokens; where texts wait, as many as there is time for (a `speculation.Grant`)."""
        if self._texts_wait:
            now, rate = perf_counter(), self._rates.get(tier)
            affordable = UNKNOWN if rate is None else int((self._until - now) / rate)
            whole = max(self._least, affordable // self._least * self._least)
            tokens = self._ranks.broadcast(min(tokens, whole))
        self._granted = tier, tokens, perf_counter()
        return tokens

    def passed(self) -> None:
        """Note that the pass that was granted, if there was one, is over."""
        if self._granted:
            tier, tokens, since = self._granted
            self._rates[tier] = (perf_counter() - since) / tokens
            self._granted = None

    def more(self) -> bool:
        """Whether there is time for another pass before the next step."""
        return self._ranks.broadcast(perf_counter() < self._until)

    def stepped(self, seconds: float) -> None:
        """Note how long a step of all texts took."""
        self._step = seconds
