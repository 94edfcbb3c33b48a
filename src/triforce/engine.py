"""A batch of texts, from their prompts to their last tokens.

Knows tokens, not text. Shape suffixes: B rows, S text capacity, J tokens of a step, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from triforce.cache import Full
from triforce.cache.saved import SavedCache
from triforce.ladder import Ladder, Models, Rows, Speculation, tiers
from triforce.planner import Costs, Focus, Pilot
from triforce.request import Logprob, SamplingParams, TierStats, TokenLogprobs
from triforce.sampler import sampling
from triforce.sampling import Constraint, Noise
from triforce.shapes import ints
from triforce.speculation import Block, Prefix, Record, Rejection, Seeded, Tier, Watch

COUPLINGS: dict[str, type[Seeded] | type[Rejection]] = {"seeded": Seeded, "rejection": Rejection, "block": Block}


@dataclass(slots=True)
class Job:
    """One text to be made: its prompt, how to sample it, and what has come of it."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    choice: int = 0
    stop_ids: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    tokens: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None

    def accept(self, tokens: list[int], origins: list[int], limit: int) -> int:
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
        self.finish = "stop"


class Batch:
    """Rows that are prefilled one by one and decoded together, each at its own length and with its own settings.

    `memory` is an exact view to go on with, of one row whose committed tokens are the start of the prompt. With `costs`
    a pilot chooses among the tiers of the ladder as it goes; `focus` finds layers for the retrieval tier to see whole.
    """

    def __init__(
        self,
        models: Models,
        ladder: Ladder,
        setting: Speculation,
        coupling: str,
        jobs: Sequence[Job],
        memory: Full | None = None,
        costs: Costs | None = None,
        focus: Focus | None = None,
    ) -> None:
        config, device = models.target.config, models.target.device
        self.jobs, self.target = jobs, models.target
        self.limits = [min(job.params.max_tokens, config.context - len(job.prompt)) for job in jobs]
        capacities = [len(job.prompt) + limit + setting.reach for job, limit in zip(jobs, self.limits, strict=True)]
        self.top = ladder(Rows(models, setting, capacities, memory))
        self.focus = focus
        self.pilot = Pilot(self.top, len(jobs), costs) if costs else None
        self.tiers = self.pilot.tiers if self.pilot else tiers(self.top)
        ids_BS = np.zeros((len(jobs), max(capacities) + 1), dtype=np.int64)
        for b, job in enumerate(jobs):
            ids_BS[b, : len(job.prompt)] = job.prompt
        lengths = [len(job.prompt) for job in jobs]
        self.prefix = Prefix(ids_BS, ints(lengths))
        noise = Noise([job.seed for job in jobs], [job.choice for job in jobs], device)
        params = [job.params for job in jobs]
        constraints = [job.constraint for job in jobs]
        self.sampling = sampling(params, lengths, config.vocab_size, COUPLINGS[coupling](noise), device, constraints)
        self.prefill_seconds = self.decode_seconds = 0.0
        self.twins = [next((a for a in range(b) if _alike(jobs[a], job)), None) for b, job in enumerate(jobs)]
        """For each row the first one that a prefill can be copied from, if there is one."""
        self._logits: deque[Tensor] = deque(maxlen=1)
        if any(job.params.logprobs is not None for job in jobs):
            self.top.record = _keep(self._logits)

    @torch.no_grad()
    def restore(self, earlier: SavedCache) -> None:
        """Start from a saved prompt, as far as the prompts begin like it. Part of the prefill."""
        started = perf_counter()
        for b, job in enumerate(self.jobs):
            if self.twins[b] is None and job.params.prompt_logprobs is None:  # these need every position scored
                earlier.restore(self.top.cache, b, job.prompt)
        self.prefill_seconds += perf_counter() - started

    @torch.no_grad()
    def prefill(self) -> Iterator[tuple[int, int]]:
        """Feed every prompt but its last token; yields (tokens seen, tokens in all) of the exact view as it goes."""
        started = perf_counter()
        sizes = [len(job.prompt) - 1 for job in self.jobs]
        for b, twin in enumerate(self.twins):
            passes = self._feed(b) if twin is None else self._fork(twin, b)
            for seen in passes:
                yield sum(sizes[:b]) + seen, sum(sizes)
        if self.focus:
            self.focus.apply(self.tiers, self.prefix)
        self.prefill_seconds += perf_counter() - started

    @torch.no_grad()
    def step(self) -> list[int]:
        """One proposal of the exact tier; returns how many new tokens each job took (0 for those that are done)."""
        started = perf_counter()
        live = [job.finish is None for job in self.jobs]
        live_B, lengths = np.array(live), self.prefix.lengths_B[live].tolist()
        if self.pilot:
            self.pilot.steer(self.prefix, live_B)
        steered = perf_counter()
        draft = self.top.propose(self.prefix, self.sampling, live_B)
        self.prefix = self.prefix.append(draft)
        tokens, origins, counts = draft.tokens_BK.tolist(), draft.origins_BK.tolist(), draft.counts_B.tolist()
        taken = [
            job.accept(tokens[b][: counts[b]], origins[b][: counts[b]], self.limits[b]) if live[b] else 0
            for b, job in enumerate(self.jobs)
        ]
        self._note_logprobs(taken)
        ended = perf_counter()
        self.decode_seconds += ended - started
        if self.pilot:
            self.pilot.learn(lengths, sum(taken), ended - steered)
        return taken

    @property
    def bitwise(self) -> bool:
        """Whether the texts are those of plain decoding bit for bit, and not in distribution only.

        Plain decoding's own are; others under `seeded`, if a token's logits do not depend on the pass it was fed in.
        """
        exact = self.target.model.width_independent and self.top.cache.pool.memory.width_independent
        return len(self.tiers) == 1 or (isinstance(self.sampling.coupling, Seeded) and exact)

    @property
    def done(self) -> bool:
        return all(job.finish for job in self.jobs)

    def stats(self, b: int) -> list[TierStats]:
        """What each tier did for row b, from the lowest to the full one. Seconds are those of the whole batch."""
        stats = []
        for tier in self.tiers:
            c = tier.counters
            kept = c.kept_BN[b].tolist() if int(c.proposed_B[b]) else []
            counts = int(c.proposed_B[b]), int(c.accepted_B[b]), int(c.passes_B[b])
            stats.append(TierStats(tier.name, *counts, c.seconds, c.prefill_seconds, kept))
        stats[-1].proposed = stats[-1].accepted = len(self.jobs[b].tokens)  # what the full tier proposes is the text
        return stats

    @property
    def plans(self) -> dict[str, int]:
        """What the pilot chose, if there is one, and for how many proposals of the whole batch."""
        return {str(plan): proposals for plan, proposals in self.pilot.flown.items()} if self.pilot else {}

    def _feed(self, b: int) -> Iterator[int]:
        job, length = self.jobs[b], len(self.jobs[b].prompt) - 1
        for tier in self.tiers:
            if tier is not self.top:
                deque(tier.prefill(self.prefix, b, length), maxlen=0)
        watch = self._watch(job) if job.params.prompt_logprobs is not None else None
        yield from self.top.prefill(self.prefix, b, length, watch)

    def _fork(self, source: int, b: int) -> Iterator[int]:
        for tier in self.tiers:
            if isinstance(tier, Tier):
                tier.cache.fork(source, b)
        self.jobs[b].prompt_logprobs = self.jobs[source].prompt_logprobs
        yield len(self.jobs[b].prompt) - 1

    def _watch(self, job: Job) -> Watch:
        job.prompt_logprobs.append(None)

        def watch(start: int, logits_1TV: Tensor) -> None:
            following = job.prompt[start + 1 : start + 1 + logits_1TV.shape[1]]
            job.prompt_logprobs += logprobs_of(logits_1TV[0], following, job.params.prompt_logprobs or 0)

        return watch

    def _note_logprobs(self, taken: list[int]) -> None:
        for b, (job, count) in enumerate(zip(self.jobs, taken, strict=True)):
            if count and job.params.logprobs is not None:
                job.logprobs += logprobs_of(self._logits[0][b, :count], job.tokens[-count:], job.params.logprobs)


def _alike(a: Job, b: Job) -> bool:
    """Whether the prefill of one serves the other."""
    return a.prompt == b.prompt and b.params.prompt_logprobs in (None, a.params.prompt_logprobs)


def _keep(logits: deque[Tensor]) -> Record:
    """A record of the last logits that does not tie the tier to its batch: both go when the batch is done with."""
    return lambda logits_BJV, step: logits.append(logits_BJV)


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
