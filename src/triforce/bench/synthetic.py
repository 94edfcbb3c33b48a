"""Decoding over random KV at a given acceptance, to see what the tiers would be worth on a model of any shape.

No prompt is read. The passes and the sampling are done for real; then the outcome is drawn instead of taken: each
guess is kept with a given probability. The texts mean nothing, so this lives in the bench alone, and its rows say
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
from torch import Tensor

from triforce.backends.cuda import graphs
from triforce.backends.decoder import Decoder
from triforce.backends.kv_rows import rounded
from triforce.bench import roofline, shapes
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
"""Tokens of random KV, repeated over the context."""


class Synthetic:
    """A sampling whose guesses are kept with given probabilities: by whose they are, that of a tier or of none.

    kept: shares of `retrieval` and of `draft`. What n-grams guess of random texts is never kept. seed: of the dice.
    `expected` has the mean and the variance of the tokens that each verification of the full tier makes, all rows
    together: a guess behind a rejected one is lost, so n guesses of probability p make 1 + p + ... + p^n tokens in the
    mean.
    """

    def __init__(self, batch: SequenceBatch, kept: Mapping[str, float], seed: int) -> None:
        self.real = batch.sampling
        self.rates = [kept.get(tier.name, 0.0) for tier in batch.tiers]
        self.dice = np.random.default_rng(seed)
        self.expected: list[tuple[float, float]] = []

    @property
    def coupling(self) -> Verification:
        return self.real.coupling

    @property
    def vocab_size(self) -> int:
        return self.real.vocab_size

    @property
    def probs_size(self) -> int:
        return self.real.probs_size

    @property
    def draws(self) -> Any:
        """Draws of several draft tokens in one call, where the real one has them: what they cost is measured, too."""
        return getattr(self.real, "draws", None)

    def verify(self, guess: Draft, logits_BJV: Tensor, prefix: SequenceState, live_B: Bools, tier: int) -> Draft:
        step = self.real.verify(guess, logits_BJV, prefix, live_B, tier)
        B, K = guess.tokens_BK.shape
        below = int(guess.origins_BK.max()) if K else 0  # that tier has drawn at least the last token that it proposes
        if tier == len(self.rates) - 1:
            self.expected.append(_expected(self.rates[below], guess.counts_B))
        if not K:
            return step
        fits_BK = self.dice.random((B, K)) < self.rates[below]
        fits_BK &= np.arange(K) < guess.counts_B[:, None]
        kept_B = fits_BK.cumprod(1).sum(1)
        tokens_BJ = np.pad(guess.tokens_BK, ((0, 0), (0, 1)), constant_values=1)
        laws_BJV = logits_BJV.new_zeros(B, K + 1, 0, dtype=torch.float64)
        return Draft(tokens_BJ, laws_BJV, np.full_like(tokens_BJ, tier), kept_B + 1)


def _expected(rate: float, guesses_B: Ints) -> tuple[float, float]:
    """Mean and variance of the tokens that a verification makes of so many guesses of each row."""
    mean = variance = 0.0
    for guesses in guesses_B.tolist():
        powers = [rate**n for n in range(1, guesses + 1)]
        kept = sum(powers)
        mean += 1 + kept
        variance += sum((2 * n - 1) * power for n, power in enumerate(powers, 1)) - kept**2
    return mean, variance


@dataclass(frozen=True)
class SyntheticDecoding:
    """Whole verifications of the full tier: their seconds, their tokens of all rows, and the tokens to expect of them.

    Steps that captured a graph are left out, and so is the first one, whose seconds stand apart. tiers: statistics of
    the first row, without its first step.
    """

    seconds: float
    tokens: int
    verifications: int
    expected_tokens: float
    deviation: float
    first_seconds: float
    tiers: list[TierStats]

    @property
    def luck(self) -> float:
        """Tokens that were made beyond those expected, in standard deviations; 0 where nothing is left to chance."""
        return (self.tokens - self.expected_tokens) / self.deviation if self.deviation else 0.0


def decode(batch: SequenceBatch, kept: Mapping[str, float], turn: int, tokens: int) -> SyntheticDecoding:
    """Decode until at least so many tokens of each row are counted, and end behind a verification.

    batch: as `read` made it for as many tokens. kept: as for `Synthetic`, whose dice are those of the turn.
    """
    batch.sampling = sampling = Synthetic(batch, kept, turn)
    counted = list[int]()
    made = 0
    seconds = 0.0
    first_seconds = 0.0
    first_tiers = list[TierStats]()
    while made < tokens * len(batch.sequences) and not batch.done:
        known = graphs.captured_graphs()
        before = batch.decode_seconds
        step = len(sampling.expected)
        taken = sum(batch.step())
        took = batch.decode_seconds - before
        captures = graphs.captured_graphs() - known
        if step == 0:
            first_seconds = took
            first_tiers = batch.stats(0)
        elif not captures:
            made = made + taken
            seconds = seconds + took
            counted.append(step)
    expected = [sampling.expected[step] for step in counted]
    mean, variance = (sum(each) for each in zip(*expected, strict=True))
    tiers = [_behind(*both) for both in zip(first_tiers, batch.stats(0), strict=True)]
    return SyntheticDecoding(seconds, made, len(counted), mean, variance**0.5, first_seconds, tiers)


def _behind(first: TierStats, last: TierStats) -> TierStats:
    """Statistics of a tier from one time to a later one."""
    counts = {
        name: getattr(last, name) - getattr(first, name) for name in ("proposed", "accepted", "passes", "seconds")
    }
    return replace(last, **counts)


def verified(turns: Sequence[SyntheticDecoding]) -> Row:
    """Tokens a verification of several turns, those to expect, and how far apart chance puts them (one deviation)."""
    count = sum(turn.verifications for turn in turns)
    return {
        "verifications": count,
        "tokens_per_verification": sum(turn.tokens for turn in turns) / count,
        "expected_tokens_per_verification": sum(turn.expected_tokens for turn in turns) / count,
        "deviation": sum(turn.deviation**2 for turn in turns) ** 0.5 / count,
    }


def read(
    models: ModelSet,
    mode: str,
    setting: SpeculativeConfig,
    context: int,
    tokens: int,
    rows: int = 1,
    memory: FullView | None = None,
    costs: CostModel | None = None,
) -> SequenceBatch:
    """A batch whose prompts of random tokens have been read, as far as its caches can tell: its KV is noise.

    It has room for a first step, and then for verifications that make so many tokens and the rest of the last one.
    `memory`: that of an earlier such batch of one row, to be used again.
    """
    most = tokens + 2 * setting.reach
    params = SamplingParams(temperature=0.6, top_p=0.9, seed=1, max_tokens=most, ignore_eos=True)
    vocabulary = min(1000, models.target.config.vocab_size)
    prompt = torch.randint(vocabulary, (context,), generator=torch.Generator().manual_seed(2)).tolist()
    if memory:
        memory.rewind(ints([context - PAGE]))
    sequences = [TokenSequence(prompt, params, seed=1) for _ in range(rows)]
    batch = SequenceBatch(models, MODES[mode], setting, "seeded", sequences, memory, costs)
    if memory is None:
        fill(batch.top.cache.pool, context - PAGE)  # the other rows' is copied from there
    for _ in prefill_batch(batch):
        pass
    return batch


def fill(pool: PagePool, length: int) -> None:
    """Random K and V for the first `length` tokens of the first row. The draft's own cache will catch up."""
    config = pool.config
    block_GND = torch.randn(config.kv_heads, BLOCK, config.head_dim, generator=torch.Generator().manual_seed(3))
    if pool.windows:
        pool.windows.allocate_row(0, 0, length)
    for layer in range(config.layers):
        for start in range(pool.first_cached_token(layer, 0), length, BLOCK):
            slots_N = pool.slots(0, start, min(start + BLOCK, length), layer)
            some_GND = block_GND[:, : len(slots_N)].to(pool.device)
            some_GND = rounded(some_GND) if config.kv_int8 else some_GND.to(pool.dtype)
            pool.kv.write(layer, slots_N, some_GND, some_GND)
    pool.lengths_B[0] = length


