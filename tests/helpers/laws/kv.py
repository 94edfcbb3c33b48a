"""The engine's texts and shared pool against a dense pass with other attention code."""

from __future__ import annotations

import torch

from tests.helpers.laws.tiny import MODELS, PROMPTS, V, finished, laws, started
from tests.helpers.simple_cache import SimpleCache, score
from triforce.backends.torch.noise import Noise
from triforce.backends.torch.tensors import as_tensor
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import columns, ints
from triforce.speculation.verification import race

ROWS = 2 * len(PROMPTS)
PARAMS = SamplingParams(0.8, max_tokens=50)


def mispicked(mode: str) -> int:
    """Return the number of tokens of `seeded` texts that plain dense decoding does not pick under the same noise."""
    texts_BT = finished(batch := started(mode, "seeded", PARAMS, ROWS))
    sequences = batch.sequences
    noise = Noise([sequence.seed for sequence in sequences], [sequence.choice for sequence in sequences])
    positions_BT = columns(ints([len(sequence.prompt) for sequence in sequences]), texts_BT.shape[1])
    exponentials_BTV = noise.exponentials(positions_BT, V)
    return int((race(laws(texts_BT, PARAMS), exponentials_BTV) != texts_BT).sum())


@torch.no_grad()
def kv_error(mode: str) -> float:
    """Return the largest difference between the pool's committed slots and a fresh dense pass over the text."""
    batch = started(mode, "seeded", PARAMS, ROWS)
    finished(batch)
    pool, worst = batch.top.cache.pool, 0.0
    for b, length in enumerate(pool.lengths_B.tolist()):
        cache = SimpleCache(MODELS.target.config)
        score(MODELS.target, batch.prefix.ids_BS[b : b + 1, :length], cache)
        for layer, dense in enumerate(zip(cache.keys, cache.values, strict=True)):
            for paged_GSD, parts in zip(pool.span(layer, b, 0, length), dense, strict=True):
                paged_SGD = as_tensor(paged_GSD).transpose(0, 1)
                worst = max(worst, float((paged_SGD - torch.cat(parts, 1)[0]).abs().max()))
    return worst
