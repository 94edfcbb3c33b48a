"""Teacher forcing on one text: read to its end once, then scored again and again under lower views.

One prefill serves them all: to start over is to rewind. As in decoding, a lower view scores a span of positions, then
the exact view verifies it, which replaces what the lower view wrote and shows where the attention went.
Shape suffixes: N positions, V vocabulary, L layers, G KV heads, U units.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.acceptance.h2o import attended
from benchmarks.acceptance.workloads import Span, Workload
from triforce.arrays import Array
from triforce.backends.decoder import Decoder
from triforce.backends.torch.logits_processor import LogitsProcessor
from triforce.backends.torch.tensors import as_tensor
from triforce.engine.tier_builder import ModelSet, SpeculativeConfig, TierBuilder
from triforce.interface.sampling_params import SamplingParams
from triforce.kvcache import PAGE, RetrievalConfig, RetrievalView
from triforce.kvcache.selection import Policy
from triforce.kvcache.views.full import TAIL
from triforce.ragged import ints
from triforce.speculation import SequenceState, Tier


class Walk:
    """One text under views of its KV; laws are as a sampler would see them.

    chunk: a divisor of all chunk sizes that its views will select by.
    """

    def __init__(self, models: ModelSet, work: Workload, params: SamplingParams, chunk: int = PAGE) -> None:
        target = models.target
        self.models = models
        self.work = work
        self._ids_1S = ints(work.ids)[None]
        self._processor = LogitsProcessor([params], [work.prompt], target.config.vocab_size, target.device)
        self._rows = TierBuilder(models, SpeculativeConfig(retrieval=RetrievalConfig(chunk=chunk)), [len(work.ids)])
        self._exact = self._rows.full_tier(self._rows.full_view())
        self.full = self._exact.cache
        self._prefill(self._exact, work.prompt - 1)

    @torch.no_grad()
    def read(self, model: Decoder, view: Any, span: Span) -> Tensor:
        """Return the probabilities at a span's positions, (N, V), from one pass over the token before each."""
        width = span.stop - span.start
        logits_1NV = as_tensor(model(self._ids_1S[:, span.start - 1 : span.stop - 1], ints([width]), view))
        return self._processor(logits_1NV, torch.from_numpy(self._ids_1S), torch.tensor([span.start]))[0]

    def _prefill(self, tier: Tier[Any], length: int) -> None:
        """Let a tier read the first `length` tokens."""
        deque(tier.prefill(SequenceState(self._ids_1S, ints([length + 1])), 0, length), maxlen=0)

    @property
    def measured_N(self) -> Tensor:
        """Tokens of the text at the measured positions, (N)."""
        spans = [self._ids_1S[0, span.start : span.stop] for span in self.work.spans if span.measured]
        return torch.from_numpy(np.concatenate(spans)).to(self.models.target.device)

    @cached_property
    @torch.no_grad()
    def attended_LGU(self) -> Array:
        """Attention that each unit of the prompt drew from all tokens, from a reading of its own."""
        rows = TierBuilder(self.models, self._rows.speculation, [self.work.prompt])
        return attended(self.models.target, rows.full_view(), self._ids_1S[:, : self.work.prompt - 1])

    def lower(self, policy: Callable[[], Policy], setting: RetrievalConfig) -> RetrievalView:
        """A fresh view of `full`, which observes what the view selects by."""
        view = RetrievalView(self.full, policy, setting)
        self.full.observe(view.unit if view.observes else 0)
        return view

    def under(self, view: RetrievalView, foresight: bool = False) -> Iterator[tuple[Span, Tensor, Tensor]]:
        """Yield each measured span with its probabilities under a fresh view of `full`, and exactly.

        With foresight the view selects by the verification of the very span that it is to score.
        """
        target = self.models.target
        end = self.work.prompt - 1
        self.full.rewind(
            ints([end - TAIL])
        )  # the tail is fed anew, so that the exact view sees in it what this view asks for
        self._prefill(self._exact, end)
        for span in self.work.spans:
            if span.measured and foresight:
                self.read(target, self.full, span)
                self.full.rewind(ints([span.start - 1]))
            view_NV = self.read(target, view, span) if span.measured else None
            exact_NV = self.read(target, self.full, span)
            if view_NV is not None:
                yield span, view_NV, exact_NV

    def draft(self) -> Tensor:
        """Return the draft model's probabilities at the measured positions, (N, V)."""
        lowest = self._rows.draft_model_tier()
        draft = self.models.draft
        assert draft is not None, "draft_model() has seen to it"
        self._prefill(lowest, self.work.prompt - 1)
        laws = [(span, self.read(draft, lowest.cache, span)) for span in self.work.spans]
        return torch.cat([law_NV for span, law_NV in laws if span.measured])
