"""TokenSequence: token ids of one sequence to be generated, with its prompt, its parameters and its results.

Tiers are listed from the lowest to the full one. The sequence is row b of each tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from triforce.arrays import Array, to_host
from triforce.disk_cache.prefixes import DiskText
from triforce.interface.explain import PlanReport, PlanSegment, TierStats, segment_difference
from triforce.interface.outputs import DecodingSnapshot, Logprob, TokenLogprobs
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import RetrievalView
from triforce.planner import PlanController
from triforce.sampling import Constraint
from triforce.speculation import PromptLogitsHook, Proposer, Tier


@dataclass(slots=True, eq=False)
class TokenSequence:
    """One sequence to be generated. Its seconds are those of the passes that it took part in."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    choice: int = 0
    """Index among the `n` completions of its request."""
    stop_ids: frozenset[int] = frozenset()
    scope: str | None = ""
    """Owner of the request: only texts of one owner share KV. "": the common owner of requests that name none, such as
    requests without an API key; None: the text shares no KV."""
    constraint: Constraint | None = None
    tokens: list[int] = field(default_factory=list)
    """New tokens."""
    origins: list[str] = field(default_factory=list)
    """The name of the tier that proposed each new token."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    tiers: list[TierStats] = field(default_factory=list)
    """Statistics of each tier, once the sequence has left its batch."""
    plan_segments: list[PlanSegment] = field(default_factory=list)
    """Plans of the controller, if there is one. Each segment has the counts and seconds at which its plan began."""
    report: PlanReport | None = None
    """Estimates of the controller, once the sequence has left its batch."""
    trace: DecodingSnapshot | None = None
    """State of its decoding, if requested."""
    cached_prompt_tokens: int = 0
    """Tokens of the prompt whose KV was cached before."""
    disk: DiskText | None = None
    """Segments of the text in the disk cache, if there is one."""
    bitwise: bool = False
    """Whether the text is bit for bit that of plain decoding."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    proposals: int = 0
    """Proposals of the full tier."""

    @property
    def timeline(self) -> list[PlanSegment]:
        """The controller's plans in order, each with its own proposals, tokens and seconds."""
        end = PlanSegment("", self.proposals, len(self.tokens), self.decode_seconds)
        return [segment_difference(began, ended) for began, ended in pairwise([*self.plan_segments, end])]

    def limit(self, context: int) -> int:
        """Most new tokens, in a context of `context` positions."""
        return min(self.params.max_tokens, context - len(self.prompt))

    def capacity(self, context: int, reach: int) -> int:
        """Most positions that the text may need. reach: positions of draft tokens beyond its end."""
        return len(self.prompt) + self.limit(context) + reach

    def accept(self, tokens: list[int], origins: list[str], limit: int) -> int:
        """Append tokens up to the first stop token or the limit. Returns the number of appended tokens."""
        for n, (token, origin) in enumerate(zip(tokens, origins, strict=True)):
            self.tokens.append(token)
            self.origins.append(origin)
            if token in self.stop_ids:
                self.finish_reason = "stop"
            elif len(self.tokens) >= limit:
                self.finish_reason = "length"
            if self.finish_reason:
                return n + 1
        return len(tokens)

    def cut(self, surplus: int) -> None:
        """Remove the last `surplus` tokens, which follow a complete stop string, and end the text."""
        for per_token in (self.tokens, self.origins, self.logprobs):
            del per_token[len(per_token) - surplus :]
        for segment in self.plan_segments:
            segment.tokens = min(segment.tokens, len(self.tokens))
        if self.tiers:  # the sequence has left its batch. The full tier counts the whole text as proposed and accepted
            self.tiers[-1].proposed = self.tiers[-1].accepted = len(self.tokens)
        self.finish_reason = "stop"

    def note_plan(self, controller: PlanController) -> None:
        """Record the controller's plan, if it differs from the latest recorded one."""
        budget = controller.budget(len(self.prompt) + len(self.tokens)) if controller.budget else None
        latest_segment = self.plan_segments[-1] if self.plan_segments else None
        if latest_segment is None or (latest_segment.plan, latest_segment.budget) != (controller.name, budget):
            progress = (self.proposals, len(self.tokens), self.decode_seconds)
            choice = controller.choice_in_use
            segment = PlanSegment(
                controller.name, *progress, choice.rate, controller.plain_rate, budget, choice.state.value, choice.score
            )
            if choice.rival:
                segment.rival, segment.rival_score = str(choice.rival.plan), choice.rival.score
                segment.cause = choice.cause.value
            self.plan_segments.append(segment)

    def prompt_logits_hook(self) -> PromptLogitsHook:
        """Return a hook that records the log-probabilities of the prompt, for a prefill from the first token on."""
        self.prompt_logprobs.append(None)

        def note(start: int, logits_1TV: Array) -> None:
            following = self.prompt[start + 1 : start + 1 + logits_1TV.shape[1]]
            self.prompt_logprobs += logprobs_of(logits_1TV[0], following, self.params.prompt_logprobs or 0)

        return note

    def can_copy_prefill(self, other: TokenSequence) -> bool:
        """Whether this sequence can copy the prefill of `other`."""
        return self.prompt == other.prompt and self.params.prompt_logprobs in (None, other.params.prompt_logprobs)

    def tier_stats(self, tiers: Sequence[Proposer], b: int, length: int) -> list[TierStats]:
        """Return the statistics of each tier. length: tokens of the text."""
        stats = []
        for tier in tiers:
            counters = tier.counters
            histogram = np.trim_zeros(counters.accepted_BN[b], "b").tolist() if int(counters.proposed_B[b]) else []
            counts = int(counters.proposed_B[b]), int(counters.accepted_B[b]), int(counters.passes_B[b])
            seconds = float(counters.seconds_B[b]), float(counters.prefill_seconds_B[b])
            view = tier.cache if isinstance(tier, Tier) else None
            visible_tokens = view.keys_read(length) if isinstance(view, RetrievalView) else None
            stats.append(TierStats(tier.name, *counts, *seconds, histogram, visible_tokens))
        stats[-1].proposed = stats[-1].accepted = len(self.tokens)  # the full tier proposes the text
        return stats

    def snapshot(self, tiers: Sequence[Proposer], b: int, stats: list[TierStats], committed: int) -> DecodingSnapshot:
        """Return the state of the decoding, with `committed` tokens in the full view.

        The coverage of a retrieval view is empty unless the view's tier made a pass since the last snapshot.
        """
        passes = [tier.passes for tier in self.trace.tiers] if self.trace else [0] * len(stats)
        views = [
            tier.cache
            for tier, counts, old_passes in zip(tiers, stats, passes, strict=True)
            if isinstance(tier, Tier) and isinstance(tier.cache, RetrievalView) and counts.passes != old_passes
        ]
        return DecodingSnapshot(committed, self.decode_seconds, views[-1].coverage(b) if views else [], stats)


def logprobs_of(logits_TV: Array, tokens: list[int], top: int) -> list[TokenLogprobs]:
    """Return for each token its log-probability and those of the `top` most likely tokens, from its row of logits."""
    scores_TV = to_host(logits_TV).astype(np.float64)
    scores_TV -= scores_TV.max(1, keepdims=True)
    scores_TV -= np.log(np.exp(scores_TV).sum(1, keepdims=True))
    chosen = scores_TV[np.arange(len(tokens)), tokens].tolist()
    tops = [_most_likely(scores_V, top) for scores_V in scores_TV]
    return [TokenLogprobs(Logprob(*pair), row) for *pair, row in zip(tokens, chosen, tops, strict=True)]


def _most_likely(scores_V: NDArray[np.float64], top: int) -> tuple[Logprob, ...]:
    """Return the `top` tokens with the highest scores, in order; among equals the lowest id comes first."""
    if not top:
        return ()
    top = min(top, len(scores_V))
    edge = np.partition(scores_V, -top)[-top]
    ids = np.flatnonzero(scores_V >= edge)
    order = np.argsort(-scores_V[ids], stable=True)[:top]
    return tuple(Logprob(int(token), float(scores_V[token])) for token in ids[order])
