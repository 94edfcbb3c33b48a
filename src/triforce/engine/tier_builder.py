"""Models and KV memory that batches share, and the `TierBuilder` that makes the tiers of a mode.

Shape suffixes: B rows, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import gcd
from typing import Any

import numpy as np

from triforce.backends import dispatch
from triforce.backends.decoder import Decoder
from triforce.backends.kernel_api import OffloadLayout, pages_for
from triforce.eagle import eagle_draft
from triforce.eagle.eagle_draft import EagleHead, EntryRecordingDecoder
from triforce.eagle.view import EagleHeadView
from triforce.errors import CacheError, RequestError, argument, require_bool, require_integer
from triforce.kvcache import (
    PAGE,
    EagleHeadMemory,
    FullView,
    OffloadConfig,
    PagePool,
    RetrievalConfig,
    RetrievalView,
    StreamingView,
    page_store,
)
from triforce.kvcache.offload_sizing import kv_sizing
from triforce.kvcache.pool import NO_PAGES, PrefixPages, WindowPages, window_pages_for_rows
from triforce.kvcache.selection import POLICIES, Policy, Recent
from triforce.kvcache.views.full import prefill_chunk
from triforce.planner import PlannedProposal
from triforce.ragged import Bools
from triforce.speculation import (
    BlockRejection,
    Draft,
    NgramProposer,
    Proposer,
    Rejection,
    Seeded,
    SequenceState,
    Tier,
    TokenSampler,
)

LOWER_TIERS = {"same": 0, "int8": 8, "int4": 4}
"""Bits of the weights that lower tiers read; 0: the weights of the full tier."""

MAX_AUTO_TOKENS = 8, 16
"""Largest draft_tokens and speculative_tokens of mode `auto`."""

STRICT_ROWS = 8
"""With `strict`, narrow passes of the full tier are padded to at least this number of rows, or the engine's if more."""


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Settings of speculation. Raises RequestError for invalid values and combinations.

    draft_tokens: tokens of a proposal of the lowest tier (gamma_1). speculative_tokens: tokens that the middle tier
    gathers for one verification (gamma_2). sinks, window: tokens that the draft sees. lower_tiers: one of
    `LOWER_TIERS`, the weights that lower tiers read. strict: fix the shape of passes, for kernels whose results differ
    in their last bits between shapes. Narrow passes of the full tier, such as verifications, are padded to at least one
    shape, and prefill passes end at fixed places.
    """

    draft_tokens: int = 2
    speculative_tokens: int = 6
    retrieval_policy: str = "observed"
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    sinks: int = PAGE
    window: int = 496
    lower_tiers: str = "same"
    strict: bool = False
    offload: OffloadConfig = field(default_factory=OffloadConfig)

    def __post_init__(self) -> None:
        if self.retrieval_policy not in POLICIES:
            raise RequestError(
                f"{argument('retrieval_policy')} {self.retrieval_policy!r} is not known; choose from "
                f"{', '.join(POLICIES)}."
            )
        for name in ("draft_tokens", "speculative_tokens"):
            require_integer(name, getattr(self, name), 1, 32)
        require_bool("strict", self.strict)
        if self.lower_tiers not in LOWER_TIERS:
            names = ", ".join(LOWER_TIERS)
            raise RequestError(f"{argument('lower_tiers')} {self.lower_tiers!r} is not known; choose from {names}.")
        if self.lower_bits and self.retrieval.chunk % PAGE:
            raise RequestError(
                f"{argument('retrieval_chunk')} is {self.retrieval.chunk}; int8 copies of KV have whole pages; give a "
                f"multiple of {PAGE}."
            )

        if self.offload.kind != "none" and (self.lower_bits or self.retrieval.chunk % PAGE):
            if self.lower_bits:
                setting = argument("lower_tiers", self.lower_tiers)
                alternative = argument("lower_tiers", "same")
            else:
                setting = argument("retrieval_chunk", self.retrieval.chunk)
                alternative = f"a {argument('retrieval_chunk')} that is a multiple of {PAGE}"
            raise RequestError(
                f"{setting} and {argument('kv_offload', self.offload.kind)} cannot be had together; use {alternative}, "
                f"or {argument('kv_offload', 'none')}"
            )

    @property
    def lower_bits(self) -> int:
        """Bits of the weights that lower tiers read; 0: the weights as they are.

        If not 0, lower tiers of the target read int8 copies of its committed KV, or only the upper 4 bits of each
        number where the KV is int8 itself. A draft model reads its own KV unchanged.
        """
        return LOWER_TIERS[self.lower_tiers]

    def padding(self, rows: int) -> tuple[int, int]:
        """Rows and columns of the widest verification, to which narrow full-tier passes are padded; (1, 1): no
        padding."""
        return (max(rows, STRICT_ROWS), self.reach // 2 - 1) if self.strict else (1, 1)

    @property
    def reach(self) -> int:
        """Positions that the tiers may use beyond the last token of a text.

        With a draft below, a middle tier gathers at most the sum of both gammas, and a verification has one column
        more. If the widest verification has n columns, the reach is 2 (n + 1): more than twice as many, as a margin.
        """
        return 2 * (max(self.draft_tokens, MAX_AUTO_TOKENS[0]) + max(self.speculative_tokens, MAX_AUTO_TOKENS[1]) + 2)


@dataclass(frozen=True, slots=True)
class ModelSet:
    """The target and an optional draft: a model of the same vocabulary, or an EAGLE head on the target's states."""

    target: Decoder
    draft: Decoder | None = None
    lower_target: Decoder | None = None
    """The target with the weights that lower tiers read; None: `target`."""
    eagle_head: EagleHead | None = None

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft of either kind."""
        return self.draft is not None or self.eagle_head is not None


@dataclass(frozen=True)
class SharedKV:
    """KV memory that batches of all modes share: `pages` of the target's KV, and the draft's KV of `rows` rows.

    The memory is allocated on first use. existing_pool: a pool to use in place of a new one.
    """

    models: ModelSet
    speculation: SpeculativeConfig
    rows: int
    pages: int
    existing_pool: PagePool | None = None

    @cached_property
    def pool(self) -> PagePool:
        """The pool of all views of the target. It has no rows: each batch makes its own by `new_rows`."""
        if self.existing_pool:
            return self.existing_pool.new_rows(0)
        target = self.models.target
        unit = self._unit
        speculation = self.speculation
        padding = self.speculation.padding(self.rows)
        int8 = speculation.lower_bits > 0
        windows = self._windows()
        layout = self._offload_layout(windows.allocator.pages if windows else 0)
        eagle_memory = self._eagle_memory()
        pages = self.pages
        placement = (target.dtype, target.device)
        return PagePool(target.config, 0, pages, *placement, unit, int8, padding, layout, eagle_memory, windows)

    @property
    def _unit(self) -> int:
        """Tokens of a unit of a page list (see `kernel_api.PageTable`): the largest divisor of both a chunk and a
        page."""
        return gcd(self.speculation.retrieval.chunk, PAGE)

    def _windows(self) -> WindowPages | None:
        """Return the page accounting of layers with a window; None: there are none."""
        target = self.models.target
        windows = self.models.target.config.windows
        widest = max(prefill_chunk(target.device), self.speculation.reach)
        pages = window_pages_for_rows(windows, self.pages, self.rows, widest)
        return WindowPages(max(windows), pages, widest) if pages else None

    def _eagle_memory(self) -> EagleHeadMemory | None:
        """Return the memory of an EAGLE head; None: there is none."""
        if (draft := self.models.eagle_head) is None:
            return None
        target = self.models.target
        unit = gcd(draft.config.sinks, PAGE)
        return EagleHeadMemory(draft.config.layer, self.pages, target.dtype, target.device, unit)

    @property
    def prefix_unit(self) -> int:
        """Unit, in tokens, of the prefixes that prompts share: a page, or under `strict` a prefill pass."""
        return prefill_chunk(self.models.target.device) if self.speculation.strict else PAGE

    def _offload_layout(self, window_pages: int) -> OffloadLayout | None:
        """Return the layout of offloaded pages; None without offload. Raises CacheError if KV does not fit."""
        target = self.models.target
        speculation = self.speculation
        offload = self.speculation.offload
        model_placement = target.config, target.dtype, target.device
        tokens_read = (speculation.reach, speculation.retrieval.budget)
        (padded, _) = speculation.padding(self.rows)
        needs = kv_sizing(
            *model_placement, self.pages, self.rows, *tokens_read, window_pages, padded_rows=padded, unit=self._unit
        )
        if offload.kind == "none":
            needs.require_all()
            return None
        dispatch.require_offload(*model_placement, offload.kind)
        return page_store.plan_offload(offload, needs, target.ranks)

    @cached_property
    def streaming(self) -> StreamingView:
        """The draft's view. It has no rows: each batch makes its own by `new_rows`.

        Raises RequestError without a draft model.
        """
        draft = self.models.draft
        speculation = self.speculation
        if draft is None:
            raise RequestError(
                f"This mode needs a draft model: name one with {argument('draft')}, or use "
                f"{argument('mode', 'retrieval')}."
            )
        window = min(speculation.window, draft.config.context - speculation.sinks)
        slack = max(128, 2 * speculation.reach)
        view = StreamingView(
            draft.config, self.rows, speculation.sinks, window, slack, draft.dtype, draft.device, read_tokens=window
        )
        view.select([])
        return view


@dataclass(frozen=True)
class TierBuilder:
    """Makes the tiers of a batch whose row b holds at most `capacities[b]` tokens.

    memory: a caller's full view to continue, instead of an empty one. shared: KV shared with other batches. beginning:
    cached pages that the prompt of the first row begins with.
    """

    models: ModelSet
    speculation: SpeculativeConfig
    capacities: list[int]
    memory: FullView | None = None
    shared: SharedKV | None = None
    beginning: PrefixPages = NO_PAGES

    @cached_property
    def store(self) -> SharedKV:
        """The shared KV, or KV for this batch alone."""
        pages = sum(map(pages_for, self.capacities))
        return self.shared or SharedKV(self.models, self.speculation, len(self.capacities), pages)

    def full_view(self) -> FullView:
        """Return the full view of the target's KV, with room for every row. Raises CacheError."""
        return self._full_view

    @cached_property
    def _full_view(self) -> FullView:
        full = self.memory or FullView(self.store.pool.new_rows(len(self.capacities)))
        try:
            if self.beginning.pages:
                full.pool.attach_prefix(0, self.beginning)
            for b, capacity in enumerate(self.capacities):
                full.pool.reserve(b, capacity)
        except CacheError:  # as where the disk of offloaded KV is full
            if self.memory is None:
                for b in range(len(self.capacities)):
                    full.pool.release(b)
            raise
        full.observe(0)  # a tier that needs observed attention turns it on, see `middle_tier`
        return full

    def full_tier(self, full: FullView, below: Proposer | None = None) -> Tier[FullView]:
        """Make the full tier: the target with all of its KV."""
        target = self.models.target
        by_layer = full.pool.layerwise_prefill
        model = self._recording_entries(target, full)
        read = target.read_by_layer if by_layer else model.read
        return Tier("full", model, full, below=below, read=read, whole_prompt=by_layer)

    def middle_tier(
        self, full: FullView, policy: Callable[[], Policy], name: str, below: Proposer | None = None
    ) -> Tier[RetrievalView]:
        """Make a tier of the target that reads only those pages of the full view that a policy selects."""
        view = RetrievalView(full, policy, self.speculation.retrieval)
        if view.observes:
            full.observe(view.unit, view.setting.budget)
        model = self._recording_entries(self.models.lower_target or self.models.target, full)
        return Tier(name, model, view, self.speculation.speculative_tokens, below)

    def _recording_entries(self, decoder: Decoder, full: FullView) -> Decoder | EntryRecordingDecoder:
        """Return the decoder of a tier on the rows of `full`.

        With an EAGLE head its passes also write the head's KV entries (see `eagle.eagle_draft`).
        """
        draft = self.models.eagle_head
        memory = full.pool.eagle_memory
        return EntryRecordingDecoder(decoder, draft, memory) if draft and memory else decoder

    def draft_tier(self) -> Tier[StreamingView] | Tier[EagleHeadView]:
        """Make the tier of the draft, which reads sinks and a window. Raises RequestError without a draft."""
        if (eagle_head := self.models.eagle_head) is None:
            return self.draft_model_tier()
        view = EagleHeadView(
            self.full_view(), eagle_head.config.sinks, eagle_head.config.window, self.speculation.reach
        )
        run = eagle_draft.fused_eagle_draft_with(eagle_head.passes, view.memory)
        fused = partial(fused_draft, lambda width: run) if run else None
        return Tier("draft", eagle_head, view, self.speculation.draft_tokens, fused_draft=fused)

    def draft_model_tier(self) -> Tier[StreamingView]:
        """Make the tier of a draft model. Raises RequestError without one."""
        view = self.store.streaming.new_rows(len(self.capacities))
        draft = self.models.draft
        assert draft is not None, "`SharedKV.streaming` raises without a draft model"
        kernels = partial(dispatch.fused_draft_with, draft.model, view.kv)
        fused = partial(fused_draft, kernels)
        return Tier("draft", draft, view, self.speculation.draft_tokens, fused_draft=fused, read=draft.read)


