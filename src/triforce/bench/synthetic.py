"""Decoding at a given acceptance, to see what the tiers would be worth on a model of any shape.

The passes and the sampling are done for real; then the outcome is drawn instead of taken: each guess is kept with a
given probability. The texts mean nothing, so this lives in the bench alone, and its rows say `synthetic`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from triforce.bench import shapes
from triforce.bench.speed import Row, timing
from triforce.cache import PAGE, Setting
from triforce.cache.retrieval import Budget
from triforce.engine import Batch, Job
from triforce.ladder import MODES, Models, Speculation
from triforce.request import SamplingParams
from triforce.speculation import Coupling, Draft, Prefix, Sampling

BLOCK = 4096
"""Tokens of random KV, repeated over the context."""


class Synthetic:
    """A sampling whose guesses are kept with probability `rates[tier]`, tier by tier."""

    def __init__(self, real: Sampling, rates: dict[int, float]) -> None:
        self.real, self.rates = real, rates
        self.dice = torch.Generator().manual_seed(1)

    @property
    def coupling(self) -> Coupling:
        return self.real.coupling

    @property
    def vocab_size(self) -> int:
        return self.real.vocab_size

    def verify(self, guess: Draft, logits_BJV: Tensor, prefix: Prefix, live_B: Tensor, tier: int) -> Draft:
        step = self.real.verify(guess, logits_BJV, prefix, live_B, tier)
        if tier not in self.rates:
            return step
        B, K = guess.tokens_BK.shape
        fits_BK = torch.rand(B, K, generator=self.dice) < self.rates[tier]
        fits_BK &= torch.arange(K) < guess.counts_B[:, None]
        kept_B = fits_BK.long().cumprod(1).sum(1)
        tokens_BJ = F.pad(guess.tokens_BK, (0, 1), value=1)
        laws_BJV = logits_BJV.new_zeros(B, K + 1, 0, dtype=torch.float64)
        return Draft(tokens_BJ, laws_BJV, torch.full_like(tokens_BJ, tier), kept_B + 1)


def rows(
    contexts: Sequence[int],
    outer: float,
    inner: float,
    gammas: tuple[int, int],
    budget: int,
    tokens: int,
    repeats: int,
    lower_tiers: str = "same",
) -> Iterator[Row]:
    """Plain decoding and TriForce on the `30m` shape, per context: `outer` and `inner` are kept shares per token."""
    longest = max(contexts) + 2 * tokens
    setting = Speculation(*gammas, retrieval=Setting(Budget(budget)), lower_tiers=lower_tiers)
    lower = shapes.decoder("30m", longest, int8=True) if setting.int8 else None
    draft = shapes.decoder("30m-draft", longest, int8=setting.int8)
    models = Models(shapes.decoder("30m", longest), draft, lower)
    for context in contexts:
        seconds: dict[str, list[float]] = {"ar": [], "triforce": []}
        passes = 0
        for _ in range(repeats):
            for mode, times in seconds.items():
                batch = _batch(models, mode, setting, context, tokens)
                batch.sampling = Synthetic(batch.sampling, {2: outer, 1: inner} if mode == "triforce" else {})
                while not batch.done:
                    batch.step()
                times.append(batch.decode_seconds)
                passes = batch.stats(0)[-1].passes
        for mode, times in seconds.items():
            yield {
                "mode": mode, "context": context, "temperature": 0.6, **timing(times, seconds["ar"], tokens),
                "prefill_tokens_per_second": None, "full_passes": passes if mode != "ar" else tokens,
                "acceptance": {"synthetic": True, "outer": outer, "inner": inner} if mode != "ar" else {},
            }  # fmt: skip


def _batch(models: Models, mode: str, setting: Speculation, context: int, tokens: int) -> Batch:
    """A batch whose prompt has been read, as far as its caches can tell."""
    params = SamplingParams(temperature=0.6, top_p=0.9, seed=1, max_tokens=tokens, ignore_eos=True)
    prompt = torch.randint(1000, (context,), generator=torch.Generator().manual_seed(2)).tolist()
    batch = Batch(models, MODES[mode], setting, "seeded", [Job(prompt, params, seed=1)])
    fill(batch, context - PAGE)
    for _ in batch.prefill():
        pass
    return batch


def fill(batch: Batch, length: int) -> None:
    """Random K and V for the first `length` tokens of the exact view. The draft's own cache will catch up."""
    pool, config = batch.top.cache.pool, batch.top.cache.pool.config
    block_GND = torch.randn(config.kv_heads, BLOCK, config.head_dim, generator=torch.Generator().manual_seed(3))
    for start in range(0, length, BLOCK):
        slots_N = pool.slots(0, start, min(start + BLOCK, length))
        some_GND = block_GND[:, : len(slots_N)].to(pool.dtype)
        for layer in range(config.layers):
            pool.memory.put(layer, slots_N, some_GND, some_GND)
    pool.lengths_B[0] = length
