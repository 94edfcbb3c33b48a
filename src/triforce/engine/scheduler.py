"""Scheduler: which group is prefilled next, how much of it, and which group is swapped out. It runs no model.

A group is admitted once there are rows and pages of KV for all that it may become: the first to come, and where there
is room for several, any with a shorter prompt than is left of those that are being read. Of these the one with the
fewest tokens left is read next, but each `OLDEST`-th time the first to come, so that none starves. Where turns are
limited, a group that has had its turn is swapped out, and waits again behind the others.

A pass of a prompt ends where `FullView.resume` says (`kvcache/views/full.py`), or before, where `PrefillPacer` grants
fewer tokens because texts wait for their next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from triforce.backends.kernel_api import pages_for
from triforce.distributed.group import TPGroup
from triforce.engine.sequence_group import SequenceGroup, Status
from triforce.engine.tier_builder import SharedKV
from triforce.errors import CacheError
from triforce.kvcache import PAGE
from triforce.kvcache.pool import PrefixPages
from triforce.kvcache.prefix_cache import PrefixCache
from triforce.kvcache.views.full import prefill_chunk

UNKNOWN = 64
"""Tokens of the first pass of a tier, whose speed is not known yet."""
LEAST, LEAST_ON_GPU = 16, 128
"""Tokens of a pass at least, which its size is a multiple of: fewer cost no less, and on a GPU would be captured."""


class PrefillPacer:
    """Grants passes of prefill their sizes, by the time that tokens took so far. Rank 0 measures for all.

    max_itl: seconds that may pass between two steps. least: tokens of a pass at least. strict: sizes of passes may not
    depend on the clock.
    """

    def __init__(self, max_itl: float, ranks: TPGroup, least: int = LEAST, *, strict: bool = False) -> None:
        self._max_itl = max_itl
        self._ranks = ranks
        self._least = least
        self._strict = strict
        self._rates: dict[str, float] = {}
        """Seconds that a token took in the latest pass of each tier."""
        self._texts_wait = False
        self._until = 0.0

    def begin(self, running: bool, step_seconds: float = 0.0) -> None:
        """Start to count the time between two steps. running: texts wait for their next step meanwhile.

        step_seconds: what a step of all texts takes.
        """
        self._texts_wait = running and not self._strict
        self._until = perf_counter() + self._max_itl - step_seconds

    def grant(self, tier: str, tokens: int) -> int:
        """Grant a pass of `tier` all tokens; where texts wait, as many as there is time for."""
        if self._texts_wait:
            now = perf_counter()
            rate = self._rates.get(tier)
            affordable = UNKNOWN if rate is None else int((self._until - now) / rate)
            whole = max(self._least, affordable // self._least * self._least)
            tokens = self._ranks.broadcast(min(tokens, whole))
        return tokens

    def passed(self, tier: str, tokens: int, seconds: float) -> None:
        """Note what a pass took."""
        self._rates[tier] = seconds / tokens

    def more(self) -> bool:
        """Whether there is time for another part of a prompt before the next step."""
        return self._ranks.broadcast(perf_counter() < self._until)


class PacedPrompt:
    """Passes over one prompt, as a pacer grants them; parts of other prompts' passes may come in between."""

    def __init__(self, pacer: PrefillPacer) -> None:
        self._pacer = pacer
        self._tier = ""
        self._tokens = 0
        self._seconds = 0.0

    def grant(self, tier: str, tokens: int) -> int:
        """Grant the next pass its tokens (a `speculation.Grant`); the one before is over."""
        self.end()
        self._tier, self._tokens, self._seconds = tier, self._pacer.grant(tier, tokens), 0.0
        return self._tokens

    def took(self, seconds: float) -> None:
        """Note what a part of the pass that was granted latest took."""
        self._seconds += seconds

    def end(self) -> None:
        """Let the pacer know what that pass took in all, if there was one."""
        if self._tokens:
            self._pacer.passed(self._tier, self._tokens, self._seconds)
        self._tokens = 0


OLDEST = 4
"""Of so many parts of prompts one is of the prompt that came first."""