def fused_draft(
    kernels: Callable[[int], dispatch.FusedDraft | None],
    tier: Tier[StreamingView] | Tier[EagleHeadView],
    prefix: SequenceState,
    sampling: TokenSampler,
    live_B: Bools,
    count: int,
) -> Draft | None:
    """Draft up to `count` tokens of each live row in one call, for a tier with no tier below.

    kernels: returns the fused kernel for a number of uncached tokens of a row, or None. The tokens are bit for bit
    those of separate passes and draws, which would spend more time in Python than in the passes. Returns None if
    separate passes are needed. Raises ModelError if logits are not finite.
    """
    view = tier.cache
    uncached_B = (prefix.lengths_B - view.lengths_B) * live_B
    width = int(uncached_B.max())
    run = kernels(width)
    prepare = getattr(sampling, "draws", None)  # only samplers that fused kernels support have it
    if not (run and prepare):
        return None
    extra_steps = view.steps(uncached_B, count - 1)
    draws = prepare(tier.level, extra_steps + 1, live_B)
    if draws is None:
        return None
    batch = view.begin(uncached_B + extra_steps * live_B, width + extra_steps)
    tokens_BK = np.empty((len(live_B), extra_steps + 1), dtype=np.int64)
    probs_BKV = run(batch, (prefix.ids_BS, prefix.lengths_B, live_B), draws, tokens_BK)
    view.record(batch)
    origins_BK = np.full_like(tokens_BK, tier.level)
    return Draft(tokens_BK, probs_BKV, origins_BK, (extra_steps + 1) * live_B)


