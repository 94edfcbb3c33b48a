"""Scheduler: which group is prefilled next, how much of it, and which group is swapped out. It runs no model.

A group is admitted once there are rows and pages of KV for its longest possible texts. The oldest group comes first;
where there is room for several, a group is also admitted if its prompt is shorter than the unread rest of all that
are being read. Among them the prompt with the fewest unread tokens is read next, and each `OLDEST_EVERY`-th time the
oldest, so that none starves. Where turns are limited, a group that has had its turn is swapped out, and waits again
behind the others.

A pass of a prompt ends where `FullView.resume` says (`kvcache/views/full.py`), or earlier where `PrefillPacer` grants
fewer tokens, because texts wait for their next step.
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

FIRST_PASS_TOKENS = 64
"""Tokens of the first pass of a tier, while its speed is unknown."""
MIN_PASS_TOKENS, MIN_PASS_TOKENS_ON_GPU = 16, 128
"""Smallest pass, and the unit of its size, in tokens: fewer cost the same, and on a GPU each size needs a capture."""


class PrefillPacer:
    """Grants prefill passes their sizes, by the measured time of a token. Rank 0 measures for all ranks.

    max_itl: most seconds between two steps. min_tokens: smallest pass. strict: sizes of passes must not depend on the
    clock.
    """

    def __init__(
        self, max_itl: float, ranks: TPGroup, min_tokens: int = MIN_PASS_TOKENS, *, strict: bool = False
    ) -> None:
        self._max_itl = max_itl
        self._ranks = ranks
        self._min_tokens = min_tokens
        self._strict = strict
        self._rates: dict[str, float] = {}
        """Seconds per token in the latest pass of each tier."""
        self._texts_wait = False
        self._deadline = 0.0

    def begin(self, running: bool, step_seconds: float = 0.0) -> None:
        """Start the time between two steps. running: texts wait for their next step. step_seconds: of one step."""
        self._texts_wait = running and not self._strict
        self._deadline = perf_counter() + self._max_itl - step_seconds

    def grant(self, tier: str, tokens: int) -> int:
        """Return the tokens granted to a pass of `tier`: all, or where texts wait as many as there is time for."""
        if self._texts_wait:
            time = perf_counter()
            rate = self._rates.get(tier)
            affordable = FIRST_PASS_TOKENS if rate is None else int((self._deadline - time) / rate)
            pass_tokens = max(self._min_tokens, affordable // self._min_tokens * self._min_tokens)
            tokens = self._ranks.broadcast(min(tokens, pass_tokens))
        return tokens

    def record_pass(self, tier: str, tokens: int, seconds: float) -> None:
        """Record the seconds of a pass."""
        self._rates[tier] = seconds / tokens

    def has_time(self) -> bool:
        """Whether there is time for another part of a prompt before the next step."""
        return self._ranks.broadcast(perf_counter() < self._deadline)


class PacedPrompt:
    """Passes over one prompt, as a pacer grants them. Parts of passes over other prompts may run in between."""

    def __init__(self, pacer: PrefillPacer) -> None:
        self._pacer = pacer
        self._tier = ""
        self._tokens = 0
        self._seconds = 0.0

    def grant(self, tier: str, tokens: int) -> int:
        """Return the tokens granted to the next pass (a `speculation.Grant`). The previous pass ends."""
        self.end()
        self._tier, self._tokens, self._seconds = tier, self._pacer.grant(tier, tokens), 0.0
        return self._tokens

    def record(self, seconds: float) -> None:
        """Record the seconds of a part of the latest granted pass."""
        self._seconds += seconds

    def end(self) -> None:
        """Record the seconds of the latest granted pass with the pacer, if there was one."""
        if self._tokens:
            self._pacer.record_pass(self._tier, self._tokens, self._seconds)
        self._tokens = 0


OLDEST_EVERY = 4
"""One in this number of parts is of the oldest prompt."""


class Scheduler:
    """All unfinished groups, in the order in which they came or were swapped out.

    The status of a group tells whether it runs, is prefilled or waits. store: bounds rows and pages. prefixes: cached
    pages that prompts may begin with. turn: steps after which a running group may be swapped out; None: never.
    """

    def __init__(self, store: SharedKV, prefixes: PrefixCache, turn: int | None) -> None:
        self._store = store
        self._prefixes = prefixes
        self.turn = turn
        self.groups: list[SequenceGroup] = []
        self._parts_read = 0

    @property
    def running(self) -> list[SequenceGroup]:
        """Groups that are decoded."""
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
        """Queue groups. Raises CacheError, and queues none, if one can never fit."""
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
        """Remove a finished group. No effect if it was removed before."""
        if group in self.groups:
            self.groups.remove(group)
        group.status = Status.FINISHED
        group.swapped = None

    def requeue(self, group: SequenceGroup) -> None:
        """Move a group that was swapped out behind all others."""
        self.groups.remove(group)
        self.groups.append(group)
        group.status = Status.SWAPPED

    def admit(self) -> tuple[SequenceGroup, PrefixPages] | None:
        """Return the next group to prefill, and cached pages that it begins with; None: no group can start.

        The caller holds a reference to these pages until it calls `decref`.
        """
        prefilling = self.prefilling
        oldest = self._oldest_unread()
        passed_by = list[SequenceGroup]()
        for group in self.waiting:
            prefix, lost_tokens = group.cached_pages(self._prefixes)
            cached = len(prefix.pages) * PAGE
            longer = group is not oldest and group.prompt_tokens - cached >= min(
                reader.unread_tokens for reader in prefilling
            )
            if longer or any(self._is_read_for(group, cached, reader) for reader in prefilling):
                passed_by.append(group)
                continue
            group.lost_tokens = lost_tokens
            return (group, prefix) if self._fits(group, prefix, passed_by) else None
        return None

    def _oldest_unread(self) -> SequenceGroup | None:
        """Return the oldest group whose prompts are not read yet."""
        return next((group for group in self.groups if group.status is not Status.RUNNING), None)

    def _is_read_for(self, group: SequenceGroup, cached: int, reader: SequenceGroup) -> bool:
        """Whether `reader` will read at least one pass of tokens that `group` also begins with, beyond those cached."""
        chunk = prefill_chunk(self._store.models.target.device)
        return not group.swapped and reader.shares(group) - cached >= chunk

    def _fits(self, group: SequenceGroup, prefix: PrefixPages, passed_by: Sequence[SequenceGroup]) -> bool:
        """Make room for a group, if the groups that it passes by would fit beside it, so that it delays none of them.

        On success the pages of its prefix are referenced from then on.
        """
        pool = self._store.pool
        groups = [group, *passed_by]
        pool.incref(*prefix)  # so that they are not evicted to make room
        rows = sum(len(member.unfinished) for member in [*self.running, *self.prefilling, *groups])
        fits = rows <= self._store.rows and self._windows_fit(groups)
        new_pages = self.pages(group) - len(prefix.pages)
        fits = fits and new_pages + sum(map(self.pages, passed_by)) <= self._prefixes.available_pages
        if fits and self._prefixes.make_room(new_pages):
            return True
        pool.decref(*prefix)
        return False

    def next_to_read(self) -> SequenceGroup:
        """Return the group whose prompt is read next, among those being prefilled."""
        prefilling = self.prefilling
        self._parts_read += 1
        if self._parts_read % OLDEST_EVERY == 0:
            return prefilling[0]
        return min(prefilling, key=lambda group: group.unread_tokens)

    def awaited(self, group: SequenceGroup) -> bool:
        """Whether a waiting group begins with tokens that `group` has read."""
        unit = self._store.whole
        readable_tokens = group.tokens_read // unit * unit
        return any(
            unit <= group.shares(waiter) // unit * unit <= readable_tokens
            for waiter in self.waiting
            if not waiter.swapped
        )

    def _windows_fit(self, groups: Sequence[SequenceGroup]) -> bool:
        """Whether layers with a window have pages left for these groups. Groups with a caller's view need none."""
        if (windows := self._store.pool.windows) is None:
            return True
        owners = [group for group in groups if not group.memory]
        pages = sum(windows.reserved_pages(capacity) for group in owners for capacity in self._capacities(group))
        return windows.allocator.reserved + pages <= windows.allocator.pages

    def to_swap_out(self) -> SequenceGroup | None:
        """Return the first running group that has had its turn, if others wait and the host has room for its KV.

        The host holds at most as many pages as the store, without those of the group that is next in line.
        """
        if self.turn is None or not (waiting := self.waiting):
            return None
        swapped = sum(self.pages(group) for group in waiting[1:] if group.status is Status.SWAPPED)
        for group in self.running:
            if group.steps >= self.turn and not group.memory and swapped + self.pages(group) <= self._store.pages:
                return group
        return None

    def pages(self, group: SequenceGroup) -> int:
        """Pages of the store that a group needs to reach its end."""
        return 0 if group.memory else sum(map(pages_for, self._capacities(group)))

    def _capacities(self, group: SequenceGroup) -> list[int]:
        """Most tokens of KV of each unfinished text of a group."""
        context = self._store.models.target.config.context
        reach = self._store.speculation.reach
        return [sequence.capacity(context, reach) for sequence in group.unfinished]
