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
from triforce.engine.modes import ModeBuilder, tiers, unlinked
from triforce.engine.sequence import TokenSequence, logprobs_of
from triforce.engine.speculative_config import SpeculativeConfig
from triforce.engine.tier_builder import ModelSet, SharedKV, TierBuilder
from triforce.interface.outputs import DecodingSnapshot
from triforce.interface.stats import TierStats
from triforce.kvcache import FullView, RetrievalView
from triforce.kvcache.prompt_file import SavedCache
from triforce.kvcache.views.coverage import coverage
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


class SequenceBatch:
    """A ladder and its rows: read with `prefill`, one by one, then decoded together with `step`.

    `store` is where other batches have their KV, too, and `begun` pages of it that the first row starts with. `memory`
    is an exact view to go on with, of one row whose committed tokens are the start of the prompt; it stays its owner's.
    With `costs` a plan controller chooses among the tiers of the ladder; with `findings` the retrieval tier searches
    layers in which that pays, and what is found is added to them. Raises TriforceError, and then holds no KV.
    """

    def __init__(
        self,
        models: ModelSet,
        build: ModeBuilder,
        speculation: SpeculativeConfig,
        coupling: str,
        sequences: Sequence[TokenSequence],
        memory: FullView | None = None,
        costs: CostModel | None = None,
        findings: Findings | None = None,
        store: SharedKV | None = None,
        begun: Sequence[int] = (),
    ) -> None:
        self.target, self.sequences = models.target, list(sequences)
        self.coupling, self.memory = COUPLINGS[coupling], memory
        self._sample()
        capacities = [sequence.capacity(models.target.config.context, speculation.reach) for sequence in sequences]
        self.top = build(TierBuilder(models, speculation, capacities, memory, store, begun))
        self.search = self._search(findings) if findings is not None else None
        self.tiers = unlinked(self.top) if costs else tiers(self.top)
        ranks = models.target.ranks
        self.controller = PlanController(self.tiers, costs, _temperature(sequences), ranks=ranks) if costs else None
        self._keep_logits()
        ids_BS = np.zeros((len(sequences), max(capacities) + 1), dtype=np.int64)
        for b, sequence in enumerate(sequences):
            ids_BS[b, : len(sequence.prompt)] = sequence.prompt
        self.prefix = SequenceState(ids_BS, ints([len(sequence.prompt) for sequence in sequences]))
        self.decode_seconds = 0.0
        self._followed = -1  # of the changes of plan, the one that all sequences have noted

    @torch.no_grad()
    def restore(self, earlier: SavedCache) -> None:
        """Start from a saved prompt, as far as the prompts begin like it. Part of the prefill."""
        started = perf_counter()
        for b, sequence in enumerate(self.sequences):
            if self._twin(b) is None and sequence.params.prompt_logprobs is None:  # these need every position scored
                earlier.restore(self.top.cache, b, sequence.prompt)
        self._spent(started)

    @torch.no_grad()
    def prefill(self, grant: Grant = all_of_it) -> Iterator[tuple[int, int]]:
        """Feed every prompt but its last token; yields (tokens seen, tokens in all) of the exact view after each pass.

        `grant`: how many tokens a pass may have.
        """
        sizes = [len(sequence.prompt) - 1 for sequence in self.sequences]
        started = perf_counter()
        if self.search:  # what is known already: the controller predicts by it, and offloading keeps it
            self._take_turn(self.search, max(sizes) + 1, 0, np.ones(len(sizes), bool))
        for b in range(len(self.sequences)):
            twin = self._twin(b)
            for seen in self._feed(b, grant) if twin is None else self._fork(twin, b):
                self._spent(started)
                yield sum(sizes[:b]) + seen, sum(sizes)
                started = perf_counter()

    @torch.no_grad()
    def step(self) -> list[int]:
        """One proposal of the exact tier; returns how many new tokens each job took (0 for those that are done)."""
        started, context = perf_counter(), self.target.config.context
        live = [sequence.finish is None for sequence in self.sequences]
        live_B, lengths = np.array(live), self.prefix.lengths_B[live].tolist()
        if self.controller:
            self.controller.steer(self.prefix, live_B)
            if self.controller.budget or self.controller.changes != self._followed:
                self._followed = self.controller.changes
                for sequence in compress(self.sequences, live):
                    sequence.follow(self.controller)
        searching = self.search if not self.controller or "retrieval" in self.controller.plan.tiers else None
        if searching:
            left = max(sequence.limit(context) - len(sequence.tokens) for sequence in self.sequences)
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
            sequence.accept(tokens[b][: counts[b]], origins[b][: counts[b]], sequence.limit(context)) if live[b] else 0
            for b, sequence in enumerate(self.sequences)
        ]
        self._note_logprobs(taken)
        if self.controller:
            self.controller.observe(lengths, sum(taken), perf_counter() - steered)
        if searching:
            searching.observe()
        seconds = perf_counter() - started
        self.decode_seconds += seconds
        for sequence in compress(self.sequences, live):
            sequence.proposed(seconds)
        self._look()
        return taken

    def join(self, other: SequenceBatch) -> None:
        """The rows of another batch of the same kind follow these; it is not to be used any more."""
        for mine, theirs in zip(self.tiers, other.tiers, strict=True):
            mine.join(theirs)
        self.sequences += other.sequences
        self._followed = -1
        self.prefix = self.prefix.join(other.prefix)
        self._sample(torch.cat([self.noise.draws, other.noise.draws], 1))
        self._keep_logits()

    def keep(self, rows: Sequence[int]) -> None:
        """The other rows leave: what they hold is given back, and their jobs know what each tier did for them."""
        for b, sequence in enumerate(self.sequences):
            if b not in rows:
                sequence.tiers, sequence.bitwise = self.stats(b), self.bitwise
        for tier in self.tiers:
            if not (isinstance(tier, Tier) and tier.cache is self.memory):
                tier.select(rows)
        self.sequences = [self.sequences[b] for b in rows]
        self.prefix = self.prefix.select(rows)
        self._sample(self.noise.draws[:, list(rows)])
        self._keep_logits()

    def swap_out(self, sequence: TokenSequence) -> SwappedSequence:
        """What the row of a job holds, before it leaves for others to have its room."""
        b = self.sequences.index(sequence)
        return SwappedSequence(self.noise.draws[:, b].clone(), [tier.swap_out(b) for tier in self.tiers])

    def swap_in(self, rows: Sequence[SwappedSequence]) -> None:
        """Let the rows of a fresh batch go on where they were put aside, in the place of `prefill`."""
        for b, (sequence, row) in enumerate(zip(self.sequences, rows, strict=True)):
            length = len(sequence.prompt) + len(sequence.tokens)
            self.prefix.ids_BS[b, :length] = sequence.prompt + sequence.tokens
            self.prefix.lengths_B[b] = length
            self.noise.draws[:, b] = row.draws
            for tier, held in zip(self.tiers, row.tiers, strict=True):
                tier.swap_in(b, held)

    @property
    def bitwise(self) -> bool:
        """Whether the texts are those of plain decoding bit for bit, and not in distribution only.

        Plain decoding's own are; others under `seeded`, if a token's logits do not depend on the pass it was fed in.
        Where several ranks share the model, what is meant is plain decoding in one process.
        """
        exact = self.target.model.width_independent and self.top.cache.pool.kv.width_independent
        plain = len(self.tiers) == 1
        return (plain and self.target.ranks.count == 1) or (exact and (plain or self.coupling is Seeded))

    @property
    def done(self) -> bool:
        return all(sequence.finish for sequence in self.sequences)

    def stats(self, b: int) -> list[TierStats]:
        """What each tier did for row b, from the lowest to the full one."""
        stats = []
        for tier in self.tiers:
            c = tier.counters
            kept = np.trim_zeros(c.kept_BN[b], "b").tolist() if int(c.proposed_B[b]) else []
            counts = int(c.proposed_B[b]), int(c.accepted_B[b]), int(c.passes_B[b])
            seconds = float(c.seconds_B[b]), float(c.prefill_seconds_B[b])
            view = tier.cache if isinstance(tier, Tier) else None
            sees = view.keys(int(self.prefix.lengths_B[b])) if isinstance(view, RetrievalView) else None
            stats.append(TierStats(tier.name, *counts, *seconds, kept, sees))
        stats[-1].proposed = stats[-1].accepted = len(
            self.sequences[b].tokens
        )  # what the full tier proposes is the text
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
        view, layers = search.tier.cache, search.next_layers(length, left)
        if self.controller and layers != view.searched_layers:
            self.controller.conclude(self.prefix, live_B)
        view.searched_layers, view.trying = layers, search.trying

    def _sample(self, draws: Tensor | None = None) -> None:
        """How these rows are sampled; their streams of noise go on where they were."""
        sequences, device = self.sequences, self.target.device
        self.noise = make_noise(
            [sequence.seed for sequence in sequences], [sequence.choice for sequence in sequences], device
        )
        if draws is not None:
            self.noise.draws = draws
        params, lengths = [sequence.params for sequence in sequences], [len(sequence.prompt) for sequence in sequences]
        coupling, constraints = self.coupling(self.noise), [sequence.constraint for sequence in sequences]
        self.sampling = sampling(params, lengths, self.target.config.vocab_size, coupling, device, constraints)

    def _keep_logits(self) -> None:
        """Keep those of the latest verification where somebody wants to see them."""
        self.top.keeps_logits = any(sequence.params.logprobs is not None for sequence in self.sequences)
        self.top.logits_BJV = None

    def _spent(self, started: float) -> None:
        for sequence in self.sequences:
            sequence.prefill_seconds += perf_counter() - started

    def _twin(self, b: int) -> int | None:
        """The first row that a prefill can be copied from, if there is one."""
        return next((a for a in range(b) if self.sequences[b].like(self.sequences[a])), None)

    def _feed(self, b: int, grant: Grant) -> Iterator[int]:
        sequence, length, seen = self.sequences[b], len(self.sequences[b].prompt) - 1, int(self.top.cache.lengths_B[b])
        for tier in self.tiers:
            if tier is not self.top:
                yield from (seen for _ in tier.prefill(self.prefix, b, length, grant=grant))
        watch = sequence.watch() if sequence.params.prompt_logprobs is not None else None
        yield from self.top.prefill(self.prefix, b, length, watch, grant=grant)

    def _fork(self, source: int, b: int) -> Iterator[int]:
        for tier in self.tiers:
            if isinstance(tier, Tier):
                tier.cache.fork(source, b)
        self.sequences[b].prompt_logprobs = self.sequences[source].prompt_logprobs
        yield len(self.sequences[b].prompt) - 1

    def _look(self) -> None:
        """Tell those who asked where their texts stand. A view that was not asked since the last time saw nothing."""
        for b, sequence in enumerate(self.sequences):
            if not sequence.params.trace:
                continue
            stats, committed = self.stats(b), int(self.top.cache.lengths_B[b])
            passes = [tier.passes for tier in sequence.trace.tiers] if sequence.trace else [0] * len(stats)
            views = [
                tier.cache
                for tier, now, before in zip(self.tiers, stats, passes, strict=True)
                if isinstance(tier, Tier) and isinstance(tier.cache, RetrievalView) and now.passes != before
            ]
            sequence.trace = DecodingSnapshot(
                committed, sequence.decode_seconds, coverage(views[-1], b) if views else [], stats
            )

    def _note_logprobs(self, taken: list[int]) -> None:
        logits_BJV = self.top.logits_BJV
        for b, (sequence, count) in enumerate(zip(self.sequences, taken, strict=True)):
            if count and sequence.params.logprobs is not None:
                assert logits_BJV is not None
                sequence.logprobs += logprobs_of(
                    logits_BJV[b, :count], sequence.tokens[-count:], sequence.params.logprobs
                )


def _temperature(sequences: Sequence[TokenSequence]) -> float:
    """The mean temperature of texts that are decoded together."""
    return sum(sequence.params.temperature for sequence in sequences) / len(sequences)
