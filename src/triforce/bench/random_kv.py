"""Batches over random KV: what a pass takes at some length, without reading a prompt of it."""

from __future__ import annotations

import torch

from triforce.engine.modes import MODES
from triforce.engine.sequence import TokenSequence
from triforce.engine.sequence_batch import SequenceBatch
from triforce.engine.sequence_group import prefill_batch
from triforce.engine.speculative_config import SpeculativeConfig
from triforce.engine.tier_builder import ModelSet
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import PAGE, FullView, PagePool
from triforce.ragged import ints

BLOCK = 4096
"""Tokens of random KV, repeated over the context."""


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
    for start in range(0, length, BLOCK):
        slots_N = pool.slots(0, start, min(start + BLOCK, length))
        some_GND = block_GND[:, : len(slots_N)].to(pool.device, pool.dtype)
        for layer in range(config.layers):
            pool.kv.write(layer, slots_N, some_GND, some_GND)
    pool.lengths_B[0] = length
