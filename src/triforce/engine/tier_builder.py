"""Configurations are functions: which tiers stand on which, for a batch of rows.

Every baseline and every ablation of the paper (Sun et al. 2024) is one of these, run by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import gcd

from triforce.backends import dispatch
from triforce.backends.decoder import Decoder
from triforce.engine.fused_draft import burst
from triforce.errors import RequestError
from triforce.interface.request import KVMemoryUsage
from triforce.kvcache import PAGE, FullView, OffloadConfig, PagePool, RetrievalConfig, RetrievalView, StreamingView
from triforce.kvcache.offload import store
from triforce.kvcache.offload.sizing import KVSizing
from triforce.kvcache.offload.sizing_cuda import needs_of
from triforce.kvcache.pool import pages_for
from triforce.kvcache.selection import POLICIES, Policy, Recent
from triforce.kvcache.views.full import prefill_chunk
from triforce.speculation import NgramProposer, Proposer, Tier


@dataclass(frozen=True, slots=True)
class ModelSet:
    """The target, and a draft that shares its vocabulary if there is one."""

    target: Decoder
    draft: Decoder | None = None
    lower: Decoder | None = None
    """What the lower tiers take for the target; None: itself."""


LOWER_TIERS = ("same", "int8")

FARTHEST = 8, 16
"""The largest gamma_1 and gamma_2 that mode `auto` goes to."""

STRICT_ROWS = 8
"""Rows of a strict pass, however few there are; where more may be decoded together, so many."""


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How to speculate: the lowest tier proposes `gamma_1` tokens at a time, the middle one gathers `gamma_2`.

    `lower_tiers`: one of `LOWER_TIERS`, how the target's lower views read committed KV: as it is, or as int8.
    `strict`: passes of the full tier have one shape, where bits depend on it, and passes of a prompt end at set places.
    """

    gamma_1: int = 2
    gamma_2: int = 6
    selection: str = "observed"
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    sinks: int = PAGE
    window: int = 496
    lower_tiers: str = "same"
    strict: bool = False
    offload: OffloadConfig = field(default_factory=OffloadConfig)

    def __post_init__(self) -> None:
        if self.selection not in POLICIES:
            raise RequestError(f"selection {self.selection!r} is not known; choose from {', '.join(POLICIES)}.")
        for name in ("gamma_1", "gamma_2"):
            if not (isinstance(getattr(self, name), int) and 1 <= getattr(self, name) <= 32):
                raise RequestError(f"{name} is {getattr(self, name)}; give 1 to 32 tokens.")
        if self.lower_tiers not in LOWER_TIERS:
            raise RequestError(f"lower_tiers {self.lower_tiers!r} is not known; choose from {', '.join(LOWER_TIERS)}.")
        if self.int8 and self.retrieval.chunk % PAGE:
            raise RequestError(f"chunk is {self.retrieval.chunk}; int8 is of whole pages: give a multiple of {PAGE}.")

        if self.offload.kind != "none" and (self.int8 or self.retrieval.chunk % PAGE):
            given = "--lower-tiers int8" if self.int8 else f"--chunk {self.retrieval.chunk}"
            raise RequestError(
                f"{given} and --kv-offload {self.offload.kind} cannot be had together; use --lower-tiers same, a "
                f"--chunk that is a multiple of {PAGE}, or --kv-offload none"
            )

    @property
    def int8(self) -> bool:
        return self.lower_tiers == "int8"

    def least(self, rows: int) -> tuple[int, int]:
        """The shape that passes of the full tier are padded to: the widest verification, plain decoding included."""
        return (max(rows, STRICT_ROWS), self.reach // 2 - 1) if self.strict else (1, 1)

    @property
    def reach(self) -> int:
        """Positions that the tiers may use beyond the last token asked for."""
        return 2 * (max(self.gamma_1, FARTHEST[0]) + max(self.gamma_2, FARTHEST[1]) + 2)


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
        return Tier(name, self.models.lower or self.models.target, view, self.setting.gamma_2, below)

    def lowest(self) -> Tier[StreamingView]:
        """The draft model, through sinks and a window."""
        view, draft = self.store.streaming.more(len(self.capacities)), self.models.draft
        assert draft is not None, "the store has seen to it"
        return Tier("draft", draft, view, self.setting.gamma_1, burst=partial(burst, draft.model))


ModeBuilder = Callable[[TierBuilder], Tier[FullView]]


def ar(rows: TierBuilder) -> Tier[FullView]:
    """Plain autoregressive decoding."""
    return rows.exact(rows.full())


def draft(rows: TierBuilder) -> Tier[FullView]:
    """A naive small model verified by the target: classic speculation (the paper's first baseline)."""
    below = rows.lowest()  # first: it may raise, and no pages are to be taken then
    return rows.exact(rows.full(), below)


def retrieval(rows: TierBuilder) -> Tier[FullView]:
    """The target drafts for itself through selected pages (the paper's ablation without hierarchy)."""
    full = rows.full()
    return rows.exact(full, rows.middle(full, POLICIES[rows.setting.selection], "retrieval"))


def streaming(rows: TierBuilder) -> Tier[FullView]:
    """The hierarchy with StreamingLLM in the place of retrieval (the paper's ablation); without a draft, two tiers."""
    below = rows.lowest() if rows.models.draft else None
    full = rows.full()
    return rows.exact(full, rows.middle(full, Recent, "streaming", below))


def triforce(rows: TierBuilder) -> Tier[FullView]:
    """Draft model, retrieval, full cache (Algorithm 1)."""
    below = rows.lowest()
    full = rows.full()
    return rows.exact(full, rows.middle(full, POLICIES[rows.setting.selection], "retrieval", below))


def lookup(rows: TierBuilder) -> Tier[FullView]:
    """TriForce with n-grams of the text itself in the place of the draft model."""
    full = rows.full()
    below = NgramProposer(len(rows.capacities), rows.setting.gamma_1)
    return rows.exact(full, rows.middle(full, POLICIES[rows.setting.selection], "retrieval", below))


def hybrid(rows: TierBuilder) -> Tier[FullView]:
    """TriForce whose draft model gives way to n-grams where the text repeats itself."""
    below = NgramProposer(len(rows.capacities), rows.setting.gamma_1, rows.lowest())
    full = rows.full()
    return rows.exact(full, rows.middle(full, POLICIES[rows.setting.selection], "retrieval", below))


def auto(rows: TierBuilder) -> Tier[FullView]:
    """All the tiers there are, for a pilot to choose from (see triforce.planner)."""
    return triforce(rows) if rows.models.draft else retrieval(rows)


MODES: dict[str, ModeBuilder] = {
    "ar": ar, "draft": draft, "retrieval": retrieval, "streaming": streaming, "triforce": triforce, "lookup": lookup,
    "hybrid": hybrid, "auto": auto,
}  # fmt: skip

DRAFTED = ("draft", "triforce", "hybrid")


def runnable(models: ModelSet) -> list[str]:
    """The modes that these models can run."""
    return [mode for mode in MODES if models.draft or mode not in DRAFTED]


def tiers(top: Proposer) -> list[Proposer]:
    """The tiers of a ladder, from the lowest to the full one."""
    return [*(tiers(top.below) if top.below else []), top]
