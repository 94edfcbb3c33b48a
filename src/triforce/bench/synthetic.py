"""Synthetic decoding over random KV at a given acceptance, to estimate the speedup on a model of any shape.

No prompt is prefilled. Passes and sampling run for real; then the outcome is drawn at random: each draft token is
accepted with a given probability. The texts mean nothing, so only the bench has this code, and its rows say
`synthetic`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch

from triforce.arrays import Array, itemsize, to_host
from triforce.backends.cuda import graphs
from triforce.backends.decoder import Decoder
from triforce.backends.torch.int8_rows import rounded
from triforce.backends.torch.tensors import torch_dtype
from triforce.bench import roofline
from triforce.bench import shapes as bench_shapes
from triforce.bench.roofline import ModelWork, Roofline
from triforce.bench.speed import Row, timing
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.sequence_group import prefill_batch
from triforce.engine.tier_builder import MODES, ModelSet, SpeculativeConfig
from triforce.interface.explain import TierStats
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import PAGE, FullView, PagePool
from triforce.model.weights import Weights, nbytes
from triforce.planner.cost_model import CostModel, kernel_level
from triforce.planner.pass_costs import TierWork
from triforce.ragged import Bools, Ints, ints
from triforce.speculation import Draft, SequenceState, Verification

BLOCK = 4096
"""Tokens of random KV that are repeated over the context."""


class SyntheticSampler:
    """Sampler that accepts each draft token with the given probability of the tier that proposed it.

    acceptance_rates: those of `retrieval` and `draft`. Draft tokens of n-grams on random texts are never accepted.
    seed: of the random generator. `expected` has the mean and the variance of the tokens of each verification by the
    full tier, over all rows. Tokens after a rejected one are dropped, so n draft tokens of probability p make on
    average 1 + p + ... + p^n tokens.
    """

    def __init__(self, batch: SequenceBatch, acceptance_rates: Mapping[str, float], seed: int) -> None:
        self.sampler = batch.sampling
        self.rates = [acceptance_rates.get(tier.name, 0.0) for tier in batch.tiers]
        self.generator = np.random.default_rng(seed)
        self.expected: list[tuple[float, float]] = []

    @property
    def coupling(self) -> Verification:
        return self.sampler.coupling

    @property
    def vocab_size(self) -> int:
        return self.sampler.vocab_size

    @property
    def probs_size(self) -> int:
        return self.sampler.probs_size

    @property
    def draws(self) -> Any:
        """Return the real sampler's draws of several draft tokens in one call, if any: their cost is measured, too."""
        return getattr(self.sampler, "draws", None)

    def verify(self, draft: Draft, logits_BJV: Array, prefix: SequenceState, live_B: Bools, tier: int) -> Draft:
        step = self.sampler.verify(draft, logits_BJV, prefix, live_B, tier)
        B, K = draft.tokens_BK.shape
        proposing_tier = int(draft.origins_BK.max()) if K else 0  # it has drawn at least its last token
        if tier == len(self.rates) - 1:
            self.expected.append(_expected(self.rates[proposing_tier], draft.counts_B))
        if not K:
            return step
        accepts_BK = self.generator.random((B, K)) < self.rates[proposing_tier]
        accepts_BK &= np.arange(K) < draft.counts_B[:, None]
        accepted_B = accepts_BK.cumprod(1).sum(1)
        tokens_BJ = np.pad(draft.tokens_BK, ((0, 0), (0, 1)), constant_values=1)
        return Draft(tokens_BJ, np.zeros((B, K + 1, 0)), np.full_like(tokens_BJ, tier), accepted_B + 1)


def _expected(rate: float, counts_B: Ints) -> tuple[float, float]:
    """Return mean and variance of the tokens of one verification over all rows. counts_B: draft tokens of each row."""
    mean = variance = 0.0
    for count in counts_B.tolist():
        powers = [rate**n for n in range(1, count + 1)]
        accepted = sum(powers)
        mean += 1 + accepted
        variance += sum((2 * n - 1) * power for n, power in enumerate(powers, 1)) - accepted**2
    return mean, variance


@dataclass(frozen=True)
class SyntheticDecoding:
    """Verifications by the full tier: seconds, tokens over all rows, and the expected tokens with their deviation.

    Steps that captured a graph are left out. The first step is left out, too; `first_seconds` are its seconds. tiers:
    statistics of the first row, without its first step.
    """

    seconds: float
    tokens: int
    verifications: int
    expected_tokens: float
    deviation: float
    first_seconds: float
    tiers: list[TierStats]

    @property
    def z_score(self) -> float:
        """Return the tokens beyond the expected ones, in standard deviations; 0 if the deviation is 0."""
        return (self.tokens - self.expected_tokens) / self.deviation if self.deviation else 0.0


