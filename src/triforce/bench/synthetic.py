"""Decoding over random KV at a given acceptance, to see what the tiers would be worth on a model of any shape.

No prompt is read. The passes and the sampling are done for real; then the outcome is drawn instead of taken: each
guess is kept with a given probability. The texts mean nothing, so this lives in the bench alone, and its rows say
`synthetic`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from triforce.backends.decoder import Decoder
from triforce.backends.kv_rows import rounded
from triforce.bench import shapes
from triforce.bench.speed import Row, timing
from triforce.engine.modes import MODES
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.sequence_group import prefill_batch
from triforce.engine.speculative_config import SpeculativeConfig
from triforce.engine.tier_builder import ModelSet
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import PAGE, FullView, PagePool, RetrievalConfig
from triforce.kvcache.retrieval_config import Budget
from triforce.ragged import Bools, ints
from triforce.speculation import Draft, SequenceState, TokenSampler, Verification

BLOCK = 4096
"""Tokens of random KV, repeated over the context."""


class Synthetic:
    """A sampling whose guesses are kept with probability `rates[tier]`, tier by tier."""

    def __init__(self, real: TokenSampler, rates: dict[int, float]) -> None:
        self.real, self.rates = real, rates
        self.dice = np.random.default_rng(1)

    @property
    def coupling(self) -> Verification:
        return self.real.coupling

    @property
    def vocab_size(self) -> int:
        return self.real.vocab_size

    def verify(self, guess: Draft, logits_BJV: Tensor, prefix: SequenceState, live_B: Bools, tier: int) -> Draft:
        step = self.real.verify(guess, logits_BJV, prefix, live_B, tier)
        if tier not in self.rates:
            return step
        B, K = guess.tokens_BK.shape
        fits_BK = self.dice.random((B, K)) < self.rates[tier]
        fits_BK &= np.arange(K) < guess.counts_B[:, None]
        kept_B = fits_BK.cumprod(1).sum(1)
        tokens_BJ = np.pad(guess.tokens_BK, ((0, 0), (0, 1)), constant_values=1)
        laws_BJV = logits_BJV.new_zeros(B, K + 1, 0, dtype=torch.float64)
        return Draft(tokens_BJ, laws_BJV, np.full_like(tokens_BJ, tier), kept_B + 1)


def rows(
    shape: str,
    contexts: Sequence[int],
    outer: float,
    inner: float,
    gammas: tuple[int, int],
    budget: int,
    tokens: int,
    repeats: int,
    lower_tiers: str = "same",
    kv_int8: bool = False,
) -> Iterator[Row]:
    """Plain decoding and TriForce on a shape that has a draft; `outer` and `inner` are kept shares per token."""
    longest = max(contexts) + 2 * tokens
    setting = SpeculativeConfig(*gammas, retrieval=RetrievalConfig(Budget(budget)), lower_tiers=lower_tiers)
    config, weights = shapes.parts(shape, longest, kv_int8=kv_int8)
    lower = Decoder(config, weights, setting.lower_bits) if setting.lower_bits else None
    draft = Decoder(*shapes.parts(f"{shape}-draft", longest, kv_int8=kv_int8), setting.lower_bits)
    models = ModelSet(Decoder(config, weights), draft, lower)
    for context in contexts:
        seconds: dict[str, list[float]] = {"ar": [], "triforce": []}
        passes = 0
        for _ in range(repeats):
            for mode, times in seconds.items():
                batch = read(models, mode, setting, context, tokens)
                batch.sampling = Synthetic(batch.sampling, {2: outer, 1: inner} if mode == "triforce" else {})
                while not batch.done:
                    batch.step()
                times.append(batch.decode_seconds)
                passes = batch.stats(0)[-1].passes
        for mode, times in seconds.items():
            yield {
                "mode": mode, "context": context, "batch": 1, "temperature": 0.6, "workload": "synthetic",
                **timing(times, seconds["ar"], tokens),
                "prefill_tokens_per_second": None, "full_passes": passes if mode != "ar" else tokens,
                "acceptance": {"outer": outer, "inner": inner} if mode != "ar" else {},
            }  # fmt: skip


def read(
    models: ModelSet,
    mode: str,
    setting: SpeculativeConfig,
    context: int,
    tokens: int,
    rows: int = 1,
    memory: FullView | None = None,
) -> SequenceBatch:
    """A batch whose prompts of random tokens have been read, as far as its caches can tell: its KV is noise.

    `memory`: that of an earlier such batch of one row, to be used again.
    """
    params = SamplingParams(temperature=0.6, top_p=0.9, seed=1, max_tokens=tokens, ignore_eos=True)
    vocabulary = min(1000, models.target.config.vocab_size)
    prompt = torch.randint(vocabulary, (context,), generator=torch.Generator().manual_seed(2)).tolist()
    if memory:
        memory.rewind(ints([context - PAGE]))
    batch = SequenceBatch(
        models, MODES[mode], setting, "seeded", [TokenSequence(prompt, params, seed=1) for _ in range(rows)], memory
    )
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
        pool.windows.place(0, 0, length)
    for layer in range(config.layers):
        for start in range(pool.held_from(layer, 0), length, BLOCK):
            slots_N = pool.slots(0, start, min(start + BLOCK, length), layer)
            some_GND = block_GND[:, : len(slots_N)].to(pool.device)
            some_GND = rounded(some_GND) if config.kv_int8 else some_GND.to(pool.dtype)
            pool.kv.write(layer, slots_N, some_GND, some_GND)
    pool.lengths_B[0] = length
