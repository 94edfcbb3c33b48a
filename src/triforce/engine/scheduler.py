"""Scheduler: which group is prefilled next, how much of it, and which group is swapped out. It runs no model.

A group is admitted once there are rows and pages of KV for its longest possible texts. The oldest group comes first,
and while it does not fit, no younger group is admitted. While groups are being prefilled, another one is admitted only
if it has fewer tokens to prefill than each of them, and if the older waiting groups that it passes still fit beside it.
A group waits while another one prefills a prefix that both prompts share. Of the groups being prefilled, the one with
the fewest tokens left comes next, and each `OLDEST_EVERY`-th time the oldest one, so that none starves. Where turns are
limited, a group that has had its turn is swapped out, and waits again behind the others.

A pass of a prompt ends where `FullView.resume` says (`kvcache/views/full.py`), or earlier where `PrefillPacer` grants
fewer tokens, because running groups wait for their next step. A pass of more than `MIN_SUSPENDED_TOKENS` tokens
(`speculation/tier.py`) may be suspended between its parts, see `Decoder.read`.
"""

from __future__ import annotations

from collections.abc import Sequence

from triforce.backends.kernel_api import pages_for
from triforce.engine.sequence_group import SequenceGroup, Status
from triforce.engine.tier_builder import SharedKV
from triforce.errors import CacheError
from triforce.kvcache import PAGE
from triforce.kvcache.pool import PrefixPages
from triforce.kvcache.prefix_cache import PrefixCache
from triforce.kvcache.views.full import prefill_chunk

OLDEST_EVERY = 4
"""Of all parts of prefills, each `OLDEST_EVERY`-th belongs to the oldest prompt."""


class Scheduler:
    """All unfinished groups, in the order in which they came or were swapped out.

    The status of a group tells whether it runs, is prefilled or waits. store: KV that bounds rows and pages. prefixes:
    cached pages that prompts may begin with. turn: steps after which a running group may be swapped out; None: never.
    """

    def __init__(self, store: SharedKV, prefixes: PrefixCache, turn: int | None) -> None:
        self._store = store
        self._prefixes = prefixes
        self.turn = turn
        self.groups: list[SequenceGroup] = []
        self._prefilled_parts = 0

    @property
    def running(self) -> list[SequenceGroup]:
        """Groups that are decoded."""
        return [group for group in self.groups if group.status is Status.RUNNING]

    @property
    def prefilling(self) -> list[SequenceGroup]:
        """Groups that are being prefilled, in the order in which they came."""
        return [group for group in self.groups if group.status is Status.PREFILLING]

    @property
    def waiting(self) -> list[SequenceGroup]:
        """Groups that wait for room, in the order in which they came or were swapped out."""
        return [group for group in self.groups if group.status in (Status.WAITING, Status.SWAPPED)]

    def add(self, groups: Sequence[SequenceGroup]) -> None:
        """Queue groups. Raises CacheError, and queues none, if one can never fit."""
        for group in groups:
            sequences = len(group.unfinished)
            pages = self.pages(group)
            if sequences > self._store.rows or pages > self._store.pages:
                raise CacheError(
                    f"the request needs {sequences} rows and {pages} pages of KV; the engine has {self._store.rows} "
                    f"rows and {self._store.pages} pages. Use a shorter prompt or a smaller max_tokens"
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
        oldest = self._oldest_not_running()
        passed_by = list[SequenceGroup]()
        for group in self.waiting:
            prefix, tokens_without_windows = group.cached_pages(self._prefixes)
            cached = len(prefix.pages) * PAGE
            is_too_long = group is not oldest and group.prompt_tokens - cached >= min(
                active_group.tokens_to_prefill for active_group in prefilling
            )
            if is_too_long or any(self._prefills_prefix(active_group, group, cached) for active_group in prefilling):
                passed_by.append(group)
                continue
            group.tokens_without_windows = tokens_without_windows
            return (group, prefix) if self._fits(group, prefix, passed_by) else None
        return None

    def _oldest_not_running(self) -> SequenceGroup | None:
        """Return the oldest group that is not running yet."""
        return next((group for group in self.groups if group.status is not Status.RUNNING), None)

    def _prefills_prefix(self, active_group: SequenceGroup, group: SequenceGroup, cached: int) -> bool:
        """Whether `group` had better wait for KV of `active_group`, which is being prefilled.

        It should if both prompts share at least a prefill pass of tokens beyond the first `cached` tokens of `group`.
        """
        chunk = prefill_chunk(self._store.models.target.device)
        return not group.swapped and active_group.common_tokens(group) - cached >= chunk

    def _fits(self, group: SequenceGroup, prefix: PrefixPages, passed_by: Sequence[SequenceGroup]) -> bool:
        """Make room for a group, if all groups in `passed_by` still fit beside it. Returns whether there is room now.

        passed_by: older groups, which the admission of `group` must not delay. On success the pages of `prefix` are
        referenced.
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

    def next_to_prefill(self) -> SequenceGroup:
        """Return the group whose prompt is prefilled next, among those being prefilled."""
        prefilling = self.prefilling
        self._prefilled_parts += 1
        if self._prefilled_parts % OLDEST_EVERY == 0:
            return prefilling[0]
        return min(prefilling, key=lambda group: group.tokens_to_prefill)

    def is_awaited(self, group: SequenceGroup) -> bool:
        """Whether some waiting group can now reuse all that it may of `group`, which is being prefilled.

        That is so once `group` has cached all whole units of the prefix that both prompts share. The prefix has at
        least one unit (`SharedKV.prefix_unit`). Groups that were swapped out do not count.
        """
        unit = self._store.prefix_unit
        shareable_tokens = group.prefilled_tokens // unit * unit
        return any(
            unit <= group.common_tokens(waiter) // unit * unit <= shareable_tokens
            for waiter in self.waiting
            if not waiter.swapped
        )

    def _windows_fit(self, groups: Sequence[SequenceGroup]) -> bool:
        """Whether layers with a window have pages left for `groups`. Groups with a caller's view need none."""
        if (windows := self._store.pool.windows) is None:
            return True
        owners = [group for group in groups if not group.memory]
        pages = sum(windows.reserved_pages(capacity) for group in owners for capacity in self._capacities(group))
        return windows.allocator.reserved + pages <= windows.allocator.pages

    def to_swap_out(self) -> SequenceGroup | None:
        """Return the first running group that has had its turn, if others wait and the host has room for its KV.

        Swapped groups together hold at most as many pages as the store has. The first waiting group does not count,
        because it is admitted next.
        """
        if self.turn is None or not (waiting := self.waiting):
            return None
        swapped = sum(self.pages(group) for group in waiting[1:] if group.status is Status.SWAPPED)
        for group in self.running:
            if group.steps >= self.turn and not group.memory and swapped + self.pages(group) <= self._store.pages:
                return group
        return None

    def pages(self, group: SequenceGroup) -> int:
        """Pages of the store that a group needs to grow to its maximum length."""
        return 0 if group.memory else sum(map(pages_for, self._capacities(group)))

    def _capacities(self, group: SequenceGroup) -> list[int]:
        """KV tokens that each unfinished sequence of a group may need at most."""
        context = self._store.models.target.config.context
        reach = self._store.speculation.reach
        return [sequence.capacity(context, reach) for sequence in group.unfinished]
