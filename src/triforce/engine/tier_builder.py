"""What batches share, and the parts that modes put together: models, KV memory, tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import gcd

from triforce.backends import dispatch
from triforce.backends.decoder import Decoder
from triforce.engine.config import SpeculativeConfig
from triforce.engine.fused_draft import burst
from triforce.errors import RequestError
from triforce.interface.outputs import KVMemoryUsage
from triforce.kvcache import PAGE, FullView, PagePool, RetrievalView, StreamingView
from triforce.kvcache.offload import store
from triforce.kvcache.offload.sizing import KVSizing
from triforce.kvcache.offload.sizing_cuda import needs_of
from triforce.kvcache.pool import pages_for
from triforce.kvcache.selection import Policy
from triforce.kvcache.views.full import prefill_chunk
from triforce.speculation import Proposer, Tier


@dataclass(frozen=True, slots=True)
class ModelSet:
    """The target, and a draft that shares its vocabulary if there is one."""

    target: Decoder
    draft: Decoder | None = None
    lower: Decoder | None = None
    """What the lower tiers take for the target; None: itself."""


@dataclass(frozen=True)
class SharedKV:
    """KV memory that batches share: `pages` of the target, and the draft's for so many `rows`. Made when it is used.

    `given` is a pool that is there already.
    """

    models: ModelSet
    setting: SpeculativeConfig
    rows: int
    pages: int
    given: PagePool | None = None

    @cached_property
    def pool(self) -> PagePool:
        """Of no row yet, for all views of the target."""
        if self.given:
            return self.given.more(0)
        target, unit = self.models.target, gcd(self.setting.retrieval.chunk, PAGE)
        setting, least = self.setting, self.setting.least(self.rows)
        given = self._room()
        return PagePool(target.config, 0, self.pages, target.dtype, target.device, unit, setting.int8, least, given)

    @property
    def whole(self) -> int:
        """Prompts share beginnings of multiples of so many tokens: under `strict`, what one pass has read."""
        return prefill_chunk(self.models.target.device) if self.setting.strict else PAGE

    @property
    def kv(self) -> KVMemoryUsage:
        """Where the target's KV lies."""
        return self.pool.bytes

    @property
    def needs(self) -> KVSizing:
        target, setting = self.models.target, self.setting
        where = target.config, target.dtype, target.device
        return needs_of(*where, self.pages, self.rows, setting.reach, setting.retrieval.budget)

    def _room(self) -> dispatch.OffloadLayout | None:
        """Where pages go that do not stay, if any do; what does not fit is told before anything is read."""
        target, offload = self.models.target, self.setting.offload
        if offload.kind == "none":
            self.needs.require_all()
            return None
        dispatch.require_offload(target.config, target.dtype, target.device, offload.kind)
        return store.room(offload, self.needs, target.ranks)

    @cached_property
    def streaming(self) -> StreamingView:
        """The draft's view, of no row yet. Raises RequestError without a draft model."""
        draft, setting = self.models.draft, self.setting
        if draft is None:
            raise RequestError("This mode needs a draft model: name one with --draft, or use --mode retrieval.")
        window = min(setting.window, draft.config.context - setting.sinks)
        slack = max(128, 2 * setting.reach)
        view = StreamingView(draft.config, self.rows, setting.sinks, window, slack, draft.dtype, draft.device)
        view.select([])
        return view


@dataclass(frozen=True)
class TierBuilder:
    """The parts of a ladder, for a batch whose row b holds at most `capacities[b]` tokens.

    `memory` is an exact view to go on with instead of an empty one; `begun` are pages that the first row starts with.
    `shared` is where other batches have their KV, too.
    """

    models: ModelSet
    setting: SpeculativeConfig
    capacities: list[int]
    memory: FullView | None = None
    shared: SharedKV | None = None
    begun: Sequence[int] = ()

    @cached_property
    def store(self) -> SharedKV:
        pages = sum(map(pages_for, self.capacities))
        return self.shared or SharedKV(self.models, self.setting, len(self.capacities), pages)

    def full(self) -> FullView:
        """The target's exact view."""
        full = self.memory or FullView(self.store.pool.more(len(self.capacities)))
        if self.begun:
            full.pool.adopt(0, self.begun)
        for b, capacity in enumerate(self.capacities):
            full.pool.reserve(b, capacity)
        full.grain, full.budget = 0, None  # until a view selects by what it saw
        return full

    def exact(self, full: FullView, below: Proposer | None = None) -> Tier[FullView]:
        model = self.models.target.model
        read = (lambda view, ids_1T: view.read(model, ids_1T)) if full.pool.offloaded else None
        return Tier("full", self.models.target, full, below=below, read=read)

    def middle(
        self, full: FullView, policy: Callable[[], Policy], name: str, below: Proposer | None = None
    ) -> Tier[RetrievalView]:
        view = RetrievalView(full, policy, self.setting.retrieval)
        return Tier(name, self.models.lower or self.models.target, view, self.setting.speculative_tokens, below)

    def lowest(self) -> Tier[StreamingView]:
        """The draft model, through sinks and a window."""
        view, draft = self.store.streaming.more(len(self.capacities)), self.models.draft
        assert draft is not None, "the store has seen to it"
        return Tier("draft", draft, view, self.setting.draft_tokens, burst=partial(burst, draft.model))
