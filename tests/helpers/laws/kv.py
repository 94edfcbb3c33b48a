"""The engine's texts and its shared pool against a dense pass that uses other attention code."""

from __future__ import annotations

import torch

from tests.helpers.laws.tiny import MODELS, PROMPTS, V, finished, laws, started
from tests.helpers.simple_cache import SimpleCache, score
from triforce.backends.token_sampler import make_noise
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import columns, ints
from triforce.speculation.verification import race

ROWS = 2 * len(PROMPTS)
PARAMS = SamplingParams(0.8, max_tokens=50)


def mispicked(mode: str) -> int:
    """Tokens of `seeded` texts that are not what plain dense decoding picks there, under the same noise."""
    texts_BT = finished(batch := started(mode, "seeded", PARAMS, ROWS))
    noise = make_noise([job.seed for job in batch.jobs], [job.choice for job in batch.jobs])
    positions_BT = columns(ints([len(job.prompt) for job in batch.jobs]), texts_BT.shape[1])
    exponentials_BTV = noise.exponentials(torch.from_numpy(positions_BT), V)
    return int((race(laws(texts_BT, PARAMS), exponentials_BTV) != texts_BT).sum())


@torch.no_grad()
def kv_error(mode: str) -> float:
    """The largest difference between a committed slot of the pool and a fresh dense pass over the committed text."""
    batch = started(mode, "seeded", PARAMS, ROWS)
    finished(batch)
    pool, worst = batch.top.cache.pool, 0.0
    for b, length in enumerate(pool.lengths_B.tolist()):
        cache = SimpleCache(MODELS.target.config)
        score(MODELS.target, torch.from_numpy(batch.prefix.ids_BS[b : b + 1, :length]), cache)
        for layer, dense in enumerate(zip(cache._keys, cache._values, strict=True)):
            for paged_GSD, parts in zip(pool.span(layer, b, 0, length), dense, strict=True):
                worst = max(worst, float((paged_GSD.transpose(0, 1) - torch.cat(parts, 1)[0]).abs().max()))
    return worst