ModeBuilder = Callable[[TierBuilder], Tier[FullView]]


def ar(build: TierBuilder) -> Tier[FullView]:
    """Plain autoregressive decoding."""
    return build.full_tier(build.full_view())


def draft(build: TierBuilder) -> Tier[FullView]:
    """A small model verified by the target: classic speculation (the paper's first baseline)."""
    below = build.draft_tier()  # first: it may raise, and must do so before pages are reserved
    return build.full_tier(build.full_view(), below)


def retrieval(build: TierBuilder, below: Proposer | None = None) -> Tier[FullView]:
    """The target drafts for itself through selected pages (without `below`: the paper's ablation without hierarchy)."""
    full = build.full_view()
    policy = POLICIES[build.speculation.retrieval_policy]
    return build.full_tier(full, build.middle_tier(full, policy, "retrieval", below))


def streaming(build: TierBuilder) -> Tier[FullView]:
    """The hierarchy with StreamingLLM instead of retrieval (the paper's ablation). Without a draft it has two tiers."""
    below = build.draft_tier() if build.models.has_draft else None
    full = build.full_view()
    return build.full_tier(full, build.middle_tier(full, Recent, "streaming", below))


def triforce(build: TierBuilder) -> Tier[FullView]:
    """Draft model, retrieval, full cache (Algorithm 1)."""
    return retrieval(build, build.draft_tier())