def rows(
    shape: str,
    contexts: Sequence[int],
    kept: tuple[float, float],
    setting: SpeculativeConfig,
    tokens: int,
    repeats: int,
    kv_int8: bool = False,
    layers: int | None = None,
) -> Iterator[Row]:
    """Plain decoding, and modes with and without a draft, if the shape has one.

    kept: shares of guesses of the retrieval tier, and of the draft. kv_int8: of all rows but the first, which is plain
    decoding over KV in bfloat16, and what speedups are over. layers: of the target; all of them if None.
    """
    longest = max(contexts) + tokens + 2 * setting.reach
    config, weights = bench_shapes.decoder_parts(shape, longest, kv_int8=kv_int8, layers=layers)
    lower = Decoder(config, weights, setting.lower_bits) if setting.lower_bits else None
    drafted = f"{shape}-draft" in shapes.SHAPES
    draft = None
    works = {"full": ModelWork(config, weights)}
    if drafted:
        parts = shapes.parts(f"{shape}-draft", longest, kv_int8=kv_int8)
        draft = Decoder(*parts, setting.lower_bits)
        works["draft"] = ModelWork(*parts)
    models = ModelSet(Decoder(config, weights), draft, lower)
    shares = dict(zip(("retrieval", "draft"), kept, strict=True))
    runs = [(mode, models) for mode in ("ar", "retrieval", *["triforce"] * drafted, "auto")]
    if kv_int8:
        runs.insert(0, ("ar", ModelSet(Decoder(replace(config, kv_int8=False), weights))))
    for context in contexts:
        turns: list[list[SyntheticDecoding]] = [[] for _ in runs]
        costs = costs_of(models, weights, setting)
        for turn in range(repeats):
            for (mode, of_run), made in zip(runs, turns, strict=True):
                batch = read(of_run, mode, setting, context, tokens, costs=costs if mode == "auto" else None)
                made.append(decode(batch, shares, turn, tokens))
        roof = roofline.measure()
        texts = [[_seconds(turn, tokens) for turn in made] for made in turns]
        for (mode, of_run), made, times in zip(runs, turns, texts, strict=True):
            int8 = of_run.target.config.kv_int8
            last = made[-1]
            least = (
                None if mode == "auto" else least_seconds(last.tiers, works, roof, context, int8, setting.lower_bits)
            )
            yield {
                "mode": mode, "context": context, "batch": 1, "temperature": 0.6, "workload": "synthetic",
                "kv_dtype": "int8" if int8 else "bfloat16", "layers": config.layers,
                **timing(times, texts[0], tokens),
                "least_seconds": least and least * tokens / last.tokens, "prefill_tokens_per_second": None,
                "full_passes": tokens * sum(turn.verifications for turn in made) / sum(turn.tokens for turn in made),
                **verified(made), "first_seconds": median(turn.first_seconds for turn in made),
                "acceptance": dict(shares) if mode != "ar" else {},
            }  # fmt: skip