def decode(batch: SequenceBatch, acceptance_rates: Mapping[str, float], turn: int, tokens: int) -> SyntheticDecoding:
    """Decode until at least `tokens` of each row are counted, and the last verification is complete.

    batch: from `prefilled_batch` for the same number of tokens. acceptance_rates: see `SyntheticSampler`. turn: the
    sampler's seed.
    """
    batch.sampling = sampling = SyntheticSampler(batch, acceptance_rates, turn)
    counted_steps = list[int]()
    token_count = 0
    seconds = 0.0
    first_seconds = 0.0
    first_tiers = list[TierStats]()
    while token_count < tokens * len(batch.sequences) and not batch.done:
        earlier_graphs = graphs.captured_graphs()
        earlier_seconds = batch.decode_seconds
        batch.catch_up()
        step = len(sampling.expected)
        step_tokens = sum(batch.step())
        step_seconds = batch.decode_seconds - earlier_seconds
        captures = graphs.captured_graphs() - earlier_graphs
        if step == 0:
            first_seconds = step_seconds
            first_tiers = batch.stats(0)
        elif not captures:
            token_count = token_count + step_tokens
            seconds = seconds + step_seconds
            counted_steps.append(step)
    expected = [sampling.expected[step] for step in counted_steps]
    mean, variance = (sum(column) for column in zip(*expected, strict=True))
    tiers = [_stats_difference(*stats_pair) for stats_pair in zip(first_tiers, batch.stats(0), strict=True)]
    return SyntheticDecoding(seconds, token_count, len(counted_steps), mean, variance**0.5, first_seconds, tiers)


def _stats_difference(start_stats: TierStats, end_stats: TierStats) -> TierStats:
    """Return a tier's statistics between two moments. Fields that are no counts have the later value."""
    counts = {
        name: getattr(end_stats, name) - getattr(start_stats, name)
        for name in ("proposed", "accepted", "passes", "seconds")
    }
    return replace(end_stats, **counts)


def verification_figures(turns: Sequence[SyntheticDecoding]) -> Row:
    """Return the tokens per verification over several turns, measured and expected, and their standard deviation."""
    count = sum(turn.verifications for turn in turns)
    return {
        "verifications": count,
        "tokens_per_verification": sum(turn.tokens for turn in turns) / count,
        "expected_tokens_per_verification": sum(turn.expected_tokens for turn in turns) / count,
        "deviation": sum(turn.deviation**2 for turn in turns) ** 0.5 / count,
    }


def prefilled_batch(
    models: ModelSet,
    mode: str,
    speculation: SpeculativeConfig,
    context: int,
    tokens: int,
    rows: int = 1,
    reused_view: FullView | None = None,
    costs: CostModel | None = None,
) -> SequenceBatch:
    """Return a batch whose prompts of random tokens count as prefilled in its caches. Its KV is noise.

    Its KV has room for a first step, for `tokens` tokens per row, and for the tokens of the last verification beyond
    them. reused_view: the full view of an earlier such batch of one row.
    """
    max_tokens = tokens + 2 * speculation.reach
    params = SamplingParams(temperature=0.6, top_p=0.9, seed=1, max_tokens=max_tokens, ignore_eos=True)
    vocabulary = min(1000, models.target.config.vocab_size)
    prompt = torch.randint(vocabulary, (context,), generator=torch.Generator().manual_seed(2)).tolist()
    if reused_view:
        reused_view.rewind(ints([context - PAGE]))
    sequences = [TokenSequence(prompt, params, seed=1) for _ in range(rows)]
    batch = SequenceBatch(models, MODES[mode], speculation, "seeded", sequences, reused_view, costs)
    if reused_view is None:
        fill(batch.top.cache.pool, context - PAGE)  # the KV of the other rows is copied from there
    for _ in prefill_batch(batch):
        pass
    return batch


def fill(pool: PagePool, length: int) -> None:
    """Write random K and V for the first `length` tokens of the first row. The draft's own cache catches up later."""
    config = pool.config
    block_GND = torch.randn(config.kv_heads, BLOCK, config.head_dim, generator=torch.Generator().manual_seed(3))
    rows_GND = rounded(block_GND) if config.kv_int8 else block_GND.to(torch_dtype(pool.dtype))
    values_GND = pool.kv.array(to_host(rows_GND))
    if pool.windows:
        pool.windows.allocate_row(0, 0, length)
    for layer in range(config.layers):
        for start in range(pool.first_cached_token(layer, 0), length, BLOCK):
            slots_N = pool.slots(0, start, min(start + BLOCK, length), layer)
            written_GND = values_GND[:, : len(slots_N)]
            pool.kv.write(layer, slots_N, written_GND, written_GND)
    pool.lengths_B[0] = length


