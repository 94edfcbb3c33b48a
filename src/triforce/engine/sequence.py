"""TokenSequence: one text to be generated. Its prompt, its parameters, and what came of it; tokens, not text.

Tiers are listed from the lowest to the full one; row b of them is the sequence's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from triforce.disk_cache.prefixes import DiskText
from triforce.interface.explain import PlanReport, PlanSegment, TierStats, since
from triforce.interface.outputs import DecodingSnapshot, Logprob, TokenLogprobs
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import RetrievalView
from triforce.planner import PlanController
from triforce.sampling import Constraint
from triforce.speculation import PromptLogitsHook, Proposer, Tier


@dataclass(slots=True, eq=False)
class TokenSequence:
    """One text to be generated. Its seconds are those of the passes that it took part in."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    choice: int = 0
    """Index among the `n` of its request."""
    stop_ids: frozenset[int] = frozenset()
    scope: str | None = ""
    """Owner of the text: KV of equal beginnings is shared within a scope. None: it is shared with nobody."""
    constraint: Constraint | None = None
    tokens: list[int] = field(default_factory=list)
    """New tokens."""
    origins: list[str] = field(default_factory=list)
    """The name of the tier that proposed each new token."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    tiers: list[TierStats] = field(default_factory=list)
    """Statistics of each tier, once the sequence has left its batch."""
    chosen: list[PlanSegment] = field(default_factory=list)
    """Plans of the controller, if there is one; proposals, tokens and seconds are those before each."""
    report: PlanReport | None = None
    """What the controller believed, once the sequence has left its batch."""
    trace: DecodingSnapshot | None = None
    """State of its decoding, if that was asked for."""
    cached: int = 0
    """Tokens of the prompt whose KV was there before."""
    disk: DiskText | None = None
    """Its segments in the disk cache, if there is one."""
    bitwise: bool = False
    """Whether it is the text of plain decoding bit for bit."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    proposals: int = 0
    """Proposals of the full tier."""

    @property
    def timeline(self) -> list[PlanSegment]:
        """The controller's plans one after the other, and what came of each."""
        present = PlanSegment("", self.proposals, len(self.tokens), self.decode_seconds)
        return [since(began, ended) for began, ended in pairwise([*self.chosen, present])]

    def limit(self, context: int) -> int:
        """New tokens at most, in a context of so many positions."""
        return min(self.params.max_tokens, context - len(self.prompt))

    def capacity(self, context: int, reach: int) -> int:
        """Positions that the text may need. reach: of these, those of draft tokens beyond its end."""
        return len(self.prompt) + self.limit(context) + reach

    def accept(self, tokens: list[int], origins: list[str], limit: int) -> int:
        """Take tokens up to the first stop token or the limit. Returns how many."""
        for n, (token, origin) in enumerate(zip(tokens, origins, strict=True)):
            self.tokens.append(token)
            self.origins.append(origin)
            if token in self.stop_ids:
                self.finish = "stop"
            elif len(self.tokens) >= limit:
                self.finish = "length"
            if self.finish:
                return n + 1
        return len(tokens)

    def cut(self, surplus: int) -> None:
        """End the text `surplus` tokens before its last one, as a stop string was found there."""
        for per_token in (self.tokens, self.origins, self.logprobs):
            del per_token[len(per_token) - surplus :]
        for segment in self.chosen:
            segment.tokens = min(segment.tokens, len(self.tokens))
        if self.tiers:  # it has left its batch, and what the full tier proposes is the text
            self.tiers[-1].proposed = self.tiers[-1].accepted = len(self.tokens)
        self.finish = "stop"

    def note_plan(self, controller: PlanController) -> None:
        """Note the controller's plan, if it is another one than before."""
        budget = controller.budget(len(self.prompt) + len(self.tokens)) if controller.budget else None
        if not self.chosen or (self.chosen[-1].plan, self.chosen[-1].budget) != (controller.name, budget):
            progress = (self.proposals, len(self.tokens), self.decode_seconds)
            choice = controller.choice_in_use
            segment = PlanSegment(
                controller.name, *progress, choice.rate, controller.plain_rate, budget, choice.state.value, choice.score
            )
            if choice.rival:
                segment.rival, segment.rival_score = str(choice.rival.plan), choice.rival.score
                segment.cause = choice.cause.value
            self.chosen.append(segment)

    def prompt_logits_hook(self) -> PromptLogitsHook:
        """Return a hook that notes the log-probabilities of the prompt as it is read, from its start on."""
        self.prompt_logprobs.append(None)

        def note(start: int, logits_1TV: Tensor) -> None:
            following = self.prompt[start + 1 : start + 1 + logits_1TV.shape[1]]
            self.prompt_logprobs += logprobs_of(logits_1TV[0], following, self.params.prompt_logprobs or 0)

        return note

    def can_copy_prefill(self, other: TokenSequence) -> bool:
        """Whether the prefill of the other sequence serves this one."""
        return self.prompt == other.prompt and self.params.prompt_logprobs in (None, other.params.prompt_logprobs)

    def tier_stats(self, tiers: Sequence[Proposer], b: int, length: int) -> list[TierStats]:
        """Return statistics of each tier. length: of the text, in tokens."""
        stats = []
        for tier in tiers:
            counters = tier.counters
            histogram = np.trim_zeros(counters.accepted_BN[b], "b").tolist() if int(counters.proposed_B[b]) else []
            counts = int(counters.proposed_B[b]), int(counters.accepted_B[b]), int(counters.passes_B[b])
            seconds = float(counters.seconds_B[b]), float(counters.prefill_seconds_B[b])
            view = tier.cache if isinstance(tier, Tier) else None
            visible_tokens = view.keys(length) if isinstance(view, RetrievalView) else None
            stats.append(TierStats(tier.name, *counts, *seconds, histogram, visible_tokens))
        stats[-1].proposed = stats[-1].accepted = len(self.tokens)  # what the full tier proposes is the text
        return stats

    def snapshot(self, tiers: Sequence[Proposer], b: int, stats: list[TierStats], committed: int) -> DecodingSnapshot:
        """Return the state of the decoding, with `committed` tokens in the full view.

        A retrieval view that made no pass since the last snapshot saw nothing.
        """
        passes = [tier.passes for tier in self.trace.tiers] if self.trace else [0] * len(stats)
        views = [
            tier.cache
            for tier, tier_stats, old_passes in zip(tiers, stats, passes, strict=True)
            if isinstance(tier, Tier) and isinstance(tier.cache, RetrievalView) and tier_stats.passes != old_passes
        ]
        return DecodingSnapshot(committed, self.decode_seconds, views[-1].coverage(b) if views else [], stats)


def logprobs_of(logits_TV: Tensor, tokens: list[int], top: int) -> list[TokenLogprobs]:
    """Log-probabilities of tokens by raw logits, one for each row of these, and the `top` best there."""
    scores_TV = logits_TV.double().log_softmax(-1)
    chosen = scores_TV.gather(1, torch.tensor(tokens, device=scores_TV.device)[:, None])[:, 0].tolist()
    best = scores_TV.topk(min(top, scores_TV.shape[1]), dim=1)
    tops = [
        tuple(map(Logprob, ids, values))
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    return [TokenLogprobs(Logprob(*pair), row) for *pair, row in zip(tokens, chosen, tops, strict=True)]
