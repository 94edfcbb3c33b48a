"""Scenes for samplers that must decide alike: random rows, drafts and logits, and a sampler's verdict on them.

Shape suffixes: B rows, S text capacity, K draft tokens, J = K + 1, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tests.helpers.samplers import Sampler, noise_for, torch_sampling
from triforce.backends.torch.logits_processor import LogitsProcessor
from triforce.interface.sampling_params import SamplingParams
from triforce.ragged import Bools
from triforce.speculation import BlockRejection, Draft, Rejection, Seeded, SequenceState
from triforce.speculation.verification import NoiseSource

COUPLINGS = [Seeded, Rejection, BlockRejection]
CAPACITY = 40
LOWER = 1
TIER = 2
EQUAL = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
TEMPERATURES = [5e-324, 1e-300, 0.7, 1.0, 1e300]
CUTS: list[dict[str, float]] = [
    *({"top_k": k} for k in range(1, 6)),
    *({"top_p": p} for p in (1e-300, 0.25, 0.5, 0.75, 1 - 2**-53)),
    {"min_p": 1.0},
    {"min_p": 1.0, "top_k": 1, "top_p": 1e-9},
]


@dataclass
class Scene:
    """A draft of a lower tier, and the logits that judge it."""

    params: list[SamplingParams]
    prompts: list[int]
    prefix: SequenceState
    live_B: Bools
    logits_BJV: Tensor
    draft: Draft

    def pick(self, b: int) -> Scene:
        """Return row b alone, without its padding columns."""
        row_slice = slice(b, b + 1)
        width = int(self.draft.counts_B[b])
        probs_BKV = self.draft.probs_BKV[row_slice, :width]
        origins_BK = self.draft.origins_BK[row_slice, :width]
        draft = Draft(self.draft.tokens_BK[row_slice, :width], probs_BKV, origins_BK, self.draft.counts_B[row_slice])
        logits_BJV = self.logits_BJV[row_slice, : width + 1]
        return Scene(
            self.params[row_slice],
            self.prompts[row_slice],
            self.prefix.select([b]),
            self.live_B[row_slice],
            logits_BJV,
            draft,
        )


def noise_of(rows: list[int], sampler: Sampler) -> NoiseSource:
    """Return noise of these rows for a sampler."""
    return noise_for(sampler, [2**63 + 977 * b for b in rows], rows)


def verdict(scene: Scene, sampler: Sampler, coupling: type, rows: list[int] | None = None) -> Draft:
    """Return a fresh sampler's verdict on a scene. rows: their numbers in the whole scene."""
    noise = noise_of(rows or list(range(len(scene.params))), sampler)
    sampling = sampler(scene.params, scene.prompts, scene.logits_BJV.shape[-1], coupling(noise))
    draft = replace(scene.draft, probs_BKV=scene.draft.probs_BKV[..., : None if issubclass(coupling, Rejection) else 0])
    return sampling.verify(draft, scene.logits_BJV, scene.prefix, scene.live_B, TIER)


def agree(scene: Scene, sampler: Sampler, coupling: type) -> None:
    """Check that the sampler decides as the one in torch does."""
    expected, got = (verdict(scene, compared_sampler, coupling) for compared_sampler in (torch_sampling, sampler))
    for b in scene.live_B.nonzero()[0].tolist():
        count = int(expected.counts_B[b])
        assert int(got.counts_B[b]) == count
        assert got.tokens_BK[b, :count].tolist() == expected.tokens_BK[b, :count].tolist()
        assert got.origins_BK[b, :count].tolist() == expected.origins_BK[b, :count].tolist()
        same_law(got.probs_BKV[b, :count], expected.probs_BKV[b, :count])


def same_law(got: Tensor, expected: Tensor) -> None:
    assert torch.equal(got > 0, expected > 0)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


CHOICES: dict[str, list[object]] = {
    "temperature": [0.0, 1e-3, 0.3, 0.6, 1.0, 1.0, 1.7],
    "top_k": [0, 0, 1, 3, 7, 50, 600],
    "top_p": [1.0, 1.0, 0.9, 0.37, 0.999, 1e-9],
    "min_p": [0.0, 0.0, 0.11, 1.0],
    "repetition_penalty": [1.0, 1.0, 1.3, 0.8],
    "presence_penalty": [0.0, 0.0, 0.7, -0.4],
    "frequency_penalty": [0.0, 0.0, 0.31, -0.2],
    "logit_bias": [None, None, {2: 1.7, 5: -50.0}, {0: -1e9}],
}


def scene(seed: int, vocab_size: int, rows: int = 4, draft_tokens: int = 3) -> Scene:
    """Return random ragged rows, some done, drafts that are often accepted, and logits with ties and -inf."""
    g = torch.Generator().manual_seed(seed)

    def some(high: int, *size: int) -> Tensor:
        return torch.randint(high, size, generator=g)

    def settings() -> SamplingParams:
        chosen = {name: values[int(some(len(values), 1))] for name, values in CHOICES.items()}
        return SamplingParams(**chosen)  # type: ignore[arg-type]

    params = [settings() for _ in range(rows)]
    lengths_B = some(CAPACITY - draft_tokens - 1, rows) + 1
    ids_BS = some(vocab_size, rows, CAPACITY)
    prompts = [int(some(length, 1)) for length in (lengths_B + 1).tolist()]
    logits_BJV = torch.randn(rows, draft_tokens + 1, vocab_size, generator=g) * (1 + 3 * torch.rand(1, generator=g))
    style = int(some(4, 1))
    if style == 1:
        logits_BJV = (logits_BJV * 2).round() / 2
    if style == 2:
        logits_BJV[torch.rand(logits_BJV.shape, generator=g) < 0.4] = -math.inf
        logits_BJV[..., int(some(vocab_size, 1))] = 1.0
    if style == 3:
        logits_BJV = torch.full_like(logits_BJV, 0.25)
    draft_logits_BKV = logits_BJV[:, :draft_tokens] + 0.3 * torch.randn(rows, draft_tokens, vocab_size, generator=g)
    probs_BKV = LogitsProcessor(params, prompts, vocab_size)(draft_logits_BKV, ids_BS, lengths_B)
    tokens_BK = probs_BKV.flatten(0, 1).multinomial(1, generator=g).view(rows, draft_tokens)
    ids_BS.scatter_(1, lengths_B[:, None] + torch.arange(draft_tokens), tokens_BK)
    origins_BK = torch.full_like(tokens_BK, LOWER)
    counts_B = some(draft_tokens + 1, rows)
    draft = Draft(tokens_BK.numpy(), probs_BKV, origins_BK.numpy(), counts_B.numpy())
    prefix = SequenceState(ids_BS.numpy(), lengths_B.numpy())
    live_B = some(5, rows).numpy() > 0
    return Scene(params, prompts, prefix, live_B, logits_BJV, draft)


def laws(sampler: Sampler, logits_BV: Tensor, params: list[SamplingParams]) -> Tensor:
    """Return a sampler's laws (B, V) of rows without draft tokens."""
    B, vocab_size = logits_BV.shape
    prefix = SequenceState(np.zeros((B, 2), dtype=np.int64), np.ones(B, dtype=np.int64))
    sampling = sampler(params, [1] * B, vocab_size, Rejection(noise_of(list(range(B)), sampler)))
    nothing = Draft.empty(B, vocab_size)
    live_B = np.ones(B, dtype=np.bool_)
    probs_BJV: Tensor = sampling.verify(nothing, logits_BV[:, None], prefix, live_B, 0).probs_BKV
    return probs_BJV[:, 0]