def rows(
    shape: str,
    contexts: Sequence[int],
    acceptance_rates: tuple[float, float],
    speculation: SpeculativeConfig,
    tokens: int,
    repeats: int,
    kv_int8: bool = False,
    layers: int | None = None,
) -> Iterator[Row]:
    """Yield rows of plain decoding and of modes with and without a draft, if the shape has one.

    acceptance_rates: of the tokens that the retrieval tier and the draft propose. kv_int8: all rows but the first have
    int8 KV; the first is plain decoding over KV in bfloat16, and speedups are over it. layers: of the target; None:
    all.
    """
    longest = max(contexts) + tokens + 2 * speculation.reach
    config, weights = bench_shapes.decoder_parts(shape, longest, kv_int8=kv_int8, layers=layers)
    lower_decoder = Decoder(config, weights, bits=speculation.lower_bits) if speculation.lower_bits else None
    has_draft = f"{shape}-draft" in bench_shapes.SHAPES
    draft = None
    works = {"full": ModelWork(config, weights)}
    if has_draft:
        draft_parts = bench_shapes.parts(f"{shape}-draft", longest, kv_int8=kv_int8)
        draft = Decoder(*draft_parts, bits=speculation.lower_bits)
        works["draft"] = ModelWork(*draft_parts)
    models = ModelSet(Decoder(config, weights), draft, lower_decoder)
    shares = dict(zip(("retrieval", "draft"), acceptance_rates, strict=True))
    runs = [(mode, models) for mode in ("ar", "retrieval", *["triforce"] * has_draft, "auto")]
    if kv_int8:
        runs.insert(0, ("ar", ModelSet(Decoder(replace(config, kv_int8=False), weights))))
    for context in contexts:
        turns: list[list[SyntheticDecoding]] = [[] for _ in runs]
        costs = costs_of(models, weights, speculation)
        for turn in range(repeats):
            for (mode, run_models), run_turns in zip(runs, turns, strict=True):
                batch = prefilled_batch(
                    run_models, mode, speculation, context, tokens, costs=costs if mode == "auto" else None
                )
                run_turns.append(decode(batch, shares, turn, tokens))
        roof = roofline.measure()
        seconds_by_run = [[_seconds(turn, tokens) for turn in run_turns] for run_turns in turns]
        for (mode, run_models), run_turns, times in zip(runs, turns, seconds_by_run, strict=True):
            has_int8_kv = run_models.target.config.kv_int8
            last_turn = run_turns[-1]
            roofline_seconds = (
                None
                if mode == "auto"
                else least_seconds(last_turn.tiers, works, roof, context, has_int8_kv, speculation.lower_bits)
            )
            yield {
                "mode": mode, "context": context, "batch": 1, "temperature": 0.6, "workload": "synthetic",
                "kv_dtype": "int8" if has_int8_kv else "bfloat16", "layers": config.layers,
                **timing(times, seconds_by_run[0], tokens),
                "least_seconds": roofline_seconds and roofline_seconds * tokens / last_turn.tokens,
                "prefill_tokens_per_second": None,
                "full_passes": tokens
                * sum(turn.verifications for turn in run_turns)
                / sum(turn.tokens for turn in run_turns),
                **verification_figures(run_turns), "first_seconds": median(turn.first_seconds for turn in run_turns),
                "acceptance": dict(shares) if mode != "ar" else {},
            }  # fmt: skip


def _seconds(turn: SyntheticDecoding, tokens: int) -> float:
    """Return the seconds of a text of `tokens`, at the rate of a turn's verifications."""
    return turn.seconds * tokens / turn.tokens


def least_seconds(
    tiers: Sequence[TierStats],
    works: Mapping[str, ModelWork],
    roof: Roofline,
    context: int,
    int8: bool,
    lower_bits: int = 0,
) -> float:
    """Return the roofline seconds of a text's passes. Each pass of a tier has the mean width of its passes.

    int8: the full tier's KV is int8. Sampling counts as no time.
    """
    full_work = works["full"]
    total_seconds = 0.0
    proposed = 0
    for tier in tiers:
        work = works.get(tier.name, full_work)
        keys = min(tier.visible_tokens or context, context)
        width = 1 + proposed / max(1, tier.passes)
        if tier.name != "full" and lower_bits:
            pass_work = work.lower_pass_work(width, keys, lower_bits)
        else:
            pass_work = work.pass_work(width, keys, replace(work.config, kv_int8=int8))
        total_seconds = total_seconds + tier.passes * roof.least_seconds(pass_work)
        proposed = tier.proposed
    return total_seconds


def costs_of(models: ModelSet, weights: Weights, speculation: SpeculativeConfig) -> CostModel:
    """Return the planner's cost model of these models before it has measured a pass."""
    target = models.target
    matrices = [*weights.product_matrices()]
    bytes_per_weight = sum(map(nbytes, matrices)) / sum(math.prod(matrix.shape) for matrix in matrices)
    lower_bytes_per_weight = speculation.lower_bits / 8 if weights.has_numbers else 0
    works = TierWork.of_target(
        target.config,
        (bytes_per_weight, lower_bytes_per_weight or bytes_per_weight),
        itemsize(target.dtype),
        speculation.lower_bits > 0,
        target.unions,
    )
    if models.draft:
        number_bytes = itemsize(target.dtype)
        works["draft"] = TierWork.of(models.draft.config, number_bytes, number_bytes, sequential=True)
    return CostModel(None, works, kernel_level(target.device))
