"""TokenSequence: one text to be generated, with its prompt, its parameters and its results; tokens, not text.

Tiers are listed from the lowest to the full one. The sequence is row b of each.
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
    """One text to be generated. Seconds are those of the passes that it took part in."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    choice: int = 0
    """Index among the `n` completions of its request."""
    stop_ids: frozenset[int] = frozenset()
    scope: str | None = ""
    """Scope within which KV of equal beginnings is shared. None: it is not shared."""
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
    """Plans of the controller, if there is one, each with the proposals, tokens and seconds before it."""
    report: PlanReport | None = None
    """Beliefs of the controller, once the sequence has left its batch."""
    trace: DecodingSnapshot | None = None
    """State of its decoding, if requested."""
    cached: int = 0
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
        present = PlanSegment("", self.proposals, len(self.tokens), self.decode_seconds)
        return [since(began, ended) for began, ended in pairwise([*self.chosen, present])]

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
                self.finish = "stop"
            elif len(self.tokens) >= limit:
                self.finish = "length"
            if self.finish:
                return n + 1
        return len(tokens)

    def cut(self, surplus: int) -> None:
        """Remove the last `surplus` tokens and end the text, as a stop string was found there."""
        for per_token in (self.tokens, self.origins, self.logprobs):
            del per_token[len(per_token) - surplus :]
        for segment in self.chosen:
            segment.tokens = min(segment.tokens, len(self.tokens))
        if self.tiers:  # it has left its batch; the proposals of the full tier are the text
            self.tiers[-1].proposed = self.tiers[-1].accepted = len(self.tokens)
        self.finish = "stop"

    def note_plan(self, controller: PlanController) -> None:
        """Record the controller's plan, if it differs from the latest recorded one."""
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
        """Return a hook that records the log-probabilities of the prompt while it is read, from its start on."""
        self.prompt_logprobs.append(None)

        def note(start: int, logits_1TV: Tensor) -> None:
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
            visible_tokens = view.keys(length) if isinstance(view, RetrievalView) else None
            stats.append(TierStats(tier.name, *counts, *seconds, histogram, visible_tokens))
        stats[-1].proposed = stats[-1].accepted = len(self.tokens)  # the proposals of the full tier are the text
        return stats

    def snapshot(self, tiers: Sequence[Proposer], b: int, stats: list[TierStats], committed: int) -> DecodingSnapshot:
        """Return the state of the decoding, with `committed` tokens in the full view.

        It covers a retrieval view only if its tier made a pass since the last snapshot.
        """
        passes = [tier.passes for tier in self.trace.tiers] if self.trace else [0] * len(stats)
        views = [
            tier.cache
            for tier, counts, old_passes in zip(tiers, stats, passes, strict=True)
            if isinstance(tier, Tier) and isinstance(tier.cache, RetrievalView) and counts.passes != old_passes
        ]
        return DecodingSnapshot(committed, self.decode_seconds, views[-1].coverage(b) if views else [], stats)


def logprobs_of(logits_TV: Tensor, tokens: list[int], top: int) -> list[TokenLogprobs]:
    """Log-probabilities of tokens by raw logits, one token for each row of logits, and of the `top` best tokens."""
    scores_TV = logits_TV.double().log_softmax(-1)
    chosen = scores_TV.gather(1, torch.tensor(tokens, device=scores_TV.device)[:, None])[:, 0].tolist()
    best = scores_TV.topk(min(top, scores_TV.shape[1]), dim=1)
    tops = [
        tuple(map(Logprob, ids, values))
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    return [TokenLogprobs(Logprob(*pair), row) for *pair, row in zip(tokens, chosen, tops, strict=True)]