def ngram(build: TierBuilder) -> Tier[FullView]:
    """TriForce with n-grams of the text itself instead of the draft model."""
    return retrieval(build, NgramProposer(len(build.capacities), build.speculation.draft_tokens))


def draft_ngram(build: TierBuilder) -> Tier[FullView]:
    """TriForce with n-grams where the text repeats itself, and the draft model elsewhere."""
    return retrieval(build, NgramProposer(len(build.capacities), build.speculation.draft_tokens, build.draft_tier()))


def auto(build: TierBuilder) -> Tier[FullView]:
    """All available tiers, for a `PlanController` to choose from."""
    return triforce(build) if build.models.has_draft else retrieval(build)


MODES: dict[str, ModeBuilder] = {
    "ar": ar, "draft": draft, "retrieval": retrieval, "streaming": streaming, "triforce": triforce, "ngram": ngram,
    "draft-ngram": draft_ngram, "auto": auto,
}  # fmt: skip

COUPLINGS: dict[str, type[Seeded] | type[Rejection]] = {
    "seeded": Seeded,
    "rejection": Rejection,
    "block": BlockRejection,
}

DRAFT_MODES = ("draft", "triforce", "draft-ngram")
"""Modes that need a draft: a model or an EAGLE head."""


def unlink_tiers(top: Tier[FullView]) -> list[Proposer]:
    """Unlink `top` from the tiers below it, and return the tiers of `auto`, for `apply_plan` to link again.

    The list begins with n-grams, and goes on from the lowest tier to the full one. Levels are indexes of the list; they
    select the tiers' streams of uniforms, and name the tiers in the origins of tokens.
    """
    all_tiers = [NgramProposer(len(top.cache.lengths_B)), *tiers(top)]
    top.below = None
    for level, tier in enumerate(all_tiers):
        tier.level = level
    return all_tiers


def apply_plan(planned: PlannedProposal, all_tiers: Sequence[Proposer]) -> None:
    """Link the tiers of a plan, and set their gammas, their budgets and `FullView.grain` for the next proposal.

    all_tiers: those of `unlink_tiers`.
    """
    plan = planned.plan
    by_name: dict[str, Any] = {tier.name: tier for tier in all_tiers}
    below = None
    for name, gamma in zip(plan.tiers, (*plan.gammas, 1), strict=True):
        tier = by_name[name]
        tier.gamma = gamma
        tier.below = below
        below = tier
    if "retrieval" in plan.tiers:
        by_name["retrieval"].cache.budget_factors = dict(plan.budget_factors)
    by_name["full"].cache.grain = planned.grain


def tiers(top: Proposer) -> list[Proposer]:
    """List a tier and all tiers below it, from the lowest up."""
    return [*(tiers(top.below) if top.below else []), top]