def _seconds(turn: SyntheticDecoding, tokens: int) -> float:
    """Seconds of a text of so many tokens, at the rate of whole verifications."""
    return turn.seconds * tokens / turn.tokens


def least_seconds(
    tiers: Sequence[TierStats],
    works: Mapping[str, ModelWork],
    roof: Roofline,
    context: int,
    int8: bool,
    lower_bits: int = 0,
) -> float:
    """Seconds that the passes of a text take at least, those of a tier over as many tokens each as in the mean.

    int8: whether the full tier's KV is. Sampling takes none.
    """
    full = works["full"]
    least = 0.0
    proposed = 0
    for tier in tiers:
        work = works.get(tier.name, full)
        keys = min(tier.visible_tokens or context, context)
        width = 1 + proposed / max(1, tier.passes)
        if tier.name != "full" and lower_bits:
            each = work.of_lower(width, keys, lower_bits)
        else:
            each = work.of(width, keys, replace(work.config, kv_int8=int8))
        least = least + tier.passes * roof.least_seconds(each)
        proposed = tier.proposed
    return least


def costs_of(models: ModelSet, weights: Weights, setting: SpeculativeConfig) -> CostModel:
    """Return what the planner knows before it has seen a pass of these models."""
    target = models.target
    matrices = [*weights.multiplied()]
    size = sum(map(nbytes, matrices)) / sum(math.prod(matrix.shape) for matrix in matrices)
    lower = setting.lower_bits / 8 if weights.has_numbers else 0
    works = TierWork.of_target(
        target.config, (size, lower or size), target.dtype.itemsize, setting.lower_bits > 0, target.unions
    )
    if models.draft:
        works["draft"] = TierWork.of(models.draft.config, target.dtype.itemsize, target.dtype.itemsize, sequential=True)
    return CostModel(None, works, kernel_level(target.device))