class Scheduler:
    """All groups that are not finished, in the order in which they came or were swapped out.

    The status of each says where it is: running ones are ahead of the one that is prefilled, and that of those that
    wait. store: bounds rows and pages. prefixes: what prompts may begin with. turn: steps after which a group makes
    room for others; None: it never does.
    """

    def __init__(self, store: SharedKV, prefixes: PrefixCache, turn: int | None) -> None:
        self._store = store
        self._prefixes = prefixes
        self.turn = turn
        self.groups: list[SequenceGroup] = []
        self._parts_read = 0

    @property
    def running(self) -> list[SequenceGroup]:
        """Groups whose texts grow with each step."""
        return [group for group in self.groups if group.status is Status.RUNNING]

    @property
    def prefilling(self) -> list[SequenceGroup]:
        """Groups whose prompts are being read, in the order in which they came."""
        return [group for group in self.groups if group.status is Status.PREFILLING]

    @property
    def waiting(self) -> list[SequenceGroup]:
        """Groups that wait for room, in the order in which they will be admitted."""
        return [group for group in self.groups if group.status in (Status.WAITING, Status.SWAPPED)]

    def add(self, groups: Sequence[SequenceGroup]) -> None:
        """Let groups wait for their turns. Raises CacheError, and takes none, if the turn of one would never come."""
        for group in groups:
            texts = len(group.unfinished)
            pages = self.pages(group)
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
        group.status = Status.FINISHED
        group.swapped = None

    def requeue(self, group: SequenceGroup) -> None:
        """Let a group that was swapped out wait behind all others."""
        self.groups.remove(group)
        self.groups.append(group)
        group.status = Status.SWAPPED

    def admit(self) -> tuple[SequenceGroup, PrefixPages] | None:
        """Return a group to be prefilled, and pages that it can begin with; None if none fits or would be read yet.

        Each of those pages has a reference for the caller, who drops it with `decref`.
        """
        prefilling = self.prefilling
        oldest = self._oldest_unread()
        passed_by = list[SequenceGroup]()
        for group in self.waiting:
            prefix, lost = group.cached_pages(self._prefixes)
            cached = len(prefix.pages) * PAGE
            longer = group is not oldest and group.prompt_tokens - cached >= min(each.left for each in prefilling)
            if longer or any(self._is_read_for(group, cached, each) for each in prefilling):
                passed_by.append(group)
                continue
            group.lost = lost
            return (group, prefix) if self._fits(group, prefix, passed_by) else None
        return None

    def _oldest_unread(self) -> SequenceGroup | None:
        """Return the first to come of the groups whose prompts are not read."""
        return next((group for group in self.groups if group.status is not Status.RUNNING), None)

    def _is_read_for(self, group: SequenceGroup, cached: int, other: SequenceGroup) -> bool:
        """Whether `other` is about to read tokens that a group begins with: a pass or more beyond those cached."""
        chunk = prefill_chunk(self._store.models.target.device)
        return not group.swapped and other.shares(group) - cached >= chunk

    def _fits(self, group: SequenceGroup, prefix: PrefixPages, passed_by: Sequence[SequenceGroup]) -> bool:
        """Make room for a group, if those that it passes by would have theirs beside it: so nobody waits for others.

        Pages of its prefix are owned from then on, unless there is no room.
        """
        pool = self._store.pool
        groups = [group, *passed_by]
        pool.incref(*prefix)  # so that they are not evicted to make room
        rows = sum(len(each.unfinished) for each in [*self.running, *self.prefilling, *groups])
        fits = rows <= self._store.rows and self._windows_fit(groups)
        own = self.pages(group) - len(prefix.pages)
        fits = fits and own + sum(map(self.pages, passed_by)) <= self._prefixes.available_pages
        if fits and self._prefixes.make_room(own):
            return True
        pool.decref(*prefix)
        return False

    def next_to_read(self) -> SequenceGroup:
        """Return the group whose prompt is read next, of those that are prefilled."""
        prefilling = self.prefilling
        self._parts_read += 1
        if self._parts_read % OLDEST == 0:
            return prefilling[0]
        return min(prefilling, key=lambda group: group.left)

    def awaited(self, group: SequenceGroup) -> bool:
        """Whether a group that waits begins with tokens that a group has read."""
        whole = self._store.whole
        seen = group.tokens_read // whole * whole
        return any(whole <= group.shares(each) // whole * whole <= seen for each in self.waiting if not each.swapped)

    def _windows_fit(self, groups: Sequence[SequenceGroup]) -> bool:
        """Whether layers with a window have pages left for some groups, if these are pages of their own."""
        if (windows := self._store.pool.windows) is None:
            return True
        own = [group for group in groups if not group.memory]
        pages = sum(windows.reserved_pages(capacity) for group in own for capacity in self._capacities(group))
        return windows.allocator.reserved + pages <= windows.allocator.pages

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
        context = self._store.models.target.config.context
        reach = self._store.speculation.reach
        return [one.capacity(context, reach) for one in group.unfinished]
