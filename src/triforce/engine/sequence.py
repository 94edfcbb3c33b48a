"""One text to be made: its prompt, how to sample it, and what has come of it. Knows tokens, not text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, Protocol

import torch
from torch import Tensor

from triforce.interface.outputs import DecodingSnapshot, Logprob, TokenLogprobs
from triforce.interface.sampling_params import SamplingParams
from triforce.interface.stats import PlanSegment, TierStats, since
from triforce.sampling import Constraint
from triforce.speculation import PromptLogitsHook


class PlanStatus(Protocol):
    """What is asked of one here: the plan, and what it and plain decoding promise (tokens per second)."""

    name: str
    predicted: float
    plain: float
    budget: Callable[[int], int] | None
    """What the retrieval tier reads of so many tokens, where that is chosen, too."""


@dataclass(slots=True, eq=False)
class TokenSequence:
    """`origins` names the tier that proposed each token. Seconds are those of the passes that it took part in."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    choice: int = 0
    stop_ids: frozenset[int] = frozenset()
    scope: str = ""
    """Whose it is: KV of equal beginnings is shared within a scope."""
    constraint: Constraint | None = None
    tokens: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    tiers: list[TierStats] = field(default_factory=list)
    """What each tier did for it, once it has left its batch."""
    chosen: list[PlanSegment] = field(default_factory=list)
    """What a pilot chose, if there is one; proposals, tokens and seconds are those before."""
    trace: DecodingSnapshot | None = None
    """Where it stands, if that was asked for."""
    bitwise: bool = False
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    proposals: int = 0

    @property
    def timeline(self) -> list[PlanSegment]:
        """What a pilot chose, if there is one, and what came of it."""
        now = PlanSegment("", self.proposals, len(self.tokens), self.decode_seconds)
        return [since(began, ended) for began, ended in pairwise([*self.chosen, now])]

    def limit(self, context: int) -> int:
        """New tokens at most."""
        return min(self.params.max_tokens, context - len(self.prompt))

    def capacity(self, context: int, reach: int) -> int:
        """Places that the text may need, with what is guessed beyond its end."""
        return len(self.prompt) + self.limit(context) + reach

    def accept(self, tokens: list[int], origins: list[str], limit: int) -> int:
        """Take tokens up to the first stop token or the limit; returns how many."""
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
        """The text ends `surplus` tokens before its last one: a stop string was found there."""
        for made in (self.tokens, self.origins, self.logprobs):
            del made[len(made) - surplus :]
        for stretch in self.chosen:
            stretch.tokens = min(stretch.tokens, len(self.tokens))
        if self.tiers:  # it has left its batch, and what the full tier proposes is the text
            self.tiers[-1].proposed = self.tiers[-1].accepted = len(self.tokens)
        self.finish = "stop"

    def proposed(self, seconds: float) -> None:
        """A proposal that it took part in has been made."""
        self.decode_seconds += seconds
        self.proposals += 1

    def follow(self, pilot: PlanStatus) -> None:
        """Note what the pilot chose, if it is something else than before."""
        budget = pilot.budget(len(self.prompt) + len(self.tokens)) if pilot.budget else None
        if not self.chosen or (self.chosen[-1].plan, self.chosen[-1].budget) != (pilot.name, budget):
            before = self.proposals, len(self.tokens), self.decode_seconds
            self.chosen.append(PlanSegment(pilot.name, *before, pilot.predicted, pilot.plain, budget))

    def watch(self) -> PromptLogitsHook:
        """Notes the log-probabilities of the prompt as it is read, from its start on."""
        self.prompt_logprobs.append(None)

        def watch(start: int, logits_1TV: Tensor) -> None:
            following = self.prompt[start + 1 : start + 1 + logits_1TV.shape[1]]
            self.prompt_logprobs += logprobs_of(logits_1TV[0], following, self.params.prompt_logprobs or 0)

        return watch

    def like(self, other: TokenSequence) -> bool:
        """Whether the prefill of the other one serves this one."""
        return self.prompt == other.prompt and self.params.prompt_logprobs in (None, other.params.prompt_logprobs)


def logprobs_of(logits_TV: Tensor, tokens: list[int], top: int) -> list[TokenLogprobs]:
    """The model's own (unwarped) log-probabilities of tokens, one for each row of logits, and the `top` best there."""
    scores_TV = logits_TV.double().log_softmax(-1)
    chosen = scores_TV.gather(1, torch.tensor(tokens, device=scores_TV.device)[:, None])[:, 0].tolist()
    best = scores_TV.topk(min(top, scores_TV.shape[1]), dim=1)
    tops = [
        tuple(map(Logprob, ids, values))
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    return [TokenLogprobs(Logprob(*pair), row) for *pair, row in zip(tokens, chosen, tops, strict=True)]
