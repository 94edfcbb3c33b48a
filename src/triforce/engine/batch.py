"""Rows that are decoded together, each at its own length and with its own settings; some may leave, and others join.

Shape suffixes: B rows, S text capacity, J tokens of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from time import perf_counter
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from triforce.backends.token_sampler import make_noise, sampling
from triforce.engine.config import SpeculativeConfig
from triforce.engine.modes import ModeBuilder, tiers
from triforce.engine.sequence import TokenSequence, logprobs_of
from triforce.engine.tier_builder import ModelSet, SharedKV, TierBuilder
from triforce.interface.outputs import DecodingSnapshot
from triforce.interface.stats import TierStats
from triforce.kvcache import FullView, RetrievalView
from triforce.kvcache.prompt_file import SavedCache
from triforce.kvcache.views.coverage import in_sight
from triforce.planner import CostModel, Findings, PlanController, SearchedLayers
from triforce.ragged import Bools, ints
from triforce.speculation import (
    BlockRejection,
    Grant,
    Rejection,
    Seeded,
    SequenceState,
    Tier,
    all_of_it,
)

COUPLINGS: dict[str, type[Seeded] | type[Rejection]] = {
    "seeded": Seeded,
    "rejection": Rejection,
    "block": BlockRejection,
}


class SwappedSequence(NamedTuple):
    """A row that was put aside: its count of draws in each stream of noise, and what it held of each tier."""

    draws: Tensor
    tiers: list[tuple[Any, ...]]


class Batch:
    """A ladder and its rows: read with `prefill`, one by one, then decoded together with `step`.

    `store` is where other batches have their KV, too, and `begun` pages of it that the first row starts with. `memory`
    is an exact view to go on with, of one row whose committed tokens are the start of the prompt; it stays its owner's.
    With `costs` a pilot chooses among the tiers of the ladder as it goes; with `findings` the retrieval tier searches
    layers in which that pays, and what is found is added to them. Raises TriforceError, and then holds no KV.
    """

    def __init__(
        self,
        models: ModelSet,
        ladder: ModeBuilder,
        setting: SpeculativeConfig,
        coupling: str,
        jobs: Sequence[TokenSequence],
        memory: FullView | None = None,
        costs: CostModel | None = None,
        findings: Findings | None = None,
        store: SharedKV | None = None,
        begun: Sequence[int] = (),
    ) -> None:
        self.target, self.jobs, self.coupling, self.memory = models.target, list(jobs), COUPLINGS[coupling], memory
        self._sample()
        capacities = [job.capacity(models.target.config.context, setting.reach) for job in jobs]
        self.top = ladder(TierBuilder(models, setting, capacities, memory, store, begun))
        self.search = self._search(findings) if findings is not None else None
        self.pilot = (
            PlanController(self.top, len(jobs), costs, _heat(jobs), ranks=models.target.ranks) if costs else None
        )
        self.tiers = self.pilot.tiers if self.pilot else tiers(self.top)
        self._keep_logits()
        ids_BS = np.zeros((len(jobs), max(capacities) + 1), dtype=np.int64)
        for b, job in enumerate(jobs):
            ids_BS[b, : len(job.prompt)] = job.prompt
        self.prefix = SequenceState(ids_BS, ints([len(job.prompt) for job in jobs]))
        self.decode_seconds = 0.0
        self._followed = -1  # of the changes of plan, the one that all sequences have noted

    @torch.no_grad()
    def restore(self, earlier: SavedCache) -> None:
        """Start from a saved prompt, as far as the prompts begin like it. Part of the prefill."""
        started = perf_counter()
        for b, job in enumerate(self.jobs):
            if self._twin(b) is None and job.params.prompt_logprobs is None:  # these need every position scored
                earlier.restore(self.top.cache, b, job.prompt)
        self._spent(started)

    @torch.no_grad()
    def prefill(self, grant: Grant = all_of_it) -> Iterator[tuple[int, int]]:
        """Feed every prompt but its last token; yields (tokens seen, tokens in all) of the exact view after each pass.

        `grant`: how many tokens a pass may have.
        """
        sizes = [len(job.prompt) - 1 for job in self.jobs]
        started = perf_counter()
        if self.search:  # what is known already: a pilot goes by it, and it had best stay in memory
            self._take_turn(self.search, max(sizes) + 1, 0, np.ones(len(sizes), bool))
        for b in range(len(self.jobs)):
            twin = self._twin(b)
            for seen in self._feed(b, grant) if twin is None else self._fork(twin, b):
                self._spent(started)
                yield sum(sizes[:b]) + seen, sum(sizes)
                started = perf_counter()

    @torch.no_grad()
    def step(self) -> list[int]:
        """One proposal of the exact tier; returns how many new tokens each job took (0 for those that are done)."""
        started, context = perf_counter(), self.target.config.context
        live = [job.finish is None for job in self.jobs]
        live_B, lengths = np.array(live), self.prefix.lengths_B[live].tolist()
        if self.pilot:
            self.pilot.steer(self.prefix, live_B)
            if self.pilot.budget or self.pilot.changes != self._followed:
                self._followed = self.pilot.changes
                for job in compress(self.jobs, live):
                    job.follow(self.pilot)
        searching = self.search if not self.pilot or "retrieval" in self.pilot.plan.tiers else None
        if searching:
            left = max(job.limit(context) - len(job.tokens) for job in self.jobs)
            self._take_turn(searching, max(lengths), left, live_B)
        steered = perf_counter()
        draft = self.top.propose(self.prefix, self.sampling, live_B)
        self.prefix = self.prefix.append(draft)
        tokens, counts = draft.tokens_BK.tolist(), draft.counts_B.tolist()
        made = [row[:count] for row, count, alive in zip(tokens, counts, live, strict=True) if alive]
        if self.target.ranks.count > 1:
            self.target.ranks.compare(crc32(repr(made).encode()), "the tokens")
        origins = [[self.tiers[level].name for level in row] for row in draft.origins_BK.tolist()]
        taken = [
            job.accept(tokens[b][: counts[b]], origins[b][: counts[b]], job.limit(context)) if live[b] else 0
            for b, job in enumerate(self.jobs)
        ]
        self._note_logprobs(taken)
        if self.pilot:
            self.pilot.learn(lengths, sum(taken), perf_counter() - steered)
        if searching:
            searching.learn()
        seconds = perf_counter() - started
        self.decode_seconds += seconds
        for job in compress(self.jobs, live):
            job.proposed(seconds)
        self._look()
        return taken

    def join(self, other: Batch) -> None:
        """The rows of another batch of the same kind follow these; it is not to be used any more."""
        for mine, theirs in zip(self.tiers, other.tiers, strict=True):
            mine.join(theirs)
        self.jobs += other.jobs
        self._followed = -1
        self.prefix = self.prefix.join(other.prefix)
        self._sample(torch.cat([self.noise.draws, other.noise.draws], 1))
        self._keep_logits()

    def keep(self, rows: Sequence[int]) -> None:
        """The other rows leave: what they hold is given back, and their jobs know what each tier did for them."""
        for b, job in enumerate(self.jobs):
            if b not in rows:
                job.tiers, job.bitwise = self.stats(b), self.bitwise
        for tier in self.tiers:
            if not (isinstance(tier, Tier) and tier.cache is self.memory):
                tier.select(rows)
        self.jobs = [self.jobs[b] for b in rows]
        self.prefix = self.prefix.select(rows)
        self._sample(self.noise.draws[:, list(rows)])
        self._keep_logits()

    def aside(self, job: TokenSequence) -> SwappedSequence:
        """What the row of a job holds, before it leaves for others to have its room."""
        b = self.jobs.index(job)
        return SwappedSequence(self.noise.draws[:, b].clone(), [tier.aside(b) for tier in self.tiers])

    def bring_back(self, rows: Sequence[SwappedSequence]) -> None:
        """Let the rows of a fresh batch go on where they were put aside, in the place of `prefill`."""
        for b, (job, row) in enumerate(zip(self.jobs, rows, strict=True)):
            length = len(job.prompt) + len(job.tokens)
            self.prefix.ids_BS[b, :length] = job.prompt + job.tokens
            self.prefix.lengths_B[b] = length
            self.noise.draws[:, b] = row.draws
            for tier, held in zip(self.tiers, row.tiers, strict=True):
                tier.bring_back(b, held)

    @property
    def bitwise(self) -> bool:
        """Whether the texts are those of plain decoding bit for bit, and not in distribution only.

        Plain decoding's own are; others under `seeded`, if a token's logits do not depend on the pass it was fed in.
        Where several ranks share the model, what is meant is plain decoding in one process.
        """
        exact = self.target.model.width_independent and self.top.cache.pool.memory.width_independent
        plain = len(self.tiers) == 1
        return (plain and self.target.ranks.count == 1) or (exact and (plain or self.coupling is Seeded))

    @property
    def done(self) -> bool:
        return all(job.finish for job in self.jobs)

    def stats(self, b: int) -> list[TierStats]:
        """What each tier did for row b, from the lowest to the full one."""
        stats = []
        for tier in self.tiers:
            c = tier.counters
            kept = np.trim_zeros(c.kept_BN[b], "b").tolist() if int(c.proposed_B[b]) else []
            counts = int(c.proposed_B[b]), int(c.accepted_B[b]), int(c.passes_B[b])
            seconds = float(c.seconds_B[b]), float(c.prefill_seconds_B[b])
            view = tier.cache if isinstance(tier, Tier) else None
            visible = view.keys(int(self.prefix.lengths_B[b])) if isinstance(view, RetrievalView) else None
            stats.append(TierStats(tier.name, *counts, *seconds, kept, visible))
        stats[-1].proposed = stats[-1].accepted = len(self.jobs[b].tokens)  # what the full tier proposes is the text
        return stats

    def _search(self, findings: Findings) -> SearchedLayers | None:
        """What finds layers for the retrieval tier to search, if there is such a tier."""
        tier = next((tier for tier in tiers(self.top) if tier.name == "retrieval"), None)
        if not isinstance(tier, Tier):
            return None
        self.top.cache.grain = tier.cache.unit  # it goes by where attention went
        return SearchedLayers(tier, findings, self.target.ranks)

    def _take_turn(self, search: SearchedLayers, length: int, left: int, live_B: Bools) -> None:
        """Search the layers that are to be searched in the next proposal from texts of such a length."""
        view, layers = search.tier.cache, search.turn(length, left)
        if self.pilot and layers != view.searched_layers:
            self.pilot.conclude(self.prefix, live_B)
        view.searched_layers, view.trying = layers, search.trying

    def _sample(self, draws: Tensor | None = None) -> None:
        """How these rows are sampled; their streams of noise go on where they were."""
        jobs, device = self.jobs, self.target.device
        self.noise = make_noise([job.seed for job in jobs], [job.choice for job in jobs], device)
        if draws is not None:
            self.noise.draws = draws
        params, lengths = [job.params for job in jobs], [len(job.prompt) for job in jobs]
        coupling, constraints = self.coupling(self.noise), [job.constraint for job in jobs]
        self.sampling = sampling(params, lengths, self.target.config.vocab_size, coupling, device, constraints)

    def _keep_logits(self) -> None:
        """Keep those of the latest verification where somebody wants to see them."""
        self.top.keeps_logits = any(job.params.logprobs is not None for job in self.jobs)
        self.top.logits_BJV = None

    def _spent(self, started: float) -> None:
        for job in self.jobs:
            job.prefill_seconds += perf_counter() - started

    def _twin(self, b: int) -> int | None:
        """The first row that a prefill can be copied from, if there is one."""
        return next((a for a in range(b) if self.jobs[b].like(self.jobs[a])), None)

    def _feed(self, b: int, grant: Grant) -> Iterator[int]:
        job, length, seen = self.jobs[b], len(self.jobs[b].prompt) - 1, int(self.top.cache.lengths_B[b])
        for tier in self.tiers:
            if tier is not self.top:
                yield from (seen for _ in tier.prefill(self.prefix, b, length, grant=grant))
        watch = job.watch() if job.params.prompt_logprobs is not None else None
        yield from self.top.prefill(self.prefix, b, length, watch, grant=grant)

    def _fork(self, source: int, b: int) -> Iterator[int]:
        for tier in self.tiers:
            if isinstance(tier, Tier):
                tier.cache.fork(source, b)
        self.jobs[b].prompt_logprobs = self.jobs[source].prompt_logprobs
        yield len(self.jobs[b].prompt) - 1

    def _look(self) -> None:
        """Tell those who asked where their texts stand. A view that was not asked since the last time saw nothing."""
        for b, job in enumerate(self.jobs):
            if not job.params.trace:
                continue
            stats, committed = self.stats(b), int(self.top.cache.lengths_B[b])
            passes = [tier.passes for tier in job.trace.tiers] if job.trace else [0] * len(stats)
            views = [
                tier.cache
                for tier, now, before in zip(self.tiers, stats, passes, strict=True)
                if isinstance(tier, Tier) and isinstance(tier.cache, RetrievalView) and now.passes != before
            ]
            job.trace = DecodingSnapshot(committed, job.decode_seconds, in_sight(views[-1], b) if views else [], stats)

    def _note_logprobs(self, taken: list[int]) -> None:
        logits_BJV = self.top.logits_BJV
        for b, (job, count) in enumerate(zip(self.jobs, taken, strict=True)):
            if count and job.params.logprobs is not None:
                assert logits_BJV is not None
                job.logprobs += logprobs_of(logits_BJV[b, :count], job.tokens[-count:], job.params.logprobs)


def _heat(jobs: Sequence[TokenSequence]) -> float:
    """The temperature of texts that are decoded together, in the mean."""
    return sum(job.params.temperature for job in jobs) / len(jobs)
