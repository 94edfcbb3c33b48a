"""SequenceBatch: sequences of one mode that are decoded together, each at its own length and with its own parameters.

Sequences may leave and join between two steps.
Shape suffixes: B rows, S text capacity, J tokens of a step, K proposed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from time import perf_counter
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from triforce.arrays import Array, namespace, on_device_of
from triforce.backends.token_sampler import make_noise, sampling
from triforce.engine.prefill_pacer import PacedPasses
from triforce.engine.sequence import TokenSequence, logprobs_of
from triforce.engine.tier_builder import (
    COUPLINGS,
    ModeBuilder,
    ModelSet,
    SharedKV,
    SpeculativeConfig,
    TierBuilder,
    apply_plan,
    tiers,
    unlink_tiers,
)
from triforce.interface.explain import TierStats
from triforce.kvcache import FullView
from triforce.kvcache.pool import NO_PAGES, PrefixPages
from triforce.planner import CostModel, Findings, PlanController, PlannedProposal, SearchedLayers, TokensToCome, report
from triforce.ragged import Bools, ints
from triforce.speculation import Draft, Proposer, Seeded, SequenceState, Tier, grant_all


class SwappedSequence(NamedTuple):
    """A row that was swapped out: its position in each stream of noise, and its state in each tier."""

    draws: Array
    tiers: list[tuple[Any, ...]]


class SequenceBatch:
    """The tiers of a mode and their rows: call `prefill_batch` first, then `catch_up` and `step` repeatedly.

    mode: builds the tiers. store: KV shared with other batches; None: KV of its own. beginning: cached pages that the
    prompt of the first row begins with. memory: a caller's full view to continue; it has one row, whose committed
    tokens begin the prompt, and it stays the caller's. costs: if given, a `PlanController` chooses among the tiers.
    findings: if given, the retrieval tier searches the layers that they name, and the batch adds its own findings.
    Raises TriforceError, and then holds no KV.
    """

    def __init__(
        self,
        models: ModelSet,
        mode: ModeBuilder,
        speculation: SpeculativeConfig,
        coupling: str,
        sequences: Sequence[TokenSequence],
        memory: FullView | None = None,
        costs: CostModel | None = None,
        findings: Findings | None = None,
        store: SharedKV | None = None,
        beginning: PrefixPages = NO_PAGES,
    ) -> None:
        self.target = models.target
        self.sequences = list(sequences)
        self.memory = memory
        self.coupling = COUPLINGS[coupling]
        self._make_sampler()
        capacities = [sequence.capacity(models.target.config.context, speculation.reach) for sequence in sequences]
        self.top = mode(TierBuilder(models, speculation, capacities, memory, store, beginning))
        ranks = models.target.ranks
        tier = next((tier for tier in tiers(self.top) if tier.name == "retrieval"), None)
        self.search = SearchedLayers(tier, findings, ranks) if findings is not None and isinstance(tier, Tier) else None
        if self.search:  # the search for layers needs the attention mass under any policy
            self.top.cache.observe(self.search.tier.cache.unit, self.top.cache.budget)
        self.tiers = unlink_tiers(self.top) if costs else tiers(self.top)
        self.controller = PlanController(self.tiers, costs, self._temperature, ranks=ranks) if costs else None
        self._applied_plan: PlannedProposal | None = None
        """The planned proposal that was applied to tiers and views last."""
        self._keep_logits()
        ids_BS = np.zeros((len(sequences), max(capacities) + 1), dtype=np.int64)  # the last column is scratch
        for b, sequence in enumerate(sequences):
            ids_BS[b, : len(sequence.prompt)] = sequence.prompt
        self.prefix = SequenceState(ids_BS, ints([len(sequence.prompt) for sequence in sequences]))
        self.decode_seconds = 0.0

    @property
    def prefilled_lower_tiers(self) -> list[Proposer]:
        """Tiers below the full one that read a prompt before the first token.

        In mode `auto` a draft model reads it behind the first token, once a plan wants the draft (see `catch_up`).
        """
        lower_tiers = [tier for tier in self.tiers if tier is not self.top]
        return [tier for tier in lower_tiers if not (self.controller and isinstance(tier, Tier))]

    def catch_up(self, pace: PacedPasses | None = None) -> None:
        """Let the draft read texts, if a plan waits for it: one pass, and further ones while there is time.

        The first token of a text does not wait for it. Its seconds are those of decoding. pace: limits the passes;
        None: the draft reads to the end of each text.
        """
        if self.controller is None or (draft := self.controller.awaited_draft) is None:
            return
        begun_B = np.array([bool(sequence.tokens) and not sequence.finish_reason for sequence in self.sequences])
        started = perf_counter()
        for tokens in draft.catch_up(self.prefix, begun_B, pace.grant if pace else grant_all):
            seconds = perf_counter() - started
            self._book(begun_B.tolist(), seconds)
            self.controller.observe_reading(tokens, seconds)
            if pace:
                pace.record(seconds)
                if not pace.has_time():
                    break
            started = perf_counter()
        if pace:
            pace.end()

    def step(self) -> list[int]:
        """Run one verification by the full tier for every unfinished sequence.

        Returns the number of new tokens of each sequence: 0 for finished ones.
        """
        started = perf_counter()
        live = [sequence.finish_reason is None for sequence in self.sequences]
        live_B = np.array(live)
        lengths = self.prefix.lengths_B[live].tolist()
        searching = self._plan(live_B, lengths)
        planned = perf_counter()
        draft = self.top.propose(self.prefix, self.sampling, live_B)
        # The full tier has written the ids.
        self.prefix = SequenceState(self.prefix.ids_BS, self.prefix.lengths_B + draft.counts_B)
        accepted = self._accept(draft, live)
        if self.top.keeps_logits:
            self._note_logprobs(accepted)
        if self.controller:
            self.controller.observe(lengths, sum(accepted), perf_counter() - planned)
        if searching:
            searching.observe()
        self._book(live, perf_counter() - started)
        for sequence in compress(self.sequences, live):
            sequence.proposals += 1
        self.take_snapshots()
        return accepted

    def join(self, other: SequenceBatch) -> None:
        """Append the rows of `other`, a batch of the same mode that must not be used afterwards."""
        if self.controller:
            self.controller.update_beliefs(self.prefix)
        for tier, joined_tier in zip(self.tiers, other.tiers, strict=True):
            tier.join(joined_tier)
        self.sequences += other.sequences
        self.prefix = self.prefix.join(other.prefix)
        draws = self.noise.draws
        self._make_sampler(namespace(draws).concat([draws, other.noise.draws], axis=1))
        self._update_rows()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order. Free the other rows, and store their statistics in their sequences."""
        if self.controller:  # before rows leave: their counts of accepted tokens train the controller too
            self.controller.update_beliefs(self.prefix)
        for b, sequence in enumerate(self.sequences):
            if b not in rows:
                sequence.tiers, sequence.bitwise = self.stats(b), self.bitwise(sequence)
                sequence.report = report(self.controller) if self.controller else None
        for tier in self.tiers:
            if not (isinstance(tier, Tier) and tier.cache is self.memory):
                tier.select(rows)
        self.sequences = [self.sequences[b] for b in rows]
        self.prefix = self.prefix.select(rows)
        draws = self.noise.draws
        self._make_sampler(namespace(draws).take(draws, on_device_of(ints(list(rows)), draws), axis=1))
        self._update_rows()

    def swap_out(self, sequence: TokenSequence) -> SwappedSequence:
        """Return a copy of a sequence's row in host memory. The row itself is removed by `keep`."""
        b = self.sequences.index(sequence)
        draws = namespace(self.noise.draws).asarray(self.noise.draws[:, b], copy=True)
        return SwappedSequence(draws, [tier.swap_out(b) for tier in self.tiers])

    def swap_in(self, rows: Sequence[SwappedSequence]) -> None:
        """Restore swapped rows in a new batch, instead of a prefill."""
        for b, (sequence, row) in enumerate(zip(self.sequences, rows, strict=True)):
            length = len(sequence.prompt) + len(sequence.tokens)
            self.prefix.ids_BS[b, :length] = sequence.prompt + sequence.tokens
            self.prefix.lengths_B[b] = length
            self.noise.draws[:, b] = row.draws
            for tier, swapped_row in zip(self.tiers, row.tiers, strict=True):
                tier.swap_in(b, swapped_row)

    def bitwise(self, sequence: TokenSequence) -> bool:
        """Whether a text is bit for bit that of plain decoding, and not only in distribution.

        The reference is plain decoding in one process. If a token's logits do not depend on the width of its pass, the
        result is True for plain decoding, and under `seeded` for all modes. If they do, the result is True only for
        plain decoding in one process without cached KV of the prompt.
        """
        exact = self.target.model.width_independent and self.top.cache.pool.kv.width_independent
        plain = len(self.tiers) == 1
        own_plain = plain and self.target.ranks.count == 1 and not sequence.cached_prompt_tokens
        return own_plain or (exact and (plain or self.coupling is Seeded))

    @property
    def done(self) -> bool:
        """Whether every sequence is finished."""
        return all(sequence.finish_reason for sequence in self.sequences)

    def stats(self, b: int) -> list[TierStats]:
        """Statistics of each tier in row b, from the lowest to the full one."""
        return self.sequences[b].tier_stats(self.tiers, b, int(self.prefix.lengths_B[b]))

    def _book(self, live: list[bool], seconds: float) -> None:
        """Add seconds of decoding to the batch and its live sequences."""
        self.decode_seconds += seconds
        for sequence in compress(self.sequences, live):
            sequence.decode_seconds += seconds

    def _plan(self, live_B: Bools, lengths: list[int]) -> SearchedLayers | None:
        """Choose tiers and searched layers for the next proposal, and apply them to tiers and views.

        Returns the layer search if it is to observe the proposal, else None.
        """
        planned = self.controller.steer(self.prefix, live_B, self._tokens_to_come) if self.controller else None
        searching = self.search if planned is None or "retrieval" in planned.plan.tiers else None
        if planned and planned != self._applied_plan:
            apply_plan(planned, self.tiers)
            self._applied_plan = planned
        if searching:
            self.search_layers(searching, max(lengths), self._tokens_to_come().most)
        if self.controller:
            for sequence in compress(self.sequences, live_B):
                sequence.note_plan(self.controller)
        return searching

    @property
    def _temperature(self) -> float:
        """Mean temperature of the rows."""
        return sum(sequence.params.temperature for sequence in self.sequences) / len(self.sequences)

    def _tokens_to_come(self) -> TokensToCome:
        context = self.target.config.context
        return TokensToCome.of([(len(sequence.tokens), sequence.limit(context)) for sequence in self.sequences])

    def _accept(self, draft: Draft, live: list[bool]) -> list[int]:
        """Append the new tokens to each sequence. Returns how many each took, up to its end."""
        tokens = draft.tokens_BK.tolist()
        counts = draft.counts_B.tolist()
        context = self.target.config.context
        if self.target.ranks.count > 1:
            new_tokens = [row[:count] for row, count, alive in zip(tokens, counts, live, strict=True) if alive]
            self.target.ranks.compare(crc32(repr(new_tokens).encode()), "the tokens")
        origins = [[self.tiers[level].name for level in row] for row in draft.origins_BK.tolist()]
        return [
            sequence.accept(tokens[b][: counts[b]], origins[b][: counts[b]], sequence.limit(context)) if live[b] else 0
            for b, sequence in enumerate(self.sequences)
        ]

    def search_layers(self, search: SearchedLayers, length: int, remaining_tokens: int) -> None:
        """Set the layers that the retrieval tier searches in the next proposal. length: tokens of the longest text.

        remaining_tokens: the most that are still to come in one text.
        """
        view = search.tier.cache
        layers = search.next_layers(length, remaining_tokens)
        if self.controller and layers != view.searched_layers:
            self.controller.update_beliefs(self.prefix)
        view.searched_layers = layers
        view.trying = search.trying

    def _make_sampler(self, draws: Array | None = None) -> None:
        """Make the sampler of these rows. draws: positions at which their streams of noise continue."""
        sequences = self.sequences
        device = self.target.device
        seeds = [sequence.seed for sequence in sequences]
        choices = [sequence.choice for sequence in sequences]
        self.noise = make_noise(seeds, choices, device)
        if draws is not None:
            self.noise.draws = draws
        params = [sequence.params for sequence in sequences]
        lengths = [len(member.prompt) for member in sequences]
        coupling = self.coupling(self.noise)
        constraints = [sequence.constraint for sequence in sequences]
        self.sampling = sampling(params, lengths, self.target.config.vocab_size, coupling, device, constraints)

    def _update_rows(self) -> None:
        """Update the controller and the kept logits after rows joined or left."""
        self._keep_logits()
        if self.controller and self.sequences:
            self.controller.update_rows(self.prefix.lengths_B.tolist(), self._temperature)

    def _keep_logits(self) -> None:
        """Have the full tier keep the logits of its latest verification if a sequence needs log-probabilities."""
        self.top.keeps_logits = any(sequence.params.logprobs is not None for sequence in self.sequences)
        self.top.logits_BJV = None

    def _note_logprobs(self, accepted: list[int]) -> None:
        logits_BJV = self.top.logits_BJV
        for b, (sequence, count) in enumerate(zip(self.sequences, accepted, strict=True)):
            if count and (top := sequence.params.logprobs) is not None:
                assert logits_BJV is not None
                sequence.logprobs += logprobs_of(logits_BJV[b, :count], sequence.tokens[-count:], top)

    def take_snapshots(self) -> None:
        """Record the state of the decoding of sequences with `params.trace`."""
        for b, sequence in enumerate(self.sequences):
            if sequence.params.trace:
                committed = int(self.top.cache.lengths_B[b])
                sequence.trace = sequence.snapshot(self.tiers, b, self.stats(b), committed)
